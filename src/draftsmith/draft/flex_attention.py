"""The unroll's attention by FlexAttention (https://arxiv.org/abs/2412.05496), for CUDA.

Same result as `draft/attention.py`. FlexAttention computes each row's softmax over its prefix keys, and `lse`, the
logarithm of that softmax's denominator: beside the scores of the row's own keys this number stands for the prefix.

    w = softmax([lse, s_1, ..., s_S]),    out = w_0 * prefix output + w_1 * v_1 + ... + w_S * v_S

Gradients run through both outputs. A row sees one run of prefix keys, from `first_seen` to its own place, so which
tiles of scores are visible follows from the ends of the runs: no mask of size rows x keys is made.

Shapes: n rows, P prefix rows, s own keys per row, h heads, g key-value heads, d head width, e = h / g.
"""

import functools
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from draftsmith.draft.attention import first_seen
from draftsmith.draft.rows import Ints

AttentionBackend = Literal["auto", "blocks", "flex"]
TILE = 128
SMALLEST_HEAD = 16  # the width of a head below which Triton has no matrix product


def uses_flex(backend: AttentionBackend, device: torch.device, head_dim: int) -> bool:
    """Say whether `backend` means FlexAttention here; auto: on CUDA, in training.

    Without gradients samples come one by one, each of another size, for which compiling does not pay.
    """
    if backend == "auto":
        return device.type == "cuda" and torch.is_grad_enabled() and head_dim >= SMALLEST_HEAD
    return backend == "flex"


def attend_flex(
    q_nhd: Tensor,
    k_Pgd: Tensor,
    v_Pgd: Tensor,
    own_k_nsgd: Tensor,
    own_v_nsgd: Tensor,
    rows: Ints,
    first: Ints,
    reach: int | None,
) -> Tensor:
    """Return the attention's output [n, h, d]; `rows`, `first` and `reach` as `plan_blocks` takes them.

    Compiled on CUDA. With `reach` 0 there must be own keys, else there is nothing to attend to.
    """
    q_nhd, k_Pgd = q_nhd.to(v_Pgd.dtype), k_Pgd.to(v_Pgd.dtype)  # autocast may leave normed heads in float32
    if len(rows) == 0 or reach == 0:  # FlexAttention gives no row without keys a usable lse
        return _with_own_keys(q_nhd, own_k_nsgd, own_v_nsgd, None)
    out_hnd, aux = _kernel(q_nhd.device.type)(
        q_nhd.transpose(0, 1)[None],
        k_Pgd.transpose(0, 1)[None],
        v_Pgd.transpose(0, 1)[None],
        block_mask=tile_mask(first_seen(rows, first[rows], reach), rows, len(k_Pgd), q_nhd.device),
        enable_gqa=q_nhd.shape[1] != k_Pgd.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    prefix_nhd: Tensor = out_hnd[0].transpose(0, 1)
    if own_k_nsgd.shape[1] == 0:
        return prefix_nhd
    return _with_own_keys(q_nhd, own_k_nsgd, own_v_nsgd, (prefix_nhd, aux.lse[0].T))


def _with_own_keys(
    q_nhd: Tensor, own_k_nsgd: Tensor, own_v_nsgd: Tensor, prefix: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Attend to the rows' own keys and to the prefix, given as its output [n, h, d] and lse [n, h]."""
    groups = own_k_nsgd.shape[2]
    with torch.autocast(q_nhd.device.type, enabled=False):
        q_nged = q_nhd.unflatten(1, (groups, -1)).float()
        scores_nges = torch.einsum("nged,nsgd->nges", q_nged, own_k_nsgd.float()) * q_nhd.shape[-1] ** -0.5
        if prefix is None:
            out_nged = torch.einsum("nges,nsgd->nged", scores_nges.softmax(-1), own_v_nsgd.float())
        else:
            prefix_nged, lse_nge = (part.float().unflatten(1, (groups, -1)) for part in prefix)
            weights_nges = torch.cat([lse_nge[..., None], scores_nges], dim=-1).softmax(-1)
            out_nged = weights_nges[..., :1] * prefix_nged
            out_nged = out_nged + torch.einsum("nges,nsgd->nged", weights_nges[..., 1:], own_v_nsgd.float())
    return out_nged.flatten(1, 2).to(q_nhd.dtype)


def tile_mask(low: Ints, high: Ints, keys: int, device: torch.device) -> BlockMask:
    """Return the mask of rows that see the keys low[i] to high[i] each (both ends included), in tiles of 128 x 128."""
    starts = np.arange(0, len(low), TILE)
    key_tiles = -(-keys // TILE)
    # A row's run of tiles: +1 where it begins, -1 behind its end; summed along, how many rows touch each tile.
    edges = np.zeros((len(starts), key_tiles + 1), np.int64)
    row_tile = np.arange(len(low)) // TILE
    np.add.at(edges, (row_tile, low // TILE), 1)
    np.add.at(edges, (row_tile, high // TILE + 1), -1)
    touched = edges.cumsum(1)[:, :-1] > 0
    latest_low = np.maximum.reduceat(low, starts)[:, None]
    earliest_high = np.minimum.reduceat(high, starts)[:, None]
    tile_start = np.arange(key_tiles)[None, :] * TILE
    full = (latest_low <= tile_start) & (earliest_high >= tile_start + TILE - 1)
    full[-1] &= len(low) % TILE == 0
    low_n, high_n = (torch.from_numpy(ends).to(device) for ends in (low, high))

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (low_n[row] <= key) & (key <= high_n[row])

    counts, indices = _tiles_in_order(touched & ~full, device)
    full_counts, full_indices = _tiles_in_order(full, device)
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(len(low), keys)
    )


def _tiles_in_order(chosen: np.ndarray[Any, np.dtype[np.bool_]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each row of tiles, how many are chosen [1, 1, R], and their numbers first [1, 1, R, C]."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(1).astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


@functools.cache
def _kernel(device_type: str) -> Any:
    # Packs differ in size: dynamic shapes compile once for all of them.
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
