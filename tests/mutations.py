"""Mutations of clean hidden-state folders: what each planted fault of faults.py does to the files.

The folders are those of make_data.py; their samples are sorted by length, so that the victim is among the shortest.
"""

import gzip
import io
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from draftsmith.files import write_json
from draftsmith.recipe import VerifierRecipe
from draftsmith.store.manifest import read_json
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import VerifierHead, read_head
from draftsmith.verifier.locate import locate
from draftsmith.verifier.run import RunningVerifier, load_verifier

Content = dict[str, Any]
BOUNDARIES = [2, 15, 27, 30]
VICTIM = 3  # the sample that faults of one sample are planted in


def data_file(folder: Path, number: int = VICTIM) -> Path:
    (path,) = [p for p in folder.rglob(f"data_{number}.*") if p.is_file()]
    return path


def rewrite(path: Path, change: Callable[[Content], Any]) -> None:
    """Load a torch.save file, change its content and save it again, as a faulty writer would."""
    packed = path.suffix == ".gz"
    source = io.BytesIO(gzip.decompress(path.read_bytes())) if packed else path
    content = torch.load(source, weights_only=True)
    result = change(content)
    buffer = io.BytesIO()
    torch.save(content if result is None else result, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue(), 1) if packed else buffer.getvalue())


def in_file(change: Callable[[Content], Any], number: int = VICTIM) -> Callable[[Path], None]:
    """Change one data file's content."""
    return lambda folder: rewrite(data_file(folder, number), change)


def in_all(change: Callable[[Content], Any]) -> Callable[[Path], None]:
    """Change every data file's content."""

    def apply(folder: Path) -> None:
        for path in sorted(folder.rglob("data_*")):
            if path.is_file() and path.suffix in (".pt", ".ckpt", ".gz"):
                rewrite(path, change)

    return apply


def in_bytes(change: Callable[[bytearray], Any], number: int = VICTIM) -> Callable[[Path], None]:
    """Change one data file's bytes."""

    def apply(folder: Path) -> None:
        path = data_file(folder, number)
        data = bytearray(path.read_bytes())
        result = change(data)
        path.write_bytes(data if result is None else result)

    return apply


def in_config(section: str, **values: Any) -> Callable[[Path], None]:
    """Change values in one section of data_config.json."""

    def apply(folder: Path) -> None:
        config = read_json(folder / "data_config.json")
        config[section].update(values)
        write_json(folder / "data_config.json", config)

    return apply


def in_arrow(change: Callable[[dict[str, torch.Tensor]], None], row: int = VICTIM) -> Callable[[Path], None]:
    """Change one states file of an Arrow dataset."""

    def apply(folder: Path) -> None:
        path = folder / "hidden_states" / f"hs_{row}.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    return apply


def row(plane: int, number: int, value: float) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        content["hidden_states"][plane][number] = value

    return change


def item(key: str, place: Any, value: float) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        content[key][place] = value

    return change


def put(key: str, value: Callable[[Any], Any]) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        content[key] = value(content[key])

    return change


