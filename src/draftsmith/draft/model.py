"""The EAGLE-3 draft (https://arxiv.org/abs/2503.01840): fc, one or more Llama or Qwen3 layers, norm, lm_head.

Parameter names are those of the speculators format. Row t takes the token after position t and a hidden state of
width H: `fc` of the verifier's aux states at t in the first step, the draft's own output later on.

Shapes: n rows, H width, X the verifier's width (mostly H), A aux boundaries, V / D vocabulary of verifier / draft,
h / g heads and key-value heads, d head width.
"""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.draft.config import DraftConfig
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.draft.width import leading_directions


class DraftNorm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, float32 while training: what autocast does on CUDA but not on CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed input in the weight's dtype."""
        return super().forward(x.to(self.weight.dtype))


class DraftAttention(nn.Module):
    """Projections of the attention; the first layer's input is [norm(embedding), norm(hidden)], width 2H."""

    def __init__(self, config: DraftConfig, wide: int) -> None:
        super().__init__()
        layer = config.layer
        self.heads, self.kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        self.head_dim: int = layer.head_dim
        self.q_proj = nn.Linear(wide, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        norms_heads, eps = config.norms_heads, layer.rms_norm_eps
        self.q_norm = DraftNorm(self.head_dim, eps) if norms_heads else nn.Identity()
        self.k_norm = DraftNorm(self.head_dim, eps) if norms_heads else nn.Identity()

    def queries(self, input_nW: Tensor, cos_nd: Tensor, sin_nd: Tensor) -> Tensor:
        """Return rotated queries [n, h, d]."""
        queries_nhd: Tensor = self.q_proj(input_nW).unflatten(-1, (self.heads, self.head_dim))
        return rotate(self.q_norm(queries_nhd).to(queries_nhd.dtype), cos_nd, sin_nd)

    def keys(self, input_nW: Tensor, cos_nd: Tensor, sin_nd: Tensor) -> Tensor:
        """Return rotated keys [n, g, d]."""
        keys_ngd: Tensor = self.k_proj(input_nW).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(self.k_norm(keys_ngd).to(keys_ngd.dtype), cos_nd, sin_nd)

    def values(self, input_nW: Tensor) -> Tensor:
        """Return values [n, g, d]."""
        values: Tensor = self.v_proj(input_nW).unflatten(-1, (self.kv_heads, self.head_dim))
        return values


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.layer.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x_nH: Tensor) -> Tensor:
        """Return the MLP's output [n, H]."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x_nH)) * self.up_proj(x_nH))
        return out


class DraftLayer(nn.Module):
    """A decoder layer in two halves; what the attention attends to is the caller's business.

    Only the first one sees the tokens; the others are plain layers.
    """

    def __init__(self, config: DraftConfig, first: bool) -> None:
        super().__init__()
        self.first = first
        self.norm_before_residual = config.norm_before_residual
        eps = config.layer.rms_norm_eps
        self.input_layernorm = DraftNorm(config.hidden_size, eps)
        if first:
            self.hidden_norm = DraftNorm(config.hidden_size, eps)
        self.post_attention_layernorm = DraftNorm(config.hidden_size, eps)
        self.self_attn = DraftAttention(config, config.hidden_size * (2 if first else 1))
        self.mlp = DraftMLP(config)

    def attention_input(self, embed_nH: Tensor, hidden_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's input [n, 2H] ([n, H] beyond the first layer) and the residual stream [n, H]."""
        if not self.first:
            return self.input_layernorm(hidden_nH), hidden_nH
        normed_nH = self.hidden_norm(hidden_nH)
        residual_nH = normed_nH if self.norm_before_residual else hidden_nH
        return torch.cat([self.input_layernorm(embed_nH), normed_nH], dim=-1), residual_nH

    def finish(self, residual_nH: Tensor, attended_nhd: Tensor) -> Tensor:
        """Add attention and MLP to the residual stream; return the layer's output [n, H]."""
        hidden_nH = residual_nH + self.self_attn.o_proj(attended_nhd.flatten(1))
        out_nH: Tensor = hidden_nH + self.mlp(self.post_attention_layernorm(hidden_nH))
        return out_nH


