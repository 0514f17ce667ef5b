"""The training step beside the dense reference, on the draft's device: loss, and every gradient."""

from torch import Tensor

from dense_reference import dense_loss
from draftsmith.draft.flex_attention import AttentionBackend
from draftsmith.draft.loss import unroll_loss
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.objectives import ObjectiveName
from draftsmith.draft.unroll import unroll
from small import SampleTensors, make_pack, small_head


def step_loss(
    draft: Eagle3Draft,
    samples: list[SampleTensors],
    weights: list[float],
    chunk: int | None = None,
    objective: ObjectiveName = "kl",
    backend: AttentionBackend = "auto",
) -> Tensor:
    pack, last = make_pack(samples, len(weights))
    head = small_head().rows(draft.vocabulary.token_ids.cpu()).to(last.device)
    rows = unroll(draft, pack, backend)
    loss, _ = unroll_loss(rows, draft.lm_head.weight, last, head, pack.plan, weights, len(last), chunk, objective)
    return loss


def relative_error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def step_errors(
    draft: Eagle3Draft,
    samples: list[SampleTensors],
    weights: list[float],
    objective: ObjectiveName = "kl",
    backend: AttentionBackend = "auto",
) -> dict[str, float]:
    """Relative errors of `loss` and of the gradient of every parameter that has one."""
    head = small_head().to(draft.fc.weight.device)
    loss = step_loss(draft, samples, weights, 5, objective, backend)
    loss.backward()
    found = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    reference = dense_loss(draft, samples, head.norm_H, head.lm_head_VH, head.eps, weights, objective)
    reference.backward()
    wanted = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    return {
        "loss": relative_error(loss, reference),
        **{name: relative_error(found[name], wanted[name]) for name in wanted},
    }


def assert_equals_the_reference(
    draft: Eagle3Draft,
    samples: list[SampleTensors],
    weights: list[float],
    objective: ObjectiveName = "kl",
    backend: AttentionBackend = "auto",
) -> set[str]:
    """Compare loss and every gradient; return the names of the parameters that have one."""
    errors = step_errors(draft, samples, weights, objective, backend)
    assert max(errors.values()) < 1e-5, errors
    return set(errors) - {"loss"}
