"""The draft's configuration and its config.json in speculators format (which vLLM and speculators read)."""

import copy
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from transformers import LlamaConfig, Qwen3Config

from draftsmith.errors import BadInput
from draftsmith.verifier.boundaries import from_boundaries, to_boundaries
from draftsmith.verifier.facts import VerifierFacts

LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "vocab_size", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "attention_bias", "attention_dropout", "mlp_bias", "initializer_range",
    "tie_word_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window",
    "use_sliding_window", "layer_types",
)  # fmt: skip
_LAYERS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
SLIDING = "sliding_attention"
_MLA_HEAD_DIM, _MLA_KV_HEADS = 128, 8
_MLP_MULTIPLE = 8


@dataclass(frozen=True)
class DraftConfig:
    """What defines a draft. `layer` is its layers' transformers config (rope included); a Qwen3 layer norms q and k.

    `norm_before_fc` norms the aux states together, `fc_norm` each of them apart (EAGLE-3.1); with `norm_output` the
    next step takes the output behind the final norm (EAGLE-3.1). `target_hidden_size` is the verifier's width where it
    is not the draft's: `fc` leads from one to the other, and the draft has an embedding of its own, which is trained.
    """

    layer: LlamaConfig | Qwen3Config
    draft_vocab_size: int
    aux_boundaries: list[int]
    norm_before_residual: bool
    verifier_name: str
    verifier_architectures: list[str]
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_hidden_size: int | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers of the draft."""
        return int(self.layer.num_hidden_layers)

    @property
    def windows(self) -> list[int | None]:
        """For each layer how many keys a query sees, the last one its own; None without a sliding window."""
        kinds = getattr(self.layer, "layer_types", None) or [None] * self.num_layers
        return [int(self.layer.sliding_window) if kind == SLIDING else None for kind in kinds]

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed per head, as in Qwen3."""
        return bool(self.layer.model_type == "qwen3")

    @property
    def hidden_size(self) -> int:
        """Width H of the draft."""
        return int(self.layer.hidden_size)

    @property
    def verifier_width(self) -> int:
        """Width of the verifier's states."""
        return self.target_hidden_size or self.hidden_size

    @property
    def has_own_embedding(self) -> bool:
        """Whether the draft has another width than its verifier, whose embedding does not fit it then."""
        return self.verifier_width != self.hidden_size

    @property
    def vocab_size(self) -> int:
        """Size V of the verifier's vocabulary."""
        return int(self.layer.vocab_size)


