"""Heads in the format of EAGLE, SpecForge and SGLang: `midlayer.` names, and aux layers named by their outputs.

    config.json          a llama config of one layer; draft_vocab_size; eagle_config.eagle_aux_hidden_state_layer_ids
                         (id k: the output of layer k, which is boundary k + 1; without ids the servers take boundaries
                         2, n//2, n-3)
                         target_hidden_size, where the verifier's width is not the draft's
    model.safetensors    midlayer.*, fc, norm, lm_head, d2t, t2d; embed_tokens only where the widths differ: else it is
    or pytorch_model.bin the verifier's

The layer's residual stream begins from the hidden state before its norm: a draft trained otherwise cannot be written.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.draft.config import (
    LAYER_KEYS,
    DraftConfig,
    check_window,
    layer_values,
    read_target_width,
    rope_keys,
)
from draftsmith.draft.model import Eagle3Draft
from draftsmith.errors import BadInput
from draftsmith.files import commit, temporary_name, write_json
from draftsmith.verifier.boundaries import default_boundaries, from_boundaries, to_boundaries
from draftsmith.verifier.facts import VerifierFacts

LAYER, MIDLAYER = "layers.0.", "midlayer."


def save_eagle(folder: Path, draft: Eagle3Draft, dtype: torch.dtype) -> None:
    """Write the draft into the existing folder; raise BadInput if the format cannot carry it."""
    config = draft.config
    if config.norm_before_residual:
        raise BadInput(
            "this draft's residual stream begins from the normed hidden state, which EAGLE's format and SGLang do not "
            "know. Export it as speculators, or train with train.norm_before_residual = false."
        )
    beyond = [name for name in ("norm_before_fc", "fc_norm", "norm_output", "norms_heads") if getattr(config, name)]
    if beyond or config.num_layers > 1:
        raise BadInput(
            f"this draft has {', '.join([*beyond, f'{config.num_layers} layers'])}, which EAGLE's format and SGLang do "
            "not know. Export it as speculators."
        )
    if config.aux_boundaries[0] == 0:
        raise BadInput("aux boundary 0 is the embedding's output, which is no layer's output: SGLang has no id for it")
    tensors = {
        name.replace(LAYER, MIDLAYER): (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in draft.state_dict().items()
        if name != "embed_tokens.weight" or config.has_own_embedding
    }
    weights = folder / "model.safetensors"
    save_file(tensors, temporary_name(weights), metadata={"format": "pt"})
    commit(weights)
    write_json(folder / "config.json", _to_json(config, str(dtype).removeprefix("torch.")))


def _to_json(config: DraftConfig, dtype: str) -> dict[str, Any]:
    # SGLang takes the key as it is wherever it is there, null too.
    width = {"target_hidden_size": config.target_hidden_size} if config.has_own_embedding else {}
    return {
        **layer_values(config.layer),
        **rope_keys(config.layer),
        **width,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": dtype,
        "norm_before_residual": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": from_boundaries(config.aux_boundaries, "sglang"),
            "use_aux_hidden_state": True,
        },
        "verifier_name_or_path": config.verifier_name,
        "verifier_architectures": config.verifier_architectures,
    }


def read_eagle_config(values: dict[str, Any], where: str, facts: VerifierFacts | None) -> DraftConfig:
    """Read a config.json of this format; raise BadInput for what it lacks or this draft model does not have."""
    missing = [key for key in ("hidden_size", "num_attention_heads", "vocab_size") if key not in values]
    if missing or values.get("num_hidden_layers", 1) != 1:
        raise BadInput(f"{where}: not an EAGLE-3 head of one layer (lacks {', '.join(missing) or 'nothing'})")
    if values.get("norm_before_residual"):
        raise BadInput(f"{where}: norm_before_residual = true, which EAGLE's format does not have")
    eagle = values.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and facts is None:
        raise BadInput(f"{where}: names no aux layers; name the verifier, so that the servers' default is known")
    boundaries = (
        to_boundaries(ids, "sglang")
        if ids is not None
        else default_boundaries("vllm", facts.num_layers if facts is not None else 0)
    )
    layer = {key: values[key] for key in LAYER_KEYS if key in values and key != "num_hidden_layers"}
    if "rope_parameters" not in layer:
        scaling = values.get("rope_scaling") or {"rope_type": "default"}
        layer["rope_parameters"] = {**scaling, "rope_theta": values.get("rope_theta", 10000.0)}
    layer_config = LlamaConfig(**{**layer, "num_hidden_layers": 1, "tie_word_embeddings": False})
    check_window(layer_config, where)
    return DraftConfig(
        layer_config,
        int(values.get("draft_vocab_size") or values["vocab_size"]),
        boundaries,
        False,
        values.get("verifier_name_or_path") or "",
        list(values.get("verifier_architectures") or (facts.architectures if facts is not None else [])),
        target_hidden_size=read_target_width(values, layer_config),
    )


def canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of the speculators format."""
    return {name.replace(MIDLAYER, LAYER): tensor for name, tensor in tensors.items()}
