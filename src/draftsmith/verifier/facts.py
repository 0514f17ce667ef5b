"""What draftsmith needs to know of a verifier, read from its config and tokenizer files alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from draftsmith.errors import BadInput
from draftsmith.files import hash_file, hash_json

# Final norms that multiply by (1 + w) instead of w.
_NORM_ADDS_ONE = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "recurrent_gemma",
}  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")
# What says how the config was written, not what the model is.
_VOLATILE_KEYS = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
}


@dataclass(frozen=True)
class VerifierFacts:
    """Sizes, identity and config of a verifier.

    `identity` holds the hashes of config, tokenizer and chat template; states, samples and heads made with
    verifiers of different identity do not belong together.
    """

    folder: Path
    model_type: str
    architectures: list[str]
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    norm_eps: float
    norm_adds_one: bool
    tied_head: bool
    logit_scale: float
    logit_softcap: float | None
    text_config: dict[str, Any]
    identity: dict[str, str]


def read_facts(folder: Path) -> VerifierFacts:
    """Read the facts of the verifier in `folder`; raise BadInput if its config cannot be understood."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        raise BadInput(f"{folder}/config.json: transformers cannot read it: {error}") from error
    text = config.get_text_config()
    missing = [k for k in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(text, k)]
    if missing:
        raise BadInput(f"{folder}/config.json: no {', '.join(missing)}; not a causal language model?")
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    return VerifierFacts(
        folder=folder,
        model_type=text.model_type,
        architectures=list(config.architectures or []),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        dtype=str(config.dtype or text.dtype or "float32").removeprefix("torch."),
        norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        norm_adds_one=text.model_type in _NORM_ADDS_ONE,
        tied_head=bool(getattr(text, "tie_word_embeddings", False) or config.tie_word_embeddings),
        logit_scale=scale,
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        text_config=text.to_dict(),
        identity=_identity(folder, config.to_dict()),
    )


def chat_template(folder: Path) -> str:
    """Return the chat template's source text; empty if the verifier has none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    tokenizer_config = folder / "tokenizer_config.json"
    if not tokenizer_config.is_file():
        return ""
    template = json.loads(tokenizer_config.read_text(encoding="utf-8")).get("chat_template") or ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def _identity(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    tokenizer = {name: hash_file(folder / name) for name in _TOKENIZER_FILES if (folder / name).is_file()}
    if not tokenizer:
        raise BadInput(f"{folder}: no tokenizer: wanted one of {', '.join(_TOKENIZER_FILES)}")
    return {
        "config": hash_json({key: value for key, value in config.items() if key not in _VOLATILE_KEYS}),
        "tokenizer": hash_json(tokenizer),
        "chat_template": hash_json(chat_template(folder)),
    }
