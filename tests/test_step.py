"""The training step against the dense reference: same loss, same gradients, nothing leaks between samples."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compare_step import assert_equals_the_reference, relative_error, step_loss
from dense_reference import dense_loss
from draftsmith.draft.attention import attend, plan_blocks
from draftsmith.draft.decode import DraftDecoder
from draftsmith.draft.objectives import ObjectiveName
from draftsmith.draft.rows import plan_rows, target_positions
from draftsmith.draft.unroll import unroll
from draftsmith.train.data import TrainingPack
from draftsmith.train.step import PackLoss
from small import make_pack, small_draft, small_head, small_sample

MASKS = {
    "full": [[1] * 17],
    "half": [[0] * 9 + [1] * 9],
    "sparse": [[0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0]],
    "empty at the start": [[0] * 14 + [1, 1, 1]],
    "supervised from the first token": [[1, 1, 1, 0, 0, 0]],
    "several packed": [[0, 0, 1, 1, 1, 1], [1] * 9, [0] * 12 + [1, 1], [0, 1, 1, 0, 1, 1, 1]],
    "one without targets among others": [[0, 0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("norm_before_residual", [True, False])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], [1.0, 0.8, 0.64, 0.512, 0.41, 0.33, 0.26]])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_loss_and_gradients_equal_the_dense_reference(
    masks: list[list[int]], weights: list[float], norm_before_residual: bool
) -> None:
    samples = [small_sample(mask, seed) for seed, mask in enumerate(masks)]
    draft = small_draft(norm_before_residual=norm_before_residual)
    assert len(assert_equals_the_reference(draft, samples, weights)) == 13  # every parameter but the frozen embedding


FORMS: dict[str, dict[str, Any]] = {
    "norm_before_fc": {"norm_before_fc": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": False},
    "qwen3": {"qwen3": True},
    "two layers": {"layers": 2},
    "window": {"window": 3},
    "narrower": {"width": 24, "norm_before_fc": True},
    "wider, EAGLE-3.1": {"width": 40, "fc_norm": True, "norm_output": True, "norm_before_residual": False},
    "three qwen3 layers, everything": {
        "layers": 3, "qwen3": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_the_draft_equals_the_dense_reference(form: dict[str, Any]) -> None:
    samples = [small_sample(mask, seed) for seed, mask in enumerate(MASKS["several packed"])]
    draft = small_draft(**form)
    named = assert_equals_the_reference(draft, samples, [1.0, 0.8, 0.64])
    frozen = set() if "width" in form else {"embed_tokens.weight"}
    assert named == {name for name, _ in draft.named_parameters()} - frozen


@pytest.mark.parametrize("window", [2, 3, 6])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_a_sliding_window_equals_the_dense_reference(masks: list[list[int]], window: int) -> None:
    """With 2, fewer than the steps, own keys fall out of the window as well."""
    samples = [small_sample(mask, seed) for seed, mask in enumerate(masks)]
    assert_equals_the_reference(small_draft(window=window), samples, [1.0, 0.8, 0.64])


def test_a_window_of_one_key_leaves_each_row_alone() -> None:
    """Attention has nothing to choose from: the same loss, and no gradient of queries and keys beyond rounding."""
    draft, head = small_draft(window=1), small_head()
    samples = [small_sample([0, 0, 1, 1, 1, 1, 1], 1)]
    loss = step_loss(draft, samples, [1.0, 1.0])
    loss.backward()
    wanted = dense_loss(draft, samples, head.norm_H, head.lm_head_VH, head.eps, [1.0, 1.0])
    assert relative_error(loss, wanted) < 1e-5
    attention = draft.decoder_layers[0].self_attn
    assert float(attention.k_proj.weight.grad.norm()) < 1e-5 * float(attention.v_proj.weight.grad.norm())


def test_windows_of_single_layers_equal_the_dense_reference() -> None:
    samples = [small_sample(mask, seed) for seed, mask in enumerate(MASKS["several packed"])]
    draft = small_draft(layers=2, qwen3=True, window=4)
    draft.config.layer.layer_types = ["sliding_attention", "full_attention"]
    assert draft.config.windows == [4, None]
    assert_equals_the_reference(draft, samples, [1.0, 0.8, 0.64])


def test_a_window_changes_the_loss_only_where_it_hides_something() -> None:
    samples = [small_sample([1] * 12, 1)]
    losses = [step_loss(small_draft(window=window), samples, [1.0, 1.0]).item() for window in (0, 12, 11, 3)]
    assert losses[0] == losses[1] == losses[2]  # the last row with a loss stands at 9, its query at step 1 at 10
    assert relative_error(torch.tensor(losses[3]), torch.tensor(losses[0])) > 1e-3


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_decoding_computes_what_the_unroll_does(form: dict[str, Any]) -> None:
    """A chain of three drafts after row 4: the same states as the unroll has when these very tokens come next."""
    draft = small_draft(**form)
    ids, mask, aux, last = small_sample([0, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0)
    decoder = DraftDecoder(draft)
    decoder.confirm(ids[1:6].tolist(), aux[:5])
    chain = decoder.propose(3)
    ids[6:9] = torch.tensor(chain)
    pack, _ = make_pack([(ids, mask, aux, last)], 3)
    for k, rows_mH in enumerate(unroll(draft, pack)):
        row = pack.plan.steps[k].rows[pack.plan.steps[k].loss_rows].tolist().index(4)
        best = int(draft.lm_head(rows_mH[row]).argmax())
        assert best + int(draft.d2t[best]) == chain[k]


@pytest.mark.parametrize("objective", ["ce", "tv", "lk"])
def test_other_objectives_equal_the_dense_reference(objective: ObjectiveName) -> None:
    samples = [small_sample(mask, seed) for seed, mask in enumerate(MASKS["several packed"])]
    assert_equals_the_reference(small_draft(), samples, [1.0, 0.8, 0.64], objective)


@pytest.mark.usefixtures("warn_always")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_products_in_bfloat16_warn_of_nothing_and_stay_close(form: dict[str, Any]) -> None:
    """bfloat16 has 8 bits, so one rounding is up to 0.4%; norms, residual stream and loss stay in float32."""
    pack, last = make_pack([small_sample(mask, seed) for seed, mask in enumerate(MASKS["several packed"])], 3)
    losses, grads = [], []
    for precision in (torch.float32, torch.bfloat16):
        draft = small_draft(**form)
        head = small_head().rows(draft.vocabulary.token_ids)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss, _ = PackLoss(draft, head, [1.0, 0.8, 0.64], "kl", precision)(
                TrainingPack(pack, last, [], 0), len(last)
            )
            loss.backward()
        losses.append(loss.detach())
        grads.append(torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None]))
    assert losses[0] != losses[1]
    assert relative_error(losses[1], losses[0]) < 0.02
    assert relative_error(grads[1], grads[0]) < 0.05


@pytest.fixture
def warn_always() -> Iterator[None]:
    """Torch says most warnings only once per process, perhaps in an earlier test."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def test_norms_compute_in_float32_and_heads_go_on_in_the_precision_of_the_products() -> None:
    draft = small_draft(qwen3=True)
    attention, norm = draft.decoder_layers[0].self_attn, draft.norm
    x_nH = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    cos_sin = draft.cos_sin(torch.arange(5))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x_nH.bfloat16()), norm(x_nH.bfloat16().float()))
        assert norm(x_nH.bfloat16()).dtype == torch.float32
        input_nW = torch.cat([x_nH, x_nH], -1)
        dtypes = {attention.queries(input_nW, *cos_sin).dtype, attention.keys(input_nW, *cos_sin).dtype}
        assert dtypes == {attention.values(input_nW).dtype} == {torch.bfloat16}


