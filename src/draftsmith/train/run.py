"""train: store + draft -> checkpoints.

Writes metrics.jsonl (a line per optimizer step) and the last checkpoint; the manifest names it.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.config import derive_config
from draftsmith.draft.loss import unroll_loss
from draftsmith.draft.model import Eagle3Draft, new_draft
from draftsmith.draft.rows import target_positions
from draftsmith.draft.unroll import unroll
from draftsmith.draft.vocabulary import choose_vocabulary, count_supervised
from draftsmith.draft.warm_start import warm_draft
from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.files import write_text
from draftsmith.interop.source import SamplePlace, Source
from draftsmith.progress import progress
from draftsmith.recipe import TrainRecipe, VerifierRecipe
from draftsmith.store.manifest import StageFolder
from draftsmith.train.checkpoints import (
    latest_checkpoint,
    restore,
    save_checkpoint,
    step_folder,
    trained_parameters,
)
from draftsmith.train.data import TrainingPack, load_ahead
from draftsmith.train.order import epoch_steps
from draftsmith.train.schedule import learning_rate
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import VerifierHead, read_embedding, read_head
from draftsmith.verifier.locate import public_name
from draftsmith.verifier.run import choose_device
from draftsmith.verifier.tokens import end_of_turn_ids, load_tokenizer, special_ids

METRICS = "metrics.jsonl"


def run_train(
    folder: StageFolder,
    source: Source,
    facts: VerifierFacts,
    recipe: TrainRecipe,
    verifier_recipe: VerifierRecipe,
    seed: int,
) -> dict[str, Any]:
    """Train a draft on the train split; go on from the last checkpoint. Returns the counts."""
    where = source.data.path
    if source.verifier_identity not in (None, facts.identity):
        raise BadInput(f"{where}: made with another verifier than {facts.folder}; run extract again")
    places = [place for place in source.split("train") if len(target_positions(place.loss_mask))]
    if not places:
        raise BadInput(f"{where}: no sample of the train split has a supervised token to learn from")
    lengths = [len(place) for place in places]
    steps = [
        (epoch, packs)
        for epoch in range(recipe.epochs)
        for packs in epoch_steps(lengths, recipe.pack_tokens, recipe.packs_per_step, seed, epoch)
    ]
    job = Job(folder.path, source, places, steps, recipe, choose_device(verifier_recipe))
    draft, head_D, covered = _start(job, facts, verifier_recipe, seed)
    optimizer = make_optimizer(draft, recipe)
    folder.begin()
    checkpoint = latest_checkpoint(folder.path)
    if checkpoint is not None:
        restore(checkpoint[0], draft, optimizer, checkpoint[1])
    last = train(job, draft, head_D, optimizer, done=checkpoint[1] if checkpoint else 0)
    final = step_folder(folder.path, len(steps))
    counts = {
        "steps": len(steps),
        "epochs": recipe.epochs,
        "samples": len(places),
        "samples_without_target": len(source.split("train")) - len(places),
        "tokens_per_epoch": sum(lengths),
        "targets_per_epoch": sum(len(target_positions(place.loss_mask)) for place in places),
        "packs": sum(len(packs) for _, packs in steps),
        "draft_vocab_size": draft.config.draft_vocab_size,
        "vocabulary_coverage": covered,
        "trained_parameters": sum(p.numel() for _, p in trained_parameters(draft)),
        "final_loss": last["loss"],
        "draft": f"{final.name}/draft",
    }
    folder.finish(counts, [str(path.relative_to(folder.path)) for path in final.rglob("*") if path.is_file()])
    return counts


@dataclass(frozen=True)
class Job:
    """What one training run is made of: `steps` are (epoch, packs of indices into `places`)."""

    folder: Path
    source: Source
    places: list[SamplePlace]
    steps: list[tuple[int, list[list[int]]]]
    recipe: TrainRecipe
    device: torch.device


def make_optimizer(draft: Eagle3Draft, recipe: TrainRecipe) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    parameters = [p for _, p in trained_parameters(draft)]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step computed: the loss and, per unroll step, mean loss and agreement over its rows."""

    loss: float
    step_loss: list[float]
    agreement: list[float]
    grad_norm: float


