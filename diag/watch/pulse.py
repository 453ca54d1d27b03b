"""How often a run makes itself heard, and when it has been silent for too long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from diag.schema import Evidence, Finding, Where

if TYPE_CHECKING:
    from diag.series import Run
    from diag.watch.formats import EventsTail
    from diag.watch.tails import Point

#: Silence counts from this many times the usual interval ...
INTERVALS = 10.0
#: ... and this many times the second-longest of the last ones: regular pauses (a checkpoint, an evaluation) come
#: twice, a restart does not ...
PAUSES = 2.0
#: ... and at least so long.
LEAST_SECONDS = 60.0
#: Before the first progress: start-up, compilation, loading of a checkpoint.
START_SECONDS = 1800.0
REMEMBERED = 200


class Pulse:
    """Times of progress. Give `limit` seconds to overrule what is learned."""

    def __init__(self, limit: float | None = None) -> None:
        self.given = limit
        self.live = False
        """Whether what was there before has been read: from then on progress happens when it is seen."""
        self.last: float | None = None
        self.step: int | None = None
        self._began: float | None = None
        self._changed: float | None = None
        self._seen: deque[float] = deque(maxlen=REMEMBERED)  # intervals between arrivals
        self._written: list[float] = []  # intervals between the stamps of the run

    def beat(self, now: float, moment: float, points: Sequence[Point]) -> None:
        """Progress was seen `now` that happened at `moment`."""
        if self.live and self.last is not None and moment > self.last:
            self._seen.append(moment - self.last)
        self.last = moment
        steps = [point.step for point in points if point.step is not None]
        self.step = steps[-1] if steps else self.step

    def changed(self, grown: bool, now: float) -> float:
        """When anything was last written; `grown`: it was now."""
        if grown or self._changed is None:
            self._changed = now
        return self._changed

    def learn(self, run: Run | None) -> None:
        """The intervals that the run's own stamps tell."""
        column = None if run is None else run.get("time")
        if column is not None and len(column) > 2:
            times = column.values[-REMEMBERED:].tolist()
            self._written = [b - a for a, b in zip(times, times[1:], strict=False) if b > a]

    @property
    def usual(self) -> float | None:
        """Seconds between two signs of progress, in the median; None before there were three."""
        known = self._written or list(self._seen)
        return median(known) if len(known) >= 3 else None

    @property
    def limit(self) -> float:
        """Seconds of silence that are too many."""
        if self.given is not None:
            return self.given
        usual = self.usual
        if usual is None:
            return START_SECONDS
        longest = sorted([*self._written, *self._seen])
        return max(LEAST_SECONDS, INTERVALS * usual, PAUSES * longest[-2] if len(longest) > 1 else 0.0)

    def silence(self, now: float, events: Sequence[EventsTail] = ()) -> Finding | None:
        """The finding of a run that has stopped to report progress, while it does."""
        if self._began is None:
            self._began = now
        last = self.last if self.last is not None else self._began
        if now - last < self.limit:
            return None
        usual = f", usually every {seconds(self.usual)}" if self.usual is not None else ""
        since = time.strftime("%H:%M:%S", time.localtime(last))
        if self.last is None:
            what = f"No progress yet, {seconds(now - last)} after the watch began"
        else:
            at = f"; the last step is {self.step}" if self.step is not None else ""
            what = f"No progress since {since} ({seconds(now - last)}){usual}{at}"
        ranks, words = _silent_ranks(events)
        proof = [Evidence(path=tail.path, text=text, rank=tail.log.ranks[0] if tail.log.ranks else None)
                 for tail, text in words[:3]]
        return Finding(cause="hang_silent", severity="error", confidence=0.7, summary=what + ".", evidence=proof,
                       where=Where(ranks=ranks, step=self.step), numbers={"silent_since": round(last, 3)})


def _silent_ranks(events: Sequence[EventsTail]) -> tuple[list[int], list[tuple[EventsTail, str]]]:
    """The ranks that do not even say that they are stuck, while most others do; and what those say."""
    stalled: list[int] = []
    quiet: list[int] = []
    words: list[tuple[EventsTail, str]] = []
    for tail in events:
        if len(tail.log.ranks) != 1:
            continue
        begin = max((i for i, event in enumerate(tail.log.events) if event.name == "start"), default=0)
        said = [event for event in tail.log.events[begin:] if event.name == "stalled"]
        (stalled if said else quiet).append(tail.log.ranks[0])
        if said:
            spans = said[-1].fields.get("open_spans")
            inside = f" in {' > '.join(map(str, spans))}" if isinstance(spans, list) and spans else ""
            words.append((tail, f"stalled{inside}"))
    guilty = sorted(quiet) if quiet and len(quiet) < len(stalled) else []
    return guilty, words


def seconds(value: float | None) -> str:
    """A length of time in words."""
    if value is None:
        return "?"
    if value < 120:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