def test_the_reference_notices_a_wrong_shift() -> None:
    """The comparison can fail: one token exchanged in the data changes the loss far beyond the tolerance."""
    samples = [small_sample([0, 0, 1, 1, 1, 1, 1, 1], 3)]
    draft, head = small_draft(), small_head()
    ids, mask, aux, last = samples[0]
    shifted = [(ids.roll(1), mask, aux, last)]
    reference = dense_loss(draft, samples, head.norm_H, head.lm_head_VH, head.eps, [1.0, 1.0])
    assert relative_error(step_loss(draft, shifted, [1.0, 1.0]), reference) > 1e-3


def test_a_sample_never_changes_its_neighbours_loss() -> None:
    draft = small_draft()
    first, second = small_sample([0, 0, 1, 1, 1, 1], 1), small_sample([0, 1, 1, 1, 1, 0], 2)
    other = small_sample([0, 1, 1, 1, 1, 0], 9)
    pack, last = make_pack([first, second], 3)
    changed, _ = make_pack([first, other], 3)
    rows, rows_changed = unroll(draft, pack), unroll(draft, changed)
    for step, (a, b) in enumerate(zip(rows, rows_changed, strict=True)):
        of_first = pack.plan.steps[step].loss_targets < len(target_positions(first[1].numpy()))
        assert torch.equal(a[of_first], b[of_first])
        assert not torch.equal(a[~of_first], b[~of_first])
    assert len(last) == 3 + 3


def test_loss_of_a_pack_is_the_target_weighted_mean_of_its_samples() -> None:
    draft, weights = small_draft(), [1.0, 0.5]
    samples = [small_sample([0, 0, 1, 1, 1, 1], 1), small_sample([0, 1, 1], 2)]
    apart = [step_loss(draft, [sample], weights).item() for sample in samples]
    together = step_loss(draft, samples, weights).item()
    assert together == pytest.approx((3 * apart[0] + 1 * apart[1]) / 4, rel=1e-5)


