"""What a rank of the pools records: trouble at once, and one `pool_step` per step (docs/run-directory.md)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from diag.artefacts.pool_records import SETTLING
from diag.steps.ranks import EXCHANGES, TENSOR_PARALLEL
from pdtrain.pools.receiving import Receiver
from pdtrain.pools.sending import Sender

if TYPE_CHECKING:
    from pdtrain.recorder import Recorder


#: Steps of which the window of `Journal.take_window` keeps the times.
MOST_WINDOW = 4096


class Journal:
    """Collects what happens on one rank. Before a recorder is attached, trouble waits for it."""

    def __init__(self, role: str, incarnation: int) -> None:
        self.role = role
        self.incarnation = incarnation
        self.recorder: Recorder | None = None
        self.wait_seconds = 0.0
        self.hand_over_seconds = 0.0
        self.staleness: Counter[int] = Counter()
        self._early: list[tuple[str, dict[str, Any]]] = []
        self._began = time.perf_counter()
        self._process = psutil.Process()
        self.last: dict[str, Any] = {}
        """The last `pool_step`."""
        self._window: deque[tuple[float, float]] = deque(maxlen=MOST_WINDOW)
        self._own: deque[float] = deque(maxlen=MOST_WINDOW)

    def attach(self, recorder: Recorder) -> None:
        """Write to `recorder` from here, and what has waited."""
        self.recorder = recorder
        for name, fields in self._early:
            recorder.event(name, **fields)
        self._early.clear()

    def note(self, name: str, **fields: Any) -> None:
        """One event; from any thread."""
        if self.recorder is None:
            self._early.append((name, fields))
        else:
            self.recorder.event(name, **fields)

    @contextmanager
    def waiting(self, span: str) -> Iterator[None]:
        """Time in which this rank waits for the other pool."""
        with self._timed(span, "wait_seconds"):
            yield

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Time that it takes to encode and hand over; the sending itself goes on beside."""
        with self._timed("pool_send", "hand_over_seconds"):
            yield

    @contextmanager
    def _timed(self, span: str, field: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            if self.recorder is None:
                yield
            else:
                with self.recorder.span(span):
                    yield
        finally:
            setattr(self, field, getattr(self, field) + time.perf_counter() - began)

    def begin(self) -> None:
        """A step begins: what lies between two steps (validation, checkpoint) belongs to neither."""
        self._began = time.perf_counter()
        self.wait_seconds = self.hand_over_seconds = 0.0

    def summarise(self) -> None:
        """At the end of a run with stale weights: how stale they were."""
        if any(self.staleness):
            last = self.last.get("step", 0)
            self.note("pool_staleness", step=last, histogram={str(age): n for age, n in sorted(self.staleness.items())})

    def end(
        self, step: int, version: int, staleness: int, state_bytes: int,
        senders: Mapping[int, Sender], receivers: Mapping[int, Receiver],
    ) -> None:
        """Write the `pool_step` of `step`."""
        seconds = time.perf_counter() - self._began
        self.staleness[staleness] += 1
        sent = {peer: sender.take_counters() for peer, sender in senders.items()}
        received = [receiver.take_counters() for receiver in receivers.values()]
        blocked = sum(counters.blocked for counters in sent.values())
        answers = sum(counters.answers for counters in sent.values())
        links = [
            {"peer": peer, "direction": senders[peer].end.direction, "bytes": counters.bytes,
             "seconds": round(counters.seconds, 6),
             "latency_seconds": round(counters.latency_sum / max(1, counters.answers), 6),
             "queue_depth": counters.queue_depth, "resends": counters.resends, "checksum_errors": 0}
            for peer, counters in sent.items()
        ]
        self.last = {
            "step": step,
            "role": self.role,
            "incarnation": self.incarnation,
            "version": version,
            "staleness": staleness,
            "step_seconds": round(seconds, 6),
            "busy_seconds": round(max(0.0, seconds - self.wait_seconds - blocked), 6),
            "wait_seconds": round(self.wait_seconds, 6),
            "send_wait_seconds": round(blocked, 6),
            "hand_over_seconds": round(self.hand_over_seconds, 6),
            "bytes_sent": sum(counters.bytes for counters in sent.values()),
            "bytes_received": sum(counters.bytes for counters in received),
            "overhead_bytes": sum(counters.overhead_bytes for counters in [*sent.values(), *received]),
            "messages_sent": sum(counters.messages for counters in sent.values()),
            "messages_received": sum(counters.messages for counters in received),
            "resends": sum(counters.resends for counters in sent.values()),
            "checksum_errors": sum(counters.checksum_errors for counters in received),
            "duplicates": sum(counters.duplicates for counters in received),
            "version_mismatches": sum(counters.version_mismatches for counters in received),
            "queue_depth": max((counters.queue_depth for counters in sent.values()), default=0),
            "latency_seconds": round(sum(c.latency_sum for c in sent.values()) / max(1, answers), 6),
            "state_bytes": state_bytes,
            "resident_bytes": self._process.memory_info().rss,
            "links": links,
        }
        self.note("pool_step", **self.last)
        if self.staleness.total() > SETTLING:
            self._window.append((seconds, self.last["busy_seconds"]))

    def alone(self, modules: Mapping[str, float], *, tensor_parallel: bool) -> None:
        """Keep what this rank computed without waiting for any other, of its seconds per step and module."""
        waits = EXCHANGES | (TENSOR_PARALLEL if tensor_parallel else frozenset())
        own = [seconds for name, seconds in modules.items() if "/" not in name and name not in waits]
        if own:
            self._own.append(sum(own))

    def take_window(self) -> tuple[int, float, float, float | None]:
        """Steps since the last call without the first of a start, and the median seconds: of a step, busy, alone."""
        rows, own = list(self._window), list(self._own)
        self._window.clear()
        self._own.clear()
        step, busy = (median([row[column] for row in rows] or [0.0]) for column in (0, 1))
        return len(rows), step, busy, median(own) if own else None
