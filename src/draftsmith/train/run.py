"""train: store + draft -> checkpoints.

Writes metrics.jsonl, measurements.jsonl and checkpoints; the manifest names the draft that was best.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.config import derive_config
from draftsmith.draft.model import Eagle3Draft, new_draft
from draftsmith.draft.rows import target_positions
from draftsmith.draft.vocabulary import choose_vocabulary, count_supervised
from draftsmith.draft.warm_start import form, kept_form, warm_draft
from draftsmith.errors import BadInput
from draftsmith.interop.source import SamplePlace, Source
from draftsmith.recipe import TrainRecipe, VerifierRecipe
from draftsmith.store.manifest import StageFolder
from draftsmith.store.training import PLANNED
from draftsmith.train.checkpoints import latest_checkpoint, restore, step_folder
from draftsmith.train.loop import Job, Measure, read_progress, train
from draftsmith.train.optimizers import make_optimizers, trained_parameters
from draftsmith.train.order import epoch_steps
from draftsmith.train.processes import Processes, joined
from draftsmith.train.step import PackLoss
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import VerifierHead, read_embedding, read_head
from draftsmith.verifier.locate import public_name
from draftsmith.verifier.run import choose_device
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer, special_ids


class Acceptance(Protocol):
    """Measures a draft: expected acceptance on some samples, `acceptance_length` and `conditional_acceptance`."""

    def __call__(
        self, source: Source, places: list[SamplePlace], draft: Eagle3Draft, head: VerifierHead, positions: int
    ) -> dict[str, Any]:
        """Run the draft over the samples' states, for chains of `positions`."""
        ...


def run_train(
    folder: StageFolder,
    source: Source,
    facts: VerifierFacts,
    recipe: TrainRecipe,
    verifier_recipe: VerifierRecipe,
    seed: int,
    acceptance: Acceptance,
) -> dict[str, Any]:
    """Train a draft on the train split; go on from the last checkpoint. Returns the counts.

    Under torchrun every process calls it; the first one writes.
    """
    where = source.data.path
    if source.verifier_identity not in (None, facts.identity):
        raise BadInput(f"{where}: made with another verifier than {facts.folder}; run extract again")
    places = [place for place in source.split("train") if len(target_positions(place.loss_mask))]
    if not places:
        raise BadInput(f"{where}: no sample of the train split has a supervised token to learn from")
    processes = Processes.from_environment()
    device = processes.device(choose_device(verifier_recipe))
    with joined(processes, device):
        draft, head_D, covered = _start(source, places, device, facts, recipe, verifier_recipe, seed)
        kept = draft.t2d.cpu().numpy() if recipe.out_of_vocabulary == "drop" else None
        targets = [
            len(target_positions(place.loss_mask, None if kept is None else kept[place.input_ids])) for place in places
        ]
        trainable = [number for number, count in enumerate(targets) if count]
        places, targets = [places[i] for i in trainable], [targets[i] for i in trainable]
        if not places:
            raise BadInput(f"{where}: no target is in the draft vocabulary; train.out_of_vocabulary = 'keep' uses all")
        lengths = [len(place) for place in places]
        steps = [
            (epoch, packs)
            for epoch in range(recipe.epochs)
            for packs in epoch_steps(lengths, recipe.pack_tokens, recipe.packs_per_step, seed, epoch)
        ]
        measure = _measure(source, facts, device, len(recipe.step_weights), recipe.measure_samples, acceptance)
        job = Job(folder.path, source, places, targets, steps, recipe, device, processes, measure)
        precision = _precision(recipe, device)
        pack_loss = PackLoss(draft, head_D, recipe.step_weights, recipe.objective, precision, recipe.attention)
        wrapped = processes.wrap(pack_loss, recipe.shard)
        optimizers = make_optimizers(draft, recipe)
        packs = [pack for _, members in steps for pack in members]
        filled = sum(lengths[i] for pack in packs for i in pack) / (len(packs) * recipe.pack_tokens)
        planned = {
            "planned_steps": len(steps),
            "epochs": recipe.epochs,
            "samples": len(places),
            "samples_without_target": len(source.split("train")) - len(places),
            "tokens_per_epoch": sum(lengths),
            "targets_per_epoch": sum(targets),
            "packs": len(packs),
            "pack_fill": round(filled, 4),
            "draft_vocab_size": draft.config.draft_vocab_size,
            "vocabulary_coverage": covered,
            "trained_parameters": sum(p.numel() for _, p in trained_parameters(draft)),
        }
        if processes.first:
            folder.begin({PLANNED: planned})
        checkpoint = processes.from_first(latest_checkpoint(folder.path) if processes.first else None)
        if checkpoint is not None:
            restore(checkpoint[0], draft, optimizers)
        so_far = read_progress(folder.path, checkpoint[1] if checkpoint else 0, processes.first)
        end = train(job, pack_loss, wrapped, optimizers, so_far)
        chosen = step_folder(folder.path, end.best["step"] if end.best else end.done)
        counts = {
            "steps": end.done,
            **planned,
            "final_loss": end.last["loss"],
            "best": end.best,
            "draft": f"{chosen.name}/draft",
        }
        if processes.first:
            files = [str(path.relative_to(folder.path)) for path in chosen.rglob("*") if path.is_file()]
            folder.finish(counts, files)
        processes.wait_for_all()  # nobody leaves before the folder is finished
    return counts


