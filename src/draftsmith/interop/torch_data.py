"""Folders and files of torch.save samples: speculators v1 and v0, SpecForge."""

from collections import Counter
from pathlib import Path
from typing import Self

from draftsmith.errors import BadInput
from draftsmith.interop.data import Data, Format, Layout, Opened
from draftsmith.interop.data_config import DataConfig, read_data_config, read_sample_lengths, vocabulary_findings
from draftsmith.interop.numbered import DATA_CONFIG, SAMPLE_LENGTHS, Entry, Listing, companion, list_numbered
from draftsmith.interop.torch_samples import FORMS, TorchForm, form_of, read_torch_content, torch_sample
from draftsmith.store.findings import Finding

_LOOK_AT = 16  # files opened to tell the format
_SUFFIX_FORMS: dict[str, Format] = {".pt": "speculators-v1", ".ckpt": "specforge", ".gz": "specforge"}


class TorchData(Data):
    """A folder of numbered torch.save files, or one such file."""

    def __init__(self, path: Path, form: TorchForm, listing: Listing, config: DataConfig, folder: Path) -> None:
        layout = Layout(
            form.format,
            config.boundaries,
            form.normed,
            len(config.boundaries) if config.boundaries else None,
            config.hidden_size,
            config.seq_length,
            config.verifier,
            DATA_CONFIG if config.boundaries else "",
        )
        super().__init__(path, layout, [entry.name for entry in listing.entries])
        self.form, self.listing, self.config = form, listing, config
        self._lengths, self._length_findings = read_sample_lengths(folder)

    @classmethod
    def recognise(cls, path: Path) -> Self | None:
        """Open `path` if it is such a folder or file."""
        if path.is_file():
            form = _form_of_file(path)
            if form is None:
                return None
            digits = "".join(c for c in path.name if c.isdigit())
            listing = Listing(path.parent, [Entry(int(digits or 0), path.name)])
            return cls(path, form, listing, read_data_config(path.parent), path.parent)
        listing = list_numbered(path.absolute())
        if not listing.entries:
            return None
        return cls(path, _majority_form(path, listing), listing, read_data_config(path.absolute()), path.absolute())

    @property
    def declared_samples(self) -> int | None:
        """How many samples data_config.json says the whole folder holds."""
        whole = self.path.is_dir() and self.config.path is not None and self.config.path.parent == self.path.absolute()
        return self.config.num_samples if whole else None

    def companions(self) -> list[Path]:
        """Return data_config.json and sample_lengths.json, where there are any."""
        found = (companion(self.listing.folder, name) for name in (DATA_CONFIG, SAMPLE_LENGTHS))
        return [path for path in found if path is not None]

    def survey(self) -> list[Finding]:
        """Return what names, numbers and companion files show."""
        if self.path.is_file():
            return list(self.config.findings)
        findings = [*self.listing.findings(), *self._length_findings, *vocabulary_findings(self.path.absolute())]
        if self.form.format == "speculators-v1" or self.config.path is not None:
            findings += self.config.findings
        else:
            wanted = "a file that says which layers"
            findings.append(Finding("DS124", str(self.path), wanted, f"{self.form.title} files say nothing of it"))
        wanted_samples = self.declared_samples
        if wanted_samples is not None and wanted_samples != len(self):
            found = f"{len(self):,} files, num_samples {wanted_samples:,}"
            findings.append(Finding("DS125", DATA_CONFIG, "as many samples as files", found))
        return findings

    def _open(self, index: int) -> Opened:
        number, name = self.listing.entries[index]
        file, content = read_torch_content(self.listing.folder / name)
        sample, findings = torch_sample(file, content, self.form, name, number)
        if sample is not None and self._lengths is not None:
            listed = self._lengths.get(str(number))
            if listed != sample.length:
                said = "nothing" if listed is None else str(listed)
                findings.append(Finding("DS118", name, f"the {said} of {SAMPLE_LENGTHS}", f"{sample.length} tokens"))
        return Opened([sample] if sample is not None else [], findings)


def _form_of_file(path: Path) -> TorchForm | None:
    try:
        file, _ = read_torch_content(path)
    except (BadInput, OSError):
        return _by_suffix(path)
    return form_of(file.content)


def _majority_form(path: Path, listing: Listing) -> TorchForm:
    """Return the form that most of some files have; where none can be read, the one that their names suggest."""
    step = max(1, len(listing.entries) // _LOOK_AT)
    found: Counter[TorchForm] = Counter()
    for _, name in listing.entries[::step]:
        try:
            form = form_of(read_torch_content(listing.folder / name)[0].content)
        except (BadInput, OSError):
            continue
        if form is not None:
            found[form] += 1
    if found:
        return found.most_common(1)[0][0]
    return _by_suffix(path / listing.entries[0].name) or FORMS[0]


def _by_suffix(path: Path) -> TorchForm | None:
    wanted = _SUFFIX_FORMS.get(path.suffix)
    return next((form for form in FORMS if form.format == wanted), None)
