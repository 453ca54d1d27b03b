"""One rank's spans and events of a run of this trainer: events/rank_<R>.jsonl (docs/run-directory.md).

    {"event":"start","time":1700000000.1,"rank":0}
    {"span":"forward","step":1,"start":1700000001.2,"seconds":0.31}
    {"times":{"attention":0.12,"experts":0.09},"step":5}

Events are few and kept, but for those of pools (`diag.artefacts.pool_records`). Spans are many: they are counted, added
up over bins of steps that double when there are too many of them, and the last ones are kept.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diag.artefacts import Artefact, Source, Unreadable
from diag.artefacts.pool_records import PoolLog, add_pool_event
from diag.artefacts.step_times import StepTimes
from diag.errors import ArtefactError

NAME = "run-events"
MAX_EVENTS = 10_000
LAST_SPANS = 64
MAX_LINE_BYTES = 1 << 20
MAX_NAMES = 10_000
MAX_STEP = 1 << 53
_LINE = re.compile(rb'\s*\{\s*"(?:(?:event|span)"\s*:\s*"|times"\s*:\s*\{)')
_RANK = re.compile(r"rank[_-]?(\d{1,7})")


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event with its 1-based line; `time` in Unix seconds."""

    name: str
    line: int
    time: float | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunSpan:
    """One finished span; `start` in Unix seconds."""

    name: str
    line: int
    step: int | None
    start: float
    seconds: float


@dataclass(slots=True)
class SpanTotal:
    """All spans of one name."""

    count: int = 0
    seconds: float = 0.0
    longest: RunSpan | None = None


@dataclass(kw_only=True)
class EventLog(Artefact):
    """What one rank did: its events in order, its spans by name, and the last spans before the end.

    `phases`: seconds by step of each span that belongs to a step; `modules`: of each watched group of modules.
    `pool`: what it recorded of its pool since its last start, in a run with phase separation.
    """

    events: list[RunEvent] = field(default_factory=list)
    spans: dict[str, SpanTotal] = field(default_factory=dict)
    phases: dict[str, StepTimes] = field(default_factory=dict)
    modules: dict[str, StepTimes] = field(default_factory=dict)
    last_spans: deque[RunSpan] = field(default_factory=lambda: deque(maxlen=LAST_SPANS))
    last_time: float | None = None
    last_step: int | None = None
    pool: PoolLog | None = None


ARTEFACT = EventLog


def sniff(head: bytes, name: str) -> float:
    """The first line is an event or a span."""
    return 0.95 if _LINE.match(head) else 0.0


def regroups(events: list[RunEvent]) -> bool:
    """Whether the last start among `events` ended in good order, to go on with another split of the pools."""
    names = [event.name for event in events[-2:]]
    return names[-1:] == ["regrouping"] or names == ["regrouping", "end"]


def empty_log(source: Source) -> EventLog:
    """The events of the rank that the file's name tells, before any is read."""
    match = _RANK.search(source.name)
    return EventLog(path=source.path, format=NAME, bytes=source.bytes, ranks=[int(match[1])] if match else [])


def read(source: Source) -> EventLog | Unreadable:
    """One pass; a torn last line is stated, other damaged lines are a warning."""
    log = empty_log(source)
    bad, number, good = 0, 0, 0
    try:
        with source.open() as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                number += 1
                try:
                    add_record(log, msgspec.json.decode(line), number)
                    good += 1
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    bad = bad or number
    except ArtefactError as error:
        log.problem, log.problem_severity = f"{error}; read up to line {number:,}", "warning"
    log.lines = number
    if not good:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="holds no event and no span")
    if bad and not log.problem:
        last = bad == number
        log.problem = f"line {bad:,} is cut off" if last else f"line {bad:,} and perhaps more are damaged"
        log.problem_severity = "info" if last else "warning"
    return log


def add_record(log: EventLog, record: Any, line: int) -> None:
    """Add the record of this line. Raises ValueError, TypeError, KeyError or OverflowError for what is none."""
    if not isinstance(record, dict):
        raise ValueError("not an object")
    if isinstance(name := record.get("event"), str):
        time = record.get("time")
        moment = float(time) if isinstance(time, (int, float)) else None
        if name.startswith("pool"):
            log.pool = log.pool or PoolLog()
            add_pool_event(log.pool, name, record, line)
            log.last_time = moment if moment is not None else log.last_time
            return
        if name == "start" and log.pool is not None:
            log.pool = log.pool.next_start(regrouped=regroups(log.events))
        if len(log.events) < MAX_EVENTS:
            fields = {key: value for key, value in record.items() if key not in ("event", "time")}
            log.events.append(RunEvent(name, line, moment, fields))
        log.last_time = moment if moment is not None else log.last_time
        if name == "resume" and isinstance(record.get("step"), int):
            for column in (*log.phases.values(), *log.modules.values()):
                column.rewind(record["step"])
            if log.pool is not None:
                log.pool.rewind(record["step"])
    elif isinstance(name := record.get("span"), str):
        step = record.get("step")
        span = RunSpan(name, line, step if isinstance(step, int) else None, float(record["start"]),
                       float(record["seconds"]))
        if name not in log.spans and len(log.spans) >= MAX_NAMES:
            raise ValueError("more names than a recorder writes")
        total = log.spans.setdefault(name, SpanTotal())
        total.count += 1
        total.seconds += span.seconds
        if total.longest is None or span.seconds > total.longest.seconds:
            total.longest = span
        log.last_spans.append(span)
        log.last_time = span.start + span.seconds
        if span.step is not None:
            log.last_step = span.step
            _put(log.phases, name, span.step, span.seconds)
    elif isinstance(times := record.get("times"), dict):
        for name, seconds in times.items():
            _put(log.modules, name, record["step"], float(seconds))
    else:
        raise ValueError("neither event nor span")


def _put(columns: dict[str, StepTimes], name: str, step: object, seconds: float) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MAX_STEP or not 0 <= seconds < 1e9:
        raise ValueError("not a time of a step")
    if name not in columns and len(columns) >= MAX_NAMES:
        raise ValueError("more names than a recorder writes")
    columns.setdefault(name, StepTimes()).add(step, seconds)
