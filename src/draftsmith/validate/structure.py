"""What files show beside each other: which form most have, who differs, whose states or tokens are another's."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from draftsmith.interop.data import Data, Layout
from draftsmith.interop.numbered import DATA_CONFIG
from draftsmith.interop.store_data import StoreData
from draftsmith.store.findings import Finding
from draftsmith.store.manifest import STORE_IDENTITY
from draftsmith.validate.scan import SampleFacts

if TYPE_CHECKING:  # transformers, behind it, is slow to import, and inspect needs none of it
    from draftsmith.verifier.facts import VerifierFacts

FAR_SCALE = 8.0
_ENOUGH = 4  # samples that make a majority's scale


def check_identity(data: Data, facts: "VerifierFacts") -> Iterator[Finding]:
    """Compare what files say of their verifier with the one at hand."""
    if isinstance(data, StoreData) and data.verifier_identity != facts.identity:
        differing = sorted(key for key in facts.identity if data.verifier_identity.get(key) != facts.identity[key])
        found = f"another {', '.join(differing)}"
        yield Finding("DS105", STORE_IDENTITY, f"the verifier in {facts.folder}", found)
    boundaries = data.layout.boundaries
    if boundaries is not None and boundaries[-1] != facts.num_layers and not isinstance(data, StoreData):
        found = f"boundaries {boundaries}: its last layer is another one"
        yield Finding("DS125", DATA_CONFIG, f"a last boundary of {facts.num_layers}, as the verifier has layers", found)


def check_forms(samples: list[SampleFacts], layout: Layout, facts: "VerifierFacts | None") -> Iterator[Finding]:
    """Compare every sample with the majority, and the majority with what is declared."""
    if not samples:
        return
    planes = _majority(samples, lambda sample: sample.num_planes)
    width = _majority(samples, lambda sample: sample.hidden_size)
    dtypes = _majority(samples, lambda sample: sample.dtypes)
    wanted_planes = layout.num_planes or planes
    if planes != wanted_planes:
        found = f"{planes} states in most files, so which is which is not known"
        yield Finding("DS115", layout.origin or "all files", f"{wanted_planes} states, one for each layer named", found)
    if layout.hidden_size is not None and width != layout.hidden_size:
        yield Finding("DS125", DATA_CONFIG, f"hidden_size {width}, as the files have", f"{layout.hidden_size}")
    if facts is not None and width != facts.hidden_size:
        yield Finding("DS117", "all files", f"the verifier's width {facts.hidden_size}", f"{width}")
    for sample in samples:
        if sample.num_planes != planes:
            yield Finding("DS115", sample.where, f"{planes} states, as most files have", f"{sample.num_planes}")
        if sample.hidden_size != width:
            yield Finding("DS117", sample.where, f"a width of {width}, as most files have", f"{sample.hidden_size}")
        if sample.dtypes != dtypes:
            words = "tokens {}, mask {}, states {}"
            yield Finding("DS119", sample.where, words.format(*dtypes), words.format(*sample.dtypes))


def check_between(
    samples: list[SampleFacts], identical: Callable[[SampleFacts, SampleFacts], bool]
) -> Iterator[Finding]:
    """Compare values between samples; `identical` reads two samples' states and says whether they are the same."""
    known = [sample for sample in samples if sample.values is not None]
    yield from _far_scales(known)
    by_tokens: dict[str, SampleFacts] = {}
    by_states: dict[str, SampleFacts] = {}
    for sample in known:
        assert sample.values is not None
        twin = by_tokens.setdefault(sample.values.tokens, sample)
        if twin is not sample:
            yield Finding("DS217", sample.where, "a conversation of its own", f"the same tokens as {twin.where}")
            continue
        twin = by_states.setdefault(sample.values.states, sample)
        if twin is not sample and identical(sample, twin):
            yield Finding("DS214", sample.where, "states of its own tokens", f"the states of {twin.where}")


def _far_scales(samples: list[SampleFacts]) -> Iterator[Finding]:
    forms = Counter(sample.num_planes for sample in samples)
    if not forms or forms.most_common(1)[0][1] < _ENOUGH:
        return
    planes = forms.most_common(1)[0][0]
    alike = [sample for sample in samples if sample.num_planes == planes]
    scales = np.array([sample.values.scales for sample in alike if sample.values], np.float64)
    usual = np.median(scales, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = scales / usual
    far = np.isfinite(scales) & (scales > 0) & ((ratios > FAR_SCALE) | (ratios < 1 / FAR_SCALE))
    for row, plane in np.argwhere(far):
        where = f"{alike[row].where}, state {plane}"
        found = f"{scales[row, plane]:.3g}, {ratios[row, plane]:.3g} times as large"
        yield Finding("DS213", where, f"a largest value of about {usual[plane]:.3g} in most rows, as elsewhere", found)


def _majority(samples: list[SampleFacts], key: Callable[[SampleFacts], Any]) -> Any:
    return Counter(map(key, samples)).most_common(1)[0][0]
