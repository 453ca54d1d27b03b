"""Slow changes of printed numbers: gradient norms that grow without bound, a loss that climbs off its best level.

A step-by-step comparison does not see them: every point is close to its neighbours. So the end of a run is compared
with the run's own best window, and the way there has to lead up through every part of it.
"""

from __future__ import annotations

import math
from statistics import median

from diag.artefacts.log_facts import Progress

#: Points in a window whose median is compared.
WINDOW = 9
#: So many windows of points have to follow the best one: a rise and not a jump.
LEAST_AFTER = 2 * WINDOW
#: A gradient norm so many times its best level, reached in steps that all lead up, is no noise and no warm-up.
GROWTH = 20.0
#: The loss so much above its best level; a curriculum or a new data mixture moves it less.
RISE_SHARE = 0.2
#: ... and so many times the scatter between neighbours.
RISE_SIGMA = 6.0
#: Losses below this are rewards, penalties or auxiliary terms, whose level means nothing.
LEAST_LOSS = 0.3

Points = list[tuple[Progress, float]]


def growing(values: Points) -> tuple[int, float, float] | None:
    """(index of the onset, best level, last level) when positive `values` grow by `GROWTH`, all the way up."""
    found = _climb([v for _, v in values])
    if found is None:
        return None
    best, low, high = found
    if low <= 0 or high < GROWTH * low:
        return None
    return _onset(values, best, 2.0 * low), low, high


def rising(values: Points) -> tuple[int, float, float] | None:
    """(index of the onset, best level, last level) when a loss has climbed away from its best level for good."""
    numbers = [v for _, v in values]
    found = _climb(numbers)
    if found is None:
        return None
    best, low, high = found
    steps = [abs(b - a) for a, b in zip(numbers, numbers[1:], strict=False)]
    noise = 1.4826 * median(steps) / math.sqrt(2.0)
    if low < LEAST_LOSS or high < low * (1 + RISE_SHARE) or high - low < RISE_SIGMA * noise:
        return None
    return _onset(values, best, low + max(3.0 * noise, 0.05 * low)), low, high


def _climb(numbers: list[float]) -> tuple[int, float, float] | None:
    """(index, level) of the best window and the last level, when the quarters between them lead up."""
    if len(numbers) < WINDOW + LEAST_AFTER:
        return None
    levels = [median(numbers[i : i + WINDOW]) for i in range(len(numbers) - WINDOW + 1)]
    best = min(range(len(levels)), key=lambda i: levels[i])
    rest = levels[best:]
    if len(rest) < LEAST_AFTER:
        return None
    quarters = [rest[round(k * (len(rest) - 1) / 4)] for k in range(5)]
    if any(b <= a for a, b in zip(quarters, quarters[1:], strict=False)):
        return None
    return best, levels[best], levels[-1]


def _onset(values: Points, best: int, bound: float) -> int:
    """The first point after the best window from which most stay above `bound`."""
    for index in range(best, len(values)):
        ahead = [v for _, v in values[index : index + WINDOW]]
        if values[index][1] > bound and sum(v > bound for v in ahead) > 0.7 * len(ahead):
            return index
    return best