class Eagle3Draft(nn.Module):
    """The whole draft with its vocabulary. The embedding is the verifier's, frozen, or in another width its own."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig, vocabulary: DraftVocabulary) -> None:
        """Make a draft whose embedding and lm_head are still to be filled in by the caller."""
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.embed_tokens.weight.requires_grad_(config.has_own_embedding)
        wide, eps = len(config.aux_boundaries) * config.verifier_width, config.layer.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = DraftNorm(wide, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(DraftNorm(config.verifier_width, eps) for _ in config.aux_boundaries)
        self.fc = nn.Linear(wide, hidden, bias=False)
        self.layers = nn.ModuleList(DraftLayer(config, number == 0) for number in range(config.num_layers))
        self.norm = DraftNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t)
        self.register_buffer("t2d", vocabulary.t2d)
        self._rope = LlamaRotaryEmbedding(config.layer)

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        """The decoder layers in order."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def fuse(self, aux_nA: Tensor) -> Tensor:
        """Return the first step's hidden states [n, H] from the verifier's aux states [n, A*X], side by side."""
        if self.config.norm_before_fc:
            aux_nA = self.input_norm(aux_nA)
        if self.config.fc_norm:
            parts = aux_nA.chunk(len(self.fc_norm), dim=-1)
            aux_nA = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        hidden_nH: Tensor = self.fc(aux_nA)
        return hidden_nH

    def feedback(self, hidden_nH: Tensor) -> Tensor:
        """Return what the next step takes of the last layer's output [n, H]."""
        fed_nH: Tensor = self.norm(hidden_nH) if self.config.norm_output else hidden_nH
        return fed_nH

    def output(self, fed_nH: Tensor) -> Tensor:
        """Return what `lm_head` takes of `feedback` [n, H]."""
        normed_nH: Tensor = fed_nH if self.config.norm_output else self.norm(fed_nH)
        return normed_nH

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The draft vocabulary as stored in `d2t`."""
        return DraftVocabulary.from_d2t(self.d2t, self.config.vocab_size)

    def cos_sin(self, positions_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rope's cosines and sines [n, d] at integer positions."""
        cos, sin = self._rope(self.fc.weight, positions_n[None])
        return cos[0], sin[0]


def rotate(x_nhd: Tensor, cos_nd: Tensor, sin_nd: Tensor) -> Tensor:
    """Rotate the two halves of each head by the position's angles (Llama's convention)."""
    cos_nd, sin_nd = cos_nd.to(x_nhd.dtype), sin_nd.to(x_nhd.dtype)
    half = x_nhd.shape[-1] // 2
    turned = torch.cat([-x_nhd[..., half:], x_nhd[..., :half]], dim=-1)
    return x_nhd * cos_nd[:, None] + turned * sin_nd[:, None]


def new_draft(
    config: DraftConfig, vocabulary: DraftVocabulary, embedding_VX: Tensor, head_rows_DX: Tensor, seed: int
) -> Eagle3Draft:
    """Make an untrained draft in float32.

    Embedding and lm_head rows are the verifier's; matrices are N(0, 0.02) from `seed`, except `fc`: it begins as
    the deepest aux state, passed through, plus N(0, 0.002). In another width all three are seen through the leading
    directions of the verifier's rows (`draft/width.py`).
    """
    generator = torch.Generator().manual_seed(seed)
    draft = Eagle3Draft(config, vocabulary)
    passed_XH = torch.eye(config.hidden_size)
    if config.has_own_embedding:
        passed_XH = leading_directions(head_rows_DX, config.hidden_size)
        embedding_VX = embedding_VX.float() @ leading_directions(embedding_VX, config.hidden_size)
        head_rows_DX = head_rows_DX @ passed_XH
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(embedding_VX)
        draft.lm_head.weight.copy_(head_rows_DX)
        for name, parameter in sorted(draft.named_parameters()):
            if parameter.dim() == 2 and not name.startswith(("embed_tokens", "lm_head")):
                parameter.normal_(0.0, 0.02, generator=generator)
        draft.fc.weight.mul_(0.1)
        draft.fc.weight[:, -config.verifier_width :] += passed_XH.T
    return draft
