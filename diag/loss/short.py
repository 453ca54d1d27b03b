"""Records too short for a course of the loss: what is so large that it needs no history.

A pasted excerpt holds 2 to 24 points. Among them a jump counts when the loss at least doubles, by 1.5 nat or more, and
the gradient norm grew tenfold with it or just before (the published 104B and 176B spikes: loss 3.1 to 7.7 with the norm
up 20 times a step before), or when the loss alone grows tenfold. Losses of small batches do neither: those of
fine-tunes double, from a level below 1. The first steps of a run count only a hundredfold. Confidence stays low.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from diag.loss.events import FEW, OPEN_POINTS, WARM_UP_POINTS, WARM_UP_STEPS, Event, Kind
from diag.loss.signals import LEAST_LOSS, SCRATCH_LOSS, Signal

if TYPE_CHECKING:
    import numpy.typing as npt

    from diag.series import Column, Run

    Floats = npt.NDArray[np.float64]

#: Longer records have a course of their own (`diag.loss.events`).
MOST_POINTS = 24
#: The loss alone; in the first steps of a run; together with the gradient norm, and by so many nat.
ALONE, EARLY, TOGETHER, NORM, HEIGHT = 10.0, 100.0, 2.0, 10.0, 1.5
#: From a level of which nothing can be said, every point from there on.
EXPLODED = 1000.0
#: Back on course within this factor of the level; still up above this share of the height.
BACK, UP = 1.2, 0.5
#: A rise in the first steps of a run, from scratch and with warm-up of the learning rate and search of the loss scale,
#: is told when so many points in a row stay this far above the first one, and none of the last ones falls.
ROUGH_STEPS, ROUGH_POINTS, ROUGH_FACTOR = 100, 6, 1.5
#: No loss of a model that learns, beside a gradient norm of this size; sums over tokens stay below it.
BEYOND_LOSS, BEYOND_NORM, BEYOND_POINTS = 1e6, 1e5, 3


def jump(run: Run, column: Column) -> Event | None:
    """The first jump that needs no history among the points of a short record of positive losses."""
    values, n = column.values, len(column)
    if not 2 <= n <= MOST_POINTS:
        return None
    for i in range(1, n):
        before = values[max(0, i - FEW) : i]
        level, top = float(np.median(before)), float(values[:i].max())
        if level < LEAST_LOSS and not _exploded(values[i:]) or values[i] < TOGETHER * level:
            continue
        alone = EARLY if i < 2 * WARM_UP_POINTS and _early(run, column, i) else ALONE
        led = values[i] >= 1.5 * top and values[i] - level >= HEIGHT and not _early(run, column, i) and \
            _norm_rose(run, column, i)
        if led or values[i] >= alone * top and values[i] - level >= HEIGHT:
            return _event(values, i, level)
    return None


def _exploded(after: Floats) -> bool:
    """Whether a loss that was next to nothing has become what no rewards, penalties or small batches are."""
    return len(after) > OPEN_POINTS and float(after.min()) > EXPLODED


def _early(run: Run, column: Column, i: int) -> bool:
    """Whether point `i` lies in the first steps of the run, or may do so."""
    return int(column.steps[i]) <= WARM_UP_STEPS if run.steps_known else i < WARM_UP_POINTS


def _norm_rose(run: Run, column: Column, i: int) -> bool:
    norm = run.get("grad_norm")
    if norm is None:
        return False
    norm = norm.finite()
    quiet = norm.values[norm.steps <= column.steps[max(i - 2, 0)]]
    near = norm.values[(norm.steps > column.steps[max(i - 2, 0)]) & (norm.steps <= column.steps[i])]
    quiet = quiet[quiet > 0]
    return bool(len(quiet) and len(near)) and float(near.max()) >= NORM * float(np.median(quiet))


def _event(values: np.ndarray, onset: int, level: float) -> Event:
    after = values[onset:]
    peak = onset + int(np.argmax(after))
    height = float(values[peak]) - level
    back = np.flatnonzero(after <= BACK * level)
    end = onset + int(back[0]) if len(back) else None
    kind: Kind = "open"
    if end is not None:
        kind = "transient"
    elif len(after) > OPEN_POINTS and values[-1] - level >= UP * height or \
            len(after) > 1 and values[-1] >= EARLY * level:
        kind = "divergence"
    return Event(kind, onset, peak, end, level, 1.0, height, (end or len(values)) - onset, 1.0)


def lost_at_once(run: Run, column: Column) -> Event | None:
    """From its first point the loss at least doubled, and never came back: of a run that began with these points.

    What comes down again, or was up for a few points only, is the rough start of a run with warm-up of the learning
    rate and search of the loss scale (12 to 76 to 31 to 21 to 17 in a public fp16 run of 64 GPUs).
    """
    values, n = column.values, len(column)
    if not 4 <= n <= MOST_POINTS or values[0] < SCRATCH_LOSS:
        return None
    peak = int(np.argmax(values))
    if peak == 0 or values[peak] < 2 * values[0] or values[peak:].min() < values[0]:
        return None
    onset = int(np.argmax(values > 1.2 * values[0]))
    if values[peak] < ALONE * values[0] and (not run.steps_known or int(column.steps[onset]) <= ROUGH_STEPS):
        tail = values[onset:]
        stays = len(tail) >= ROUGH_POINTS and bool((tail > ROUGH_FACTOR * values[0]).all())
        falls = len(tail) >= 3 and bool((np.diff(values[peak:]) < 0).mean() > 0.6) and values[-1] < 0.9 * values[peak]
        if not stays or falls:
            return None
    return Event("open" if values[-1] < 1.1 * values[0] else "divergence", onset, peak, None, float(values[0]), 1.0,
                 float(values[peak] - values[0]), n - onset, 1.0)


def beyond(run: Run, column: Column) -> Signal | None:
    """A loss of millions with a gradient norm to match, from the first point shown, that does not fall."""
    norm = run.get("grad_norm")
    if norm is None or len(column) < BEYOND_POINTS or not run.steps_known or column.steps[0] <= WARM_UP_STEPS:
        return None
    values, norms = column.values, norm.finite().values
    third = max(len(values) // 3, 1)
    if values.min() < BEYOND_LOSS or not len(norms) or np.median(norms) < BEYOND_NORM:
        return None
    if np.median(values[-third:]) < 0.5 * np.median(values[:third]):
        return None
    return Signal(0, float(np.median(values[:third])), float(np.median(values[-third:])), len(values))


def zeroed(column: Column) -> Signal | None:
    """The loss is exactly 0 at the end of a short record, right after values of a loss that was not small.

    No cross entropy is 0; trainers that average over finite values only print it so for NaN, and so does a batch
    without labels. One such point is enough where it is the last of few, two where there are more.
    """
    values = column.values
    n = len(values)
    tail = n if not values.any() else int(np.argmax((values != 0)[::-1]))
    if not 2 <= n <= MOST_POINTS or not 0 < tail < n or values[: n - tail].min() < LEAST_LOSS:
        return None
    if tail < 2 and n > 4:
        return None
    return Signal(n - tail, float(values[n - tail - 1]), 0.0, tail, "few")