def optimizer_step(
    draft: Eagle3Draft,
    head_D: VerifierHead,
    packs: list[TrainingPack],
    optimizer: torch.optim.Optimizer,
    step_weights: list[float],
    clip_norm: float,
) -> StepResult:
    """Make one optimizer step on `packs`; `head_D` is the verifier's head on the draft vocabulary.

    Raises DraftsmithError, before any parameter changes, if loss or gradient is not finite.
    """
    optimizer.zero_grad(set_to_none=True)
    targets = sum(len(pack.target_JH) for pack in packs)
    loss = 0.0
    totals = torch.zeros(3, len(step_weights), dtype=torch.float64)
    for pack in packs:
        step_rows = unroll(draft, pack.pack)
        pack_loss, sums = unroll_loss(
            step_rows, draft.lm_head.weight, pack.target_JH, head_D, pack.pack.plan, step_weights, targets
        )
        pack_loss.backward()
        loss += pack_loss.item()
        totals += torch.stack([sums.loss, sums.agreeing, sums.rows])
    norm = nn.utils.clip_grad_norm_([p for _, p in trained_parameters(draft)], clip_norm).item()
    if not torch.isfinite(torch.tensor([loss, norm])).all():
        names = [name for pack in packs for name in pack.samples]
        raise DraftsmithError(
            f"loss {loss} or gradient norm {norm} is not finite; stopped before the step. Samples: "
            f"{', '.join(names[:20])}{' ...' if len(names) > 20 else ''}. Validate the store at depth values, or "
            "lower train.lr."
        )
    optimizer.step()
    step_loss, agreement = (totals[:2] / totals[2].clamp(min=1)).tolist()
    return StepResult(loss, step_loss, agreement, norm)


def train(
    job: Job, draft: Eagle3Draft, head_D: VerifierHead, optimizer: torch.optim.Optimizer, done: int
) -> dict[str, Any]:
    """Run the steps after the first `done`; return the last line of the metrics."""
    recipe, steps = job.recipe, job.steps
    tokens = [sum(len(job.places[i]) for pack in packs for i in pack) for _, packs in steps]
    last = _cut_metrics(job.folder / METRICS, done)
    batches = load_ahead(
        job.source, job.places, [packs for _, packs in steps[done:]], len(recipe.step_weights), job.device
    )
    with (
        (job.folder / METRICS).open("a", encoding="utf-8") as log,
        progress("train", sum(tokens), "tokens", sum(tokens[:done])) as meter,
    ):
        for number, packs in enumerate(batches, done):
            began = time.perf_counter()
            lr = learning_rate(number, len(steps), recipe.lr, recipe.warmup_share, recipe.min_lr_share)
            for group in optimizer.param_groups:
                group["lr"] = lr
            result = optimizer_step(draft, head_D, packs, optimizer, recipe.step_weights, recipe.clip_norm)
            last = _metrics_line(number + 1, steps[number][0], lr, result, packs, time.perf_counter() - began)
            log.write(json.dumps(last) + "\n")
            log.flush()
            meter.advance(tokens[number], f"loss {result.loss:.3f}")
            if (number + 1) % recipe.checkpoint_steps == 0 or number + 1 == len(steps):
                save_checkpoint(job.folder, draft, optimizer, number + 1)
    return last


def _metrics_line(
    step: int, epoch: int, lr: float, result: StepResult, packs: list[TrainingPack], seconds: float
) -> dict[str, Any]:
    tokens = sum(pack.tokens for pack in packs)
    return {
        "step": step,
        "epoch": epoch,
        "loss": result.loss,
        "step_loss": result.step_loss,
        "agreement": result.agreement,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens": tokens,
        "targets": sum(len(pack.target_JH) for pack in packs),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def _cut_metrics(path: Path, done: int) -> dict[str, Any]:
    """Cut the metrics back to the checkpoint that training goes on from; return the last line left."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:done] if path.is_file() else []
    write_text(path, "".join(lines))
    return dict(json.loads(lines[-1])) if lines else {}


def _start(
    job: Job, facts: VerifierFacts, verifier_recipe: VerifierRecipe, seed: int
) -> tuple[Eagle3Draft, VerifierHead, float]:
    """Return the untrained draft, the verifier's head on the draft vocabulary, and that vocabulary's coverage."""
    recipe = job.recipe
    counts = count_supervised(((p.input_ids, p.loss_mask) for p in job.places), facts.vocab_size)
    tokenizer = load_tokenizer(facts.folder)
    keep = sorted({*special_ids(tokenizer), *end_of_turn_ids(facts.folder, tokenizer)})
    vocabulary = choose_vocabulary(counts, recipe.draft_vocab_size, keep)
    name = public_name(verifier_recipe.model)
    config = derive_config(facts, len(vocabulary), job.source.aux_boundaries, recipe.norm_before_residual, name)
    head_D = read_head(facts).for_states(job.source.normed).rows(vocabulary.token_ids)
    if recipe.warm_start:
        earlier = load_draft(Path(recipe.warm_start), facts)
        draft = warm_draft(earlier, config, vocabulary, read_embedding(facts), head_D.lm_head_VH, recipe.warm_start)
    else:
        draft = new_draft(config, vocabulary, read_embedding(facts), head_D.lm_head_VH, seed)
    draft.lm_head.weight.requires_grad_(recipe.train_lm_head)
    covered = int(counts[vocabulary.token_ids.numpy()].sum()) / int(counts.sum())
    return draft.to(job.device), head_D.to(job.device), round(covered, 6)
