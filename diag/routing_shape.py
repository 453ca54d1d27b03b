"""How an imbalance came: off a cliff or by drifting; and whether a balanced layer is on its way there.

Points are (first step of a window, Gini above the sampling floor), in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Points = Sequence[tuple[int, float]]

#: A rise within so many steps is a cliff: something changed at one moment. Slower ones are a drift.
CLIFF_STEPS = 50
#: The part of the rise that is timed: from this share of its height to the other.
FROM, TO = 0.1, 0.9
#: A drift is told when it has at least this many windows, has risen by so much and stands at so much.
LEAST_WINDOWS, LEAST_RISE, LEAST_LEVEL = 8, 0.08, 0.12
#: ... and its slope, carried on, reaches the threshold within so many times the steps that it was seen for.
HORIZON = 1.0


@dataclass(frozen=True, slots=True)
class Rise:
    """The excess rose from level `low` to `high` within `steps`."""

    steps: int
    low: float
    high: float

    @property
    def cliff(self) -> bool:
        return self.steps <= CLIFF_STEPS


def rise_of(points: Points, first: int, last: int) -> Rise | None:
    """The rise into the stretch `first` … `last` (indexes); None when the records begin inside it."""
    if first == 0:
        return None
    before = sorted(excess for _, excess in points[:first])
    low = before[len(before) // 4]  # a drift is half-way up when its stretch begins
    inside = [excess for _, excess in points[first : last + 1]]
    high = median(inside[len(inside) // 2 :])
    if high <= low:
        return None
    start = first
    while start > 0 and points[start - 1][1] > low + FROM * (high - low):
        start -= 1
    end = next((i for i in range(first, last + 1) if points[i][1] >= low + TO * (high - low)), last)
    foot = points[start - 1][0] if start else points[start][0]
    return Rise(max(points[end][0] - foot, 1), low, high)


def drift_of(points: Points, threshold: float) -> int | None:
    """Steps from the last point until `threshold`, for a layer whose excess rises through every quarter."""
    if len(points) < LEAST_WINDOWS:
        return None
    size = len(points) // 4
    quarters = [points[len(points) - (4 - i) * size : len(points) - (3 - i) * size] for i in range(4)]
    levels = [median(excess for _, excess in part) for part in quarters]
    climbing = all(b > a for a, b in zip(levels, levels[1:]))
    if not climbing or levels[-1] - levels[0] < LEAST_RISE or levels[-1] < LEAST_LEVEL:
        return None
    middles = [median(step for step, _ in part) for part in quarters]
    slope = (levels[-1] - levels[1]) / max(middles[-1] - middles[1], 1)
    if slope <= 0:
        return None
    ahead = (threshold - levels[-1]) / slope
    return max(int(ahead), 0) if ahead <= HORIZON * (points[-1][0] - points[0][0]) else None
