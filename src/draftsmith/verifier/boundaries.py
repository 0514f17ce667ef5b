"""The one table that translates everybody's layer numbers into boundaries.

Boundary b is the residual stream after b decoder layers: 0 is the embedding output, N (of N layers) the output
of the last layer before the final norm. With five layers:

    embedding -0- layer 0 -1- layer 1 -2- layer 2 -3- layer 3 -4- layer 4 -5- final norm, lm_head
                           ^ boundary 1 = output of layer 0 = input of layer 1
"""

from typing import Literal

from draftsmith.errors import BadInput

Numbering = Literal["speculators-v1", "vllm", "sglang", "transformers"]

# boundary = id + offset. speculators v1 and SGLang / SpecForge name a layer by its output, vLLM and speculators
# since 0.5 by its input; transformers' output_hidden_states[b] is boundary b, its last entry excepted (that one
# is taken after the final norm).
OFFSETS: dict[Numbering, int] = {"speculators-v1": 1, "vllm": 0, "sglang": 1, "transformers": 0}


def to_boundaries(ids: list[int], numbering: Numbering) -> list[int]:
    """Translate a tool's layer ids into boundaries."""
    return [layer_id + OFFSETS[numbering] for layer_id in ids]


def from_boundaries(boundaries: list[int], numbering: Numbering) -> list[int]:
    """Translate boundaries into a tool's layer ids."""
    return [boundary - OFFSETS[numbering] for boundary in boundaries]


def default_boundaries(numbering: Numbering, num_layers: int) -> list[int]:
    """Return the aux boundaries that a tool's hidden states have where nobody chose others.

    vLLM takes the inputs of layers [2, n//2, n-3]; speculators v1 the outputs of the same numbers, which is one
    boundary later; SpecForge the outputs of [1, n//2-1, n-4], which are vLLM's boundaries again.
    """
    ids = [1, num_layers // 2 - 1, num_layers - 4] if numbering == "sglang" else [2, num_layers // 2, num_layers - 3]
    return to_boundaries(ids, numbering)


def aux_boundaries(wanted: list[int], num_layers: int) -> list[int]:
    """Return the aux boundaries of a verifier: `wanted`, or vLLM's default [2, N//2, N-3] if empty.

    Raises BadInput unless they are three, ascending, distinct, and within [0, N-1].
    """
    chosen = list(wanted) or [2, num_layers // 2, num_layers - 3]
    good = sorted(set(chosen)) == chosen and len(chosen) == 3 and chosen[0] >= 0 and chosen[-1] < num_layers
    if not good:
        origin = "extract.aux_boundaries" if wanted else "the default aux boundaries [2, N//2, N-3]"
        raise BadInput(
            f"{origin} = {chosen} cannot be used with a verifier of N = {num_layers} layers: wanted three "
            f"ascending boundaries from 0 to {num_layers - 1}. Set extract.aux_boundaries in the recipe."
        )
    return chosen
