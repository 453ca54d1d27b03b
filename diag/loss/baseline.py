"""The course that a loss is expected to keep: a robust local trend and the scatter around it, from the past alone.

Everything is in log loss: noise of a cross entropy is roughly proportional to it. The trend of a point is the median of
the later half of the window before it, carried on along the slope between the medians of its halves; a rising slope is
not carried on, so that a climb is not taken for the course. The scatter is the median absolute residual (x 1.4826) of
the points before, never less than a floor. Medians are deaf to points that jump, and `events` takes the points of a
found excursion out of the sequence altogether.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

#: Points whose trend is followed, and points whose scatter counts.
WINDOW = 24
SCATTER = 96
#: The scatter is taken anew every so many points.
STRIDE = 8
#: Least relative scatter: a constant or coarsely printed loss has none (0.2 %).
FLOOR = 0.002
#: Below so many points the trend is only a median.
FEW = 8
_CHUNK = 200_000


def trend(y: Floats) -> Floats:
    """The expected value of each point of `y` [n] from the points before it; the first is its own expectation."""
    n = len(y)
    expected = np.empty(n)
    for i in range(min(n, WINDOW)):
        past = y[:i]
        if i < FEW:
            expected[i] = np.median(past[-FEW:]) if i else y[0]
        else:
            half = i // 2
            expected[i] = _ahead(np.median(past[:half]), np.median(past[half:]), i)
    half = WINDOW // 2
    for start in range(WINDOW, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        windows = sliding_window_view(y[start - WINDOW : stop - 1], WINDOW)
        early, late = np.median(windows[:, :half], axis=1), np.median(windows[:, half:], axis=1)
        expected[start:stop] = _ahead(early, late, WINDOW)
    return expected


def _ahead(early: Floats | float, late: Floats | float, length: int) -> Floats:
    slope = np.minimum((late - early) / (length / 2), 0.0)
    return np.asarray(late + slope * (length / 4 + 0.5))


def scatter(residual: Floats, floor: float = FLOOR) -> Floats:
    """The scatter [n] before each point, from the residuals of the points before it."""
    n = len(residual)
    size = np.abs(residual)
    sigma = np.full(n, np.inf)
    for i in range(3, min(n, SCATTER + STRIDE)):
        sigma[i] = 1.4826 * np.median(size[max(1, i - SCATTER) : i])
    for start in range(SCATTER + STRIDE, n, _CHUNK * STRIDE):
        stop = min(start + _CHUNK * STRIDE, n)
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
