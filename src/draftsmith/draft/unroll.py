"""The training-time-test unroll (EAGLE-3, section 3.2) on the rows that the loss needs.

Shapes: P prefix rows, n rows of a step, m rows with a loss, H width, A aux boundaries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.draft.attention import attend, plan_blocks
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.rows import RowPlan


@dataclass(frozen=True)
class Pack:
    """Samples laid end to end: `input_ids` int64 [T], `aux` [P, A*H] for the plan's prefix rows."""

    input_ids: Tensor
    aux: Tensor
    plan: RowPlan


def unroll(draft: Eagle3Draft, pack: Pack) -> list[Tensor]:
    """Return, for each step, the normed hidden states [m, H] of its rows with a loss."""
    plan, layer, device = pack.plan, draft.layer, draft.fc.weight.device
    attention = layer.self_attn
    token_after_P = torch.from_numpy(plan.prefix + 1).to(device)
    position_P = torch.from_numpy(plan.position).to(device)

    def embedded(rows_n: Tensor, step: int) -> Tensor:
        embed_nH: Tensor = draft.embed_tokens(pack.input_ids[token_after_P[rows_n] + step])
        return embed_nH

    every_row_P = torch.arange(len(plan.prefix), device=device)
    input_PW, residual_PH = layer.attention_input(embedded(every_row_P, 0), draft.fc(pack.aux))
    cos_sin_P = draft.cos_sin(position_P)
    prefix_keys, prefix_values = attention.keys(input_PW, *cos_sin_P), attention.values(input_PW)

    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    hidden_nH = torch.empty(0)
    losses_from: list[Tensor] = []
    for k, step in enumerate(plan.steps):
        rows_n = torch.from_numpy(step.rows).to(device)
        cos, sin = draft.cos_sin(position_P[rows_n] + k)
        if k == 0:
            input_nW, residual_nH = input_PW.index_select(0, rows_n), residual_PH.index_select(0, rows_n)
        else:
            still_n = torch.from_numpy(step.from_previous).to(device)
            input_nW, residual_nH = layer.attention_input(embedded(rows_n, k), hidden_nH.index_select(0, still_n))
            own_keys = [keys.index_select(0, still_n) for keys in own_keys] + [attention.keys(input_nW, cos, sin)]
            own_values = [values.index_select(0, still_n) for values in own_values] + [attention.values(input_nW)]
        attended_nhd = attend(
            attention.queries(input_nW, cos, sin),
            prefix_keys,
            prefix_values,
            _stacked(own_keys, prefix_keys, len(rows_n)),
            _stacked(own_values, prefix_values, len(rows_n)),
            plan_blocks(step.rows, plan.first, device),
        )
        hidden_nH = layer.finish(residual_nH, attended_nhd)
        losses_from.append(draft.norm(hidden_nH.index_select(0, torch.from_numpy(step.loss_rows).to(device))))
    return losses_from


def _stacked(own: list[Tensor], like_Pgd: Tensor, rows: int) -> Tensor:
    """Stack the rows' own keys or values of all steps so far: [n, s, g, d]."""
    if own:
        return torch.stack(own, dim=1)
    return like_Pgd.new_empty(rows, 0, *like_Pgd.shape[1:])
