"""A draft that begins from an earlier head, also one with another draft vocabulary."""

from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.draft.config import DraftConfig, with_window
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.errors import BadInput


def warm_draft(
    earlier: Eagle3Draft,
    config: DraftConfig,
    vocabulary: DraftVocabulary,
    embedding_VH: Tensor,
    head_rows_DH: Tensor,
    where: str,
) -> Eagle3Draft:
    """Make a draft with the earlier one's layer, and its lm_head rows for the tokens that both vocabularies have.

    Rows of other tokens are the verifier's (`head_rows_DH`), as in a new draft. The form of the layer (heads, rope,
    residual) is the earlier draft's, its sliding window too if `config` has none. Raises BadInput if it has another
    width, vocabulary size, or other aux boundaries.
    """
    theirs = earlier.config
    for what, found, wanted in (
        ("width", theirs.hidden_size, config.hidden_size),
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
    rows_DH = head_rows_DH.clone()
    known = earlier.t2d[vocabulary.token_ids]
    place_of = torch.cumsum(earlier.t2d, 0) - 1  # draft id of each verifier token that the earlier vocabulary has
    rows_DH[known] = earlier.lm_head.weight.detach()[place_of[vocabulary.token_ids[known]]]
    state = {
        **earlier.state_dict(),
        "embed_tokens.weight": embedding_VH.float(),
        "lm_head.weight": rows_DH,
        "d2t": draft.d2t,
        "t2d": draft.t2d,
    }
    draft.load_state_dict(state)
    return draft
