"""How each format is read on: metrics, events, console logs, tables, TensorBoard files; others as a whole."""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from diag.artefacts import Artefact, Reader, Source, csv_table, memory_source, metrics, run_events, tensorboard_events
from diag.artefacts import log as log_reader
from diag.artefacts.log_lines import style_of
from diag.artefacts.log_progress import grad_norm_of, loss_of
from diag.artefacts.log_scan import GLANCE, TAIL, Scan
from diag.artefacts.metric_table import MetricTable, Series
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_events import add_record, empty_log
from diag.series_names import meaning_of
from diag.signatures import Catalogue, load_catalogue
from diag.watch.tails import Growth, Point, Tail, WholeTail

BLOCK = 2 << 20
#: Of what is long (a log that was there before, a burst) so much at its beginning and its end is searched for progress
#: line by line.
FULL_BEGIN, FULL_END = 1 << 20, 4 << 20
#: A line that is longer than this and still grows is a progress bar.
BAR_BYTES = 2048
#: Progress kept of a log: the beginning, and the latest.
FIRST_PROGRESS, LAST_PROGRESS = 500, 5000
#: A traceback that may still be printed is waited for so long.
HOLD_SECONDS = 1.5
#: Steps of each rank that are kept singly, to compare ranks.
RECENT_STEPS = 64
_TRACEBACK = b"Traceback (most recent call last)"
#: Events that change what is to be thought of the run.
_TELLING = {"exception", "interrupted", "stalled", "signal", "end", "finished", "spike", "start", "recording_stopped",
            "pool_peer_lost", "pool_timeout", "pool_checksum_error", "pool_version_mismatch"}


class MetricsTail(Tail):
    """metrics.jsonl, or any JSON Lines of numbers."""

    def __init__(self, source: Source, reader: Reader, info: os.stat_result) -> None:
        super().__init__(source, reader, info)
        self.log = MetricsLog(path=source.path, format=metrics.NAME, lines=0)
        self.number = self.records = 0
        self._keys: tuple[int, dict[str, Series]] = (0, {})

    def feed(self, block: bytes, growth: Growth, now: float) -> None:
        for line in block.splitlines():
            self.number += 1
            if not line.strip():
                continue
            try:
                if metrics.add_line(self.log, line, self.number, self.records):
                    self.records += 1
                    growth.points.append(self._point())
            except (ValueError, OverflowError):
                continue
        self.log.lines = self.number

    def _point(self) -> Point:
        if self._keys[0] != len(self.log.series):
            named = {meaning.name: series for key, series in self.log.series.items()
                     if (meaning := meaning_of(key)) is not None and meaning.name in ("loss", "grad_norm", "time")}
            self._keys = (len(self.log.series), named)
        values = {name: series.values[-1] for name, series in self._keys[1].items()
                  if series.lines and series.lines[-1] == self.number}
        step = self.log.last_step if self.log.steps_known else None
        return Point(step, values.get("loss"), values.get("grad_norm"), values.get("time"))

    def artefact(self) -> Artefact | None:
        self.log.path, self.log.bytes = self.path, self.offset
        return self.log if self.records else None


