"""convert: hidden states of any known format written in another one, every state the same bit by bit.

What a target cannot hold, or would have to be told without anybody knowing it, is refused before a file is written:

    target            states          layers          last state         besides
    draftsmith        BF16            boundaries      before the norm    hashes of the verifier, split, sample names
    speculators-v1    not fp8         layer_ids       before the norm
    speculators       not fp8         not stated      before the norm

An interrupted conversion goes on where it stopped. In the other tools' formats `convert.json` says until the end what
the folder is made from; then it is deleted, and the folder holds what those tools would have written.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput
from draftsmith.files import TEMPORARY_SUFFIX
from draftsmith.interop.arrow_data import ArrowData
from draftsmith.interop.convert_source import NAMED, Checked, look, refuse_errors
from draftsmith.interop.data import TITLES, Data
from draftsmith.interop.numbered import companion
from draftsmith.interop.source import fingerprint
from draftsmith.interop.store_data import StoreData
from draftsmith.interop.writers import (
    DATASET_INFO,
    FEATURES,
    SHARD_BYTES,
    Target,
    Writing,
    write_speculators,
    write_store,
    write_v1,
)
from draftsmith.store.findings import Finding
from draftsmith.store.manifest import MANIFEST, STORE_IDENTITY, StageFolder, read_json
from draftsmith.verifier.boundaries import from_boundaries
from draftsmith.verifier.facts import VerifierFacts

IDENTITY = "convert.json"
FORMAT_VERSION = 1
_FLOATS = ("BF16", "F16", "F32", "F64")
_DTYPES: dict[Target, tuple[str, ...]] = {"draftsmith": ("BF16",), "speculators-v1": _FLOATS, "speculators": _FLOATS}
_WRITERS: dict[Target, Callable[[Writing], int]] = {
    "draftsmith": write_store, "speculators-v1": write_v1, "speculators": write_speculators,
}  # fmt: skip
_COMPANIONS = ("token_freq.pt", "d2t.npy", "t2d.npy", "vocab_mapping")


@dataclass(frozen=True)
class Conversion:
    """What to convert into what; boundaries, facts and name of the verifier are what the user names."""

    data: Data
    target: Path
    to: Target
    boundaries: list[int] | None = None
    facts: VerifierFacts | None = None
    verifier_name: str | None = None
    shard_bytes: int = SHARD_BYTES


def run_convert(conversion: Conversion) -> dict[str, Any]:
    """Check the source, write the target, go on where an interrupted run stopped; return what was written."""
    data, to, facts = conversion.data, conversion.to, conversion.facts
    _refuse_place(conversion)
    boundaries = _boundaries(conversion)
    _check_verifier(conversion, boundaries)
    surveyed = data.survey()
    refuse_errors(data, surveyed)
    folder = _folder(conversion, boundaries)
    source = look(data, facts.vocab_size if facts is not None else None)
    _check_form(conversion, source, boundaries)
    dropped = _dropped(conversion, source, boundaries)
    name = conversion.verifier_name or data.layout.verifier
    files = _WRITERS[to](Writing(source, folder, boundaries, name, conversion.shard_bytes))
    if folder.identity_name == IDENTITY:
        (folder.path / IDENTITY).unlink()
    warnings = [finding for finding in [*surveyed, *source.findings] if finding.code != "DS124"]
    return {
        "source": str(data.path),
        "from": data.layout.format,
        "target": str(conversion.target),
        "to": to,
        "files": files,
        "samples": len(source.parts),
        "tokens": sum(source.lengths),
        "supervised_tokens": source.supervised_tokens,
        "dtype": source.form.dtype,
        "boundaries": boundaries,
        **({"layer_ids": from_boundaries(boundaries, to)} if boundaries and to == "speculators-v1" else {}),
        "splits": dict(Counter(part.split for part in source.parts)),
        "dropped": dropped,
        "warnings": [f"{finding.code} {finding.where}: {finding.found}" for finding in warnings[:NAMED]],
    }


def _refuse_place(conversion: Conversion) -> None:
    source, target = conversion.data.path, conversion.target
    if target.resolve().is_relative_to(source.resolve()):
        raise BadInput(f"{target}: lies in the source {source}. Choose a folder outside of it.")
    if target.exists() and not target.is_dir():
        raise BadInput(f"{target}: there is a file of this name. Choose another folder.")


def _boundaries(conversion: Conversion) -> list[int] | None:
    """Return the boundaries of the planes, as files or user say; None if neither does and the target needs none."""
    data, named = conversion.data, conversion.boundaries
    stated, title = data.layout.boundaries, TITLES[conversion.to]
    if data.layout.normed:
        raise BadInput(
            f"{data.path}: a {TITLES[data.layout.format]}, whose last state was taken after the final norm. A {title} "
            "holds it before the norm, and a norm cannot be undone exactly. Nothing was converted; validate and train "
            "read the folder as it is (data.path in the recipe)."
        )
    if stated is not None and named is not None and stated != named:
        raise BadInput(
            f"{data.path}: {data.layout.origin} says that its states are of boundaries {stated}, --boundaries says "
            f"{named}. `draftsmith validate --verifier DIR` finds out; mend the file, or leave the option out."
        )
    boundaries = named if stated is None else stated
    if boundaries is None and conversion.to != "speculators":
        raise BadInput(
            f"{data.path}: nothing says which layers its states are of, and a {title} has to. `draftsmith validate "
            f"{data.path} --verifier DIR` finds out; then name all of them: --boundaries 2,15,27,30"
        )
    if boundaries is not None and (not boundaries or sorted(set(boundaries)) != boundaries or boundaries[0] < 0):
        raise BadInput(f"boundaries {boundaries}: wanted ascending numbers from 0, for example 2,15,27,30")
    if boundaries is not None and boundaries[0] == 0 and conversion.to == "speculators-v1":
        raise BadInput(
            f"{data.path}: boundary 0, the embedding's output, has no layer id in a {title}, which names layers by "
            "their output. Convert it --to speculators."
        )
    return boundaries


def _check_verifier(conversion: Conversion, boundaries: list[int] | None) -> None:
    data, facts = conversion.data, conversion.facts
    if facts is None:
        if conversion.to == "draftsmith":
            raise BadInput(
                f"{data.path}: a draftsmith store holds the hashes of its verifier: name it with --verifier DIR"
            )
        return
    if isinstance(data, StoreData) and data.verifier_identity != facts.identity:
        differing = sorted(key for key in facts.identity if data.verifier_identity.get(key) != facts.identity[key])
        raise BadInput(
            f"{data.path}: made with another verifier than the one in {facts.folder}: another {', '.join(differing)}. "
            "Name its own, or leave out --verifier."
        )
    if boundaries is not None and boundaries[-1] != facts.num_layers:
        raise BadInput(
            f"{data.path}: the last of its boundaries {boundaries} is not {facts.num_layers}, the number of layers of "
            f"the verifier in {facts.folder}. Name the verifier that made the states, or the right --boundaries."
        )


def _folder(conversion: Conversion, boundaries: list[int] | None) -> StageFolder:
    """Return the target's folder; raise BadInput unless it is new, or this conversion's own and unfinished."""
    facts, target = conversion.facts, conversion.target
    name = STORE_IDENTITY if conversion.to == "draftsmith" else IDENTITY
    made_from = {
        "format": FORMAT_VERSION,
        "stage": "convert",
        "inputs": {"fingerprint": fingerprint(conversion.data)},
        "to": conversion.to,
        "boundaries": boundaries,
        "verifier": facts.identity if facts is not None else None,
        "verifier_name": conversion.verifier_name,
        **({"shard_bytes": conversion.shard_bytes} if conversion.to == "draftsmith" else {}),
    }
    if (target / MANIFEST).is_file():
        raise BadInput(f"{target}: already there and finished. Remove it, or choose another folder.")
    if (target / name).is_file():
        if read_json(target / name).get("made_from") != made_from:
            raise BadInput(
                f"{target}: unfinished, and begun from another source, from one that has changed, or with other "
                "settings. Remove it, or choose another folder."
            )
    elif target.is_dir() and any(path.suffix != TEMPORARY_SUFFIX for path in target.iterdir()):
        raise BadInput(f"{target}: not empty, and no unfinished conversion (no {name}). Choose another folder.")
    return StageFolder(target, name, made_from)


def _check_form(conversion: Conversion, source: Checked, boundaries: list[int] | None) -> None:
    """Compare what the samples are with what files, user and verifier say, and with what the target holds."""
    path, facts, form = source.data.path, conversion.facts, source.form
    title, held, stated = TITLES[conversion.to], _DTYPES[conversion.to], source.data.layout.hidden_size
    if boundaries is not None and len(boundaries) != form.num_planes:
        raise BadInput(
            f"{path}: its samples hold {form.num_planes} states, but {len(boundaries)} boundaries are named: "
            f"{boundaries}. Name one for each state, the last layer's included."
        )
    if stated not in (None, form.hidden_size):
        raise BadInput(
            f"{path}: its states are {form.hidden_size} wide, but a file beside them says {stated}. "
            "Find which of the two is right."
        )
    if facts is not None and facts.hidden_size != form.hidden_size:
        raise BadInput(
            f"{path}: its states are {form.hidden_size} wide, those of the verifier in {facts.folder} "
            f"{facts.hidden_size}. Name the verifier that made them."
        )
    if form.dtype not in held:
        others = [to for to, dtypes in _DTYPES.items() if form.dtype in dtypes]
        instead = f"convert --to {' or '.join(others)}, or " if others else ""
        raise BadInput(
            f"{path}: its states are {form.dtype}; a {title} holds {', '.join(held)} only, and a conversion never "
            f"rounds. Instead, {instead}train on the files as they are (data.path in the recipe)."
        )


def _dropped(conversion: Conversion, source: Checked, boundaries: list[int] | None) -> dict[str, int]:
    """Count what the source has and the target cannot hold."""
    data, to = conversion.data, conversion.to
    dropped: Counter[str] = Counter()
    if isinstance(data, StoreData) and to != "draftsmith":
        dropped["sample names"] = len(source.parts)
        dropped["marks of validation samples"] = sum(part.split == "validation" for part in source.parts)
        dropped["hashes of the verifier"] = len(data.verifier_identity)
    if boundaries is not None and to == "speculators":
        dropped[f"layer numbers (kept as text in {DATASET_INFO})"] = len(boundaries)
    if isinstance(data, ArrowData):
        info = data.path / DATASET_INFO
        columns: dict[str, Any] = read_json(info).get("features", {}) if info.is_file() else {}
        for column in sorted(columns.keys() - FEATURES.keys()):
            dropped[f"column {column}"] = 1
        dropped["rows without states"] = data.table.num_rows - len(source.parts)
    elif not isinstance(data, StoreData):
        folder = (data.path if data.path.is_dir() else data.path.parent).absolute()
        for name in _COMPANIONS:
            dropped[name] = int(companion(folder, name) is not None)
    dropped["keys that the source's format does not know"] = _count(source.findings, "DS113")
    return {name: count for name, count in dropped.items() if count}


def _count(findings: list[Finding], code: str) -> int:
    return sum(finding.code == code for finding in findings)
