"""Train the same draft on the same samples with draftsmith, speculators and SpecForge; compare speed, memory, quality.

    make bench-peers                                                    # once: an environment for each peer
    python benchmarks/train.py --conversations conversations.jsonl     # prepares and extracts under runs/benchmark
    python benchmarks/train.py --run runs/demo/run                      # or: the store of a run that is there
    python benchmarks/train.py --run RUN --unroll 7 --draft-vocab 32000 --pack-tokens 8192 --supervised 0.15
    python benchmarks/train.py --run RUN --quality                      # CPU seconds to a held-out acceptance

Every tool runs in its own environment, as one process with one thread, in float32, with its own collator, model class,
step and optimizer (benchmarks/peers); the tools take turns. What is printed: tokens (padding not counted) per CPU
second of the training steps, data loading left out; the memory at the peak, and above what the process had before the
first step; loss and agreement as the tool itself says them. For draftsmith also the share of this CPU's matrix rate, by
the operations that the step needs (benchmarks/operations.py).

--supervised F keeps the last share F of each sample's tokens supervised, 1 all of them. With --quality each tool starts
from its own initial weights, trains on the train split at the same constant learning rate, and saves its draft now and
then; draftsmith's offline acceptance measures all of them, in draftsmith's draft class, on the validation split.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.quality import measure_drafts, quality_table
from peers.samples import BenchmarkSamples, make_run, write_samples

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = {
    "draftsmith": Path(sys.executable),
    "speculators": ROOT / ".venv-peers" / "bin" / "python",
    "specforge": ROOT / ".venv-specforge" / "bin" / "python",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
UNCOUNTED_STEPS = 2  # they compile, and make the optimizer's state


def run_worker(tool: str, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run a tool on a job in a new folder; return what it measured, or `failed` with the last line it said."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"folder": str(folder), **job}))
    worker = ROOT / "benchmarks" / "peers" / f"{tool}_worker.py"
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            [str(PYTHONS[tool]), str(worker), str(folder / "job.json")],
            stdout=log,
            stderr=log,
            env={**_environment(), **ONE_THREAD},
        )
    measured = folder / "measured.json"
    if ended.returncode != 0 or not measured.is_file():
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        return {"failed": lines[-1][:200] if lines else f"exit status {ended.returncode}"}
    result: dict[str, Any] = json.loads(measured.read_text())
    return result


def _environment() -> dict[str, str]:
    own = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(own)}


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up a tool's rounds: rates by round, the peaks, the last loss and agreement."""
    failed = [result["failed"] for result in rounds if "failed" in result]
    if failed:
        return {"failed": failed[0]}
    rates, operations = [], []
    for result in rounds:
        counted = slice(UNCOUNTED_STEPS if len(result["tokens"]) > UNCOUNTED_STEPS else 0, None)
        seconds = sum(result["cpu_seconds"][counted])
        rates.append(sum(result["tokens"][counted]) / seconds)
        if result["matrix_rate"]:
            operations.append((sum(result["operations"][counted]) / seconds, result["matrix_rate"]))
    reached = {
        "operations_per_second": round(max(rate for rate, _ in operations)),
        "matrix_rate": round(max(rate for _, rate in operations)),
    } if operations else {}  # fmt: skip
    return {
        **reached,
        "tokens_per_cpu_second": [round(rate, 1) for rate in rates],
        "peak_mb": round(max(result["peak_mb"] for result in rounds)),
        "above_start_mb": round(max(result["peak_mb"] - result["start_mb"] for result in rounds)),
        "loss": round(rounds[-1]["loss"][-1], 4),
        "agreement": round(rounds[-1]["agreement"][-1], 4),
    }


def speed(samples: BenchmarkSamples, arguments: argparse.Namespace, folder: Path, job: dict[str, Any]) -> Any:
    """Let the tools take turns; return a summary per tool."""
    job["packs"] = samples.packs(arguments.pack_tokens, UNCOUNTED_STEPS + arguments.steps)
    results: dict[str, list[dict[str, Any]]] = {tool: [] for tool in arguments.tools}
    for number in range(arguments.rounds):
        for tool in arguments.tools:
            results[tool].append(run_worker(tool, folder / f"{tool}-{number}", job))
    return {tool: summarise(rounds) for tool, rounds in results.items()}


