"""The time of a step as one series, and what it does: rise for good, creep up, or stall at intervals.

`cost` is seconds per step, or per token where only throughput is known, so that a change of the batch or the sequence
length is no slow-down. Long series are folded into medians before they are searched for a level.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diag.series import Column, Run

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

#: First logged points: compilation, allocation, caches.
SETTLING = 2
#: Most bins into which a series is folded, fine to coarse.
BINS = (300, 100, 36)
#: A rise by less is not worth a warning; a 384-GPU run was searched for a day for 5 % (BLOOM chronicles, 2022-04-28).
RISE_SHARE = 0.03
RISE_SIGMAS = 6.0
#: Points before and after the rise, and the share of the series after which "it stays so" may be said.
LEAST_BEFORE, LEAST_AFTER, AFTER_SHARE = 4, 3, 0.05
#: Levels are medians of so many points on either side.
NEAR = 40
#: In an excerpt so short that its first points count too.
SHORT_RATIO = 2.0
#: Creeping: each quarter slower than the one before, and so much in all.
CREEP_SHARE = 0.15
#: The rate falls from the first steps on, as it does when a cache in front of slow storage runs empty.
EARLY_POINTS, EARLY_RATIO = 60, 1.4
#: A stall is a step of this many times the usual time; they come at an interval when so many of them fit it.
STALL_RATIO, STALL_SIGMAS = 1.5, 6.0
LEAST_STALLS, LEAST_POINTS, STALL_MOST = 4, 30, 0.25
FITTING, FILLED = 0.8, 0.7


@dataclass(frozen=True, slots=True)
class Cost:
    """`values` [n] > 0 at increasing `steps` [n], each from point `index` [n] of `column`; `per_step`: in seconds."""

    column: Column
    steps: npt.NDArray[np.int64]
    values: Floats
    index: npt.NDArray[np.int64]
    per_step: bool


@dataclass(frozen=True, slots=True)
class Rise:
    """The level rose by `ratio` at `point` (an index of Cost) and stays there."""

    point: int
    ratio: float


@dataclass(frozen=True, slots=True)
class Stalls:
    """Slow steps at `points` (indexes of Cost), one every `period` steps, which cost `lost` of all time."""

    points: npt.NDArray[np.int64]
    period: int
    ratio: float
    lost: float


def cost_of(run: Run) -> Cost | None:
    """The run's cost per step or token from the best column there is; None where nothing tells the time."""
    column = run.get("step_seconds")
    if column is not None and _enough(column):
        return _cost(column, column.values / _work(run, column), per_step=True)
    for name in ("tokens_per_second", "samples_per_second", "tflops_per_device"):
        column = run.get(name)
        if column is not None and _enough(column):
            with np.errstate(divide="ignore", invalid="ignore"):
                return _cost(column, 1.0 / column.values, per_step=False)
    column = run.get("time")
    if column is not None and _enough(column):
        seconds = np.diff(column.values) / np.diff(column.steps)
        if np.median(seconds) >= 5.0:  # clocks of logs tick in seconds
            return _cost(column, np.concatenate(([np.nan], seconds)), per_step=True)
    return None


def _enough(column: Column) -> bool:
    return len(column) >= LEAST_BEFORE + LEAST_AFTER and bool((column.values > 0).mean() > 0.9)


def _work(run: Run, column: Column) -> Floats:
    """Batch size times sequence length at each point, relative to the last; ones where they are not recorded."""
    work = np.ones(len(column))
    for name in ("batch_size", "sequence_length"):
        other = run.get(name)
        if other is not None and len(other):
            at = np.clip(np.searchsorted(other.steps, column.steps, side="right") - 1, 0, None)
            values = other.values[at]
            if np.isfinite(values).all() and (values > 0).all():
                work *= values / values[-1]
    return work


def _cost(column: Column, values: Floats, *, per_step: bool) -> Cost | None:
    keep = np.isfinite(values) & (values > 0)
    spare = int(keep.sum()) - LEAST_BEFORE - LEAST_AFTER
    keep[: min(SETTLING, max(spare, 0))] = False
    if spare < 0 or keep.sum() < LEAST_BEFORE + LEAST_AFTER:
        return None
    return Cost(column, column.steps[keep], values[keep], np.flatnonzero(keep), per_step)


def scatter(values: Sequence[float] | Floats) -> float:
    """A robust standard deviation: 1.4826 times the median distance from the median."""
    array = np.asarray(values, dtype=np.float64)
    return float(1.4826 * np.median(np.abs(array - np.median(array)))) if len(array) else 0.0


