"""The draft vocabulary: which V_d of the verifier's V tokens the draft can propose.

`d2t` [V_d] int64 holds offsets: verifier id = draft id + d2t[draft id]. `t2d` [V] bool marks membership.
With V = 6 and the draft vocabulary {1, 4, 5}: d2t = [1, 3, 3], t2d = [0, 1, 0, 0, 1, 1].
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftsmith.errors import BadInput


@dataclass(frozen=True)
class DraftVocabulary:
    """`token_ids` [V_d] int64, ascending: draft id i proposes verifier token token_ids[i]."""

    token_ids: Tensor
    verifier_size: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def d2t(self) -> Tensor:
        """Offsets [V_d] int64."""
        return self.token_ids - torch.arange(len(self.token_ids), device=self.token_ids.device)

    @property
    def t2d(self) -> Tensor:
        """Membership [V] bool."""
        member = torch.zeros(self.verifier_size, dtype=torch.bool, device=self.token_ids.device)
        member[self.token_ids] = True
        return member

    @classmethod
    def from_d2t(cls, d2t: Tensor, verifier_size: int) -> "DraftVocabulary":
        """Rebuild the vocabulary from stored offsets."""
        return cls(d2t + torch.arange(len(d2t), device=d2t.device), verifier_size)


def count_supervised(
    samples: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]], vocab_size: int
) -> npt.NDArray[np.int64]:
    """Count supervised tokens by id; `samples` are pairs (input_ids, loss_mask)."""
    counts = np.zeros(vocab_size, np.int64)
    for input_ids, loss_mask in samples:
        counts += np.bincount(input_ids[loss_mask.astype(bool)], minlength=vocab_size)
    return counts


def choose_vocabulary(counts: npt.NDArray[np.int64], size: int, keep: list[int]) -> DraftVocabulary:
    """Take the tokens in `keep` and the most frequent others (ties: the smaller id), `size` in all.

    Raises BadInput if `size` has no room for `keep` and one token more.
    """
    size = min(size, len(counts))
    if size <= len(keep) and size < len(counts):
        raise BadInput(
            f"train.draft_vocab_size = {size} is too small: {len(keep)} special and end-of-turn tokens are always kept"
        )
    order = np.argsort(-counts, kind="stable")
    kept = np.zeros(len(counts), bool)
    kept[keep] = True
    chosen = np.concatenate([np.flatnonzero(kept), order[~kept[order]][: size - int(kept.sum())]])
    return DraftVocabulary(torch.from_numpy(np.sort(chosen).astype(np.int64)), len(counts))


def coverage(counts: npt.NDArray[np.int64], sizes: Iterable[int]) -> dict[str, float]:
    """Return, for each size of draft vocabulary, the share of supervised tokens it holds."""
    total = max(int(counts.sum()), 1)
    descending = np.cumsum(-np.sort(-counts))
    return {str(size): round(float(descending[min(size, len(counts)) - 1]) / total, 6) for size in sizes}