def _precision(recipe: TrainRecipe, device: torch.device) -> torch.dtype:
    if recipe.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, recipe.precision)
    return dtype


def _measure(
    source: Source, facts: VerifierFacts, device: torch.device, positions: int, samples: int, acceptance: Acceptance
) -> Measure | None:
    """Return the measurement on up to `samples` held-out samples, spread evenly; None if there are none."""
    held_out = [place for place in source.split("validation") if len(target_positions(place.loss_mask))]
    if not samples or not held_out:
        if samples:
            print("train: no held-out samples: the last checkpoint counts, not the best", file=sys.stderr)
        return None
    every = max(1, math.ceil(len(held_out) / samples))
    chosen, head = held_out[::every], read_head(facts).for_states(source.normed).to(device)

    def measure(draft: Eagle3Draft) -> dict[str, Any]:
        return acceptance(source, chosen, draft.to(device), head, positions)

    return measure


def _start(
    source: Source,
    places: list[SamplePlace],
    device: torch.device,
    facts: VerifierFacts,
    recipe: TrainRecipe,
    verifier_recipe: VerifierRecipe,
    seed: int,
) -> tuple[Eagle3Draft, VerifierHead, float]:
    """Return the untrained draft, the verifier's head on the draft vocabulary, and that vocabulary's coverage."""
    counts = count_supervised(((p.input_ids, p.loss_mask) for p in places), facts.vocab_size)
    tokenizer = load_tokenizer(facts.folder)
    keep = sorted({*special_ids(tokenizer), *end_of_turn_ids(facts.folder, tokenizer)})
    vocabulary = choose_vocabulary(counts, recipe.draft_vocab_size, keep)
    name = public_name(verifier_recipe.model)
    derived = derive_config(
        facts,
        len(vocabulary),
        source.aux_boundaries,
        recipe.norm_before_residual,
        name,
        recipe.layers,
        recipe.layer_type,
        recipe.sliding_window,
        recipe.hidden_size,
    )
    config = replace(
        derived, norm_before_fc=recipe.norm_before_fc, fc_norm=recipe.fc_norm, norm_output=recipe.norm_output
    )
    head_D = read_head(facts).for_states(source.normed).rows(vocabulary.token_ids)
    if recipe.warm_start:
        earlier = load_draft(Path(recipe.warm_start), facts)
        asked = [key for key in form(config) if getattr(recipe, key) != TrainRecipe.model_fields[key].default]
        if kept := kept_form(earlier.config, config, asked, recipe.warm_start):
            named = ", ".join(f"{key} {value}" for key, value in kept.items())
            print(f"train: the form of the head in {recipe.warm_start} is kept: {named}", file=sys.stderr)
        draft = warm_draft(earlier, config, vocabulary, read_embedding(facts), head_D.lm_head_VH, recipe.warm_start)
    else:
        draft = new_draft(config, vocabulary, read_embedding(facts), head_D.lm_head_VH, seed)
    draft.lm_head.weight.requires_grad_(recipe.train_lm_head)
    covered = int(counts[vocabulary.token_ids.numpy()].sum()) / int(counts.sum())
    return draft.to(device), head_D.to(device), round(covered, 6)
