"""The training-time-test unroll (EAGLE-3, section 3.2) on the rows that the loss needs.

With a sliding window W a query at position i sees the keys at positions i-W+1 to i, as in transformers and vLLM. Row
t's query at step k stands at t+k, its own keys of steps 1..k at t+1..t+k. Row 4 with W = 3:

    position           0   1   2   3   4   5   6
    step 0 sees                x   x   x
    step 1 sees                    x   x   o         x key of step 0
    step 2 sees                        x   o   o     o own key

Shapes: P prefix rows, n rows of a step, m rows with a loss, T tokens, H width, X the verifier's, A aux boundaries.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.draft.attention import attend, plan_blocks
from draftsmith.draft.flex_attention import AttentionBackend, attend_flex, uses_flex
from draftsmith.draft.model import DraftLayer, Eagle3Draft
from draftsmith.draft.rows import Ints, RowPlan

CosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Pack:
    """Samples laid end to end: `input_ids` int64 [T], `aux` [P, A*X] for the plan's prefix rows."""

    input_ids: Tensor
    aux: Tensor
    plan: RowPlan


class _LayerCache:
    """A layer's keys and values: of all prefix rows at step 0, and of each row's own later steps."""

    def __init__(self, layer: DraftLayer, window: int | None, backend: AttentionBackend) -> None:
        self._layer, self._window, self._backend = layer, window, backend
        self._own_keys: list[Tensor] = []
        self._own_values: list[Tensor] = []

    def step_0(self, hidden_PH: Tensor, embed_PH: Tensor, cos_sin_P: CosSin, rows: Ints, first: Ints) -> Tensor:
        """Keep the prefix rows' keys and values; return the layer's output [n, H] at `rows`."""
        layer, attention = self._layer, self._layer.self_attn
        input_PW, residual_PH = layer.attention_input(embed_PH, hidden_PH)
        self._keys, self._values = attention.keys(input_PW, *cos_sin_P), attention.values(input_PW)
        if len(rows) < len(hidden_PH):
            rows_n = torch.from_numpy(rows).to(hidden_PH.device)
            input_PW, residual_PH = input_PW.index_select(0, rows_n), residual_PH.index_select(0, rows_n)
            cos_sin_P = (cos_sin_P[0].index_select(0, rows_n), cos_sin_P[1].index_select(0, rows_n))
        return self._attend(input_PW, residual_PH, cos_sin_P, rows, first)

    def later_step(
        self, hidden_nH: Tensor, embed_nH: Tensor, cos_sin_n: CosSin, still_n: Tensor, rows: Ints, first: Ints
    ) -> Tensor:
        """Go on with the rows `still_n` of the step before; return the layer's output [n, H]."""
        attention = self._layer.self_attn
        input_nW, residual_nH = self._layer.attention_input(embed_nH, hidden_nH)
        keys, values = attention.keys(input_nW, *cos_sin_n), attention.values(input_nW)
        self._own_keys = [earlier.index_select(0, still_n) for earlier in self._own_keys] + [keys]
        self._own_values = [earlier.index_select(0, still_n) for earlier in self._own_values] + [values]
        return self._attend(input_nW, residual_nH, cos_sin_n, rows, first)

    def _attend(self, input_nW: Tensor, residual_nH: Tensor, cos_sin_n: CosSin, rows: Ints, first: Ints) -> Tensor:
        # A row's query stands behind its own keys: each of them takes one place of the window from the prefix.
        reach = None if self._window is None else max(self._window - len(self._own_keys), 0)
        inputs = (
            self._layer.self_attn.queries(input_nW, *cos_sin_n),
            self._keys,
            self._values,
            self._stacked(self._own_keys, len(rows)),
            self._stacked(self._own_values, len(rows)),
        )
        if uses_flex(self._backend, input_nW.device, self._layer.self_attn.head_dim):
            attended_nhd = attend_flex(*inputs, rows, first, reach)
        else:
            attended_nhd = attend(*inputs, plan_blocks(rows, first, input_nW.device, reach))
        return self._layer.finish(residual_nH, attended_nhd)

    def _stacked(self, own: list[Tensor], rows: int) -> Tensor:
        """Stack the rows' own keys or values of the steps so far that the window reaches: [n, s, g, d]."""
        seen = own if self._window is None else own[-self._window :]
        return torch.stack(seen, dim=1) if seen else self._keys.new_empty(rows, 0, *self._keys.shape[1:])


def unroll(draft: Eagle3Draft, pack: Pack, backend: AttentionBackend = "auto") -> list[Tensor]:
    """Return, for each step, the normed hidden states [m, H] of its rows with a loss."""
    plan, device = pack.plan, draft.fc.weight.device
    token_after_P = torch.from_numpy(plan.prefix + 1).to(device)
    position_P = torch.from_numpy(plan.position).to(device)
    windows = draft.config.windows
    layers = zip(draft.decoder_layers, windows, strict=True)
    caches = [_LayerCache(layer, window, backend) for layer, window in layers]
    every_row = np.arange(len(plan.prefix))

    hidden_nH = draft.fuse(pack.aux)
    embed_TH = draft.embed_tokens(pack.input_ids)  # once: its gradient is as large as the vocabulary
    losses_from: list[Tensor] = []
    for k, step in enumerate(plan.steps):
        if k == 0:
            embed_PH = embed_TH.index_select(0, token_after_P)
            cos_sin_P = draft.cos_sin(position_P)
            for cache in caches:
                # A layer below the last one owes its output to the keys of the next: for every prefix row.
                rows = step.rows if cache is caches[-1] else every_row
                hidden_nH = cache.step_0(hidden_nH, embed_PH, cos_sin_P, rows, plan.first)
        else:
            rows_n = torch.from_numpy(step.rows).to(device)
            still_n = torch.from_numpy(step.from_previous).to(device)
            embed_nH = embed_TH.index_select(0, token_after_P[rows_n] + k)
            cos_sin_n = draft.cos_sin(position_P[rows_n] + k)
            hidden_nH = hidden_nH.index_select(0, still_n)
            for cache in caches:
                hidden_nH = cache.later_step(hidden_nH, embed_nH, cos_sin_n, still_n, step.rows, plan.first)
        hidden_nH = draft.feedback(hidden_nH)
        losses_from.append(draft.output(hidden_nH.index_select(0, torch.from_numpy(step.loss_rows).to(device))))
    return losses_from
