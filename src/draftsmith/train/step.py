"""One optimizer step: gradients of all its packs, over all processes, then the update."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from draftsmith.draft.flex_attention import AttentionBackend
from draftsmith.draft.loss import unroll_loss
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.objectives import ObjectiveName
from draftsmith.draft.rows import plan_rows
from draftsmith.draft.unroll import Pack, unroll
from draftsmith.errors import DraftsmithError
from draftsmith.train.data import TrainingPack
from draftsmith.train.optimizers import trained_parameters
from draftsmith.train.processes import Processes, whole, without_sync
from draftsmith.verifier.head import VerifierHead


class PackLoss(nn.Module):
    """The draft together with its loss, as one module: what DDP and FSDP2 wrap."""

    def __init__(
        self,
        draft: Eagle3Draft,
        head_D: VerifierHead,
        step_weights: list[float],
        objective: ObjectiveName,
        precision: torch.dtype = torch.float32,
        attention: AttentionBackend = "auto",
    ) -> None:
        super().__init__()
        self.draft = draft
        self.step_weights = step_weights
        self._head_D, self._objective, self._precision, self._attention = head_D, objective, precision, attention

    def forward(self, pack: TrainingPack, targets_in_step: int) -> tuple[Tensor, Tensor]:
        """Return the pack's share of the step's loss, and float64 [3, K]: summed loss, agreeing rows, rows."""
        device = self.draft.fc.weight.device
        with torch.autocast(device.type, self._precision, enabled=self._precision != torch.float32):
            rows = unroll(self.draft, pack.pack, self._attention)
        with _target_products(device, self._precision):
            loss, sums = unroll_loss(
                rows,
                self.draft.lm_head.weight,
                pack.target_JH,
                self._head_D,
                pack.pack.plan,
                self.step_weights,
                targets_in_step,
                objective=self._objective,
                precision=self._precision,
            )
        return loss, torch.stack([sums.loss, sums.agreeing, sums.rows])

    def empty_pack(self) -> TrainingPack:
        """Return a pack without rows: a process without samples takes part with gradients of zero."""
        weight = self.draft.fc.weight
        width, aux = self.draft.config.verifier_width, len(self.draft.config.aux_boundaries)
        ids = torch.empty(0, dtype=torch.long, device=weight.device)
        pack = Pack(ids, torch.empty(0, aux * width, device=weight.device), plan_rows([], len(self.step_weights)))
        return TrainingPack(pack, torch.empty(0, width, device=weight.device), [], 0)


@contextmanager
def _target_products(device: torch.device, precision: torch.dtype) -> Iterator[None]:
    """On a GPU, beside products in bfloat16, let the verifier's run as TF32: it holds bfloat16 weights exactly."""
    if device.type != "cuda" or precision == torch.float32:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step computed: the loss and, per unroll step, mean loss and agreement over its rows."""

    loss: float
    step_loss: list[float]
    agreement: list[float]
    grad_norm: float


def optimizer_step(
    pack_loss: PackLoss,
    wrapped: nn.Module,
    packs: list[TrainingPack | None],
    targets_in_step: int,
    optimizers: list[Optimizer],
    clip_norm: float,
    processes: Processes,
) -> StepResult:
    """Make one optimizer step on this process's `packs`; `wrapped` is `pack_loss` as `Processes.wrap` gave it.

    Raises DraftsmithError, before any parameter changes, if loss or gradient is not finite.
    """
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    totals = torch.zeros(3, len(pack_loss.step_weights), dtype=torch.float64)
    for number, pack in enumerate(packs):
        with without_sync(wrapped, last=number == len(packs) - 1):
            loss, sums = wrapped(pack or pack_loss.empty_pack(), targets_in_step)
            # Gradients are averaged over the processes, but the losses are parts of one sum.
            (loss * processes.count).backward()
        totals += sums
    totals = processes.summed(totals)
    parameters = [p for _, p in trained_parameters(pack_loss.draft)]
    norm = float(whole(nn.utils.clip_grad_norm_(parameters, clip_norm)))
    loss_sum = float(totals[0] @ torch.tensor(pack_loss.step_weights, dtype=torch.float64)) / targets_in_step
    if not torch.isfinite(torch.tensor([loss_sum, norm])).all():
        own = [name for pack in packs if pack is not None for name in pack.samples]
        names = [name for process in processes.gathered(own) for name in process]
        raise DraftsmithError(
            f"loss {loss_sum} or gradient norm {norm} is not finite; stopped before the step. Samples: "
            f"{', '.join(names[:20])}{' ...' if len(names) > 20 else ''}. Validate the store at depth values, or "
            "lower train.lr."
        )
    for optimizer in optimizers:
        optimizer.step()
    step_loss, agreement = (totals[:2] / totals[2].clamp(min=1)).tolist()
    return StepResult(loss_sum, step_loss, agreement, norm)
