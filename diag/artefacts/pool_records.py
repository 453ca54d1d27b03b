"""What a rank of a separated run records about its pool: the `pool*` events of events/rank_<R>.jsonl, folded.

    {"event":"pool","role":"update","index":0,"mode":"sync","peers":[0,1],"incarnation":1,"state_bytes":3161088, ...}
    {"event":"pool_step","step":12,"role":"update","version":12,"step_seconds":0.4,"busy_seconds":0.04, ...}
    {"event":"pool_checksum_error","step":12,"peer":1,"direction":"up","bucket":3,"attempt":1}

The format is docs/run-directory.md. "up" is gradients, compute -> update; "down" weights, update -> compute. There is
one `pool_step` per rank and step: they are summed in bins of steps; of each kind of trouble the first event is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diag.artefacts.step_times import StepTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

#: First steps of a start, in which connections are made and memory is allocated: not in the times and rates.
SETTLING = 3
MAX_LINKS = 4096
MAX_TROUBLES = 4096
MAX_LAGS = 64
MAX_REGROUPINGS = 64
MAX_NUMBER = 1e15
#: Columns kept by step.
COLUMNS = {"step_seconds": "step", "busy_seconds": "busy", "send_wait_seconds": "blocked", "queue_depth": "queue",
           "latency_seconds": "latency", "bytes_sent": "bytes", "version": "version"}
#: Counters of the whole start.
COUNTERS = ("messages_sent", "messages_received", "bytes_sent", "bytes_received", "resends", "checksum_errors",
            "duplicates", "version_mismatches")


@dataclass(slots=True)
class Link:
    """What one rank sent to `peer` in one direction, over `steps` steps after the first ones.

    `seconds` is the time that the direction was busy; `latency` the sum of the steps' means; `queue` the deepest.
    """

    peer: int
    direction: str
    steps: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    latency: float = 0.0
    queue: float = 0.0
    resends: float = 0.0
    checksum_errors: float = 0.0

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second while it was sending; None where it was not timed."""
        return self.bytes / self.seconds if self.seconds > 0 and self.bytes > 0 else None


