"""The FlexAttention backend against the dense reference and the plain backend, uncompiled.

On CPU FlexAttention refuses tensors that need gradients, but the uncompiled form computes them: only its check of the
device stands in the way, and is taken out here. The uncompiled form looks at single elements of the mask, not at tiles;
these are compared with what torch makes of the same mask.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from compare_step import assert_equals_the_reference, relative_error
from draftsmith.draft.attention import attend, first_seen, plan_blocks
from draftsmith.draft.flex_attention import attend_flex, tile_mask, uses_flex
from draftsmith.draft.rows import Ints
from small import small_draft, small_sample

CPU = torch.device("cpu")
PACKED = [[0, 0, 1, 1, 1, 1], [1] * 9, [0] * 12 + [1, 1], [0, 1, 1, 0, 1, 1, 1]]


@pytest.fixture
def gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize("form", [{}, {"window": 2}, {"window": 4}, {"layers": 2, "qwen3": True}], ids=str)
def test_loss_and_gradients_equal_the_dense_reference(form: dict[str, Any]) -> None:
    samples = [small_sample(mask, seed) for seed, mask in enumerate(PACKED)]
    assert_equals_the_reference(small_draft(**form), samples, [1.0, 0.8, 0.64], backend="flex")


@pytest.mark.usefixtures("gradients_on_cpu")
@pytest.mark.parametrize(("reach", "own"), [(None, 0), (None, 2), (40, 2), (1, 1), (0, 2)])
def test_gradients_equal_the_plain_backends(reach: int | None, own: int) -> None:
    """513 of 700 rows, in three samples; with reach 0 only own keys are left."""
    first = np.repeat([0, 300, 450], [300, 150, 250])
    rows = np.sort(np.random.default_rng(0).choice(700, 513, replace=False))
    generator = torch.Generator().manual_seed(0)
    shapes = [(513, 4, 16), (700, 2, 16), (700, 2, 16), (513, own, 2, 16), (513, own, 2, 16)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    grad_out = torch.randn(shapes[0], generator=generator)
    plain = attend(*inputs, plan_blocks(rows, first, CPU, reach))
    flex = attend_flex(*inputs, rows, first, reach)
    assert relative_error(flex, plain) < 1e-5
    used = inputs[0:3] if own == 0 else [inputs[0], *inputs[3:]] if reach == 0 else inputs
    wanted = torch.autograd.grad(plain, used, grad_out)
    found = torch.autograd.grad(flex, used, grad_out)
    assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-5


@pytest.mark.usefixtures("gradients_on_cpu")
def test_normed_heads_in_float32_beside_values_in_bfloat16() -> None:
    """As autocast may leave them in a Qwen3 layer: FlexAttention itself takes one dtype only."""
    rows = first = np.zeros(1, np.int64)
    wide, short = torch.ones(1, 2, 16), torch.ones(1, 2, 16, dtype=torch.bfloat16)
    own = torch.ones(1, 1, 2, 16)
    assert torch.equal(attend_flex(wide, wide, short, own, own.bfloat16(), rows, first, None), short)


def tiles(mask: BlockMask) -> list[tuple[list[int], list[int]]]:
    """Return, per row of tiles, those that need the mask and those that do not."""
    counts, indices = mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    full_counts, full_indices = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
    return [
        (sorted(indices[i, : counts[i]].tolist()), sorted(full_indices[i, : full_counts[i]].tolist()))
        for i in range(len(counts))
    ]


def brute_force(rows: Ints, first: Ints, reach: int | None) -> BlockMask:
    row_n, first_n = torch.from_numpy(rows), torch.from_numpy(first[rows])

    def visible(_batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        near = key > row_n[row] - reach if reach is not None else key == key
        return (key <= row_n[row]) & (key >= first_n[row]) & near

    return create_block_mask(visible, None, None, len(rows), len(first), device="cpu")


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    share=st.floats(0.05, 1.0),
    reach=st.none() | st.integers(1, 700),
    seed=st.integers(0, 1000),
)
def test_tiles_are_those_of_torchs_own_mask(lengths: list[int], share: float, reach: int | None, seed: int) -> None:
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    rows = np.flatnonzero(np.random.default_rng(seed).random(len(first)) < share)
    if len(rows):
        found = tile_mask(first_seen(rows, first[rows], reach), rows, len(first), CPU)
        wanted = brute_force(rows, first, reach)
        assert tiles(found) == tiles(wanted)
        assert found.shape == wanted.shape


def test_three_tiles_by_hand() -> None:
    """One sample of 300 rows, all of them: the diagonal tiles need the mask, those below do not; the last is cut."""
    rows, first = np.arange(300), np.zeros(300, np.int64)
    assert tiles(tile_mask(first, rows, 300, CPU)) == [([0], []), ([1], [0]), ([0, 1, 2], [])]


def test_flex_is_taken_on_cuda_in_training() -> None:
    cuda = torch.device("cuda")
    assert uses_flex("auto", cuda, 128)
    assert not uses_flex("auto", cuda, 8)
    assert not uses_flex("auto", CPU, 128)
    assert uses_flex("flex", CPU, 8)
    assert not uses_flex("blocks", cuda, 128)
    with torch.no_grad():
        assert not uses_flex("auto", cuda, 128)