def derive_config(
    facts: VerifierFacts,
    draft_vocab_size: int,
    aux_boundaries: list[int],
    norm_before_residual: bool,
    verifier_name: str,
    num_layers: int = 1,
    layer_type: Literal["llama", "qwen3"] = "llama",
    sliding_window: int = 0,
    hidden_size: int = 0,
) -> DraftConfig:
    """Derive a draft from its verifier: same width, heads, MLP width, norm epsilon and rope.

    `sliding_window` is that of all layers, 0 for none. `hidden_size` is the draft's width, 0 for the verifier's; in
    another one heads are as wide as the verifier's and share keys in its ratio, and the MLP's width is in proportion.
    Raises BadInput if such heads do not fill the width.
    """
    text, width = facts.text_config, hidden_size or facts.hidden_size
    own_width = width != facts.hidden_size
    heads, kv_heads, head_dim = _attention_shape(text, facts.hidden_size)
    intermediate_size = text["intermediate_size"]
    if own_width:
        heads, kv_heads = _heads_of_width(width, heads, kv_heads, head_dim)
        intermediate_size = -(-intermediate_size * width // (facts.hidden_size * _MLP_MULTIPLE)) * _MLP_MULTIPLE
    layer = _LAYERS[layer_type](
        hidden_size=width,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=facts.vocab_size,
        rms_norm_eps=facts.norm_eps,
        max_position_embeddings=text.get("max_position_embeddings", 4096),
        rope_parameters=_rope(text),
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=text.get("bos_token_id"),
        eos_token_id=text.get("eos_token_id"),
    )
    if sliding_window:
        layer = with_window(layer, sliding_window)
    return DraftConfig(
        layer,
        draft_vocab_size,
        aux_boundaries,
        norm_before_residual,
        verifier_name,
        facts.architectures,
        target_hidden_size=facts.hidden_size if own_width else None,
    )


def _attention_shape(text: dict[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Return heads, key-value heads and head width; a verifier with latent attention (MLA) has no usable ones."""
    if text.get("kv_lora_rank"):
        heads = hidden_size // _MLA_HEAD_DIM
        return heads, _MLA_KV_HEADS if heads % _MLA_KV_HEADS == 0 else heads, _MLA_HEAD_DIM
    heads = text["num_attention_heads"]
    return heads, text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden_size // heads


def _heads_of_width(width: int, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return heads and key-value heads that fill a width, of the verifier's head width and in its ratio."""
    ratio = heads // kv_heads
    if width % (ratio * head_dim):
        raise BadInput(
            f"train.hidden_size = {width}: wanted a multiple of {ratio * head_dim}, {ratio} query heads of width "
            f"{head_dim} for each key-value head, as the verifier has them"
        )
    return width // head_dim, width // head_dim // ratio


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """Take the verifier's rope where it is one set of parameters for the whole head, else plain rope."""
    rope = text.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or text.get("rope_theta") or 10000.0
    known = {"default", "linear", "dynamic", "yarn", "llama3"}
    if rope.get("rope_type") in known and "partial_rotary_factor" not in rope and not text.get("kv_lora_rank"):
        return dict(rope)
    return {"rope_type": "default", "rope_theta": theta}


def rope_keys(layer: LlamaConfig | Qwen3Config) -> dict[str, Any]:
    """Return the two older rope keys: readers with transformers 4 look for them and ignore rope_parameters."""
    rope = layer.rope_parameters
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else rope}


def with_window(layer: LlamaConfig | Qwen3Config, sliding_window: int) -> LlamaConfig | Qwen3Config:
    """Return the layer config with a sliding window in all layers.

    speculators and vLLM go by `layer_types`, transformers' Qwen3 also by `use_sliding_window`.
    """
    changed = copy.deepcopy(layer)
    changed.sliding_window, changed.use_sliding_window = sliding_window, True
    changed.layer_types = [SLIDING] * layer.num_hidden_layers
    return changed


def check_window(layer: LlamaConfig | Qwen3Config, where: str) -> None:
    """Raise BadInput if a layer slides without a window: servers differ in what they take for it."""
    kinds = getattr(layer, "layer_types", None) or []
    window = getattr(layer, "sliding_window", None)
    if SLIDING in kinds and not (
        isinstance(window, int) and window >= 1 and getattr(layer, "use_sliding_window", True)
    ):
        raise BadInput(f"{where}: layer_types names {SLIDING}, but sliding_window is off ({window})")


def read_target_width(values: dict[str, Any], layer: LlamaConfig | Qwen3Config) -> int | None:
    """Return the verifier's width as a config names it; None if it is the draft's."""
    width = values.get("target_hidden_size")
    return None if width is None or width == layer.hidden_size else int(width)


def layer_values(layer: LlamaConfig | Qwen3Config) -> dict[str, Any]:
    """Return the keys of config.json that describe the layers."""
    return {key: getattr(layer, key) for key in LAYER_KEYS if hasattr(layer, key)}


def to_json(config: DraftConfig, dtype: str, speculative_tokens: int) -> dict[str, Any]:
    """Return config.json: every key whose absence changes the meaning in a server is there."""
    layer = layer_values(config.layer) | rope_keys(config.layer)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draftsmith_version": version("draftsmith"),
        "dtype": dtype,
        "torch_dtype": dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.has_own_embedding,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": from_boundaries(config.aux_boundaries, "vllm"),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": config.verifier_name,
                "architectures": config.verifier_architectures,
            },
        },
    }


def from_json(values: dict[str, Any], where: str) -> DraftConfig:
    """Read a config.json in speculators format; raise BadInput for what this draft model does not have."""
    needed = ("draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    missing = [key for key in (*needed, "transformer_layer_config", "speculators_config") if key not in values]
    if values.get("speculators_model_type") != "eagle3" or missing:
        raise BadInput(f"{where}: not an EAGLE-3 head in speculators format (lacks {', '.join(missing) or 'type'})")
    layer = dict(values["transformer_layer_config"])
    if layer.get("model_type") not in _LAYERS:
        raise BadInput(f"{where}: a draft of {layer.get('model_type')} layers; only {' and '.join(_LAYERS)} are known")
    verifier = values["speculators_config"]["verifier"]
    layer_config = _LAYERS[layer["model_type"]](**layer)
    check_window(layer_config, where)
    return DraftConfig(
        layer_config,
        values["draft_vocab_size"],
        to_boundaries(values["eagle_aux_hidden_state_layer_ids"], "vllm"),
        values["norm_before_residual"],
        verifier["name_or_path"],
        verifier["architectures"],
        **{key: bool(values.get(key)) for key in ("norm_before_fc", "fc_norm", "norm_output")},
        target_hidden_size=read_target_width(values, layer_config),
    )
