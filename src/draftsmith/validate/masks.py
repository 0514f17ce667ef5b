"""Does the loss mask cover what the verifier would have generated? Codes DS313, DS314 and DS317.

A mask that fits the template when moved by one token is shifted; one that does not fit, in data whose masks do, is
another's. How a span is compared with the template: verifier/turns.py.
"""

from collections.abc import Iterator

from draftsmith.store.findings import Finding
from draftsmith.verifier.turns import MaskFit

MOST = 0.5  # where fewer masks than this share fit, the data has another template than the verifier


def judge_masks(fits: list[tuple[str, MaskFit]]) -> Iterator[Finding]:
    """Yield findings for the samples of a folder, given as (place, fit)."""
    if not fits:
        return
    share = sum(fit.as_is for _, fit in fits) / len(fits)
    shifted = {
        "late": sum(fit.one_earlier and not fit.as_is for _, fit in fits),
        "early": sum(fit.one_later and not fit.as_is for _, fit in fits),
    }
    if share < MOST and max(shifted.values()) < MOST * len(fits):
        found = f"{share:.0%} of {len(fits):,} do; another template, or other turns are supervised"
        yield Finding("DS317", "loss masks", "spans from the generation prompt to the end-of-turn token", found)
        return
    wanted = "spans that begin after the generation prompt and end with the end of the turn"
    for where, fit in fits:
        if fit.as_is:
            continue
        if fit.one_earlier or fit.one_later:
            way = "one token too late" if fit.one_earlier else "one token too early"
            yield Finding("DS313", where, wanted, f"every span begins and ends {way}")
        else:
            yield Finding("DS314", where, wanted, f"not the span that begins at token {fit.first_misfit}")
