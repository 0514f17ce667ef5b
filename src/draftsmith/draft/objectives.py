"""What a draft distribution p is asked for, given the verifier's q on the draft vocabulary: loss and gradient by hand.

    kl   KL(q || p)
    ce   -log p(argmax q)
    tv   1 - sum min(p, q): one minus the acceptance of speculative sampling (total variation distance)
    lk   -log sum min(p, q): tv with gradients that do not fade where p and q hardly overlap
         (https://arxiv.org/abs/2602.23881)

Each takes a `Softmax`, whose memory it may overwrite, and returns losses [m] and their gradient [m, D] with respect to
the logits, in that memory. Nothing of size [m, D] is allocated: on a CPU, touching fresh memory costs several times the
arithmetic that is done in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ObjectiveName = Literal["kl", "ce", "tv", "lk"]


@dataclass(frozen=True)
class Softmax:
    """p = softmax(z) [m, D] of logits z [m, D], with the largest logit and its log p [m]."""

    z: Tensor
    p: Tensor
    largest: Tensor
    largest_log_p: Tensor

    @classmethod
    def of(cls, z: Tensor, memory: Tensor) -> "Softmax":
        """Take the softmax of z into `memory` [m, D]."""
        p = torch.softmax(z, -1, out=memory)
        return cls(z, p, z.amax(-1), p.amax(-1).log())


@dataclass(frozen=True)
class Targets:
    """The verifier's distributions q [m, D], their most likely tokens [m], and sum q log q [m]."""

    q: Tensor
    best: Tensor
    negative_entropy: Tensor

    @classmethod
    def of(cls, z: Tensor, memory: Tensor) -> "Targets":
        """Normalise the verifier's logits z [m, D] on the draft vocabulary into `memory` [m, D]; z is overwritten."""
        best = z.argmax(-1)
        softmax = Softmax.of(z, memory)
        return cls(softmax.p, best, _expected_log(softmax, softmax.p))

    def __getitem__(self, rows: slice | Tensor) -> "Targets":
        return Targets(self.q[rows], self.best[rows], self.negative_entropy[rows])


def _expected_log(softmax: Softmax, q: Tensor) -> Tensor:
    """Return sum q log p [m]; the logits are overwritten."""
    # Relative to the largest logit: large ones would leave few digits to a difference of sums.
    return softmax.z.sub_(softmax.largest[:, None]).mul_(q).sum(-1) + softmax.largest_log_p


def kl(draft: Softmax, targets: Targets) -> tuple[Tensor, Tensor]:
    """Kullback-Leibler divergence; its gradient is p - q."""
    loss = targets.negative_entropy - _expected_log(draft, targets.q)
    return loss, draft.p.sub_(targets.q)


def cross_entropy(draft: Softmax, targets: Targets) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the verifier's most likely token."""
    best = targets.best[:, None]
    loss = draft.largest - draft.z.gather(-1, best)[:, 0] - draft.largest_log_p
    return loss, draft.p.scatter_add_(-1, best, draft.p.new_full(best.shape, -1.0))


def total_variation(draft: Softmax, targets: Targets) -> tuple[Tensor, Tensor]:
    """One minus the overlap of p and q."""
    overlap, gradient = _overlap(draft, targets)
    return 1.0 - overlap, gradient


def negative_log_overlap(draft: Softmax, targets: Targets) -> tuple[Tensor, Tensor]:
    """Negative logarithm of the overlap of p and q."""
    overlap, gradient = _overlap(draft, targets)
    overlap = overlap.clamp(min=torch.finfo(overlap.dtype).tiny)
    return -overlap.log(), gradient.div_(overlap[:, None])


def _overlap(draft: Softmax, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return sum min(p, q) [m] and minus its gradient [m, D]: p (sum of p where p < q) - p [p < q]."""
    p, memory = draft.p, draft.z
    overlap = torch.minimum(p, targets.q, out=memory).sum(-1)
    below = torch.lt(p, targets.q, out=memory).mul_(p)
    return overlap, p.mul_(below.sum(-1, keepdim=True)).sub_(below)


Objective = Callable[[Softmax, Targets], tuple[Tensor, Tensor]]

OBJECTIVES: dict[ObjectiveName, Objective] = {
    "kl": kl,
    "ce": cross_entropy,
    "tv": total_variation,
    "lk": negative_log_overlap,
}
