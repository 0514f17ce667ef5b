"""A draft that begins from an earlier head of any form, also one with another draft vocabulary."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.config import DraftConfig, with_window
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.draft.width import fitted_rows
from draftsmith.errors import BadInput


def form(config: DraftConfig) -> dict[str, Any]:
    """Return a draft's form by the recipe's keys; the sliding window is no part of it, as it can change."""
    return {
        "hidden_size": config.hidden_size,
        "layers": config.num_layers,
        "layer_type": config.layer.model_type,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
    }


def kept_form(earlier: DraftConfig, config: DraftConfig, asked: Collection[str], where: str) -> dict[str, Any]:
    """Return the keys, with the head's values, in which the head has another form than `config`: they stay as they are.

    Raises BadInput if the recipe asks for one of them (`asked`: its keys that are not at their default).
    """
    theirs, ours = form(earlier), form(config)
    differing = [key for key in theirs if theirs[key] != ours[key]]
    refused = [
        f"train.{key} = {_toml(ours[key])}, but it has {_toml(theirs[key])}" for key in differing if key in asked
    ]
    if refused:
        raise BadInput(
            f"{where}: cannot start from this head: {'; '.join(refused)}. Leave these keys at their default to keep "
            "the head's form, or train without train.warm_start."
        )
    return {key: theirs[key] for key in differing}


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def warm_draft(
    earlier: Eagle3Draft,
    config: DraftConfig,
    vocabulary: DraftVocabulary,
    embedding_VX: Tensor,
    head_rows_DX: Tensor,
    where: str,
) -> Eagle3Draft:
    """Make a draft with the earlier one's layer, and its lm_head rows for the tokens that both vocabularies have.

    Rows of other tokens are the verifier's (`head_rows_DX`), as in a new draft; in a draft of another width than its
    verifier they follow from them as the known rows do, and the embedding is the earlier draft's. The form of the layer
    (width, heads, rope, residual) is the earlier draft's, its sliding window too if `config` has none. Raises BadInput
    if it is for a verifier of another width or vocabulary size, or for other aux boundaries.
    """
    theirs = earlier.config
    for what, found, wanted in (
        ("verifier width", theirs.verifier_width, config.verifier_width),
        ("verifier vocabulary", theirs.vocab_size, config.vocab_size),
        ("aux boundaries", theirs.aux_boundaries, config.aux_boundaries),
    ):
        if found != wanted:
            raise BadInput(f"{where}: cannot start from this head: its {what} is {found}, wanted {wanted}")
    window = config.windows[0]
    own = replace(
        theirs,
        layer=theirs.layer if window is None else with_window(theirs.layer, window),
        draft_vocab_size=config.draft_vocab_size,
        verifier_name=config.verifier_name,
        verifier_architectures=config.verifier_architectures,
    )
    draft = Eagle3Draft(own, vocabulary)
    state = {
        **earlier.state_dict(),
        "lm_head.weight": _lm_head_rows(earlier, vocabulary, head_rows_DX, where),
        "d2t": draft.d2t,
        "t2d": draft.t2d,
    }
    if not own.has_own_embedding:
        state["embed_tokens.weight"] = embedding_VX.float()
    draft.load_state_dict(state)
    return draft


def _lm_head_rows(earlier: Eagle3Draft, vocabulary: DraftVocabulary, head_rows_DX: Tensor, where: str) -> Tensor:
    """Return the rows [D, H] for the vocabulary: the earlier draft's where it has the token, else made from X."""
    known = earlier.t2d[vocabulary.token_ids]
    place_of = torch.cumsum(earlier.t2d, 0) - 1  # draft id of each verifier token that the earlier vocabulary has
    kept_NH = earlier.lm_head.weight.detach()[place_of[vocabulary.token_ids[known]]]
    if not earlier.config.has_own_embedding:
        rows_DH = head_rows_DX.clone()
    elif known.any():
        rows_DH = fitted_rows(head_rows_DX[known], kept_NH, head_rows_DX)
    else:
        raise BadInput(f"{where}: cannot start from this head: it knows no token of the draft vocabulary")
    rows_DH[known] = kept_NH
    return rows_DH
