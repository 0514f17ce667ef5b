"""draftsmith's own store, seen as files with samples in them."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from draftsmith.errors import BadInput
from draftsmith.interop.data import Data, Format, Layout, Opened
from draftsmith.interop.numbered import is_leftover
from draftsmith.store.findings import Finding
from draftsmith.store.manifest import MANIFEST, STORE_IDENTITY, read_json, read_manifest
from draftsmith.store.shard import open_shard
from draftsmith.store.validation import RECORD


class StoreData(Data):
    """A store's shards, as its store.json plans them."""

    format: ClassVar[Format] = "draftsmith"

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        try:
            self.plan: list[dict[str, Any]] = identity["shards"]
            self.verifier_identity: dict[str, str] = identity["made_from"]["verifier"]
            self.boundaries: list[int] = identity["boundaries"]
            self.width: int = identity["hidden_size"]
            names = [entry["file"] for entry in self.plan]
        except (KeyError, TypeError) as error:
            raise BadInput(f"{path / STORE_IDENTITY}: lacks {error}. Restore it, or extract again.") from error
        layout = Layout(
            self.format, self.boundaries, False, len(self.boundaries), self.width, origin=STORE_IDENTITY
        )  # fmt: skip
        super().__init__(path, layout, names)

    @classmethod
    def recognise(cls, path: Path) -> Self | None:
        """Open `path` if it is a store."""
        return cls(path, read_json(path / STORE_IDENTITY)) if (path / STORE_IDENTITY).is_file() else None

    @cached_property
    def _wrong_sizes(self) -> dict[str, Finding]:
        """What is missing or of another size than the manifest says, by file name; nothing if there is no manifest."""
        if not (self.path / MANIFEST).is_file():
            return {}
        files: dict[str, dict[str, Any]] = read_manifest(self.path).get("files", {})
        findings = {}
        for name in self.names:
            path, listed = self.path / name, files.get(name)
            size = path.stat().st_size if path.is_file() else None
            if listed is None or size != listed["bytes"]:
                expected = f"{listed['bytes']:,} bytes" if listed else f"an entry in {MANIFEST}"
                found = "missing" if size is None else f"{size:,} bytes"
                findings[name] = Finding("DS102", name, expected, found)
        return findings

    def survey(self) -> list[Finding]:
        """Return whether the store is finished, whole, and nothing else is in it."""
        if not (self.path / MANIFEST).is_file():
            wanted = f"{STORE_IDENTITY} and {MANIFEST} of a finished store"
            return [Finding("DS101", str(self.path), wanted, f"no {MANIFEST}")]
        findings = list(self._wrong_sizes.values())
        known = {STORE_IDENTITY, MANIFEST, RECORD, *self.names}
        for stray in sorted(path.name for path in self.path.iterdir() if path.name not in known):
            code = "DS123" if is_leftover(stray) else "DS106"
            findings.append(Finding(code, stray, "only files of the store", "this file"))
        return findings

    def _open(self, index: int) -> Opened:
        entry = self.plan[index]
        path = self.path / entry["file"]
        if entry["file"] in self._wrong_sizes or not path.is_file():
            return Opened()  # the survey says so
        shard = open_shard(path)
        found = (shard.boundaries, shard.hidden_size, len(shard), len(shard.tables["input_ids"]))
        wanted = (self.boundaries, self.width, entry["samples"], entry["tokens"])
        if found != wanted:
            words = "boundaries {}, width {}, {} samples, {} tokens"
            return Opened([], [Finding("DS104", entry["file"], words.format(*wanted), words.format(*found))])
        return Opened(shard.samples(entry["split"]))
