"""Structure: headers and tables only. Codes DS101 to DS106."""

from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.store.manifest import MANIFEST, read_json, read_manifest
from draftsmith.store.reader import STORE_IDENTITY
from draftsmith.store.shard import Shard, open_shard
from draftsmith.store.validation import RECORD
from draftsmith.validate.findings import Finding
from draftsmith.verifier.facts import VerifierFacts

_AGAIN = "Run extract again with --redo."


def check_structure(folder: Path, facts: VerifierFacts | None) -> list[Finding]:
    """Check that the folder is a finished store of this verifier and that its shards are what it says."""
    try:
        manifest, identity = read_manifest(folder), read_json(folder / STORE_IDENTITY)
        files: dict[str, dict[str, Any]] = manifest["files"]
        plan, made_from = identity["shards"], identity["made_from"]
        boundaries, width = identity["boundaries"], identity["hidden_size"]
    except (DraftsmithError, KeyError) as error:
        finished = f"{STORE_IDENTITY} and {MANIFEST} of a finished store"
        return [Finding("DS101", str(folder), finished, _text(error), "Run extract; it goes on where it stopped.")]
    findings = []
    if facts is not None and made_from["verifier"] != facts.identity:
        differing = sorted(key for key in facts.identity if made_from["verifier"].get(key) != facts.identity[key])
        findings.append(
            Finding(
                "DS105", STORE_IDENTITY, f"the verifier in {facts.folder}", f"another {', '.join(differing)}",
                "Use the verifier that made the store, or extract again.",
            )
        )  # fmt: skip
    for entry in plan:
        findings += _check_shard(folder, entry, files.get(entry["file"]), boundaries, width)
    known = {STORE_IDENTITY, MANIFEST, RECORD, *(entry["file"] for entry in plan)}
    for stray in sorted(path.name for path in folder.iterdir() if path.name not in known):
        findings.append(Finding("DS106", stray, "only files of the store", "this file", "Move it elsewhere."))
    return findings


def _check_shard(
    folder: Path, entry: dict[str, Any], listed: dict[str, Any] | None, boundaries: list[int], width: int
) -> list[Finding]:
    name = entry["file"]
    path = folder / name
    size = path.stat().st_size if path.is_file() else None
    if listed is None or size != listed["bytes"]:
        expected = f"{listed['bytes']} bytes" if listed else f"an entry in {MANIFEST}"
        return [Finding("DS102", name, expected, "missing" if size is None else f"{size} bytes", _AGAIN)]
    try:
        shard = open_shard(path)
    except DraftsmithError as error:
        return [Finding("DS103", name, "an intact shard", _text(error), _AGAIN)]
    found, wanted = _facts_of(shard), (boundaries, width, entry["samples"], entry["tokens"])
    if found != wanted:
        words = "boundaries {}, width {}, {} samples, {} tokens"
        return [Finding("DS104", name, words.format(*wanted), words.format(*found), _AGAIN)]
    return []


def _facts_of(shard: Shard) -> tuple[list[int], int, int, int]:
    return shard.boundaries, shard.hidden_size, len(shard), len(shard.tables["input_ids"])


def _text(error: Exception) -> str:
    return f"no key {error}" if isinstance(error, KeyError) else str(error)
