"""The order of the data: which samples make up each optimizer step, fixed by (seed, epoch) alone.

Samples are permuted; each window of 256 is packed into bins of at most `capacity` tokens by best fit, longest
first; the bins of a window are shuffled again. A longer sample gets a bin of its own.
"""

from bisect import bisect_left, insort

import numpy as np

WINDOW = 256


def epoch_steps(lengths: list[int], capacity: int, packs_per_step: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """Return the steps of one epoch: each a list of packs, each a list of sample numbers."""
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths)).tolist()
    bins: list[list[int]] = []
    for start in range(0, len(order), WINDOW):
        window = best_fit(order[start : start + WINDOW], lengths, capacity)
        bins += [window[i] for i in generator.permutation(len(window))]
    return [bins[start : start + packs_per_step] for start in range(0, len(bins), packs_per_step)]


def best_fit(members: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack `members`, longest first, each into the bin that it fills best.

    >>> best_fit([0, 1, 2, 3], [5, 3, 4, 6], 9)
    [[3, 1], [0, 2]]
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), ascending
    for member in sorted(members, key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[member], -1))
        if place < len(room):
            left, number = room.pop(place)
        else:
            left, number = max(capacity, lengths[member]), len(bins)
            bins.append([])
        bins[number].append(member)
        insort(room, (left - lengths[member], number))
    return bins
