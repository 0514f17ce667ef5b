"""Attention of the unroll: causal over a shared prefix, plus a few keys that belong to each row alone.

Row t at step k sees the step-0 keys of its sample at positions <= t, and its own keys of steps 1..k. With a sliding
window it sees only the last few of them. Scores are made for one block of rows at a time and made again in the backward
pass, so nothing of size rows x keys is kept.

Shapes: n rows, P prefix rows, s own keys per row, h heads, g key-value heads, d head width, e = h / g;
within a block b rows, L keys.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.draft.rows import Ints

BLOCK_ROWS = 128


@dataclass(frozen=True)
class Block:
    """Rows [row_start, row_end) of a step and the prefix keys [key_start, key_end) that any of them sees.

    `hidden` are runs of keys that not all rows see: a run's first key, counted from key_start, and marks [b, keys] of
    what a row must not see.
    """

    row_start: int
    row_end: int
    key_start: int
    key_end: int
    hidden: list[tuple[int, Tensor]]


def plan_blocks(
    rows: Ints, first: Ints, device: torch.device, reach: int | None = None, block_rows: int = BLOCK_ROWS
) -> list[Block]:
    """Cut ascending prefix rows into blocks, each within one sample (`first` marks where a sample begins).

    `reach` is how many prefix keys a row sees at most: its own place and those before it.
    """
    sample = first[rows]
    borders = [0, *(np.flatnonzero(np.diff(sample)) + 1).tolist(), len(rows)]
    blocks = []
    for start, end in itertools.pairwise(borders):
        for row_start in range(start, end, block_rows):
            own = rows[row_start : min(row_start + block_rows, end)]
            low = first_seen(own, sample[row_start : row_start + len(own)], reach)
            key_start, key_end = int(low[0]), int(own[-1]) + 1
            # Keys from the last row's first one up to the first row's own place are seen by the whole block: only
            # those before and behind them need a mask.
            before = np.arange(key_start, min(int(low[-1]), key_end))
            behind = np.arange(int(own[0]) + 1, key_end)
            hidden = [
                (int(keys[0]) - key_start, torch.from_numpy(marks).to(device))
                for keys, marks in ((before, before < low[:, None]), (behind, behind > own[:, None]))
                if len(keys)
            ]
            blocks.append(Block(row_start, row_start + len(own), key_start, key_end, hidden))
    return blocks


def first_seen(rows: Ints, first: Ints, reach: int | None) -> Ints:
    """Return the first prefix key that each row sees; `first` [n] is where its sample begins.

    Raises ValueError if `reach` is below 0. With 0 a row sees none: the result is the place behind it.
    """
    if reach is None:
        return first
    if reach < 0:
        raise ValueError(f"reach {reach}")
    return np.maximum(first, rows + 1 - reach)


def attend(
    q_nhd: Tensor, k_Pgd: Tensor, v_Pgd: Tensor, own_k_nsgd: Tensor, own_v_nsgd: Tensor, blocks: list[Block]
) -> Tensor:
    """Return the attention's output [n, h, d]; `own_*` may have s = 0."""
    out: Tensor = _PrefixAndOwn.apply(q_nhd, k_Pgd, v_Pgd, own_k_nsgd, own_v_nsgd, blocks)  # type: ignore[no-untyped-call]
    return out


