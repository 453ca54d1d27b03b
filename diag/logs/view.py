"""All logs of a run as one: events with their rank and host resolved, in a partial order of time.

Within one file lines are ordered by their number. Between files time stamps decide when both lines have one and they
differ by more than the skew allowed; otherwise the order is unknown, and unknown is never taken for "before".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from diag.artefacts import Artefacts
from diag.artefacts.log_facts import Event, Log, Progress, Traceback
from diag.artefacts.log_lines import show_time
from diag.artefacts.traceback import WRAPPERS, short_type
from diag.identity import Block, Identity, identify, summary_blocks
from diag.schema import Evidence
from diag.signatures import Rule

#: Clocks of two hosts may differ by this many seconds without saying anything about order.
SKEW_SECONDS = 2.0
#: The exception that Python ignores stands at most this many lines below the words that say so.
IGNORED_LINES = 60


@dataclass(frozen=True, slots=True)
class Place:
    """A point in the run: one line of one log."""

    log: int
    line: int
    time: float | None = None

    def before(self, other: Place) -> bool | None:
        """Whether this is earlier; None when that is not known."""
        if self.log == other.log:
            return self.line < other.line
        if self.time is None or other.time is None or abs(self.time - other.time) <= SKEW_SECONDS:
            return None
        return self.time < other.time


@dataclass(slots=True)
class Item:
    """An event with what the identity tables add."""

    event: Event
    rule: Rule
    place: Place
    rank: int | None
    host: str | None
    log: Log

    @property
    def line(self) -> int:
        return self.event.line

    @property
    def groups(self) -> dict[str, str]:
        return self.event.groups

    def evidence(self) -> Evidence:
        return evidence(self.log, self.event.line, self.event.offset, self.event.text, self.event.speaker.time,
                        self.rank)


@dataclass(slots=True)
class Raised:
    """A traceback with what the identity tables add."""

    traceback: Traceback
    place: Place
    rank: int | None
    host: str | None
    log: Log

    @property
    def short(self) -> str:
        return short_type(self.traceback.type)

    @property
    def wrapper(self) -> bool:
        return self.short in WRAPPERS

    def evidence(self) -> Evidence:
        tb = self.traceback
        return evidence(self.log, tb.line, tb.offset, tb.text, tb.speaker.time, self.rank)


def evidence(log: Log, line: int, offset: int, text: str, time: float | None, rank: int | None) -> Evidence:
    """One line of a log as evidence."""
    return Evidence(path=log.path, line=line, offset=offset, text=text[:600], rank=rank,
                    time=show_time(time) if time is not None else None)


@dataclass
class View:
    """Everything the logs say, joined."""

    logs: list[Log]
    identity: Identity
    items: list[Item]
    raised: list[Raised]
    blocks: list[tuple[int, Block]] = field(default_factory=list)
    #: everything that was read, logs and others
    artefacts: Artefacts | None = None

    @cached_property
    def by_rule(self) -> dict[str, list[Item]]:
        table: dict[str, list[Item]] = {}
        for item in self.items:
            table.setdefault(item.rule.id, []).append(item)
        return table

    def of(self, *rules: str) -> list[Item]:
        """The events of these rules, in reading order, without lines that only quote source code."""
        found = [item for rule in rules for item in self.by_rule.get(rule, ()) if not item.event.quoted]
        return sorted(found, key=lambda item: (item.place.log, item.line)) if len(rules) > 1 else found

    @property
    def world(self) -> int | None:
        return self.identity.world

    @cached_property
    def progress(self) -> list[tuple[int, Progress]]:
        """Training progress (not bars of preparation or summaries) with its log, in reading order."""
        return [(index, p) for index, log in enumerate(self.logs) for p in log.progress if is_training(p)]

    @cached_property
    def ignored(self) -> list[Raised]:
        """The tracebacks under "Exception ignored in", of destructors: the nearest below each such line, no other."""
        found: list[Raised] = []
        for item in self.of("ignored-exception"):
            below = [r for r in self.raised if r.place.log == item.place.log
                     and r.traceback.speaker.mark == item.event.speaker.mark
                     and 0 < r.traceback.line - item.line < IGNORED_LINES]
            found += sorted(below, key=lambda raised: raised.traceback.line)[:1]
        return found

    def progress_after(self, place: Place) -> int:
        """How many progress lines of the same log come after a place."""
        return sum(1 for index, p in self.progress if index == place.log and p.line > place.line)

    def last_progress(self) -> tuple[int, Progress] | None:
        """The last training progress of the run: by time where known, else of the log that has most of it."""
        if not self.progress:
            return None
        timed = [entry for entry in self.progress if entry[1].speaker.time is not None]
        if timed and len({index for index, _ in self.progress}) > 1:
            return max(timed, key=lambda entry: entry[1].speaker.time or 0.0)
        counts: dict[int, int] = {}
        for index, _ in self.progress:
            counts[index] = counts.get(index, 0) + 1
        most = max(counts, key=lambda index: counts[index])
        return next(entry for entry in reversed(self.progress) if entry[0] == most)


def is_training(item: Progress) -> bool:
    """Whether a progress line belongs to the training loop and not to data preparation, evaluation or a summary."""
    if item.kind == "summary":
        return False
    if item.kind.startswith("bar"):
        name = item.kind[4:].lower()
        return bool(item.values) or any(word in name for word in ("train", "epoch", "step", "iter"))
    return True


def view_of(artefacts: Artefacts) -> View:
    """The view over all logs among `artefacts`; made once for all detectors."""
    known = artefacts.__dict__.get("log_view")
    if isinstance(known, View):
        return known
    view = make_view(artefacts.of(Log))
    view.artefacts = artefacts
    artefacts.__dict__["log_view"] = view
    return view


def make_view(logs: list[Log]) -> View:
    """Join the facts of `logs`."""
    who = identify(logs)
    items: list[Item] = []
    raised: list[Raised] = []
    blocks: list[tuple[int, Block]] = []
    for index, log in enumerate(logs):
        rules = log.rules
        for event in log.events:
            rule = rules.get(event.rule)
            if rule is None:
                continue
            items.append(Item(event, rule, Place(index, event.line, event.speaker.time), who.rank(event.speaker, log),
                              who.host(event.speaker, log) or _leading_host(event.text, who), log))
        for tb in log.tracebacks:
            rank = who.rank(tb.speaker, log)
            if rank is None and tb.process is not None:
                rank = who.rank_from_local(tb.process, None)
                if rank is None and who.one_host():
                    rank = tb.process  # mp.spawn numbers its processes as ranks on one host
            raised.append(Raised(tb, Place(index, tb.line, tb.speaker.time), rank, who.host(tb.speaker, log), log))
        blocks.extend((index, replace(block, host=who.named(block.host))) for block in summary_blocks(log))
    return View(logs, who, items, raised, blocks)


def _leading_host(text: str, who: Identity) -> str | None:
    """A known host's name at the very front of a line ("node-3: ...", "node-3 | ...")."""
    found = re.match(r"[\[(<]?([A-Za-z][\w.-]*[\w])[\])>]?(?:\s*[:|]|\s+\S+\[\d+\]:)\s", text)
    return found[1] if found is not None and found[1] in who.hosts else None


def iter_before(items: list[Item], place: Place, lines: int) -> Iterator[Item]:
    """Items of the same log within so many lines before a place, nearest first."""
    for item in reversed(items):
        if item.place.log == place.log and 0 <= place.line - item.line <= lines:
            yield item
