"""Layer numbers of the tools, and the aux boundaries of a verifier."""

import pytest

from draftsmith.errors import BadInput
from draftsmith.verifier.boundaries import aux_boundaries, from_boundaries, to_boundaries


def test_numberings_of_the_known_example() -> None:
    """61 layers: v1 [2, 30, 58 | 60] = boundaries [3, 31, 59 | 61] = vLLM [3, 31, 59] = SGLang [2, 30, 58]."""
    assert to_boundaries([2, 30, 58, 60], "speculators-v1") == [3, 31, 59, 61]
    assert from_boundaries([3, 31, 59], "vllm") == [3, 31, 59]
    assert from_boundaries([3, 31, 59], "sglang") == [2, 30, 58]


def test_default_aux_boundaries() -> None:
    """vLLM's default: [2, N//2, N-3]."""
    assert aux_boundaries([], 30) == [2, 15, 27]
    assert aux_boundaries([], 61) == [2, 30, 58]
    assert aux_boundaries([1, 2, 3], 4) == [1, 2, 3]


@pytest.mark.parametrize("wanted", [[], [1, 2], [3, 2, 1], [1, 2, 6], [-1, 2, 3]])
def test_unusable_aux_boundaries_are_refused(wanted: list[int]) -> None:
    with pytest.raises(BadInput, match="wanted three ascending boundaries from 0 to 5"):
        aux_boundaries(wanted, 6)