@dataclass(slots=True)
class Trouble:
    """One kind of trouble with one peer: how often, and its first and last event."""

    name: str
    peer: int | None
    direction: str | None
    first: dict[str, Any]
    line: int
    last: dict[str, Any]
    count: int = 1
    actions: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The step of the first event."""
        step = self.first.get("step")
        return step if isinstance(step, int) else None

    @property
    def time(self) -> float | None:
        """When it first happened, in Unix seconds."""
        return _number(self.first.get("time"))


@dataclass(slots=True)
class Lag:
    """Steps with one staleness: how many, and where the first of them is."""

    count: int
    step: int
    line: int


@dataclass(slots=True)
class Regrouping:
    """A change of the split of a run's ranks after `step`: (compute, update) ranks before and after it.

    `seconds`: without training, from the last step before it to the first one after; None where the run did not go on.
    `failed`: the ranks did not start with the new split, and went back.
    """

    step: int
    before: tuple[int, int]
    after: tuple[int, int]
    why: str
    line: int
    seconds: float | None = None
    failed: bool = False


@dataclass(slots=True)
class PoolLog:
    """One rank's pool records since its last start. Fields that no record told stay empty.

    A start that goes on after a change of the split belongs to the same run: trouble and counters are carried over,
    times and links are not, because the rank may be in the other pool now. `regroupings` are those of all starts.
    """

    role: str | None = None
    mode: str | None = None
    peers: list[int] = field(default_factory=list)
    incarnation: int | None = None
    working_bytes: float | None = None
    state_bytes: float | None = None
    resident_bytes: float | None = None
    version: int | None = None
    records: int = 0
    line: int = 0
    last_line: int = 0
    last_step: int | None = None
    #: name of `COLUMNS` -> values by step
    times: dict[str, StepTimes] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    links: dict[tuple[int, str], Link] = field(default_factory=dict)
    troubles: dict[tuple[str, int | None, str | None], Trouble] = field(default_factory=dict)
    lags: dict[int, Lag] = field(default_factory=dict)
    histogram: dict[int, int] = field(default_factory=dict)
    regroupings: list[Regrouping] = field(default_factory=list)

    def next_start(self, *, regrouped: bool) -> PoolLog | None:
        """What the next start begins with; None: nothing."""
        if not regrouped:
            return PoolLog(regroupings=self.regroupings) if self.regroupings else None
        return PoolLog(totals=self.totals, troubles=self.troubles, lags=self.lags, regroupings=self.regroupings)

    def trouble(self, *names: str) -> list[Trouble]:
        """What there was of these kinds, in the order of the file."""
        return sorted((t for t in self.troubles.values() if t.name in names), key=lambda t: t.line)

    def rewind(self, step: int) -> None:
        """Drop what lies beyond `step`: it was done again."""
        for column in self.times.values():
            column.rewind(step)


def add_pool_event(log: PoolLog, name: str, record: Mapping[str, Any], line: int) -> None:
    """Add one event whose name begins with "pool". Raises ValueError for what is none."""
    if name == "pool_step":
        _step(log, record, line)
        return
    if name in ("pool_rebalance", "pool_regrouped"):
        _rebalance(log, name, record, line)
        return
    role = record.get("role")
    if name == "pool":
        if role not in ("compute", "update"):
            raise ValueError("no pool has this role")
        log.role, log.line = role, line
        log.mode = record["mode"] if isinstance(record.get("mode"), str) else log.mode
        peers = record.get("peers")
        log.peers = [p for p in peers if _is_rank(p)][:MAX_LINKS] if isinstance(peers, list) else []
        log.incarnation = record["incarnation"] if _is_rank(record.get("incarnation")) else None
        log.working_bytes, log.state_bytes = _number(record.get("working_bytes")), _number(record.get("state_bytes"))
    elif name == "pool_staleness":
        counts = record.get("histogram")
        if isinstance(counts, dict) and len(counts) <= 4096:
            log.histogram = {int(key): int(value) for key, value in counts.items() if _number(value) is not None}
    else:
        _trouble(log, name, record, line)


def _rebalance(log: PoolLog, name: str, record: Mapping[str, Any], line: int) -> None:
    """The run has looked at its pools, or has changed its split before this start."""
    step = record.get("step")
    if not _is_rank(step):
        raise ValueError("no step")
    assert isinstance(step, int)
    why = record["why"][:400] if isinstance(record.get("why"), str) else ""
    if name == "pool_rebalance":
        if record.get("action") != "regroup":
            return
        before, after, seconds = _pair(record.get("split")), _pair(record.get("proposed")), None
    else:
        before, after, seconds = _pair(record.get("before")), _pair(record.get("after")), _number(record.get("seconds"))
    found = Regrouping(step, before, after, why, line, seconds, record.get("failed") is True)
    log.regroupings = [made for made in log.regroupings if (made.step, made.after) != (step, after)] + [found]
    log.regroupings = log.regroupings[-MAX_REGROUPINGS:]


def _pair(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_rank, value)):
        raise ValueError("not a split")
    return value[0], value[1]


def _step(log: PoolLog, record: Mapping[str, Any], line: int) -> None:
    step, role = record.get("step"), record.get("role")
    if not _is_rank(step) or role not in ("compute", "update"):
        raise ValueError("a step without number or role")
    assert isinstance(step, int)
    whole = _needed(record, "step_seconds")
    wait = _number(record.get("wait_seconds"))
    busy = _number(record.get("busy_seconds"))
    busy = max(whole - (wait or 0.0), 0.0) if busy is None else min(busy, whole)
    log.role, log.last_line, log.last_step = role, line, step
    log.records += 1
    for name in ("state_bytes", "resident_bytes"):
        if (value := _number(record.get(name))) is not None:
            setattr(log, name, max(value, getattr(log, name) or 0.0) if name == "resident_bytes" else value)
    if _is_rank(record.get("version")):
        log.version = record["version"]
    for name in COUNTERS:
        log.totals[name] = log.totals.get(name, 0.0) + (_number(record.get(name)) or 0.0)
    staleness = record.get("staleness")
    if isinstance(staleness, int) and not isinstance(staleness, bool) and abs(staleness) < MAX_NUMBER:
        lag = log.lags.get(staleness)
        if lag is not None:
            lag.count += 1
        elif len(log.lags) < MAX_LAGS:
            log.lags[staleness] = Lag(1, step, line)
    if log.records <= SETTLING:
        return
    values = {key: _number(record.get(key)) for key in COLUMNS} | {"busy_seconds": busy, "step_seconds": whole}
    for key, value in values.items():
        if value is not None:
            log.times.setdefault(COLUMNS[key], StepTimes()).add(step, value)
    links = record.get("links")
    for item in links if isinstance(links, list) else ():
        if isinstance(item, dict):
            _link(log, item)


def _link(log: PoolLog, item: dict[str, Any]) -> None:
    peer, direction = item.get("peer"), item.get("direction")
    if not _is_rank(peer) or direction not in ("up", "down"):
        return
    assert isinstance(peer, int)
    key = (peer, direction)
    if key not in log.links and len(log.links) >= MAX_LINKS:
        return
    link = log.links.setdefault(key, Link(peer, direction))
    link.steps += 1
    link.bytes += _number(item.get("bytes")) or 0.0
    link.seconds += _number(item.get("seconds")) or 0.0
    link.latency += _number(item.get("latency_seconds")) or 0.0
    link.resends += _number(item.get("resends")) or 0.0
    link.checksum_errors += _number(item.get("checksum_errors")) or 0.0
    link.queue = max(link.queue, _number(item.get("queue_depth")) or 0.0)


def _trouble(log: PoolLog, name: str, record: Mapping[str, Any], line: int) -> None:
    peer, direction = record.get("peer"), record.get("direction")
    rank = peer if _is_rank(peer) else None
    key = (name, rank, direction if direction in ("up", "down") else None)
    found = log.troubles.get(key)
    if found is None:
        if len(log.troubles) >= MAX_TROUBLES:
            return
        kept = dict(record)
        found = log.troubles[key] = Trouble(name, rank, key[2], kept, line, kept, 0)
    found.count += 1
    found.last = dict(record)
    action = record.get("action") or record.get("reason")
    if isinstance(action, str) and (action in found.actions or len(found.actions) < 16):
        found.actions[action] = found.actions.get(action, 0) + 1


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _number(value: object) -> float | None:
    """A finite number of a sane size that is not negative, or None: files are untrusted."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < MAX_NUMBER and math.isfinite(value) else None


def _needed(record: Mapping[str, Any], key: str) -> float:
    value = _number(record.get(key))
    if value is None:
        raise ValueError(f"no {key}")
    return value