def _folded(cost: Cost, bins: int) -> tuple[Floats, int]:
    """Medians of `size` neighbouring points each, at most `bins` of them, and `size`."""
    size = -(-len(cost.values) // bins)
    if size == 1:
        return cost.values, 1
    whole = len(cost.values) // size * size
    return np.median(cost.values[:whole].reshape(-1, size), axis=1), size


def rise(cost: Cost) -> Rise | None:
    """Where the level rises once and for all; both sides must be quiet for the height of it.

    Searched at three scales: medians of more points are quieter, so that a small rise that lasts shows in them.
    """
    sizes = set()
    for bins in BINS:
        values, size = _folded(cost, bins)
        if size not in sizes and (found := _rise(cost, values, size)) is not None:
            return found
        sizes.add(size)
    return None


def _medians_before(values: Floats) -> Floats:
    """At each place 0..n the median of the up to `NEAR` values before it; NaN at 0."""
    result = np.full(len(values) + 1, np.nan)
    ordered: list[float] = []
    for at, value in enumerate(values[:NEAR].tolist(), 1):
        insort(ordered, value)
        result[at] = (ordered[(at - 1) // 2] + ordered[at // 2]) / 2
    if len(values) > NEAR:
        result[NEAR:] = np.median(np.lib.stride_tricks.sliding_window_view(values, NEAR), axis=1)
    return result


def _rise(cost: Cost, values: Floats, size: int) -> Rise | None:
    after = max(LEAST_AFTER if size == 1 else 2 * LEAST_AFTER, int(AFTER_SHARE * len(values)))
    best: tuple[float, int, float] | None = None
    lowest = np.minimum.accumulate(values[::-1])[::-1]
    lows, highs = _medians_before(values), _medians_before(values[::-1])[::-1]
    for at in np.flatnonzero(highs > lows * (1 + RISE_SHARE)).tolist():
        if not LEAST_BEFORE <= at <= len(values) - after:
            continue
        left, right = values[max(0, at - NEAR) : at], values[at : at + NEAR]
        low, high = float(lows[at]), float(highs[at])
        noise = max(scatter(left), 0.001 * low)
        floor = low + max(3 * noise, 0.3 * (high - low))
        if high - low > RISE_SIGMAS * noise and lowest[at] > floor and scatter(right) < 0.35 * (high - low) \
                and np.percentile(left, 90) < floor and np.percentile(values[:at], 90) < (low + high) / 2 \
                and values[-1] > low * (1 + RISE_SHARE) and (best is None or high / low > best[0] * 1.01):
            best = high / low, at, low
    if best is None:
        return None
    ratio, at, low = best
    if len(cost.column) < SETTLING + LEAST_BEFORE + LEAST_AFTER and ratio < SHORT_RATIO:
        return None
    begin = max(0, (at - 1) * size)  # the exact point lies in the bin before or in this one
    points = cost.values[begin : (at + 1) * size]
    left, right = np.abs(points - low), np.abs(points - low * ratio)  # the split that fits both levels best
    misfit = np.concatenate(([0.0], np.cumsum(left))) + np.concatenate((np.cumsum(right[::-1])[::-1], [0.0]))
    return Rise(min(begin + int(misfit.argmin()), len(cost.values) - 1), ratio)


def early_fall(cost: Cost, first: float, last: float) -> bool:
    """Whether a short series of throughput falls all the way from its first points. `first`, `last`: with those."""
    values = cost.values
    if cost.per_step or not 6 <= len(values) <= EARLY_POINTS or last < EARLY_RATIO * first:
        return False
    return bool((np.diff(values) >= -0.01 * values[:-1]).mean() >= 0.8)


def creep(cost: Cost) -> float | None:
    """The ratio of the last level to the first when steps get slower and slower in every quarter; else None."""
    values, _ = _folded(cost, BINS[0])
    if len(values) < 40:
        return None
    eighths = [float(np.median(part)) for part in np.array_split(values, 8)]
    ups = np.diff(eighths)
    noise = max(scatter(np.diff(values)) / np.sqrt(2), 0.001 * eighths[0])
    total = eighths[-1] - eighths[0]
    even = ups.max() < 0.5 * total
    if (ups > 0).all() and even and total > CREEP_SHARE * eighths[0] and total > RISE_SIGMAS * noise:
        return eighths[-1] / eighths[0]
    return None


def stalls(cost: Cost) -> Stalls | None:
    """Slow steps that come at an interval; None when they are rare, common or irregular."""
    values = cost.values
    if len(values) < LEAST_POINTS:
        return None
    usual = float(np.median(values))
    limit = max(STALL_RATIO * usual, usual + STALL_SIGMAS * scatter(values))
    points = np.flatnonzero(values > limit)
    if not LEAST_STALLS <= len(points) <= STALL_MOST * len(values):
        return None
    steps = cost.steps[points]
    gap = max(1, int(np.median(np.diff(cost.steps))))
    apart, often = np.unique(np.diff(steps), return_counts=True)
    period = int(apart[np.argmax(often)])
    if period < 3 * gap:
        return None
    phase = steps[0] % period
    off = np.abs((steps - phase + period // 2) % period - period // 2)
    fitting = off <= gap
    slots = (cost.steps[-1] - cost.steps[0]) // period + 1
    if fitting.mean() < FITTING or fitting.sum() < max(LEAST_STALLS, FILLED * slots):
        return None
    chosen = points[fitting]
    lost = float((values[chosen] - usual).sum() / values.sum())
    return Stalls(chosen, period, float(np.median(values[chosen]) / usual), lost)
