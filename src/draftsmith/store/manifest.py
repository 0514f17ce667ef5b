"""What every stage folder has: an identity file written first, a `manifest.json` written last.

The identity says what the folder is made from. A folder without a manifest is unfinished; a stage that finds
its own identity there goes on, one that finds another identity refuses.
"""

import json
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.files import TEMPORARY_SUFFIX, hash_file, hash_json, remove_leftovers, write_json

MANIFEST = "manifest.json"
IDENTITY = "identity.json"  # the identity file of a stage's folder
STORE_IDENTITY = "store.json"  # but of a store
State = Literal["fresh", "resume", "done"]


@dataclass(frozen=True)
class StageFolder:
    """A folder that one stage writes.

    `made_from` is plain JSON: format, recipe of the stage, hashes of its inputs, verifier identity.
    `plan` is derived from it (such as the division into shards) and stored beside it.
    """

    path: Path
    identity_name: str
    made_from: dict[str, Any]

    def state(self) -> State:
        """Return how far the folder is; raise BadInput if it was made from something else."""
        identity_file = self.path / self.identity_name
        if not identity_file.is_file():
            if self.path.is_dir() and any(file.suffix != TEMPORARY_SUFFIX for file in self.path.iterdir()):
                raise BadInput(
                    f"{self.path}: not empty, and no {self.identity_name} says what it is. "
                    "Choose another run_dir, or remove it."
                )
            return "fresh"
        found = read_json(identity_file)["made_from"]
        if found != self.made_from:
            raise BadInput(
                f"{self.path}: made from something else than asked for now:\n"
                + "\n".join(f"  {line}" for line in _differences(found, self.made_from))
                + "\nUse --redo to replace it, or choose another run_dir."
            )
        if not (self.path / MANIFEST).is_file():
            return "resume"
        check_sizes(self.path)
        return "done"

    def is_usable(self) -> bool:
        """Say whether the stage can go on from, or keep, what is there."""
        try:
            self.state()
        except DraftsmithError:
            return False
        return True

    def begin(self, plan: dict[str, Any] | None = None) -> None:
        """Create the folder with its identity, or clear an interrupted run's temporary files."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        if not (self.path / self.identity_name).is_file():
            write_json(self.path / self.identity_name, {"made_from": self.made_from, **(plan or {})})

    def finish(self, counts: dict[str, Any], files: list[str]) -> None:
        """Write the manifest: the folder is complete from here on. `files` are relative names."""
        write_json(
            self.path / MANIFEST,
            {
                "made_from": self.made_from,
                "written_by": {name: version(name) for name in ("draftsmith", "torch", "transformers")},
                "counts": counts,
                "files": {name: _describe_file(self.path / name) for name in sorted(files)},
            },
        )

    def remove(self) -> None:
        """Delete the folder if it holds a stage's output; raise BadInput if it is something else."""
        if not self.path.exists():
            return
        if not (self.path / self.identity_name).is_file():
            raise BadInput(f"{self.path}: no {self.identity_name} in it; not deleting what no stage wrote")
        shutil.rmtree(self.path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise BadInput if the file is missing or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: wanted a JSON object, found {type(value).__name__}")
    return value


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a finished stage's manifest; raise BadInput if the stage did not finish."""
    if not (folder / MANIFEST).is_file():
        state = "unfinished" if folder.is_dir() else "not there"
        raise BadInput(f"{folder}: {state} (no {MANIFEST}). Run the stage that writes it first.")
    return read_json(folder / MANIFEST)


def content_hash(folder: Path) -> str:
    """Return the hash that stands for everything in a finished folder: its origin, counts and files."""
    manifest = read_manifest(folder)
    return hash_json({key: manifest[key] for key in ("made_from", "counts", "files")})


def check_sizes(folder: Path) -> None:
    """Raise DraftsmithError if a file of a finished folder is gone or has another size."""
    for name, expected in read_manifest(folder)["files"].items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != expected["bytes"]:
            what = "missing" if found is None else f"{found} bytes"
            raise DraftsmithError(
                f"{file}: {what}, but {MANIFEST} says {expected['bytes']} bytes. "
                "Restore it, or make the folder again with --redo."
            )


def _describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}


def _differences(found: Any, wanted: Any, where: str = "") -> list[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        lines = []
        for key in sorted(found.keys() | wanted.keys()):
            lines += _differences(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
        return lines
    return [] if found == wanted else [f"{where}: there {found!r}, now {wanted!r}"]
