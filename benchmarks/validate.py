"""How fast `validate` reads: headers (files/s per core), and every byte beside reading and summing the same bytes.

    python benchmarks/validate.py                 # writes about 1.2 GB of synthetic speculators v1 files
    python benchmarks/validate.py --files 5000 --wide 20

Everything is read from the page cache, in one process and one thread. The yardstick of depth values reads each file
into memory and sums it as 64-bit integers once; both are timed in alternation and the best of each is compared.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from draftsmith.interop.formats import open_data
from draftsmith.validate.scan import Orders, scan_file

WIDE = (512, 7168)  # tokens, width: one sample of a 1T model
REAL = (216, 576)  # the mean length of the shared conversations at SmolLM2's width
SMALL = (80, 64)
ROUNDS = 5


def write_folder(folder: Path, files: int, tokens: int, width: int) -> None:
    """Write synthetic v1 files with 4 layers, whose scales grow as real ones do."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(files):
        mask = torch.arange(tokens) > tokens // 4
        content = {
            "input_ids": torch.randint(0, 1000, (tokens,), generator=generator),
            "hidden_states": [
                (torch.randn(tokens, width, generator=generator) * (layer + 1)).bfloat16() for layer in range(4)
            ],
            "loss_mask": mask.long(),
        }
        torch.save(content, folder / f"data_{i}.pt")
    config = {"hidden_states": {"layer_ids": [2, 30, 58, 60]}, "model": {"hidden_size": width}}
    (folder / "data_config.json").write_text(json.dumps(config))


def scan(folder: Path, values: bool) -> None:
    """Look at every file of a folder as validate does, in this process."""
    data, orders = open_data(folder), Orders(values)
    for index in range(len(data)):
        report = scan_file(data, index, orders)
        assert not report.findings, report.findings[0]


def read_and_sum(folder: Path) -> None:
    """Read every file whole and add it up."""
    for path in sorted(folder.glob("data_*.pt")):
        whole = np.fromfile(path, np.uint8)
        whole[: len(whole) // 8 * 8].view(np.uint64).sum()


def best_seconds(works: list[Callable[[], None]]) -> list[float]:
    """Time some works in alternation; return the best of each."""
    best = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for number, work in enumerate(works):
            began = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - began)
    return best


def main() -> None:
    """Print a line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=4000, help="small files for the structure rate")
    parser.add_argument("--wide", type=int, default=20, help="files of width 7168 (29 MB each)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"
        write_folder(small, arguments.files, *SMALL)
        (seconds,) = best_seconds([lambda: scan(small, values=False)])
        print(f"structure: {arguments.files / seconds:,.0f} files/s")
        for name, shape, files in (("WIDE", WIDE, arguments.wide), ("REAL", REAL, 20 * arguments.wide)):
            data = Path(folder) / name
            write_folder(data, files, *shape)
            size = sum(path.stat().st_size for path in data.iterdir())
            checked, summed = best_seconds([lambda d=data: scan(d, values=True), lambda d=data: read_and_sum(d)])
            print(
                f"values, {name} (width {shape[1]}): {size / checked / 1e9:.2f} GB/s, read and summed "
                f"{size / summed / 1e9:.2f} GB/s: {summed / checked:.0%} of that rate"
            )


if __name__ == "__main__":
    main()