def test_frozen_head_gets_no_gradient_and_the_same_hidden_gradients() -> None:
    samples = [small_sample([0, 0, 1, 1, 1, 1, 1], 1)]
    draft = small_draft()
    step_loss(draft, samples, [1.0, 1.0]).backward()
    wanted = draft.fc.weight.grad.clone()
    draft.zero_grad(set_to_none=True)
    draft.lm_head.weight.requires_grad_(False)
    step_loss(draft, samples, [1.0, 1.0]).backward()
    assert draft.lm_head.weight.grad is None
    assert torch.equal(draft.fc.weight.grad, wanted)


def test_rows_of_the_drawn_example() -> None:
    """The example in draft/rows.py, by hand."""
    plan = plan_rows([np.array([0, 0, 1, 1, 1], np.uint8)], 2)
    assert plan.targets.tolist() == [2, 3]
    assert plan.prefix.tolist() == [0, 1, 2]
    assert [step.rows.tolist() for step in plan.steps] == [[0, 1, 2], [0, 1]]
    assert [step.loss_rows.tolist() for step in plan.steps] == [[1, 2], [0, 1]]
    assert [step.loss_targets.tolist() for step in plan.steps] == [[0, 1], [0, 1]]


def test_rows_of_two_packed_samples() -> None:
    """Sample one has 4 tokens and target 2; sample two begins at 4: its target 1 allows step 0 only."""
    plan = plan_rows([np.array([0, 0, 1, 1], np.uint8), np.array([0, 1, 1], np.uint8)], 2)
    assert plan.targets.tolist() == [2, 5]
    assert plan.prefix.tolist() == [0, 1, 4]
    assert plan.position.tolist() == [0, 1, 0]
    assert plan.first.tolist() == [0, 0, 2]
    assert [step.rows.tolist() for step in plan.steps] == [[0, 1, 2], [0]]
    assert [step.loss_targets.tolist() for step in plan.steps] == [[0, 1], [0]]


@settings(max_examples=40, deadline=None)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=4),
    steps=st.integers(1, 4),
)
def test_row_plan_is_what_brute_force_says(masks: list[list[int]], steps: int) -> None:
    plan = plan_rows([np.array(mask, np.uint8) for mask in masks], steps)
    offset, targets, active = 0, [], [set() for _ in range(steps)]
    for mask in masks:
        for j in range(1, len(mask) - 1):
            if mask[j] and mask[j + 1]:
                targets.append(offset + j)
                for k in range(steps):
                    if j - 1 - k >= 0:
                        for earlier in range(k + 1):
                            active[earlier].add(offset + j - 1 - k)
        offset += len(mask)
    assert plan.targets.tolist() == targets
    for k, (step, rows) in enumerate(zip(plan.steps, active, strict=True)):
        assert plan.prefix[step.rows].tolist() == sorted(rows)
        aimed = plan.targets[step.loss_targets]
        assert (plan.prefix[step.rows[step.loss_rows]] + 1 + k).tolist() == aimed.tolist()


def test_attention_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    first = np.array([0, 0, 0, 3, 3, 3, 3])
    rows = np.array([1, 2, 3, 5, 6])
    blocks = plan_blocks(rows, first, torch.device("cpu"), block_rows=2)
    assert [(b.row_start, b.row_end, b.key_start, b.key_end) for b in blocks] == [
        (0, 2, 0, 3), (2, 4, 3, 6), (4, 5, 3, 7),
    ]  # fmt: skip
    inputs = (random(5, 4, 3), random(7, 2, 3), random(7, 2, 3), random(5, 2, 2, 3), random(5, 2, 2, 3))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, blocks), inputs)
    near = plan_blocks(rows, first, torch.device("cpu"), reach=2, block_rows=2)
    assert [(b.key_start, b.key_end) for b in near] == [(0, 3), (3, 6), (5, 7)]
    assert torch.autograd.gradcheck(lambda *x: attend(*x, near), inputs)
    none = plan_blocks(rows, first, torch.device("cpu"), reach=0, block_rows=1)
    assert [(b.key_start, b.key_end) for b in none] == [(2, 2), (3, 3), (4, 4), (6, 6), (7, 7)]
    assert torch.autograd.gradcheck(lambda *x: attend(*x, none), inputs)


def test_keys_that_a_window_hides_are_marked() -> None:
    """Rows 4, 5 and 8 of a sample that begins at 0, each with the three keys up to its own place."""
    rows, first = np.array([4, 5, 8]), np.zeros(9, np.int64)
    (block,) = plan_blocks(rows, first, torch.device("cpu"), reach=3)
    assert (block.key_start, block.key_end) == (2, 9)
    seen = torch.ones(3, 7, dtype=torch.bool)
    for start, marks in block.hidden:
        seen[:, start : start + marks.shape[1]] &= ~marks
    assert [(seen[i].nonzero().flatten() + 2).tolist() for i in range(3)] == [[2, 3, 4], [3, 4, 5], [6, 7, 8]]
