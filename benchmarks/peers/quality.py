"""How good the drafts are that the tools saved: draftsmith's offline acceptance, in draftsmith's draft class.

All tools train an EAGLE-3 draft whose weights have the same meaning; SpecForge's residual stream alone begins from the
hidden state before its norm, which the draft's config says.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.samples import BenchmarkSamples
from safetensors.torch import load_file

from draftsmith.draft.config import derive_config
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.rows import target_positions
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.evaluate.offline import offline_acceptance
from draftsmith.verifier.head import read_embedding, read_head

WANTED = 0.20  # first-position acceptance


def measure_drafts(
    samples: BenchmarkSamples, tool: str, folder: Path, result: dict[str, Any], job: dict[str, Any]
) -> list[dict[str, float]]:
    """Return, for each draft that a tool saved: step, CPU seconds so far, acceptance and acceptance length."""
    tensors = load_file(Path(job["samples"]) / "vocabulary.safetensors")
    vocabulary = DraftVocabulary.from_d2t(tensors["d2t"], len(tensors["t2d"]))
    config = derive_config(samples.facts, len(vocabulary), samples.source.aux_boundaries, True, "benchmark")
    draft = Eagle3Draft(replace(config, norm_before_residual=tool != "specforge"), vocabulary)
    embedding, head = read_embedding(samples.facts), read_head(samples.facts)
    draft.embed_tokens.weight.data.copy_(embedding)
    places = [place for place in samples.source.split("validation") if len(target_positions(place.loss_mask))]
    curve = []
    for step in job["save_after"]:
        file = folder / f"step-{step}.safetensors"
        if not file.is_file():
            break
        missing, unexpected = draft.load_state_dict(load_file(file), strict=False)
        assert missing == ["embed_tokens.weight"], missing
        assert not unexpected, unexpected
        found = offline_acceptance(samples.source, places, draft, head, job["unroll"])
        curve.append(
            {
                "step": step,
                "cpu_seconds": round(sum(result["cpu_seconds"][:step]), 1),
                "acceptance": round(found.conditional[0], 4),
                "acceptance_length": round(found.acceptance_length(job["unroll"]), 4),
            }
        )
    return curve


def quality_table(curves: dict[str, Any]) -> str:
    """Return each tool's curve, the CPU seconds to the wanted acceptance, and the lengths at equal CPU time."""
    lines = [f"{'':12} {'step':>5} {'CPU s':>8} {'first position':>14} {'length':>7}"]
    good = {tool: curve for tool, curve in curves.items() if isinstance(curve, list) and curve}
    for tool, curve in curves.items():
        if tool not in good:
            lines.append(f"{tool:12} {curve.get('failed') if isinstance(curve, dict) else 'saved nothing'}")
            continue
        for point in curve:
            lines.append(
                f"{tool:12} {point['step']:5} {point['cpu_seconds']:8.1f} {point['acceptance']:14.4f} "
                f"{point['acceptance_length']:7.4f}"
            )
    for tool, curve in good.items():
        reached = next((point for point in curve if point["acceptance"] >= WANTED), None)
        when = f"{reached['cpu_seconds']:.0f} CPU s" if reached else f"not in {curve[-1]['cpu_seconds']:.0f} CPU s"
        lines.append(f"{tool}: first-position acceptance {WANTED} after {when}")
    if good:
        equal = min(curve[-1]["cpu_seconds"] for curve in good.values())
        for tool, curve in good.items():
            last = [point for point in curve if point["cpu_seconds"] <= equal] or curve[:1]
            lines.append(f"{tool}: acceptance length {last[-1]['acceptance_length']:.4f} after {equal:.0f} CPU s")
    return "\n".join(lines)