def speed_table(summary: dict[str, dict[str, Any]]) -> str:
    """Return one line per tool."""
    lines = [
        f"{'':12} {'tokens/CPU s':>13} {'of rounds':>18} {'peak MB':>8} {'above start':>11} {'loss':>9} {'agree':>6}"
    ]
    for tool, values in summary.items():
        if "failed" in values:
            lines.append(f"{tool:12} failed: {values['failed']}")
            continue
        rates = values["tokens_per_cpu_second"]
        spread = f"{min(rates):.0f} to {max(rates):.0f}"
        lines.append(
            f"{tool:12} {sum(rates) / len(rates):13.1f} {spread:>18} {values['peak_mb']:8,} "
            f"{values['above_start_mb']:11,} {values['loss']:9.4f} {values['agreement']:6.3f}"
        )
        if "matrix_rate" in values:
            reached, rate = values["operations_per_second"] / 1e9, values["matrix_rate"] / 1e9
            text = f"{reached:.0f} of {rate:.0f} G operations/s: {reached / rate:.0%} of the matrix rate"
            lines.append(f"{'':12} {text} in the best round")
    return "\n".join(lines)


def quality(samples: BenchmarkSamples, arguments: argparse.Namespace, folder: Path, job: dict[str, Any]) -> Any:
    """Train each tool for its CPU seconds and measure what it saved; return the curve per tool."""
    job["packs"] = samples.epochs(arguments.pack_tokens, arguments.epochs, arguments.seed)
    job["cpu_limit"] = arguments.cpu_seconds
    job["save_after"] = list(range(arguments.save_every, len(job["packs"]) + 1, arguments.save_every))
    curves = {}
    for tool in arguments.tools:
        result = run_worker(tool, folder / tool, job)
        curves[tool] = result if "failed" in result else measure_drafts(samples, tool, folder / tool, result, job)
    return curves


def main() -> None:
    """Print the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a run folder or a store of draftsmith")
    parser.add_argument("--conversations", type=Path, help="rows of conversations, where there is no run yet")
    parser.add_argument("--verifier", default="smollm2", help="the verifier of the run")
    parser.add_argument("--tools", nargs="+", default=list(PYTHONS), choices=list(PYTHONS))
    parser.add_argument("--unroll", type=int, default=3, help="unroll steps K")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="size V_d of the draft vocabulary")
    parser.add_argument("--pack-tokens", type=int, default=1024, help="tokens packed into a step")
    parser.add_argument("--one-sequence", action="store_true", help="a pack is one long sample, not several")
    parser.add_argument("--supervised", type=float, help="share of supervised tokens; not given: as in the data")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each tool")
    parser.add_argument("--quality", action="store_true", help="held-out acceptance over CPU seconds")
    parser.add_argument("--cpu-seconds", type=float, default=400, help="with --quality: how long each tool trains")
    parser.add_argument("--save-every", type=int, default=10, help="with --quality: steps between measurements")
    parser.add_argument("--epochs", type=int, default=60, help="with --quality: the most epochs")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-limit", type=float, default=16, help="GiB a worker may use")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.run is None:
        if arguments.conversations is None:
            parser.error("name a --run, or --conversations to make one of")
        arguments.run = make_run(arguments.conversations, arguments.verifier, ROOT / "runs" / "benchmark")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        samples = write_samples(
            folder / "samples",
            arguments.run,
            arguments.verifier,
            arguments.draft_vocab,
            arguments.supervised,
            arguments.pack_tokens if arguments.one_sequence else None,
        )
        job = {
            "samples": str(samples.folder),
            "verifier": str(samples.facts.folder),
            "unroll": arguments.unroll,
            "pack_tokens": arguments.pack_tokens,
            "boundaries": samples.source.boundaries,
            "lr": arguments.lr,
            "seed": arguments.seed,
            "cpu_limit": 1e9,
            "memory_limit_gib": arguments.memory_limit,
            "save_after": [],
        }
        work = quality if arguments.quality else speed
        result = work(samples, arguments, folder, job)
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    if arguments.json:
        print(json.dumps({"asked": asked, "supervised": samples.supervised, "tools": result}))
        return
    print(
        f"K = {arguments.unroll}, V_d = {arguments.draft_vocab}, T = {arguments.pack_tokens}, "
        f"{samples.supervised:.0%} of the tokens supervised"
    )
    print(quality_table(result) if arguments.quality else speed_table(result))


if __name__ == "__main__":
    main()
