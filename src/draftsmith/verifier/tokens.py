"""The verifier's tokenizer and the token ids with a meaning of their own."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from draftsmith.errors import BadInput
from draftsmith.verifier.facts import chat_template


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer; raise BadInput if it has no chat template or gives no character offsets."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise BadInput(f"{folder}: transformers cannot load the tokenizer: {error}") from error
    if not tokenizer.is_fast:
        raise BadInput(f"{folder}: {type(tokenizer).__name__} gives no character offsets, which loss masks need")
    if not chat_template(folder):
        raise BadInput(f"{folder}: the tokenizer has no chat template (chat_template.jinja)")
    return tokenizer


def end_of_turn_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Return the ids that end an answer: the generation config's eos ids and the tokenizer's own."""
    ids: set[int] = {tokenizer.eos_token_id} - {None}
    file = folder / "generation_config.json"
    if file.is_file():
        declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids |= set(declared if isinstance(declared, list) else [declared]) - {None}
    if not ids:
        raise BadInput(f"{folder}: neither tokenizer nor generation_config.json names an end-of-turn token")
    return sorted(ids)


def special_ids(tokenizer: Any) -> list[int]:
    """Return the ids of all special tokens."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))
