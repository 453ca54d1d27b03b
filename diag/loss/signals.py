"""What numbers show beside excursions: NaN, a loss of nothing, slow climbs, growing norms, fp16, oscillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from diag.series import Column, Run

    Floats = npt.NDArray[np.float64]

#: Points in a window whose median is compared; windows that follow the best one: a rise and not a jump.
WINDOW = 9
LEAST_AFTER = 2 * WINDOW
#: Long series are judged by so many medians.
MEDIANS = 400
#: A gradient norm so many times its best level, reached in steps that all lead up, is no noise and no warm-up.
GROWTH = 20.0
#: The loss so much above its best level; a curriculum or a new data mixture moves it less ...
RISE_SHARE = 0.2
#: ... and so many times the scatter between neighbours.
RISE_SIGMA = 6.0
#: A loss that had fallen by this share, and went up by it again to stay: other data alone move it less.
SETTLED_SHARE = 0.5
#: A loss that climbed by `RISE_SHARE` within a run of so many points, has been above its early best ever since by the
#: first of these shares, and ends above it by the second, has not recovered. Levels are medians: 4 scatters will do.
ABOVE_POINTS, ABOVE_SIGMA, ABOVE_SHARE, END_SHARE = 36, 4.0, 0.05, 0.08
#: Losses below this are rewards, penalties or auxiliary terms, whose level means nothing.
LEAST_LOSS = 0.3
#: A dynamic loss scale starts high and is halved until it fits; Megatron starts at 2^32.
SCALE_SEARCH_STEPS = 40
#: So many halvings in a row, without one point that holds, are no search any more.
HALVINGS = 5
#: A loss with values on both sides of zero has exploded when it stays so many times above its own early range.
BLOW_UP = 30.0
#: From scratch (at least this loss), a loss that fell by less than this share over so many points and steps.
SCRATCH_LOSS, LEARNT_SHARE, PLATEAU_POINTS, PLATEAU_STEPS = 5.0, 0.02, 100, 1000
#: No loss that learns begins above this and stays there, however few the steps.
ABSURD_LOSS = 1e6
#: Oscillation: share of the variance in one period, periods seen, amplitude in log loss.
PERIOD_SHARE, PERIODS, AMPLITUDE = 0.5, 8, 0.05


@dataclass(frozen=True, slots=True)
class Signal:
    """Something seen in a column: first point, what the level was, what it became."""

    at: int
    before: float
    after: float
    points: int = 1
    note: str = ""


def nan_onset(run: Run, column: Column) -> Signal | None:
    """The first point of a lasting loss (or of a loss of 0 with such a norm) that is no number. One skipped step is
    none, and so is a norm that overflows while fp16 looks for its scale."""
    values = column.values
    bad = ~np.isfinite(values)
    note = "not finite"
    norm = run.get("grad_norm")
    if column.name == "loss" and norm is not None:
        odd = ~np.isfinite(norm.values)
        if odd.any():
            _, mine, theirs = np.intersect1d(column.steps, norm.steps, assume_unique=True, return_indices=True)
            zero = np.zeros(len(values), dtype=bool)
            zero[mine] = odd[theirs] & (values[mine] == 0)
            note = "printed loss 0 with a gradient norm that is no number" if zero.any() and not bad.any() else note
            bad = bad | zero
            if not bad.any() and not run.get("loss_scale") and _lasting(odd):
                first = int(len(odd) - np.argmin(odd[::-1])) if not odd.all() else 0
                place = min(int(np.searchsorted(column.steps, norm.steps[first])), len(values) - 1)
                return Signal(place, float("nan"), float("nan"), int(odd.sum()), "the gradient norm is no number")
    counted = run.get("nan_iterations")
    if not bad.any() and column.name == "loss" and counted is not None and (counted.values > 0).any():
        first = int(np.argmax(counted.values > 0))
        place = min(int(np.searchsorted(column.steps, counted.steps[first])), len(values) - 1)
        number = int((counted.values > 0).sum())
        if number > 1 or first >= len(counted) - 2:
            return Signal(place, float("nan"), float("nan"), number, "NaN iterations were counted")
        return None
    if not bad.any():
        return None
    places = np.flatnonzero(bad)
    ended = len(values) - 1 - places[-1] < 2
    if len(places) == 1 and not ended:
        return None
    first = int(places[0])
    if not ended and len(places) < 3 and len(values) > 50:
        return None
    if ended:  # the beginning of the stretch that lasts to the end; earlier single ones were skipped steps
        good = np.flatnonzero(~bad)
        first = int(good[-1]) + 1 if len(good) and good[-1] < places[-1] else first
        thick = [int(p) for p in places if bad[p : p + 10].sum() >= min(3, len(values) - p)]
        first = min(first, thick[0]) if thick else first
    before = values[:first][np.isfinite(values[:first])]
    return Signal(first, float(before[-1]) if len(before) else float("nan"), float("nan"), len(places), note)


def norm_alone(norm: Column, scale: Column | None) -> Signal | None:
    """The norm of a record without any loss is no number to its end; a single last one is enough where nothing was
    scaled (a loss scale of 1) and such a step therefore is not skipped."""
    odd = ~np.isfinite(norm.values)
    unscaled = scale is not None and len(scale) > 0 and bool((scale.values == 1.0).all())
    if not odd.any() or not odd[-1] or not (_lasting(odd) or unscaled and len(odd) < 25):
        return None
    first = len(odd) - int(np.argmin(odd[::-1])) if not odd.all() else 0
    return Signal(first, float("nan"), float("nan"), len(odd) - first, "the gradient norm is no number")


def _lasting(odd: npt.NDArray[np.bool_]) -> bool:
    """Whether norms are no numbers to the end: three in a row, or two that are the only ones of a short record."""
    return bool(odd[-3:].all() and len(odd) > 3 or len(odd) > 4 and odd[-2:].all() and odd.sum() == 2 and len(odd) < 25)


def degenerate(column: Column) -> Signal | None:
    """The loss falls to almost nothing at once, and stays there; or it is 0 from the beginning."""
    values = column.values
    n = len(values)
    if n >= 5 and (values == 0).all():
        return Signal(0, 0.0, 0.0, n, "0 from the beginning")
    if n < 4:
        return None
    later = np.maximum.accumulate(np.abs(values[::-1]))[::-1]
    fell = np.flatnonzero(later[1 : n - 2] < 0.01 * values[: n - 3]) + 1
    if not len(fell):
        return None
    i = int(fell[0])
    before = values[max(0, i - 3) : i]
    if before.max() < 1.0 or before.min() <= 0.5 or later[i] >= 0.01 * before.min():
        return None
    return Signal(i, float(values[i - 1]), float(values[i]), n - i)


def climb(values: Floats) -> Signal | None:
    """A loss that climbed away from its best level for good, without a jump."""
    found = _climb(values)
    if found is None:
        return None
    best, low, high = found
    noise = _noise(values)
    if low < LEAST_LOSS or high < low * (1 + RISE_SHARE) or high - low < RISE_SIGMA * noise:
        return None
    return Signal(_onset(values, best, low + max(3.0 * noise, 0.05 * low)), low, high)


def settled(values: Floats) -> Signal | None:
    """A loss that had fallen, rose too gently for a jump, and has stayed up there since, however it got there."""
    found = _from_best(values)
    if found is None:
        return None
    best, highest, since = found
    low, last = float(since[0]), float(np.median(since[-max(len(since) // 4, 1) :]))
    noise = _noise(values)
    if low < LEAST_LOSS or last < low * (1 + SETTLED_SHARE) or last - low < RISE_SIGMA * noise or \
            highest < low * (1 + SETTLED_SHARE) or \
            float(since[-max(len(since) // 3, 1) :].min()) < (low + last) / 2:
        return None
    return Signal(_onset(values, best, low + max(3.0 * noise, 0.05 * low)), low, last)


def above_best(values: Floats) -> tuple[Signal, float] | None:
    """A loss whose best level lies in the first two fifths of the run: (signal, highest level since)."""
    n = len(values)
    if n < ABOVE_POINTS:
        return None
    width = max(WINDOW if n >= 100 else WINDOW // 2 + 1, n // MEDIANS)
    count = n // width
    levels = np.median(values[: count * width].reshape(count, width), axis=1)
    best = int(np.argmin(levels))
    since = levels[best + 1 + (count - best) // 4 :]
    if 5 * best > 2 * count or len(since) < 4:
        return None
    low, high, last = float(levels[best]), float(levels[best:].max()), float(np.median(levels[-2:]))
    noise = _noise(values)
    if low < LEAST_LOSS or high < low * (1 + RISE_SHARE) or high - low < ABOVE_SIGMA * noise or \
            last < low * (1 + END_SHARE) or since.min() < low * (1 + ABOVE_SHARE):
        return None
    return Signal(best * width + width // 2, low, last, n - best * width), high


def growth(values: Floats) -> Signal | None:
    """A gradient norm that grew by `GROWTH` from its best level, all the way up."""
    values = np.where(values > 0, values, np.nan)
    keep = np.isfinite(values)
    found = _climb(values[keep])
    if found is None:
        return None
    best, low, high = found
    if low <= 0 or high < GROWTH * low:
        return None
    places = np.flatnonzero(keep)
    return Signal(int(places[_onset(values[keep], best, 2.0 * low)]), low, high)


def _noise(values: Floats) -> float:
    """The scatter between neighbours: a robust standard deviation of their differences, of one point of two."""
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / float(np.sqrt(2.0))


def _from_best(values: Floats) -> tuple[int, float, Floats] | None:
    """(index of the window with the lowest median, the highest median up to it, the medians from it on); None where
    too few points follow."""
    n = len(values)
    if n < WINDOW + LEAST_AFTER:
        return None
    if n <= MEDIANS * WINDOW:
        from numpy.lib.stride_tricks import sliding_window_view

        starts = np.arange(n - WINDOW + 1)
        levels = np.median(sliding_window_view(values, WINDOW), axis=1)
        least = LEAST_AFTER
    else:
        width = n // MEDIANS
        starts = np.arange(MEDIANS) * width
        levels = np.median(values[: MEDIANS * width].reshape(MEDIANS, width), axis=1)
        least = 8
    best = int(np.argmin(levels))
    if len(levels) - best < least:
        return None
    return int(starts[best]), float(levels[: best + 1].max()), levels[best:]


def _climb(values: Floats) -> tuple[int, float, float] | None:
    """(index, level) of the best window and the last level, when the quarters between them lead up."""
    found = _from_best(values)
    if found is None:
        return None
    best, _, rest = found
    quarters = rest[np.round(np.arange(5) * (len(rest) - 1) / 4).astype(int)]
    if (np.diff(quarters) <= 0).any():
        return None
    return best, float(rest[0]), float(rest[-1])


def _onset(values: Floats, best: int, bound: float) -> int:
    """The first point after the best window from which most stay above `bound`."""
    above = values[best:] > bound
    if len(above) < WINDOW:
        return best
    share = np.convolve(above, np.ones(WINDOW), "full")[WINDOW - 1 :]
    size = np.minimum(WINDOW, len(above) - np.arange(len(above)))
    where = np.flatnonzero(above & (share > 0.7 * size))
    return best + int(where[0]) if len(where) else best


def scale_collapse(run: Run) -> Signal | None:
    """The fp16 loss scale falls to its minimum, or is halved again and again without ever fitting."""
    column = run.get("loss_scale")
    if column is None or len(column) < 3:
        return None
    values, steps = column.values, column.steps
    good = np.isfinite(values) & (values > 0)
    values, steps, places = values[good], steps[good], np.flatnonzero(good)
    if len(values) < 3 or values.max() < 1024:
        return None
    if values[-1] <= 1.0 and (values <= 1.0).sum() >= 2:
        first = int(np.argmax(values <= 1.0))
        while first > 0 and values[first - 1] > values[first]:
            first -= 1  # where the fall began
        first = min(first + 1, len(values) - 1)
        return Signal(int(places[first]), float(values.max()), float(values[-1]), int((values <= 1.0).sum()),
                      "its minimum")
    change = np.diff(np.log2(values))
    tail = 0
    for step in change[::-1]:
        if step >= -0.5:
            break
        tail += 1
    if tail >= HALVINGS and steps[-1 - tail] > SCALE_SEARCH_STEPS:
        first = len(values) - tail
        return Signal(int(places[first]), float(values[first - 1]), float(values[-1]), tail, "and keeps falling")
    return None


def all_skipped(run: Run) -> Signal | None:
    """Every one of the last many steps was skipped."""
    column = run.get("skipped")
    if column is None or len(column) < 2 * HALVINGS or column.steps[0] < 0:
        return None
    good = column.values < 1
    tail = len(column) if not good.any() else int(np.argmax(good[::-1]))
    first = len(column) - tail
    if tail < 2 * HALVINGS or column.steps[first] <= SCALE_SEARCH_STEPS or np.diff(column.values[first:]).max() > 0:
        return None
    return Signal(first, 0.0, float(column.values[-1]), tail)


def blow_up(column: Column) -> Signal | None:
    """A loss with values on both sides of zero that leaves its early range by orders of magnitude."""
    keep = np.flatnonzero(np.isfinite(column.values))
    size = np.abs(column.values[keep])
    n = len(size)
    if n < 60:
        return None
    early = size[: max(50, n // 5)]
    scale = float(np.quantile(early, 0.9))
    if scale <= 0:
        return None
    high = size > BLOW_UP * scale
    share = np.convolve(high, np.ones(WINDOW), "valid")
    where = np.flatnonzero(share >= 5)
    if not len(where):
        return None
    first = int(where[0]) + int(np.argmax(high[where[0] : where[0] + WINDOW]))
    while first > 0 and size[first - 1] > 5 * scale:
        first -= 1
    return Signal(int(keep[first]), scale, float(np.median(size[-20:])), n - first, f"{size.max():.3g}")


def plateau(column: Column) -> Signal | None:
    """From scratch and nothing learnt: the loss is where it began, after many points and steps."""
    values = column.values
    if len(values) < PLATEAU_POINTS or column.steps[0] > 100:
        return None
    if column.steps[-1] - column.steps[0] < PLATEAU_STEPS and values.min() < ABSURD_LOSS:
        return None
    begin, end = float(np.median(values[:9])), float(np.median(values[-len(values) // 4 :]))
    if begin < SCRATCH_LOSS or end < begin * (1 - LEARNT_SHARE) or values.min() < begin * (1 - 3 * LEARNT_SHARE):
        return None
    return Signal(0, begin, end, len(values))


def oscillation(values: Floats) -> tuple[Signal, float] | None:
    """A loss that swings with one period: (signal, period in points)."""
    n = len(values)
    if n < 64:
        return None
    y = np.log(values[-min(max(64, 3 * n // 4), 4096) :])
    n = len(y)
    x = np.linspace(-1, 1, n)
    rest = y - np.polyval(np.polyfit(x, y, 5), x)
    rest = rest - rest.mean()
    total = float((rest**2).sum())
    if total <= 0:
        return None
    power = np.abs(np.fft.rfft(rest * np.hanning(n))) ** 2
    low, high = PERIODS, n // 3
    if high <= low + 2:
        return None
    peak = low + int(np.argmax(power[low:high]))
    share = float(power[max(peak - 2, 1) : peak + 3].sum() / power[1:].sum())
    amplitude = float(np.sqrt(2 * share * total / n))
    if share < PERIOD_SHARE or amplitude < AMPLITUDE:
        return None
    return Signal(len(values) - n, float(np.exp(y.mean())), amplitude, n), n / peak
