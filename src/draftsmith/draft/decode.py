"""The draft while decoding: one row after another with a cache of keys and values.

With a sliding window W a row sees the keys less than W positions before it: drafts on other branches of a tree never,
ancestors as they stand on its own branch.

Shapes: n new rows, L rows in the cache, H width, h / g heads, d head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.draft.model import Eagle3Draft


class Tree(NamedTuple):
    """Drafts as a tree: `tokens` (verifier ids), parents before children; `parents` are places, -1 the root."""

    tokens: list[int]
    parents: list[int]

    def depth(self, node: int) -> int:
        """Return how many nodes are above a node."""
        above = 0
        while (node := self.parents[node]) >= 0:
            above += 1
        return above


class DraftDecoder:
    """Proposes chains of tokens after the rows that the verifier has confirmed."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self._draft = draft
        attention = draft.decoder_layers[0].self_attn
        empty = draft.fc.weight.new_empty(0, attention.kv_heads, attention.head_dim)
        self._keys: list[Tensor] = [empty] * len(draft.layers)  # a layer each, [L, g, d]
        self._values: list[Tensor] = [empty] * len(draft.layers)
        self._positions = torch.empty(0, dtype=torch.long, device=empty.device)  # of the rows in the cache, [L]
        self._confirmed = 0
        self._hidden_1H = draft.fc.weight.new_empty(0)

    def confirm(self, next_tokens: list[int], aux_nA: Tensor) -> None:
        """Add rows of confirmed tokens: row t has the verifier's aux states at t and the token after t."""
        self._hidden_1H = self.extend(next_tokens, self._draft.fuse(aux_nA.to(self._draft.fc.weight)))[-1:]
        self._confirmed = len(self._keys[0])

    def propose(self, length: int) -> list[int]:
        """Return the chain of `length` greedy tokens (verifier ids) after the confirmed rows."""
        draft, hidden_1H = self._draft, self._hidden_1H
        tokens: list[int] = []
        for step in range(length):
            if step:
                hidden_1H = self.extend(tokens[-1:], hidden_1H)
            best = int(draft.lm_head(draft.output(hidden_1H)).argmax())
            tokens.append(best + int(draft.d2t[best]))
        self._forget_drafts()
        return tokens

    def propose_tree(self, depth: int, width: int, total: int) -> Tree:
        """Return the dynamic tree of EAGLE-2 (https://arxiv.org/abs/2406.16858) after the confirmed rows.

        Level by level the `width` most likely paths so far get `width` children each; of all nodes the `total` with the
        most likely paths are kept. A path's likelihood is the product of the draft's probabilities along it.
        """
        draft, nodes, confirmed = self._draft, _Nodes(), self._confirmed
        hidden_nH, parents = self._hidden_1H, [-1]
        for level in range(depth):
            log_p_nD = draft.lm_head(draft.output(hidden_nH)).log_softmax(-1)
            best = log_p_nD.topk(min(width, log_p_nD.shape[-1]), dim=-1)
            tokens_nk = best.indices + draft.d2t[best.indices]
            new = nodes.add(parents, tokens_nk.tolist(), best.values.tolist())
            parents = sorted(new, key=lambda node: -nodes.scores[node])[:width]
            if level + 1 < depth:
                hidden_nH = self._expand(nodes, parents, confirmed + level, hidden_nH)
        self._forget_drafts()
        return nodes.best(total)

    def _expand(self, nodes: "_Nodes", chosen: list[int], position: int, hidden_nH: Tensor) -> Tensor:
        """Run the layers on the chosen nodes; each sees the confirmed rows, its ancestors and itself."""
        rows = [nodes.row_in_level[nodes.parents[node]] if nodes.parents[node] >= 0 else 0 for node in chosen]
        cached = len(self._keys[0])
        visible = torch.zeros(len(chosen), cached + len(chosen), dtype=torch.bool, device=hidden_nH.device)
        visible[:, : self._confirmed] = True
        for row, node in enumerate(chosen):
            visible[row, cached + row] = True
            for ancestor in nodes.ancestors(node):
                visible[row, nodes.cache_row[ancestor]] = True
        for row, node in enumerate(chosen):
            nodes.row_in_level[node], nodes.cache_row[node] = row, cached + row
        positions = torch.full((len(chosen),), position, device=hidden_nH.device)
        return self._run([nodes.tokens[node] for node in chosen], hidden_nH[rows], positions, visible)

    def extend(self, tokens: list[int], hidden_nH: Tensor) -> Tensor:
        """Run the layers on new rows, add their keys and values to the cache; return what a next step takes [n, H]."""
        cached, new = len(self._keys[0]), len(tokens)
        visible = torch.ones(new, cached + new, dtype=torch.bool, device=hidden_nH.device).tril(cached)
        return self._run(tokens, hidden_nH, torch.arange(cached, cached + new, device=hidden_nH.device), visible)

    def _run(self, tokens: list[int], hidden_nH: Tensor, positions_n: Tensor, visible_nL: Tensor) -> Tensor:
        draft = self._draft
        embed_nH = draft.embed_tokens(torch.tensor(tokens, device=hidden_nH.device))
        cos, sin = draft.cos_sin(positions_n)
        self._positions = torch.cat([self._positions, positions_n])
        distance_nL = positions_n[:, None] - self._positions
        for number, (layer, window) in enumerate(zip(draft.decoder_layers, draft.config.windows, strict=True)):
            input_nW, residual_nH = layer.attention_input(embed_nH, hidden_nH)
            attention = layer.self_attn
            self._keys[number] = torch.cat([self._keys[number], attention.keys(input_nW, cos, sin)])
            self._values[number] = torch.cat([self._values[number], attention.values(input_nW)])
            attended_hnd = scaled_dot_product_attention(
                attention.queries(input_nW, cos, sin).transpose(0, 1),
                self._keys[number].transpose(0, 1),
                self._values[number].transpose(0, 1),
                attn_mask=visible_nL if window is None else visible_nL & (distance_nL < window),
                enable_gqa=True,
            )
            hidden_nH = layer.finish(residual_nH, attended_hnd.transpose(0, 1))
        return draft.feedback(hidden_nH)

    def _forget_drafts(self) -> None:
        """Cut the caches back to the confirmed rows."""
        self._positions = self._positions[: self._confirmed]
        self._keys = [keys[: self._confirmed] for keys in self._keys]
        self._values = [values[: self._confirmed] for values in self._values]


class _Nodes:
    """A tree that grows: tokens, parents and path log-probabilities; where expanded nodes' rows are."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.row_in_level: dict[int, int] = {}
        self.cache_row: dict[int, int] = {}

    def add(self, parents: list[int], tokens_nk: list[list[int]], log_p_nk: list[list[float]]) -> list[int]:
        """Add each parent's children; return their places."""
        first = len(self.tokens)
        for parent, tokens, log_p in zip(parents, tokens_nk, log_p_nk, strict=True):
            base = self.scores[parent] if parent >= 0 else 0.0
            self.tokens += tokens
            self.parents += [parent] * len(tokens)
            self.scores += [base + value for value in log_p]
        return list(range(first, len(self.tokens)))

    def ancestors(self, node: int) -> list[int]:
        """Return the nodes above a node."""
        found = []
        while (node := self.parents[node]) >= 0:
            found.append(node)
        return found

    def best(self, total: int) -> Tree:
        """Return the `total` nodes with the best paths: with a node its ancestors, whose paths are at least as good."""
        kept = sorted(sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))[:total])
        place = {node: i for i, node in enumerate(kept)}
        return Tree([self.tokens[node] for node in kept], [place.get(self.parents[node], -1) for node in kept])