class _PrefixAndOwn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_nhd: Tensor,
        k_Pgd: Tensor,
        v_Pgd: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        blocks: list[Block],
    ) -> Tensor:
        out_nhd = torch.empty_like(q_nhd)
        for block, q, k, v, ok, ov in _block_inputs(blocks, q_nhd, k_Pgd, v_Pgd, own_k, own_v):
            p = _probabilities(block, q, k, ok)
            keys = k.shape[1]
            out = torch.bmm(p[..., :keys], v)
            if ov.shape[2]:
                out += torch.einsum("gebs,gbsd->gebd", _by_row(p[..., keys:], block), ov).flatten(1, 2)
            out_nhd[block.row_start : block.row_end] = _to_rows(out, block)
        ctx.save_for_backward(q_nhd, k_Pgd, v_Pgd, own_k, own_v, out_nhd)
        ctx.blocks = blocks
        return out_nhd

    @staticmethod
    def backward(ctx: Any, grad_out_nhd: Tensor) -> tuple[Tensor | None, ...]:
        q_nhd, k_Pgd, v_Pgd, own_k, own_v, out_nhd = ctx.saved_tensors
        scale = q_nhd.shape[-1] ** -0.5
        dq, dk, dv = torch.empty_like(q_nhd), torch.zeros_like(k_Pgd), torch.zeros_like(v_Pgd)
        dok, dov = torch.empty_like(own_k), torch.empty_like(own_v)
        delta_nh = (grad_out_nhd * out_nhd).sum(-1)
        for block, q, k, v, ok, ov in _block_inputs(ctx.blocks, q_nhd, k_Pgd, v_Pgd, own_k, own_v):
            rows, seen = slice(block.row_start, block.row_end), slice(block.key_start, block.key_end)
            keys, heads = k.shape[1], k.shape[0]
            grad = _to_groups(grad_out_nhd[rows], heads)
            delta = _to_groups(delta_nh[rows, :, None], heads)
            p = _probabilities(block, q, k, ok)
            dv[seen] += torch.bmm(p[..., :keys].mT, grad).transpose(0, 1)
            ds = torch.bmm(grad, v.mT).sub_(delta).mul_(p[..., :keys]).mul_(scale)
            dk[seen] += torch.bmm(ds.mT, q).transpose(0, 1)
            block_dq = torch.bmm(ds, k)
            if ok.shape[2]:
                p_own, grad_own = _by_row(p[..., keys:], block), _by_row(grad, block)
                dov[rows] = torch.einsum("gebs,gebd->bsgd", p_own, grad_own)
                dp = torch.einsum("gebd,gbsd->gebs", grad_own, ov)
                ds_own = p_own * (dp - _by_row(delta, block)) * scale
                dok[rows] = torch.einsum("gebs,gebd->bsgd", ds_own, _by_row(q, block))
                block_dq += torch.einsum("gebs,gbsd->gebd", ds_own, ok).flatten(1, 2)
            dq[rows] = _to_rows(block_dq, block)
        return dq, dk, dv, dok, dov, None


def _block_inputs(
    blocks: list[Block], q_nhd: Tensor, k_Pgd: Tensor, v_Pgd: Tensor, own_k: Tensor, own_v: Tensor
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield each block with q [g, e*b, d], keys and values [g, L, d], own keys and values [g, b, s, d]."""
    for block in blocks:
        rows, seen = slice(block.row_start, block.row_end), slice(block.key_start, block.key_end)
        q = _to_groups(q_nhd[rows], k_Pgd.shape[1])
        own = (own_k[rows].permute(2, 0, 1, 3), own_v[rows].permute(2, 0, 1, 3))
        yield block, q, k_Pgd[seen].transpose(0, 1), v_Pgd[seen].transpose(0, 1), *own


def _probabilities(block: Block, q: Tensor, k: Tensor, own_k: Tensor) -> Tensor:
    """Return the softmax [g, e*b, L + s] over visible prefix keys and own keys."""
    scores = torch.bmm(q, k.mT)
    for start, marks in block.hidden:
        _by_row(scores, block)[..., start : start + marks.shape[1]].masked_fill_(marks, -torch.inf)
    if own_k.shape[2]:
        own = torch.einsum("gebd,gbsd->gebs", _by_row(q, block), own_k)
        scores = torch.cat([scores, own.flatten(1, 2)], dim=-1)
    return scores.mul_(q.shape[-1] ** -0.5).softmax(-1)


def _to_groups(x_bhd: Tensor, kv_heads: int) -> Tensor:
    """[b, h, d] -> [g, e*b, d]: the e query heads of a key-value head side by side."""
    rows, heads, _ = x_bhd.shape
    return x_bhd.reshape(rows, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x: Tensor, block: Block) -> Tensor:
    """[g, e*b, ...] -> [g, e, b, ...]."""
    out: Tensor = x.unflatten(1, (-1, block.row_end - block.row_start))
    return out


def _to_rows(x: Tensor, block: Block) -> Tensor:
    """[g, e*b, d] -> [b, h, d]."""
    return _by_row(x, block).permute(2, 0, 1, 3).flatten(1, 2)