class EventsTail(Tail):
    """One rank's events. `recent` [step] holds what each phase and module took in the latest measured steps."""

    def __init__(self, source: Source, reader: Reader, info: os.stat_result) -> None:
        super().__init__(source, reader, info)
        self.log = empty_log(source)
        self.number = self.good = 0
        self.spans: OrderedDict[int, dict[str, float]] = OrderedDict()
        self.modules: OrderedDict[int, dict[str, float]] = OrderedDict()

    def feed(self, block: bytes, growth: Growth, now: float) -> None:
        last = self.log.last_step
        for line in block.splitlines():
            self.number += 1
            try:
                record = msgspec.json.decode(line)
                add_record(self.log, record, self.number)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
            self.good += 1
            self._recent(record)
            if record.get("event") in _TELLING:
                growth.urgent = True
        self.log.lines = self.number
        if self.log.last_step is not None and self.log.last_step != last:
            growth.points.append(Point(self.log.last_step, None, None, self.log.last_time))

    def _recent(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        if record.get("event") in ("start", "resume"):
            self.spans.clear()
            self.modules.clear()
        if not isinstance(step, int):
            return
        if isinstance(name := record.get("span"), str):
            entry = self.spans.setdefault(step, {})
            entry[name] = entry.get(name, 0.0) + float(record["seconds"])
        elif isinstance(times := record.get("times"), dict):
            self.modules[step] = {str(key): float(value) for key, value in times.items()}
        for kept in (self.spans, self.modules):
            while len(kept) > RECENT_STEPS:
                kept.popitem(last=False)

    def artefact(self) -> Artefact | None:
        self.log.path, self.log.bytes = self.path, self.offset
        return self.log if self.good else None


class LogTail(Tail):
    """A console log of any program, scanned as the post-mortem scans it."""

    catalogue: Catalogue | None = None

    def __init__(self, source: Source, reader: Reader, info: os.stat_result) -> None:
        super().__init__(source, reader, info)
        if LogTail.catalogue is None:
            LogTail.catalogue = load_catalogue(source.options.signatures)
        self.scan = Scan(LogTail.catalogue, style_of(source.head), 1 << 62)
        self.end = b""
        self.held = b""
        self.held_since = 0.0

    def feed(self, block: bytes, growth: Growth, now: float) -> None:
        data, self.held = self.held + block, b""
        at = data.rfind(_TRACEBACK, max(0, len(data) - TAIL))
        if at >= 0 and not self.behind and len(data) < BLOCK:
            at = data.rfind(b"\n", 0, at) + 1
            self.held, self.held_since = data[at:], now
            data = data[:at]
        self._scan(data, growth)

    def whole(self, data: bytes) -> int:
        """Whole lines; of a progress bar that redraws itself for long, its whole redraws."""
        cut = super().whole(data)
        return cut if cut or len(data) < BAR_BYTES else data.rfind(b"\r") + 1

    def settle(self, growth: Growth, now: float) -> None:
        if self.held and now - self.held_since >= HOLD_SECONDS:
            data, self.held = self.held, b""
            self._scan(data, growth)
            growth.changed = growth.urgent = True

    def _scan(self, data: bytes, growth: Growth) -> None:
        at = 0
        while at < len(data):
            stop = data.rfind(b"\n", at, at + BLOCK) + 1 or data.find(b"\n", at) + 1 or len(data)
            self._block(data[at:stop], growth)
            at = stop

    def _block(self, block: bytes, growth: Growth) -> None:
        facts = self.scan.facts
        whole = facts.size < FULL_BEGIN or facts.size > self.size - FULL_END
        self.scan.budget = 1 << 62 if whole else 16 * GLANCE
        events, known = len(facts.events) + len(facts.tracebacks), len(facts.progress)
        self.scan.feed(block, b"", False)
        self.end = (self.end + block)[-TAIL:]
        if len(self.end) == TAIL:
            self.end = self.end[self.end.find(b"\n") + 1 :]
        growth.urgent |= len(facts.events) + len(facts.tracebacks) > events
        for item in facts.progress[known:]:
            growth.points.append(Point(item.step if item.step >= 0 else None, loss_of(item), grad_norm_of(item),
                                       item.speaker.time))
        if len(facts.progress) > FIRST_PROGRESS + 2 * LAST_PROGRESS:
            del facts.progress[FIRST_PROGRESS:-LAST_PROGRESS]
        if len(facts.clock) > FIRST_PROGRESS + 2 * LAST_PROGRESS:
            del facts.clock[FIRST_PROGRESS:-LAST_PROGRESS]

    def artefact(self) -> Artefact | None:
        assert LogTail.catalogue is not None
        if not self.scan.facts.lines:
            return None
        source = replace(self.source, path=self.path, name=Path(self.path).name, bytes=self.offset)
        return log_reader.log_of(source, [self.scan.so_far(self.end)], LogTail.catalogue.by_id)


class PieceTail(Tail):
    """A table that is read in pieces, each of which its reader takes for a small file of its own."""

    def __init__(self, source: Source, reader: Reader, info: os.stat_result) -> None:
        super().__init__(source, reader, info)
        self.table: MetricTable | None = None
        self.front = b""
        self.records = 0

    def feed(self, block: bytes, growth: Growth, now: float) -> None:
        piece = self.reader.read(memory_source(self.front + block, self.source.name))
        count = self.count(block)
        if isinstance(piece, MetricTable):
            self._join(piece, growth)
        self.records += count

    def count(self, block: bytes) -> int:
        """Lines or records of a whole block."""
        return block.count(b"\n")

    def _join(self, piece: MetricTable, growth: Growth) -> None:
        base = self.records - (1 if self.front else 0)
        if self.table is None:
            self.table = MetricTable(path=self.path, format=piece.format, lines_known=piece.lines_known,
                                     steps_known=piece.steps_known, created=piece.created, style=piece.style,
                                     joins=f"{piece.format}:{self.source.directory}" if piece.joins else None)
        known: dict[int, dict[str, float]] = {}
        for key, series in piece.series.items():
            column = self.table.column(key)
            shift = 0 if piece.steps_known else len(column.steps)
            meaning = meaning_of(key, piece.style)
            for step, line, value in zip(series.steps, series.lines, series.values, strict=True):
                column.add(step + shift, line + base, value)
                if meaning is not None and meaning.name in ("loss", "grad_norm", "time"):
                    known.setdefault(step, {}).setdefault(meaning.name, value)
        for step, values in sorted(known.items()):
            growth.points.append(Point(step if piece.steps_known else None, values.get("loss"),
                                       values.get("grad_norm"), values.get("time")))

    def artefact(self) -> Artefact | None:
        if self.table is not None:
            self.table.path, self.table.bytes = self.path, self.offset
            self.table.lines = self.records if self.table.lines_known else None
        return self.table


class CsvTail(PieceTail):
    """A CSV table: every piece is read below the header."""

    def feed(self, block: bytes, growth: Growth, now: float) -> None:
        super().feed(block, growth, now)
        if not self.front:
            self.front = block[: block.find(b"\n") + 1]


class EventFileTail(PieceTail):
    """A TensorBoard event file: records of a stated length."""

    def whole(self, data: bytes) -> int:
        return self._walk(data)[0]

    def count(self, block: bytes) -> int:
        return self._walk(block)[1]

    @staticmethod
    def _walk(data: bytes) -> tuple[int, int]:
        at = number = 0
        while at + 12 <= len(data):
            end = at + 12 + struct.unpack_from("<Q", data, at)[0] + 4
            if end > len(data):
                break
            at, number = end, number + 1
        return at, number


_TAILS: dict[str, type[Tail]] = {
    metrics.NAME: MetricsTail, run_events.NAME: EventsTail, log_reader.NAME: LogTail, csv_table.NAME: CsvTail,
    tensorboard_events.NAME: EventFileTail,
}


def tail_of(source: Source, reader: Reader, info: os.stat_result) -> Tail:
    """The tail that fits a format."""
    kind = WholeTail if source.compression is not None else _TAILS.get(reader.NAME, WholeTail)
    return kind(source, reader, info)
