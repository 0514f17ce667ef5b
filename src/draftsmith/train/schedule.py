"""The learning rate as a pure function of the step."""

import math


def learning_rate(step: int, total: int, peak: float, warmup_share: float, min_share: float) -> float:
    """Rise linearly over the first `warmup_share` of steps, then fall along a cosine to `min_share` of the peak.

    >>> [round(learning_rate(step, 10, 1.0, 0.2, 0.0), 2) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warmup = int(total * warmup_share)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)
    return peak * (min_share + (1 - min_share) * 0.5 * (1 + math.cos(math.pi * progress)))
