"""From the verifier's width to the draft's, where they differ: what a draft of its own width begins with.

A row r of the verifier (embedding or lm_head) becomes r @ directions: the leading right singular vectors of all such
rows keep the most of them. A hidden state x becomes x @ directions of lm_head, so its logits are the verifier's as far
as a matrix of that rank can give them.

Shapes: N rows, X the verifier's width, H the draft's.
"""

import torch
from torch import Tensor

_PART = 8192  # rows in float64 at a time


def leading_directions(rows_NX: Tensor, width: int) -> Tensor:
    """Return the first `width` right singular vectors of `rows_NX` as columns [X, H], the strongest first, float32.

    Singular vectors have no sign of their own: the entry of largest magnitude is made positive. A `width` beyond X is
    filled up with zeros. The same rows give the same directions.
    """
    gram_XX = _gram(rows_NX, rows_NX)
    vectors_XX: Tensor = torch.linalg.eigh(gram_XX).eigenvectors.flip(-1)
    largest_1X = vectors_XX.abs().argmax(0, keepdim=True)
    directions_XH = (vectors_XX * vectors_XX.gather(0, largest_1X).sign())[:, :width]
    filled_XH: Tensor = torch.nn.functional.pad(directions_XH, (0, width - directions_XH.shape[1]))
    return filled_XH.float()


def fitted_rows(known_NX: Tensor, rows_NH: Tensor, wanted_MX: Tensor) -> Tensor:
    """Return rows [M, H] for other tokens, as `rows_NH` of the draft follow from the verifier's `known_NX`, float32.

    That is `wanted_MX` times the matrix [X, H] that fits best (least squares, with a ridge of 1e-6 of the mean square).
    """
    gram_XX = _gram(known_NX, known_NX)
    gram_XX.diagonal().add_(1e-6 * gram_XX.diagonal().mean())
    fit_XH = torch.linalg.solve(gram_XX, _gram(known_NX, rows_NH))
    fitted_MH: Tensor = wanted_MX.double() @ fit_XH
    return fitted_MH.float()


def _gram(left_NX: Tensor, right_NH: Tensor) -> Tensor:
    """Return left.T @ right in float64, a part of the rows at a time."""
    parts = zip(left_NX.split(_PART), right_NH.split(_PART), strict=True)
    total = left_NX.new_zeros(left_NX.shape[1], right_NH.shape[1], dtype=torch.float64)
    for left, right in parts:
        total += left.double().T @ right.double()
    return total