def drop(key: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        del content[key]

    return change


def states(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[[Content], None]:
    return put("hidden_states", lambda planes: [plane.clone() for plane in change(planes)])


def last(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Content], None]:
    return states(lambda planes: [*planes[:-1], change(planes[-1])])


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/draftsmith-was-attacked",)


def attack(content: Content) -> None:
    content["extra"] = _Attack()


def deflate(data: bytearray) -> bytes:
    """The same records, compressed, with a storage that says to become 8 GB of zeros."""
    source, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        for info in source.infolist():
            content = source.read(info)
            packed.writestr(info.filename, bytes(64 << 20) if info.filename.endswith("/data/1") else content)
    return target.getvalue()


def gzip_bomb(folder: Path) -> None:
    path = data_file(folder)
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(40):
            file.write(bytes(8 << 20))


def record_place(data: bytearray, ending: str) -> int:
    """Return where the 30-byte header of a zip's record begins."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return next(info.header_offset for info in archive.infolist() if info.filename.endswith(ending))


def overwrite_record(data: bytearray) -> None:
    place = record_place(data, "/data/1")
    data[place : place + 4] = b"XXXX"


def flip(share: float) -> Callable[[bytearray], None]:
    """Flip a bit at this share of the file: tensors fill nearly all of it."""

    def change(data: bytearray) -> None:
        data[int(len(data) * share)] ^= 4

    return change


def flip_token(data: bytearray) -> None:
    place = record_place(data, "/data/0")
    name_bytes, extra_bytes = struct.unpack("<HH", data[place + 26 : place + 30])
    data[place + 30 + name_bytes + extra_bytes + 8] ^= 1


def legacy(folder: Path) -> None:
    path = data_file(folder)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)


def duplicate(folder: Path) -> None:
    (folder / "rows_0-2000").mkdir()
    shutil.copy(data_file(folder), folder / "rows_0-2000" / f"data_{VICTIM}.pt")


def misplace(folder: Path) -> None:
    (folder / "rows_2000-4000").mkdir()
    path = data_file(folder)
    path.rename(folder / "rows_2000-4000" / path.name)


def anothers(plane: int, by: int = 7) -> Callable[[Path], None]:
    """Put another sample's states in one plane of the victim, as far as they reach."""

    def apply(folder: Path) -> None:
        other = torch.load(data_file(folder, VICTIM + by), weights_only=True)["hidden_states"]

        def change(content: Content) -> None:
            own = content["hidden_states"][plane]
            rows = min(len(own), len(other[plane]))
            own[:rows] = other[plane][:rows]

        rewrite(data_file(folder), change)

    return apply


def whole_of_another(folder: Path) -> None:
    """The victim gets exactly the next sample's states; both are cut to one length."""
    other = torch.load(data_file(folder, VICTIM + 1), weights_only=True)["hidden_states"]
    rows = min(len(other[0]), len(torch.load(data_file(folder), weights_only=True)["input_ids"]))

    def change(content: Content) -> None:
        content["hidden_states"] = other
        cut(rows)(content)

    rewrite(data_file(folder), change)
    rewrite(data_file(folder, VICTIM + 1), cut(rows))
    (folder / "sample_lengths.json").unlink()


def cut(rows: int) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        for key in ("input_ids", "loss_mask"):
            content[key] = content[key][:rows].clone()
        content["hidden_states"] = [plane[:rows].clone() for plane in content["hidden_states"]]

    return change


def rotate_files(by: int) -> Callable[[Path], None]:
    """Each file gets the states of the one `by` further on: the order of requests was mixed up."""

    def apply(folder: Path) -> None:
        paths = sorted(folder.glob("data_*.pt"), key=lambda path: int(path.stem[5:]))
        every = [torch.load(path, weights_only=True)["hidden_states"] for path in paths]
        longest = max(len(planes[0]) for planes in every)
        for number, path in enumerate(paths):
            planes = every[(number + by) % len(paths)]

            def change(content: Content, planes: list[torch.Tensor] = planes) -> None:
                rows = len(content["input_ids"])
                repeats = -(-longest // len(planes[0])) + 1
                content["hidden_states"] = [plane.repeat(repeats, 1)[:rows].clone() for plane in planes]

            rewrite(path, change)

    return apply


def same_conversation(folder: Path) -> None:
    shutil.copy(data_file(folder), data_file(folder, VICTIM + 1))
    lengths = read_json(folder / "sample_lengths.json")
    lengths[str(VICTIM + 1)] = lengths[str(VICTIM)]
    write_json(folder / "sample_lengths.json", lengths)


def pad(content: Content) -> None:
    content["input_ids"] = torch.cat([content["input_ids"], torch.full((9,), 2)])
    content["loss_mask"] = torch.cat([content["loss_mask"], torch.zeros(9, dtype=torch.int64)])
    noise = torch.randn(9, content["hidden_states"][0].shape[1]).bfloat16()
    content["hidden_states"] = [torch.cat([plane, plane[-9:] + noise]) for plane in content["hidden_states"]]


def token_freq(folder: Path) -> None:
    torch.save({1: 2}, folder / "token_freq.pt")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def views(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat([plane, plane])[: len(plane)] for plane in planes]


def vocabulary(folder: Path) -> None:
    np.save(folder / "d2t.npy", np.arange(8))
    np.save(folder / "t2d.npy", np.arange(32) < 8)


def other_answers(content: Content) -> None:
    """An eighth of the supervised tokens were written by nobody; the states are truly of these tokens."""
    generator = torch.Generator().manual_seed(int(content["input_ids"].sum()))
    places = content["loss_mask"].bool() & (torch.rand(len(content["input_ids"]), generator=generator) < 0.12)
    places &= content["input_ids"] > 16  # the turns stay as they are
    content["input_ids"][places] = torch.randint(1000, 40000, (int(places.sum()),), generator=generator)
    computed = smollm2().states(content["input_ids"][None], BOUNDARIES)
    content["hidden_states"] = [computed[boundary][0].bfloat16() for boundary in BOUNDARIES]


def supervise_questions(content: Content) -> None:
    content["loss_mask"] = torch.zeros_like(content["loss_mask"])
    content["loss_mask"][5:-2:2] = 1


def anothers_mask(folder: Path) -> None:
    """The mask of the next sample whose answer begins elsewhere."""
    own = torch.load(data_file(folder), weights_only=True)["loss_mask"]
    for number in range(VICTIM + 1, 24):
        other = torch.load(data_file(folder, number), weights_only=True)["loss_mask"]
        if abs(int(other.argmax()) - int(own.argmax())) > 1:
            break
    padded = torch.nn.functional.pad(other, (0, max(0, len(own) - len(other))))[: len(own)]
    rewrite(data_file(folder), put("loss_mask", lambda _: padded.clone()))


@cache
def smollm2() -> RunningVerifier:
    return load_verifier(read_facts(locate("smollm2")), VerifierRecipe(model="smollm2", device="cpu"))


@cache
def smollm2_head() -> VerifierHead:
    return read_head(read_facts(locate("smollm2")))


def other_family(folder: Path) -> None:
    """v0 targets normed with 1 + w, as for another family of models."""
    norm_H = smollm2_head().norm_H
    in_all(put("target", lambda target: (target.float() / norm_H * (1 + norm_H)).bfloat16()))(folder)


def norm_again(folder: Path) -> None:
    in_all(last(lambda state: smollm2_head().normed(state).bfloat16()))(folder)


def not_normed(folder: Path) -> None:
    """v0 targets without the norm's weights: the raw states but for each row's size, which the norm takes out."""
    in_all(put("target", lambda target: (target.float() / smollm2_head().norm_H).bfloat16()))(folder)


def swap(a: int, b: int) -> Callable[[Content], None]:
    def change(planes: list[torch.Tensor]) -> list[torch.Tensor]:
        result = list(planes)
        result[a], result[b] = result[b], result[a]
        return result

    return states(change)


def thousandfold(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    return [planes[0], planes[1] * 1000, *planes[2:]]


def transposed(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    return [plane.T.contiguous().T for plane in planes]


def permuted(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    """Another model of the same size: the hidden dimensions mean something else."""
    order = torch.randperm(planes[0].shape[1], generator=torch.Generator().manual_seed(0))
    return [plane[:, order] for plane in planes]


def one_permuted(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    order = torch.randperm(planes[0].shape[1], generator=torch.Generator().manual_seed(0))
    return [planes[0], planes[1][:, order], *planes[2:]]


def beyond_rows(folder: Path) -> None:
    states_folder = folder / "hidden_states"
    shutil.copy(states_folder / "hs_0.safetensors", states_folder / "hs_99.safetensors")


def stale_rows(content: Content) -> None:
    content["hidden_states"][1][10:14] = content["hidden_states"][1][9]


def lengths(folder: Path) -> None:
    listed = read_json(folder / "sample_lengths.json")
    listed[str(VICTIM)] += 1
    write_json(folder / "sample_lengths.json", listed)


def cut_lengths(folder: Path) -> None:
    (folder / "sample_lengths.json").write_text('{"0": 1')


def hole(folder: Path) -> None:
    data_file(folder).unlink()
    in_config("data", num_samples=23)(folder)
