"""The loss of all unroll steps, after the unroll, in chunks of target positions.

For target j the verifier's distribution q is softmax(lm_head(norm(last state j))) renormalised over the draft
vocabulary; step k's draft distribution p_k comes from the row that aims at j. With an objective L of
`draft/objectives.py` (KL by default) the loss is

    sum over k of w_k * sum over j of L(q_j, p_kj) / N,    N = number of targets in the whole batch

Logits exist for one chunk and one step at a time, in memory that all chunks share: the gradients with respect to hidden
states and lm_head are made together with the loss, and the backward pass only scales them. Peak memory does not grow
with T x D x K.

Shapes: J targets, m_k rows of step k, H width, D draft vocabulary, c targets of a chunk.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.draft.objectives import OBJECTIVES, Objective, ObjectiveName, Softmax, Targets
from draftsmith.draft.rows import RowPlan
from draftsmith.verifier.head import VerifierHead

# Of logits: enough rows for a matrix product at full rate, yet small beside the caches or the memory of the device.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
LEAST_CHUNK = 128


@dataclass(frozen=True)
class StepSums:
    """Per unroll step, summed over its rows with a loss: `loss` and `agreeing` (argmax of p = argmax of q) [K]."""

    loss: Tensor
    agreeing: Tensor
    rows: Tensor


def unroll_loss(
    step_rows: list[Tensor],
    lm_head_DH: Tensor,
    target_JH: Tensor,
    head: VerifierHead,
    plan: RowPlan,
    step_weights: list[float],
    targets_in_batch: int,
    chunk_targets: int | None = None,
    objective: ObjectiveName = "kl",
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, StepSums]:
    """Return the scalar loss and the sums per step.

    `step_rows` are the unroll's normed states [m_k, H], `target_JH` the last states (boundary N) at the plan's
    targets, `head` the verifier's head restricted to the draft vocabulary (`VerifierHead.rows`). The draft's products
    are made in `precision`, softmax, loss and sums in float32 or more.
    """
    steps = len(step_rows)
    if chunk_targets is None:
        chunk_targets = max(LEAST_CHUNK, CHUNK_BYTES[lm_head_DH.device.type] // (4 * lm_head_DH.shape[0]))
    rows_MH = torch.cat(step_rows).to(precision)
    sums = torch.zeros(2, steps, dtype=torch.float64, device=rows_MH.device)
    weights = [weight / targets_in_batch for weight in step_weights]
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        rows_MH, lm_head_DH, target_JH, head, plan, weights, chunk_targets, OBJECTIVES[objective], sums
    )
    counts = torch.tensor([len(rows) for rows in step_rows], dtype=torch.float64)
    losses, agreeing = sums.cpu()
    return loss, StepSums(losses, agreeing, counts)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_MH: Tensor,
        lm_head_DH: Tensor,
        target_JH: Tensor,
        head: VerifierHead,
        plan: RowPlan,
        weights: list[float],
        chunk_targets: int,
        objective: Objective,
        sums: Tensor,
    ) -> Tensor:
        needs_rows, needs_head = ctx.needs_input_grad[:2]
        grad_rows = torch.empty_like(rows_MH) if needs_rows else None
        grad_head = torch.zeros_like(lm_head_DH) if needs_head else None
        head_DH = lm_head_DH.to(rows_MH.dtype)
        q_memory, z_memory, p_memory = target_JH.new_empty(
            3, min(chunk_targets, len(target_JH)), len(lm_head_DH), dtype=torch.float32
        )
        for start in range(0, len(target_JH), chunk_targets):
            stop = min(start + chunk_targets, len(target_JH))
            chunk = stop - start
            targets = Targets.of(head.logits(target_JH[start:stop], z_memory[:chunk]), q_memory[:chunk])
            for k, (rows, local) in enumerate(_rows_of_chunk(plan, start, stop, rows_MH.device)):
                h, aimed = rows_MH[rows], targets[local]
                z = z_memory[: len(h)]
                if h.dtype == z.dtype:
                    torch.mm(h, head_DH.T, out=z)
                else:
                    z.copy_(h @ head_DH.T)
                best_logit = z.gather(-1, aimed.best[:, None])[:, 0]
                softmax = Softmax.of(z, p_memory[: len(h)])
                # Equal to comparing the most likely tokens, but a maximum is several times cheaper than its place.
                sums[1, k] += (best_logit >= softmax.largest).sum()
                losses, grad_logits = objective(softmax, aimed)
                grad_logits = grad_logits.to(h.dtype)
                sums[0, k] += losses.sum().double()
                if grad_rows is not None:
                    torch.mm(grad_logits, head_DH, out=grad_rows[rows]).mul_(weights[k])
                if grad_head is not None and grad_head.dtype == h.dtype:
                    grad_head.addmm_(grad_logits.T, h, alpha=weights[k])
                elif grad_head is not None:
                    grad_head.add_(grad_logits.T @ h, alpha=weights[k])
        ctx.save_for_backward(*(grad for grad in (grad_rows, grad_head) if grad is not None))
        ctx.has = (grad_rows is not None, grad_head is not None)
        return (sums[0] @ sums.new_tensor(weights)).float()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        grads = [(part := saved.pop(0)) * grad_loss.to(part.dtype) if has else None for has in ctx.has]
        return *grads, None, None, None, None, None, None, None


def _rows_of_chunk(plan: RowPlan, start: int, stop: int, device: torch.device) -> list[tuple[slice, slice | Tensor]]:
    """Return, per step, its rows that aim at targets [start, stop), and those targets counted from `start`."""
    found: list[tuple[slice, slice | Tensor]] = []
    offset = 0
    for step in plan.steps:
        low, high = np.searchsorted(step.loss_targets, [start, stop])
        aimed = step.loss_targets[low:high] - start
        # Mostly all targets of the chunk, which need no copy then.
        without_gap = len(aimed) > 0 and int(aimed[-1] - aimed[0]) == len(aimed) - 1
        local = slice(int(aimed[0]), int(aimed[-1]) + 1) if without_gap else torch.from_numpy(aimed).to(device)
        found.append((slice(offset + int(low), offset + int(high)), local))
        offset += len(step.loss_targets)
    return found
