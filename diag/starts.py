"""One incident at a time: of a run directory that was started several times, only the last start is judged.

A job that is preempted, resumed and then killed leaves the lines of both ends in the same files. The earlier end is
not what the user asks about, and must not become the root of a report about the later one. What is cut:

- logs that say where they were started (`pdtrain-start`): everything above the last such line;
- a rank's events: everything before its last "start"; a rank that took no part in the last start: all of it;
- torchrun's folders of earlier launches and attempts, and dumps that the recorder has set aside
  (`dumps/earlier_<n>/`). The folders of the last one may hold nothing that was read, after a good end: the events tell
  whether a start that came after a folder was made was not the last.

A run that changes the split of its pools ends all ranks in good order and starts them again: that is one start. A
rank's events are joined over it, and what its processes said before it is cut like that of any earlier start.

Metrics stay whole: a loss is judged over the restarts. Logs of other programs know their attempts themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import PurePath

from diag.artefacts import Artefact
from diag.artefacts.log_facts import Log
from diag.artefacts.run_events import EventLog, RunEvent, regroups

START_RULE = "pdtrain-start"
#: Ranks of one start begin within this time of each other; one that began earlier took no part in it.
SAME_START_SECONDS = 600.0
#: pdtrain train names torchrun's folder by the UTC time of the launch.
_LAUNCH = re.compile(r"^(\d{8}T\d{6}Z)-")
_ATTEMPT = re.compile(r"^attempt_(\d{1,6})$")
_SET_ASIDE = re.compile(r"^earlier_\d+$")


def last_starts(items: Sequence[Artefact]) -> tuple[list[Artefact], list[str]]:
    """`items` without what belongs to earlier starts, and a note for the report about each run it was cut from."""
    events: dict[PurePath, list[EventLog]] = {}
    for item in items:
        if isinstance(item, EventLog):
            events.setdefault(_root(item.path), []).append(item)
    began = {root: _began(logs) for root, logs in events.items()}
    launches, ended = _newest_launches(items), {root: _earlier(logs) for root, logs in events.items()}
    attempts = {root: _attempt(logs) for root, logs in events.items()}
    joints = {root: max((_joints(log.events) for log in logs), default=0) for root, logs in events.items()}
    earlier: dict[PurePath, int] = {}
    kept: list[Artefact] = []
    for item in items:
        root = next((root for root in began if root in PurePath(item.path).parents), None)
        cut: Artefact | None = item
        if isinstance(item, Log):
            cut = _cut_log(item)
        elif isinstance(item, EventLog):
            cut = _cut_events(item, began[_root(item.path)])
        if _of_earlier_launch(item, launches, ended.get(root, ()) if root is not None else ()) or (
                root is not None and (_set_aside(item) or _of_earlier_attempt(item, attempts[root]))):
            cut = None
        if cut is not item:
            place = root if root is not None else PurePath(item.path)
            joined = joints.get(place, 0)
            earlier[place] = max(earlier.get(place, 0), _starts(item) - 1 - joined, 0 if joined else 1)
        if cut is not None:
            kept.append(cut)
    notes = [f"earlier starts: {place} was started {count + 1} times or more; only the last start is judged"
             for place, count in earlier.items() if count]
    notes += [f"regrouped: {root} changed the split of its pools {count} time{'s' if count > 1 else ''}, which is one "
              "run; its logs, and the times of its pools, are judged from the last change on"
              for root, count in joints.items() if count]
    return kept, notes


def _root(path: str) -> PurePath:
    """The run directory of `<run>/events/rank_<R>.jsonl`."""
    return PurePath(path).parent.parent


def _last_start(log: EventLog) -> float | None:
    return next((event.time for event in reversed(log.events) if event.name == "start" and event.time is not None),
                None)


def _began(logs: list[EventLog]) -> float | None:
    """When the last start of a run began, in Unix seconds."""
    starts = [start for log in logs if (start := _last_start(log)) is not None]
    return min((start for start in starts if max(starts) - start <= SAME_START_SECONDS), default=None)


def _earlier(logs: list[EventLog]) -> list[float]:
    """When the starts before the last one began: of rank 0, whose clock is the launcher's."""
    starts = [[event.time for event in log.events if event.name == "start" and event.time is not None]
              for log in logs if log.ranks == [0]]
    return max(starts, key=len, default=[])[:-1]


