"""Hidden states of any known format, read in place: what the files are, where each sample lies, in what layout.

A `Data` (made by `interop.formats.open_data`, which tells the format from content) lists its files by name; `open(i)`
reads the header of one of them and gives its samples as places (store/sample_file.py), with what is wrong. Nothing
here needs torch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from draftsmith.store.findings import DamagedFile, Finding
from draftsmith.store.sample_file import SampleFile
from draftsmith.verifier.boundaries import Numbering

Format = Literal["draftsmith", "speculators-v1", "speculators-v0", "speculators", "specforge"]
TITLES: dict[Format, str] = {
    "draftsmith": "draftsmith hidden-state store",
    "speculators-v1": "speculators v1 hidden-state folder",
    "speculators-v0": "speculators v0 hidden-state folder",
    "speculators": "speculators 0.5+ dataset (Arrow + safetensors)",
    "specforge": "SpecForge hidden-state folder",
}
# Whose layer ids a format's files speak of.
NUMBERINGS: dict[Format, Numbering] = {
    "draftsmith": "vllm",
    "speculators-v1": "speculators-v1",
    "speculators-v0": "speculators-v1",
    "speculators": "vllm",
    "specforge": "sglang",
}


@dataclass(frozen=True)
class Layout:
    """What the planes of all samples are, as far as files say.

    `boundaries` has one per plane, the last being N; None: not said. `normed`: the last state was taken after the
    final norm. `num_planes`, `hidden_size`, `max_length` and `verifier` are None where nothing declares them.
    """

    format: Format
    boundaries: list[int] | None
    normed: bool
    num_planes: int | None = None
    hidden_size: int | None = None
    max_length: int | None = None
    verifier: str | None = None
    origin: str = ""


@dataclass(frozen=True)
class Opened:
    """One file: its samples, and what is wrong with it."""

    samples: list[SampleFile] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    file_bytes: int = 0


class Data(ABC):
    """A folder (or one file) of hidden states."""

    format: ClassVar[Format]

    def __init__(self, path: Path, layout: Layout, names: list[str]) -> None:
        self.path, self.layout, self.names = path, layout, names

    def __len__(self) -> int:
        return len(self.names)

    def companions(self) -> list[Path]:
        """Return the files beside the data files that say what these are."""
        return []

    @abstractmethod
    def survey(self) -> list[Finding]:
        """Return what names, numbers and companion files show, without opening a data file."""

    @abstractmethod
    def _open(self, index: int) -> Opened:
        """Read the header of a file; raise DamagedFile if it cannot be used at all."""

    def open(self, index: int) -> Opened:
        """Read the header of file `index`; damage becomes a finding."""
        path = self.path / self.names[index] if self.path.is_dir() else self.path
        try:
            opened = self._open(index)
        except DamagedFile as error:
            found = str(error).removeprefix(f"{path}: ").removeprefix(f"{path.absolute()}: ")
            return Opened([], [Finding(error.code, self.names[index], "a readable file", found)], _size(path))
        return replace(opened, file_bytes=_size(path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
