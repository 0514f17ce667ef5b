"""validate: store -> findings, recorded in the store for `train` to see."""

from pathlib import Path
from typing import Any

from draftsmith.recipe import ValidateRecipe
from draftsmith.store.manifest import MANIFEST
from draftsmith.store.reader import Store
from draftsmith.store.validation import write_record
from draftsmith.validate.findings import Finding
from draftsmith.validate.meaning import check_meaning
from draftsmith.validate.structure import check_structure
from draftsmith.validate.values import check_values
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import read_head


def run_validate(store_folder: Path, facts: VerifierFacts, recipe: ValidateRecipe) -> dict[str, Any]:
    """Check the store to the recipe's depth, record the result, return the report.

    A depth is gone into only if the one before found no error: hashes that disagree make numbers meaningless.
    """
    findings = check_structure(store_folder, facts)
    report: dict[str, Any] = {"depth": "structure"}
    if recipe.depth != "structure" and not _errors(findings):
        store = Store(store_folder)
        findings += check_values(store, facts.vocab_size)
        report["depth"] = "values"
        if recipe.depth == "meaning" and not _errors(findings):
            result = check_meaning(store, read_head(facts), recipe.positions, recipe.min_agreement)
            findings += result.findings
            report["depth"] = "meaning"
            report["agreement"] = {name: round(share, 4) for name, share in result.agreement.items()}
            report["positions"] = result.positions
            report["supervised_positions"] = result.supervised
    report["settings"] = recipe.model_dump(mode="json")
    report["passed"] = not _errors(findings)
    report["findings"] = [finding.as_json() for finding in findings]
    if (store_folder / MANIFEST).is_file():
        write_record(store_folder, report)
    return report


def _errors(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]