def _attempt(logs: list[EventLog]) -> int:
    """The number of torchrun's last attempt where torchrun itself started the ranks again, from 0."""
    for log in logs:
        for trouble in log.pool.trouble("pool_restart") if log.pool is not None else ():
            start = trouble.first.get("start")
            if isinstance(start, int) and trouble.first.get("failures") == []:
                return start - 1
    return 0


def _cut_events(log: EventLog, began: float | None) -> EventLog | None:
    mine = _last_start(log)
    if began is not None and mine is not None and mine < began:
        return None
    last = max((index for index, event in enumerate(log.events) if event.name == "start"), default=0)
    kept = log.events[last:]
    while regroups(log.events[:last]):  # the start before ended to go on with another split: without its end, one start
        end = next(index for index in range(last - 1, -1, -1) if log.events[index].name == "regrouping")
        last = max((index for index, event in enumerate(log.events[:end]) if event.name == "start"), default=0)
        kept = log.events[last:end] + [event for event in kept if event.name != "start"]
    return replace(log, events=kept) if len(kept) < len(log.events) else log


def _joints(events: list[RunEvent]) -> int:
    """How often the last start of a rank went on in another process with another split."""
    starts = [index for index, event in enumerate(events) if event.name == "start"]
    count = 0
    while count < len(starts) and regroups(events[: starts[-1 - count]]):
        count += 1
    return count


def _cut_log(log: Log) -> Log:
    """The log from its last start on. Progress stays: the loss before a restart explains the loss after it."""
    line = max((event.line for event in log.events if event.rule == START_RULE), default=0)
    if not any(event.line < line for event in log.events) and not any(tb.line < line for tb in log.tracebacks):
        return log
    return replace(log, events=[e for e in log.events if e.line >= line],
                   tracebacks=[t for t in log.tracebacks if t.line >= line],
                   tail=[s for s in log.tail if s.line >= line], rare=[s for s in log.rare if s.line >= line],
                   clock=[entry for entry in log.clock if entry[0] >= line])


def _starts(item: Artefact) -> int:
    if isinstance(item, EventLog):
        return sum(event.name == "start" for event in item.events)
    return sum(event.rule == START_RULE for event in item.events) if isinstance(item, Log) else 0


def _launch(path: str) -> tuple[PurePath, float] | None:
    """The folder that holds torchrun's folders, and when this one was made, in Unix seconds."""
    for folder in PurePath(path).parents:
        if (stamp := _LAUNCH.match(folder.name)) is not None:
            try:
                made = datetime.strptime(stamp[1], "%Y%m%dT%H%M%SZ")
            except ValueError:
                return None
            return folder.parent, made.replace(tzinfo=UTC).timestamp()
    return None


def _newest_launches(items: Sequence[Artefact]) -> dict[PurePath, float]:
    newest: dict[PurePath, float] = {}
    for item in items:
        if (found := _launch(item.path)) is not None:
            newest[found[0]] = max(newest.get(found[0], found[1]), found[1])
    return newest


def _of_earlier_launch(item: Artefact, newest: dict[PurePath, float], earlier: Sequence[float]) -> bool:
    """Whether a newer launch is known, or a start that came after this one was not the last."""
    found = _launch(item.path)
    return found is not None and (found[1] < newest[found[0]] or any(found[1] <= start for start in earlier))


def _of_earlier_attempt(item: Artefact, last: int) -> bool:
    attempt = next((_ATTEMPT.match(folder.name) for folder in PurePath(item.path).parents
                    if _ATTEMPT.match(folder.name)), None)
    return attempt is not None and int(attempt[1]) < last


def _set_aside(item: Artefact) -> bool:
    folder = PurePath(item.path).parent
    return bool(_SET_ASIDE.match(folder.name)) and folder.parent.name == "dumps"
