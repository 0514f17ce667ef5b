"""What a draft distribution p is asked for, given the verifier's q on the draft vocabulary: loss and gradient by hand.

    kl   KL(q || p)
    ce   -log p(argmax q)
    tv   1 - sum min(p, q): one minus the acceptance of speculative sampling (total variation distance)
    lk   -log sum min(p, q): tv with gradients that do not fade where p and q hardly overlap
         (https://arxiv.org/abs/2602.23881)

Each takes logits z [m, D], which it may overwrite, and returns losses [m] and their gradient [m, D] with respect to z.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ObjectiveName = Literal["kl", "ce", "tv", "lk"]


@dataclass(frozen=True)
class Targets:
    """The verifier's distributions q [m, D], their most likely tokens [m], and sum q log q [m]."""

    q: Tensor
    best: Tensor
    negative_entropy: Tensor

    @classmethod
    def of(cls, logits_mD: Tensor) -> "Targets":
        """Normalise the verifier's logits on the draft vocabulary."""
        best = logits_mD.argmax(-1)
        log_q = logits_mD.log_softmax(-1)
        q = log_q.exp()
        return cls(q, best, torch.linalg.vecdot(q, log_q))

    def __getitem__(self, rows: slice | Tensor) -> "Targets":
        return Targets(self.q[rows], self.best[rows], self.negative_entropy[rows])


def kl(z: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Kullback-Leibler divergence; its gradient is p - q."""
    log_p = z.log_softmax(-1)
    loss = targets.negative_entropy - torch.linalg.vecdot(targets.q, log_p)
    return loss, log_p.exp_().sub_(targets.q)


def cross_entropy(z: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the verifier's most likely token."""
    log_p = z.log_softmax(-1)
    best = targets.best[:, None]
    loss = -log_p.gather(-1, best)[:, 0]
    return loss, log_p.exp_().scatter_add_(-1, best, log_p.new_full(best.shape, -1.0))


def total_variation(z: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """One minus the overlap of p and q."""
    overlap, gradient = _overlap(z, targets)
    return 1.0 - overlap, gradient


def negative_log_overlap(z: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Negative logarithm of the overlap of p and q."""
    overlap, gradient = _overlap(z, targets)
    overlap = overlap.clamp(min=torch.finfo(overlap.dtype).tiny)
    return -overlap.log(), gradient.div_(overlap[:, None])


def _overlap(z: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return sum min(p, q) [m] and minus its gradient [m, D]: p (sum of p where p < q) - p [p < q]."""
    p = z.softmax(-1)
    overlap = torch.minimum(p, targets.q).sum(-1)
    gradient = p * (p < targets.q)
    return overlap, p.mul_(gradient.sum(-1, keepdim=True)).sub_(gradient)


OBJECTIVES: dict[ObjectiveName, Callable[[Tensor, Targets], tuple[Tensor, Tensor]]] = {
    "kl": kl,
    "ce": cross_entropy,
    "tv": total_variation,
    "lk": negative_log_overlap,
}
