"""evaluate: checkpoint -> acceptance, offline over the validation split and by real decoding of its prompts."""

from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.model import Eagle3Draft
from draftsmith.errors import BadInput
from draftsmith.evaluate.offline import offline_acceptance
from draftsmith.evaluate.page import ShownAnswer, evaluation_page, shown_answers
from draftsmith.evaluate.real import Decoded, Method, decode_prompts
from draftsmith.evaluate.tree import TreeShape
from draftsmith.files import write_json, write_text
from draftsmith.interop.source import SamplePlace, Source
from draftsmith.recipe import EvaluateRecipe, VerifierRecipe
from draftsmith.store.manifest import StageFolder
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import VerifierHead, read_head
from draftsmith.verifier.run import choose_device, load_verifier
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer

RESULT, PAGE = "evaluation.json", "evaluation.html"


def run_evaluate(
    folder: StageFolder,
    draft_folder: Path,
    source: Source,
    facts: VerifierFacts,
    recipe: EvaluateRecipe,
    verifier_recipe: VerifierRecipe,
) -> dict[str, Any]:
    """Measure a draft's acceptance; write and return the figures."""
    held_out = source.split("validation")
    if not held_out:
        section = "prepare" if source.verifier_identity else "data"
        raise BadInput(f"{source.data.path}: no validation split; set {section}.validation_share above 0")
    device = choose_device(verifier_recipe)
    draft = load_draft(draft_folder, facts).to(device)
    if draft.config.aux_boundaries != source.aux_boundaries:
        raise BadInput(
            f"{draft_folder}: its aux boundaries {draft.config.aux_boundaries} are not those of the states, "
            f"{source.aux_boundaries}; extract with its boundaries (extract.aux_boundaries)"
        )
    folder.begin()
    positions = max(recipe.draft_lengths)
    head = read_head(facts).for_states(source.normed).to(device)
    offline = offline_acceptance(source, held_out, draft, head, positions)
    result: dict[str, Any] = {
        "offline": {
            "samples": len(held_out),
            "chains": offline.reached[0],
            "reached": offline.reached,
            "accepted": offline.accepted,
            "conditional_acceptance": [round(share, 4) for share in offline.conditional],
            "acceptance_length": {str(n): round(offline.acceptance_length(n), 4) for n in range(1, positions + 1)},
            "targets_outside_draft_vocabulary": offline.out_of_vocabulary,
        }
    }
    answers: list[ShownAnswer] = []
    if recipe.prompts:
        result["real"], decoded = _decode(held_out, draft, facts, recipe, verifier_recipe)
        answers = shown_answers(decoded, load_tokenizer(facts.folder))
    write_json(folder.path / RESULT, result)
    write_text(folder.path / PAGE, evaluation_page(result, answers, str(draft_folder)))
    folder.finish({"samples": len(held_out), "prompts": recipe.prompts}, [RESULT, PAGE])
    return result


def measured_acceptance(
    source: Source, places: list[SamplePlace], draft: Eagle3Draft, head: VerifierHead, positions: int
) -> dict[str, Any]:
    """Return a draft's acceptance on some samples, for chains of `positions`."""
    found = offline_acceptance(source, places, draft, head, positions)
    return {
        "acceptance_length": round(found.acceptance_length(positions), 5),
        "conditional_acceptance": [round(share, 5) for share in found.conditional],
    }


def _decode(
    held_out: list[SamplePlace],
    draft: Eagle3Draft,
    facts: VerifierFacts,
    recipe: EvaluateRecipe,
    verifier_recipe: VerifierRecipe,
) -> tuple[dict[str, Any], Decoded]:
    end_ids = end_of_turn_ids(facts.folder, load_tokenizer(facts.folder))
    verifier = load_verifier(facts, verifier_recipe)
    prompts = held_out_prompts(held_out, recipe.prompts)
    methods: list[Method] = [*recipe.draft_lengths, *([TreeShape(*recipe.tree)] if recipe.tree else [])]
    decoded = decode_prompts(verifier, draft, prompts, recipe.max_new_tokens, end_ids, methods)
    results = [result.as_json() for result in decoded.results]
    plain = results[0]["tokens_per_second"]
    for result in results:
        result["speed_up"] = round(result["tokens_per_second"] / plain, 3)
    chains = [result for result in results if "tree" not in result]
    figures: dict[str, Any] = {
        "prompts": len(prompts),
        "methods": chains,
        "fastest_draft_length": max(chains, key=lambda result: float(result["tokens_per_second"]))["draft_length"],
        "lossless": all(difference["rounding_tie"] for result in results for difference in result["differences"]),
    }
    if recipe.tree:
        figures["tree"] = results[-1]
    return figures, decoded


def held_out_prompts(held_out: list[SamplePlace], count: int) -> list[tuple[str, list[int]]]:
    """Return up to `count` prompts (name, token ids), spread evenly over the validation split."""
    spread = np.linspace(0, len(held_out) - 1, min(count, len(held_out))).astype(int)
    return [(held_out[i].id, _prompt(held_out[i])) for i in spread]


def _prompt(place: SamplePlace) -> list[int]:
    """Return the tokens before the first one that the verifier wrote."""
    first = int(np.flatnonzero(place.loss_mask)[0])
    prompt: list[int] = place.input_ids[:first].tolist()
    return prompt
