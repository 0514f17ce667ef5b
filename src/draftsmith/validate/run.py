"""validate: hidden states of any format -> a report of findings and figures."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from draftsmith.errors import BadInput
from draftsmith.interop.data import TITLES, Data
from draftsmith.interop.description import printable
from draftsmith.interop.source import read_states
from draftsmith.recipe import ValidateRecipe, VerifierRecipe
from draftsmith.store.findings import Finding
from draftsmith.store.sample_file import SampleFile
from draftsmith.validate.masks import judge_masks
from draftsmith.validate.meaning import SAMPLE_POSITIONS, MeaningSample, check_meaning, choose_rows
from draftsmith.validate.report import FindingLog, distributions, histogram
from draftsmith.validate.scan import FileReport, Orders, SampleFacts, scan_files
from draftsmith.validate.spot import SpotResult, check_growth, spot_check
from draftsmith.validate.structure import check_between, check_forms, check_identity
from draftsmith.validate.values import TokenLimits
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import VerifierHead, read_head
from draftsmith.verifier.run import load_verifier
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer
from draftsmith.verifier.turns import mask_rules

_SPARE_MEMORY = 1.2  # a verifier is loaded for the spot check if this many times its weights are free


@dataclass(frozen=True)
class Validation:
    """One validation: the data, the verifier (None: not at hand), settings, and boundaries that the user names."""

    data: Data
    facts: VerifierFacts | None
    recipe: ValidateRecipe
    verifier_recipe: VerifierRecipe
    boundaries: list[int] | None = None

    @property
    def declared(self) -> list[int] | None:
        """The boundaries of the planes, as the user or the files say."""
        return self.boundaries or self.data.layout.boundaries


def run_validate(validation: Validation) -> dict[str, Any]:
    """Check the data to the recipe's depth; return the report.

    The meaning is asked only if structure and values show no error: numbers of damaged files mean nothing.
    """
    data, facts, recipe = validation.data, validation.facts, validation.recipe
    if recipe.depth == "meaning" and facts is None:
        raise BadInput("the meaning check needs the verifier: name it with --verifier, or choose --depth values")
    log = FindingLog()
    log.add(data.survey())
    if facts is not None:
        log.add(check_identity(data, facts))
    samples, file_bytes = _scan(validation, log)
    log.add(check_forms(samples, data.layout, facts))
    log.add(check_between(samples, lambda one, other: _identical(data, one, other)))
    log.add(judge_masks([(sample.where, sample.mask_fit) for sample in samples if sample.mask_fit is not None]))
    report: dict[str, Any] = {
        "path": printable(data.path),
        "format": data.layout.format,
        "title": TITLES[data.layout.format],
        "depth": recipe.depth if recipe.depth != "meaning" else "values",
        "files": len(data),
        "samples": len(samples),
        "tokens": sum(sample.length for sample in samples),
        "supervised_tokens": sum(sample.supervised for sample in samples),
        "bytes": file_bytes,
        "boundaries": validation.declared,
        "boundaries_from": "data.boundaries" if validation.boundaries else data.layout.origin or None,
        "last_state": "after the final norm" if data.layout.normed else "before the final norm",
    }
    if recipe.depth == "meaning" and not log.errors and facts is not None:
        report["depth"] = "meaning"
        report |= _check_meaning(validation, facts, samples, log)
    names = _first_sample(data, samples).plane_names() if samples else []
    report["distributions"] = distributions(samples, names) | report.pop("distributions", {})
    report["settings"] = recipe.model_dump(mode="json", exclude={"jobs"})
    return report | log.as_json()


def _scan(validation: Validation, log: FindingLog) -> tuple[list[SampleFacts], int]:
    data, facts, recipe = validation.data, validation.facts, validation.recipe
    deep = recipe.depth != "structure"
    limits, rules = TokenLimits(), None
    if facts is not None:
        tokenizer = load_tokenizer(facts.folder) if deep else None
        limits = TokenLimits(facts.vocab_size, len(tokenizer) if tokenizer is not None else None)
        if recipe.depth == "meaning":
            rules = mask_rules(tokenizer, end_of_turn_ids(facts.folder, tokenizer))
    longest = data.layout.max_length or (facts.text_config.get("max_position_embeddings") if facts else None)
    samples: list[SampleFacts] = []
    file_bytes = 0
    jobs = recipe.jobs or len(os.sched_getaffinity(0))
    for file in scan_files(data, Orders(deep, limits, longest, rules), jobs):
        report: FileReport = file
        log.add(report.findings)
        samples += report.samples
        file_bytes += report.file_bytes
    return samples, file_bytes


def _check_meaning(
    validation: Validation, facts: VerifierFacts, samples: list[SampleFacts], log: FindingLog
) -> dict[str, Any]:
    data, recipe, head = validation.data, validation.recipe, read_head(facts)
    chosen = _choose(samples, recipe.positions)
    share = recipe.positions / max(sum(sample.supervised for sample in chosen), 1)
    asked = (_read(data, sample, max(SAMPLE_POSITIONS, int(sample.supervised * share) + 1)) for sample in chosen)
    result = check_meaning(asked, len(chosen), head, data.layout.normed, recipe.min_agreement)
    log.add(result.findings)
    report: dict[str, Any] = {
        "agreement": {name: round(value, 4) for name, value in result.agreement.items()},
        "positions": result.positions,
        "supervised_positions": sum(sample.supervised for sample in samples),
        "distributions": {
            "sample_agreement": histogram([right / total for _, right, total in result.by_sample], 20, (0.0, 1.0))
        }
        if result.by_sample
        else {},
    }
    spot = _spot(validation, facts, head, chosen, log)
    if spot is not None:
        report["spot"] = {
            "planes": spot.planes,
            "declared": validation.declared,
            "samples": spot.samples, "boundaries": spot.boundaries, "relative_differences": spot.differences,
        }  # fmt: skip
        if validation.declared is None and not log.errors:
            report |= {"boundaries": spot.known(), "boundaries_from": "the spot check"}
    if report.get("boundaries", validation.declared) is None and not log.errors:
        found = "the verifier was not run on samples"
        log.add([Finding("DS315", str(data.path), "a boundary for each layer", found)])
    return report


def _spot(
    validation: Validation, facts: VerifierFacts, head: VerifierHead, chosen: list[SampleFacts], log: FindingLog
) -> SpotResult | None:
    """Run the verifier on the shortest of the chosen samples, if it can be loaded; else look at the growth."""
    data, count = validation.data, validation.recipe.spot_samples
    shortest = sorted(chosen, key=lambda sample: sample.length)[: max(count, 4)]
    if not shortest or any(log.counts[code] for code in ("DS301", "DS304", "DS308")):
        return None
    read = [_read(data, sample, 1) for sample in shortest]
    if count == 0 or not _fits_in_memory(facts):
        log.add(check_growth(read, data.layout.normed))
        return None
    verifier = load_verifier(facts, validation.verifier_recipe)
    spot = spot_check(read[:count], verifier, head, data.layout.normed, validation.declared)
    log.add(spot.findings)
    return spot


def _choose(samples: list[SampleFacts], positions: int) -> list[SampleFacts]:
    """Choose samples with supervised tokens, spread evenly in runs of two neighbours, enough for `positions`."""
    supervised = [sample for sample in samples if sample.supervised > 1]
    most = max(2, positions // SAMPLE_POSITIONS)
    if len(supervised) <= most:
        return supervised
    pairs = np.linspace(0, len(supervised) - 2, most // 2).astype(int)
    return [supervised[i] for i in sorted({*pairs.tolist(), *(pairs + 1).tolist()})]


def _read(data: Data, sample: SampleFacts, positions: int) -> MeaningSample:
    found = _sample(data, sample)
    with found.content.open() as opened:
        tokens, mask = found.read_tables(opened)
    rows = choose_rows(np.asarray(mask, np.uint8), positions)
    ids = np.ascontiguousarray(tokens, np.int32)
    return MeaningSample(found.where, ids, rows, read_states(found), found.plane_names())


def _identical(data: Data, one: SampleFacts, other: SampleFacts) -> bool:
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]] = zip(
        read_states(_sample(data, one)), read_states(_sample(data, other)), strict=True
    )
    return all(bool(torch.equal(a, b)) for a, b in pairs)


def _sample(data: Data, facts: SampleFacts) -> SampleFile:
    return data.open(facts.file).samples[facts.index]


def _first_sample(data: Data, samples: list[SampleFacts]) -> SampleFile:
    return _sample(data, samples[0])


def _fits_in_memory(facts: VerifierFacts) -> bool:
    weights = sum(file.stat().st_size for file in Path(facts.folder).glob("*.safetensors"))
    return bool(weights * _SPARE_MEMORY < psutil.virtual_memory().available)
