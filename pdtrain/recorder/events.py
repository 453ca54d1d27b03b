"""events/rank_R.jsonl: the spans and events of one rank.

Spans wait in memory until the logging interval ends; an event is written at once, and everything before it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pdtrain.recorder.files import LineFile, line

#: Spans kept when nothing is ever logged: beyond this they are written without waiting for the interval.
MAX_WAITING = 10_000


class Span:
    """One timed part of a step; a context manager that may be used once."""

    __slots__ = ("_log", "name", "step", "start")

    def __init__(self, log: EventLog | None, name: str, step: int | None) -> None:
        self._log, self.name, self.step = log, name, step
        self.start = 0.0

    def __enter__(self) -> Span:
        self.start = time.perf_counter()
        if self._log is not None:
            self._log.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.leave(self, time.perf_counter())
            if error is not None:
                self._log.unwind(self, error)


class EventLog:
    """The spans and events of one rank. Safe to use from several threads; errors of the disk are raised (OSError)."""

    def __init__(self, path: Path, *, spans: bool = True) -> None:
        self.last_beat = time.monotonic()
        """When the loop last showed a sign of life."""
        self.open_spans: dict[int, Span] = {}
        """Spans that have begun and not ended: what a crashed or stalled rank was doing."""
        self._unwound: tuple[int, list[str]] = (0, [])
        self._file = LineFile(path)
        self._spans = spans
        self._lock = threading.RLock()
        self._waiting: list[tuple[str, int | None, float, float]] = []
        self._unnumbered = 0  # index of the first waiting span that the next `end_step` numbers
        self._times: list[bytes] = []
        self._names: dict[str, str] = {}
        self._offset = time.time() - time.perf_counter()

    def count_starts(self) -> int:
        """How many processes have written here before: their `start` events."""
        if not self._file.path.exists():
            return 0
        with self._file.path.open("rb") as stream:
            return sum(row.startswith(b'{"event":"start"') for row in stream)

    def beat(self) -> None:
        """The loop is alive."""
        self.last_beat = time.monotonic()

    def span(self, name: str, step: int | None) -> Span:
        """A span that reports here."""
        return Span(self, name, step)

    def enter(self, span: Span) -> None:
        """`span` begins."""
        self.last_beat = time.monotonic()
        self.open_spans[id(span)] = span

    def leave(self, span: Span, now: float) -> None:
        """`span` ended at `now` (perf_counter)."""
        self.last_beat = time.monotonic()
        self.open_spans.pop(id(span), None)
        if self._spans and len(self._waiting) < 2 * MAX_WAITING:
            self._waiting.append((span.name, span.step, span.start, now - span.start))

    def unwind(self, span: Span, error: BaseException) -> None:
        """`error` leaves `span`."""
        if self._unwound[0] != id(error):
            self._unwound = (id(error), [])  # the id only: an exception would keep its frames alive
        self._unwound[1].insert(0, span.name)

    def spans_left_by(self, error: BaseException | None) -> list[str]:
        """The spans that `error`, or what it was raised from, has left on its way, outermost first."""
        seen = 0
        while error is not None and seen < 100:
            if id(error) == self._unwound[0]:
                return list(self._unwound[1])
            error, seen = error.__cause__ or error.__context__, seen + 1
        return []

    def end_step(self, step: int) -> None:
        """Spans since the last call that named no step belong to `step`."""
        waiting = self._waiting
        for index in range(self._unnumbered, len(waiting)):
            name, own, start, seconds = waiting[index]
            if own is None:
                waiting[index] = (name, step, start, seconds)
        self._unnumbered = len(waiting)
        if len(waiting) > MAX_WAITING:
            self.flush()

    def times(self, step: int, seconds: Mapping[str, float]) -> None:
        """Keep `seconds` per step by module of this rank for the end of the interval."""
        if self._spans and len(self._times) < MAX_WAITING:
            record = line({"times": {name: round(value, 7) for name, value in seconds.items()}, "step": step})
            with self._lock:
                self._times.append(record)

    def event(self, name: str, fields: Mapping[str, Any], *, alone: bool = False) -> None:
        """Write one event now, after the spans of finished steps, or `alone`."""
        record = {"event": name, "time": round(time.time(), 6)} | {k: v for k, v in fields.items() if v is not None}
        with self._lock:
            if not alone:
                self.flush()
            self._file.write(line(record))

    def flush(self, *, unfinished_step: bool = False) -> None:
        """Write the spans of finished steps, in one write; those of the `unfinished_step` too when nothing follows."""
        with self._lock:
            count = len(self._waiting) if unfinished_step else self._unnumbered
            if not count and not self._times:
                return
            done, self._waiting[:count] = self._waiting[:count], []
            times, self._times = self._times, []
            self._unnumbered = max(0, self._unnumbered - count)
            self._file.write("".join(self._line(*item) for item in done).encode() + b"".join(times))
            self._offset = time.time() - time.perf_counter()  # follow a clock that NTP corrects

    def _line(self, name: str, step: int | None, start: float, seconds: float) -> str:
        quoted = self._names.get(name)
        if quoted is None:
            quoted = self._names[name] = json.dumps(name)
        number = "" if step is None else f'"step":{step},'
        return f'{{"span":{quoted},{number}"start":{start + self._offset:.6f},"seconds":{seconds:.6f}}}\n'

    def stop(self) -> None:
        """Let go of what waits and keep no more spans: the disk refuses."""
        self._spans = False
        with self._lock:
            self._waiting.clear()
            self._times.clear()
            self._unnumbered = 0

    def close(self) -> None:
        """Write what waits and close the file."""
        with self._lock:
            self.flush(unfinished_step=True)
            self._file.close()
