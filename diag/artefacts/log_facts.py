"""What the log reader says about a console log: plain facts with their place, no judgement."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from diag.artefacts.metric_table import HasSeries, MetricTable
from diag.signatures.schema import Rule


class Speaker(msgspec.Struct, omit_defaults=True, frozen=True):
    """Who printed a line, as far as the line itself says."""

    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    device: int | None = None
    time: float | None = None
    #: how the line was marked ("[rank3]:", "[default1]:"); lines of one writer share it
    mark: str = ""


class Event(msgspec.Struct, omit_defaults=True):
    """One line that a signature matched. `line` is 1-based, `offset` the byte offset of the line in the text."""

    rule: str
    line: int
    offset: int
    text: str
    speaker: Speaker
    groups: dict[str, str] = {}
    #: set by the reader on lines inside a traceback's source listing: code quoted, not a message printed
    quoted: bool = False


class Frame(msgspec.Struct, omit_defaults=True):
    """One frame of a traceback."""

    file: str
    line: int
    function: str = ""
    code: str = ""


class Traceback(msgspec.Struct, omit_defaults=True):
    """One Python exception with its frames, oldest first. `cause` is what it was chained to (raised earlier)."""

    type: str
    message: str
    line: int
    end_line: int
    offset: int
    text: str
    speaker: Speaker
    frames: list[Frame] = []
    cause: Traceback | None = None
    #: number of the process when a parent reports it ("-- Process 3 terminated with the following error")
    process: int | None = None

    @property
    def origin(self) -> Traceback:
        """The exception that was raised first in the chain."""
        return self.cause.origin if self.cause is not None else self


class Progress(msgspec.Struct, omit_defaults=True):
    """One report of progress: the step, and the numbers printed with it under their own names."""

    step: int
    line: int
    offset: int
    text: str
    speaker: Speaker
    total: int | None = None
    values: dict[str, float] = {}
    kind: str = ""
    #: seconds since the beginning of its own bar
    elapsed: float | None = None


class Sample(msgspec.Struct, omit_defaults=True):
    """One line kept for its own sake: near the end, or rare."""

    line: int
    offset: int
    text: str
    speaker: Speaker
    #: how many lines of the same shape were seen in the parts that were looked at
    count: int = 1


@dataclass(kw_only=True)
class Log(HasSeries):
    """A console log, kernel log or scheduler log, reduced to its facts in bounded memory."""

    events: list[Event] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    #: how often each rule matched; more than the events kept
    counts: dict[str, int] = field(default_factory=dict)
    #: the last lines of the log and the rare ones, for a verdict "unknown"
    tail: list[Sample] = field(default_factory=list)
    rare: list[Sample] = field(default_factory=list)
    #: times of lines along the log (line, seconds), thinned
    clock: list[tuple[int, float]] = field(default_factory=list)
    #: from the file's name or folder ("rank_3.log", "attempt_0/3/stderr.log", "node-07.out")
    name_rank: int | None = None
    name_local_rank: int | None = None
    name_host: str | None = None
    attempt: int | None = None
    size: int = 0
    #: every number printed with a step, when the reader was asked for series instead of facts
    table: MetricTable | None = None
    #: the rules behind the events, by id
    rules: dict[str, Rule] = field(default_factory=dict, repr=False)
