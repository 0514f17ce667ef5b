"""The draft while decoding: one row after another with a cache of keys and values.

Shapes: n new rows, L rows in the cache, H width, h / g heads, d head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.draft.model import Eagle3Draft


class DraftDecoder:
    """Proposes chains of tokens after the rows that the verifier has confirmed."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self._draft = draft
        attention = draft.layer.self_attn
        empty = draft.fc.weight.new_empty(0, attention.kv_heads, attention.head_dim)
        self._keys_Lgd, self._values_Lgd = empty, empty
        self._confirmed = 0
        self._hidden_1H = draft.fc.weight.new_empty(0)

    def confirm(self, next_tokens: list[int], aux_nA: Tensor) -> None:
        """Add rows of confirmed tokens: row t has the verifier's aux states at t and the token after t."""
        self._hidden_1H = self.extend(next_tokens, self._draft.fc(aux_nA.to(self._draft.fc.weight)))[-1:]
        self._confirmed = len(self._keys_Lgd)

    def propose(self, length: int) -> list[int]:
        """Return the chain of `length` greedy tokens (verifier ids) after the confirmed rows."""
        draft, hidden_1H = self._draft, self._hidden_1H
        tokens: list[int] = []
        for step in range(length):
            if step:
                hidden_1H = self.extend(tokens[-1:], hidden_1H)
            best = int(draft.lm_head(draft.norm(hidden_1H)).argmax())
            tokens.append(best + int(draft.d2t[best]))
        self._keys_Lgd = self._keys_Lgd[: self._confirmed]
        self._values_Lgd = self._values_Lgd[: self._confirmed]
        return tokens

    def extend(self, tokens: list[int], hidden_nH: Tensor) -> Tensor:
        """Run the layer on new rows, add their keys and values to the cache, return its output [n, H]."""
        draft, layer = self._draft, self._draft.layer
        cached, new = len(self._keys_Lgd), len(tokens)
        device = hidden_nH.device
        embed_nH = draft.embed_tokens(torch.tensor(tokens, device=device))
        input_nW, residual_nH = layer.attention_input(embed_nH, hidden_nH)
        cos, sin = draft.cos_sin(torch.arange(cached, cached + new, device=device))
        self._keys_Lgd = torch.cat([self._keys_Lgd, layer.self_attn.keys(input_nW, cos, sin)])
        self._values_Lgd = torch.cat([self._values_Lgd, layer.self_attn.values(input_nW)])
        visible = torch.ones(new, cached + new, dtype=torch.bool, device=device).tril(cached)
        attended_hnd = scaled_dot_product_attention(
            layer.self_attn.queries(input_nW, cos, sin).transpose(0, 1),
            self._keys_Lgd.transpose(0, 1),
            self._values_Lgd.transpose(0, 1),
            attn_mask=visible,
            enable_gqa=True,
        )
        return layer.finish(residual_nH, attended_hnd.transpose(0, 1))
