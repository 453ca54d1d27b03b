"""The course that a loss is expected to keep: a robust local trend and the scatter around it, from the past alone.

Everything is in log loss: noise of a cross entropy is roughly proportional to it. The trend of a point is the median of
the last third of the window before it, carried on along the gentler of the slopes between the medians of its thirds: a
stair (the end of an epoch) has a flat side. A rising slope is not carried on, so that a climb is not the course. The
scatter is the median absolute residual (x 1.4826) of the points before, never less than a floor. Medians are deaf to
points that jump, and `events` takes the points of a found excursion out of the sequence altogether.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

#: Points whose trend is followed (three odd thirds: a median that averages two points would lie on neither side of a
#: stair), and points whose scatter counts.
WINDOW = 27
SCATTER = 96
#: The scatter is taken anew every so many points.
STRIDE = 8
#: Least relative scatter: a constant or coarsely printed loss has none (0.2 %).
FLOOR = 0.002
#: Below so many points the trend is only a median.
FEW = 8
#: Points of which the windows are laid out at a time; a multiple of `STRIDE`.
_CHUNK = 200_000


def trend(y: Floats) -> Floats:
    """The expected value of each point of `y` [n] from the points before it; the first is its own expectation."""
    n = len(y)
    expected = np.empty(n)
    for i in range(min(n, WINDOW)):
        past = y[:i]
        if i < 2 * FEW:
            expected[i] = np.median(past[-FEW:]) if i else y[0]
        else:
            third = i // 3 - (i // 3 + 1) % 2
            parts = [np.median(past[-(k + 1) * third : len(past) - k * third]) for k in range(3)]
            expected[i] = _ahead(parts[2], parts[1], parts[0], third)
    third = WINDOW // 3
    for start in range(WINDOW, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        medians = np.median(sliding_window_view(y[start - WINDOW : stop - 1], third), axis=1)
        count = stop - start
        expected[start:stop] = _ahead(medians[:count], medians[third : third + count],
                                      medians[2 * third : 2 * third + count], third)
    return expected


def _ahead(early: Floats | float, middle: Floats | float, late: Floats | float, length: int) -> Floats:
    slope = np.minimum(np.maximum(np.subtract(middle, early), np.subtract(late, middle)) / length, 0.0)
    return np.asarray(late + slope * (length / 2 + 0.5))


def scatter(residual: Floats, floor: float = FLOOR) -> Floats:
    """The scatter [n] before each point, from the residuals of the points before it."""
    n = len(residual)
    size = np.abs(residual)
    sigma = np.full(n, np.inf)
    for i in range(3, min(n, SCATTER + STRIDE)):
        sigma[i] = 1.4826 * np.median(size[max(1, i - SCATTER) : i])
    for start in range(SCATTER + STRIDE, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        windows = sliding_window_view(size[start - SCATTER : stop - 1], SCATTER)[::STRIDE]
        values = 1.4826 * np.median(windows, axis=1)
        sigma[start:stop] = np.repeat(values, STRIDE)[: stop - start]
    return np.maximum(sigma, floor)


def tail_factor(residual: Floats, sigma: Floats) -> float:
    """How much wider than a normal distribution the upper residuals reach (1 or more): a run that often jumps a little
    is judged by its own tail. From the 95th percentile, so that a few excursions do not count."""
    ratio = (residual / sigma)[np.isfinite(sigma)]
    if len(ratio) < 40:
        return 1.0
    return float(np.clip(np.quantile(ratio, 0.95) / 1.645, 1.0, 3.0))


def resolution(values: Floats) -> float:
    """The step in which values were printed, relative to their size; 0 where they are not rounded coarsely."""
    unique = np.unique(values[:2000])
    if len(unique) < 2:
        return 0.0
    return float(np.min(np.diff(unique)) / max(float(np.median(np.abs(unique))), 1e-12))


def quantum(values: Floats) -> float:
    """The least difference between two values: the last printed digit of a loss that is rounded."""
    unique = np.unique(np.concatenate([values[:2000], values[-2000:]]))
    return float(np.min(np.diff(unique))) if len(unique) > 1 else 0.0
