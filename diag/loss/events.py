"""Excursions of a positive loss above its course: onset, peak, end, and whether the loss came back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from diag.loss.baseline import FLOOR, SCATTER, WINDOW, quantum, resolution, scatter, tail_factor, trend

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

Kind = Literal["transient", "slow", "divergence", "open"]

#: A point this far above the course may begin an excursion (scatter; log loss) ...
ONSET_SIGMA, ONSET_SHARE = 6.0, 0.02
#: ... which counts when its peak is this far above it. The scatter is widened by the run's own tail.
PEAK_SIGMA, PEAK_SHARE = 10.0, 0.10
#: Where the gradient norm left its way at the same time, in two points or more, it is enough that so many points are
#: this far above the course in the mean: each alone may be within the noise of a small batch.
TOGETHER_NORMS, TOGETHER_POINTS, TOGETHER_SIGMA = 2, 4, 3.5
#: A single point must stand out further: losses of single batches have tails.
LONE_SIGMA, LONE_SHARE = 14.0, 0.22
#: With so few points before it an excursion must be much larger.
FEW, FEW_SHARE = 8, 0.26
#: Back on course: the median of three points within this of the level.
BACK_SIGMA, BACK_SHARE = 3.0, 0.03
#: Points after which an excursion that came back was slow to do so.
TRANSIENT_POINTS = 20
#: An excursion is open, not a divergence, while it has lasted for fewer points than this or is coming down.
OPEN_POINTS = 3
#: Of the height of the peak this much has to be left at the end of the run for a divergence ...
LEFT_SHARE = 0.25
#: ... or so much above the level (log loss).
LEFT_LOG = 0.10
#: A loss that came up to where it is now so often before, from halfway below, and came down again, has not diverged;
#: unless it has stayed so many times longer than ever before.
AGAIN, AGAIN_LONGER = 2, 3
#: A jump of fewer steps of the last printed digit is a matter of rounding.
PRINTED_STEPS = 3
#: The first points of a run bounce: no excursion begins in them (steps from the beginning; points).
WARM_UP_STEPS, WARM_UP_POINTS = 20, 3
#: Points within which a rise is traced back to its beginning.
TRACE_BACK = 6
#: After so many excursions a run is unstable, and more of them say nothing new.
MAX_EVENTS = 200


@dataclass(slots=True)
class Event:
    """One excursion. Indexes are into the column that was searched; `end` is the first point back on course."""

    kind: Kind
    onset: int
    peak: int
    end: int | None
    level: float
    sigma: float
    height: float
    points: int
    sigmas: float
    #: one point alone, with its neighbours on course: the noise of a batch as often as a fault
    lone: bool = False
    #: it is still up, and has been as high and come down before
    again: bool = False


def excursions(steps: Ints, values: Floats, *, from_start: bool, moved: Flags | None = None) -> list[Event]:
    """All excursions of positive, finite `values` [n] at `steps` [n], in order.

    `from_start` says that the run began with these points, so that the first ones are warm-up. `moved` [n] tells the
    points at which the gradient norm had left its way.
    """
    n = len(values)
    if n < WARM_UP_POINTS + 1:
        return []
    y = np.log(values)
    floor = max(FLOOR, resolution(values))
    search = _Search(y, floor, moved)
    printed = PRINTED_STEPS * quantum(values)
    first = WARM_UP_POINTS
    if from_start:
        first = max(first, int(np.searchsorted(steps, WARM_UP_STEPS)))
    found: list[Event] = []
    at = first
    while len(found) < MAX_EVENTS and (place := search.next(at)) is not None:
        event = _judge(search, place, n)
        if event is None or event.height <= printed:
            at = place + 1
            continue
        found.append(event)
        if event.end is None:
            break
        at = search.remove(event.onset, event.end)
    return found


class _Search:
    """The sequence without the points of excursions found so far, with its trend and scatter."""

    def __init__(self, y: Floats, floor: float, moved: Flags | None) -> None:
        self.y, self.floor, self.moved = y, floor, moved
        self.index = np.arange(len(y))
        self.expected = trend(y)
        self.sigma = scatter(y - self.expected, floor)
        self.tail = tail_factor(y - self.expected, self.sigma)
        self._mark()

    def _mark(self) -> None:
        rise = self.y[self.index] - self.expected
        limit: Floats | float = ONSET_SIGMA
        if self.moved is not None:
            limit = np.where(self.moved[self.index], TOGETHER_SIGMA, ONSET_SIGMA)
        self.hot = np.flatnonzero(rise > np.maximum(limit * self.sigma, ONSET_SHARE))

    def together(self, start: int, peak: int, rise: Floats, sigma: float) -> bool:
        """Whether the gradient norm left its way around the rise [from `start` on] too, and the rise is no blip."""
        if self.moved is None or len(rise) < TOGETHER_POINTS:
            return False
        norms = int(self.moved[max(start - 2, 0) : start + peak + 3].sum())
        return norms >= TOGETHER_NORMS and float(rise[:TOGETHER_POINTS].mean()) >= TOGETHER_SIGMA * sigma

    def next(self, at: int) -> int | None:
        """The next place of the sequence, from `at` on, that lies above the course."""
        where = int(np.searchsorted(self.hot, at))
        return int(self.hot[where]) if where < len(self.hot) else None

    def remove(self, onset: int, end: int) -> int:
        """Take the points [onset, end) out of the sequence; returns the place to go on from."""
        low, high = int(np.searchsorted(self.index, onset)), int(np.searchsorted(self.index, end))
        self.index = np.delete(self.index, slice(low, high))
        self.expected = np.delete(self.expected, slice(low, high))
        self.sigma = np.delete(self.sigma, slice(low, high))
        reach = SCATTER + WINDOW + 8
        start = max(low - 2 * reach, 0)
        stop = min(low + reach, len(self.index))
        piece = self.y[self.index[start:stop]]
        expected = trend(piece)
        sigma = scatter(piece - expected, self.floor)
        keep = low - start
        self.expected[low:stop] = expected[keep:]
        self.sigma[low:stop] = sigma[keep:]
        self._mark()
        return low


def _judge(search: _Search, place: int, n: int) -> Event | None:
    """The excursion that begins at a place of the sequence, or None when it is no more than noise."""
    y = search.y
    start = int(search.index[place])
    level, sigma = float(search.expected[place]), float(search.sigma[place])
    if y[start] <= np.median(y[search.index[max(place - WINDOW // 3, 0) : place]]):
        return None  # above the slope carried on, but not above what was: the fall has ended
    wide = sigma * search.tail
    rise = y[start:] - level
    back = min(max(BACK_SIGMA * sigma, BACK_SHARE), 0.9 * float(rise[0]))
    end = _end(rise, back)
    inside = rise[:end] if end is not None else rise
    peak = int(np.argmax(inside))
    height = float(inside[peak])
    above = int((inside > max(ONSET_SIGMA * sigma, ONSET_SHARE)).sum())
    share = PEAK_SHARE if place >= FEW else FEW_SHARE
    together = height >= share and search.together(start, peak, rise, sigma)
    if height < max(PEAK_SIGMA * wide, share) and not together:
        return None
    if above < 2 and height < max(LONE_SIGMA * wide, LONE_SHARE) and not together:
        return None
    if above < 2 and not together and start == n - 1 and height < max(2 * LONE_SIGMA * wide, 2 * LONE_SHARE):
        return None  # the very last point: nothing shows yet whether it is one
    onset = start
    for back_at in range(1, TRACE_BACK + 1):
        before = place - back_at
        if before < 1 or y[search.index[before]] - level <= 2.5 * sigma or \
                int(search.index[before]) != start - back_at:
            break
        onset = start - back_at
    last = None if end is None else start + end
    kind = _kind(rise, peak, height, last, start, n, sigma)
    again = kind == "divergence" and _as_before(y, onset, level)
    return Event(kind="open" if again else kind, again=again,
                 onset=onset, peak=start + peak, end=last, level=float(np.exp(level)), sigma=sigma,
                 height=float(np.exp(y[start + peak]) - np.exp(level)),
                 points=(last if last is not None else n) - onset, sigmas=height / sigma,
                 lone=end == 1 and above == 1 and onset == start and abs(float(rise[1])) <= BACK_SIGMA * sigma)


def _end(rise: Floats, back: float) -> int | None:
    """The first point from which the loss is back: the median of three points below `back`, itself below it."""
    low = rise <= back
    if len(low) < 3:
        return 1 if len(low) == 2 and low[1] else None
    majority = low[:-2].astype(np.int8) + low[1:-1] + low[2:] >= 2
    where = np.flatnonzero(majority & low[:-2])
    if len(where):
        return int(where[0])
    if low[-1] and (low[-2] or len(low) < 6):
        return len(low) - (2 if low[-2] else 1)
    return None


def _as_before(y: Floats, onset: int, level: float) -> bool:
    """Whether a loss that is up at the end went up as high, and came down again, several times before."""
    now = float(np.median(y[-min(9, max(1, (len(y) - onset) // 4)) :]))
    middle = (level + now) / 2
    past = np.where(y[:onset] >= now, 1, np.where(y[:onset] < middle, -1, 0))
    sides = past[past != 0]
    if int(((sides[:-1] < 0) & (sides[1:] > 0)).sum()) < AGAIN:
        return False
    low = np.flatnonzero(np.concatenate([[True], past < 0, [True]]))
    return len(y) - onset <= AGAIN_LONGER * int(np.diff(low).max() - 1)


def _kind(rise: Floats, peak: int, height: float, end: int | None, start: int, n: int, sigma: float) -> Kind:
    if end is not None:
        return "transient" if end - start <= TRANSIENT_POINTS else "slow"
    tail = rise[-min(9, max(1, len(rise) // 4)):]
    left = float(np.median(tail))
    if len(rise) < OPEN_POINTS:
        return "open"
    after = rise[peak:]
    falling = len(after) > 3 and bool((np.diff(after) < 0).all()) and after[-1] < after[-2] - 0.01
    if falling or (left < LEFT_SHARE * height and left < LEFT_LOG):
        return "open"
    if len(after) > 12:
        thirds = [float(np.median(part)) for part in np.array_split(after[-max(12, len(after) // 2):], 3)]
        if thirds[0] > thirds[1] > thirds[2] and thirds[0] - thirds[2] > max(0.25 * height, 3 * sigma) and \
                left < 0.5 * height:
            return "open"
    return "divergence"
