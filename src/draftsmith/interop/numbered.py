"""Folders of numbered data files, listed by name alone.

data_{i}.pt                       speculators v1
rows_{a}-{b}/data_{i}.ckpt[.gz]   SpecForge, one numbering over all folders; v1 payloads are met there too
{i}/data_{i}.ckpt                 speculators v0
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from draftsmith.store.findings import Finding

DATA_CONFIG, SAMPLE_LENGTHS = "data_config.json", "sample_lengths.json"
MAX_NAMED = 20  # of holes or duplicates, by number
_DATA_NAME = re.compile(r"data_(\d{1,18})\.(?:pt|ckpt)(?:\.gz)?")
_ROWS_NAME = re.compile(r"rows_(\d{1,18})-(\d{1,18})")
_NUMBER_NAME = re.compile(r"\d{1,18}")
_COMPANIONS = {DATA_CONFIG, SAMPLE_LENGTHS, "d2t.npy", "t2d.npy", "vocab_mapping"}
_LEFTOVER = re.compile(r".*(\.tmp|\.temp|\.part|\.partial|\.incomplete|~)|\..*|tmp.*")


class Entry(NamedTuple):
    """A data file: its number and its name, relative to the folder."""

    number: int
    name: str


@dataclass
class Listing:
    """What lies in a folder of numbered files; `first` is the number it should begin with."""

    folder: Path
    entries: list[Entry] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    misplaced: list[Entry] = field(default_factory=list)
    first: int = 0

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with names and numbers."""
        for stray in sorted(self.strays):
            if is_leftover(Path(stray).name):
                yield Finding("DS123", stray, "finished files only", "a temporary name")
            else:
                wanted = "data files and their companions only"
                risk = "; speculators' v1 reader takes every name that ends in 'pt'" if stray.endswith("pt") else ""
                yield Finding("DS106", stray, wanted, f"another file{risk}")
        for number, name in self.misplaced:
            yield Finding("DS122", name, "a number that its folder's name covers", str(number))
        numbers = [entry.number for entry in self.entries]
        for (number, name), (following, other) in pairwise(self.entries):
            if number == following:
                yield Finding("DS121", name, f"the number {number} once", f"also {other}")
        gaps, missing = _gaps(numbers, self.first)
        if missing:
            whole = f"every number from {min(self.first, numbers[0])} to {numbers[-1]}"
            yield Finding("DS120", str(self.folder), whole, f"{missing:,} have no file: {', '.join(gaps)}")


def list_numbered(folder: Path) -> Listing:
    """List a folder; entries are sorted by number. There are none if it is not a folder of numbered files."""
    listing = Listing(folder)
    own = _bounds(folder.name)
    _list_place(folder, own, listing)
    listing.entries.sort()
    listing.first = own[0] if own else 0
    return listing


def is_leftover(name: str) -> bool:
    """Say whether a file's name is a temporary one, of a write that was interrupted."""
    return _LEFTOVER.fullmatch(name) is not None


def companion(folder: Path, name: str) -> Path | None:
    """Find a companion file in the folder, in one of its `rows_` folders, or one folder up."""
    places = [folder, *sorted(path for path in folder.glob("rows_*-*") if path.is_dir())[:1], folder.parent]
    return next((place / name for place in places if (place / name).is_file()), None)


def _list_place(place: Path, bounds: tuple[int, int] | None, listing: Listing) -> None:
    top = place == listing.folder
    with os.scandir(place) as entries:
        for entry in entries:
            name = entry.name if top else f"{place.relative_to(listing.folder).as_posix()}/{entry.name}"
            match = _DATA_NAME.fullmatch(entry.name)
            if match and entry.is_file():
                found = Entry(int(match[1]), name)
                listing.entries.append(found)
                if bounds is not None and not bounds[0] <= found.number <= bounds[1]:
                    listing.misplaced.append(found)
            elif top and entry.is_dir() and (inner := _bounds(entry.name) or _single(entry.name)):
                _list_place(place / entry.name, inner, listing)
            elif entry.name not in _COMPANIONS:
                listing.strays.append(name)


def _bounds(name: str) -> tuple[int, int] | None:
    """Return the numbers that belong into a folder of this name, if it is `rows_{a}-{b}`."""
    match = _ROWS_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _single(name: str) -> tuple[int, int] | None:
    return (int(name), int(name)) if _NUMBER_NAME.fullmatch(name) else None


def _gaps(numbers: list[int], first: int) -> tuple[list[str], int]:
    """Return the first gaps in sorted numbers as text, and how many numbers are missing."""
    names: list[str] = []
    missing = 0
    if not numbers:
        return names, missing
    for before, after in pairwise([min(first, numbers[0]) - 1, *numbers]):
        if after - before > 1:
            missing += after - before - 1
            if len(names) < MAX_NAMED:
                names.append(str(before + 1) if after - before == 2 else f"{before + 1}-{after - 1}")
    return names, missing
