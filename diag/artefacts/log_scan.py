"""Scanning one stream of log text: blocks in, facts out, in bounded memory.

The text is cut into blocks at line ends. The catalogue proposes places in a block; only those lines are looked at in
Python. Tracebacks may continue into the next block, so one block of look-ahead is kept.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from diag.artefacts import traceback as tracebacks
from diag.artefacts.log_facts import Event, Progress, Sample, Traceback
from diag.artefacts.log_lines import ANSI, Style, clean, speaker_of, time_of
from diag.artefacts.log_progress import find_progress
from diag.artefacts.traceback import TextLine
from diag.signatures import Catalogue, Rule, verify

BLOCK = 2 << 20
#: How much of a compressed stream is asked for at once.
STEP = 16 << 10
#: A line without an end for this long is cut; the rest counts as the next piece of the same line.
MAX_LINE = 8 << 20
#: How much of a line is kept around the words that matter.
KEEP = 4096
#: Events kept per rule: the first ones, the first of each rank, and the last ones.
FIRST, LAST, RANKS = 200, 12, 4096
#: After this many verified lines of one rule in one file the rest is only counted, unverified.
COUNT_ONLY = 20_000
#: Rules whose first few lines say it all (channels, interfaces): NCCL prints them by the million.
CHATTY = "chat-"
CHATTY_COUNT, CHATTY_TRIES = 8, 4000
#: Places of one line at which one rule is tried in vain.
MAX_TRIES = 64
#: Text within this distance behind a traceback's start belongs to it.
CONTEXT = 96 << 10
TAIL = 32 << 10
#: Of each block beyond the budget so much is searched for progress.
GLANCE = 8 << 10
#: Groups that count ranks.
COUNTED = {"rank", "local", "world", "nranks", "count", "missing", "process"}
#: Addresses that stand for any host.
NO_HOST = frozenset({"0.0.0.0", "::"})
#: The watchdog's sentence as some launchers print it, in two lines; joined without moving what follows.
_FOLDED = re.compile(rb"(operation timeout: )[^\n]{0,8}\n(?:[^\n]{0,48}[\s|>m])?(WorkNCCL\([^\n]*)\n")
_ESCAPES = re.compile(ANSI.pattern.encode())


class Facts(msgspec.Struct):
    """What one scan found. Lines and offsets are relative to its start until `shift` is called."""

    events: list[Event] = []
    tracebacks: list[Traceback] = []
    progress: list[Progress] = []
    counts: dict[str, int] = {}
    tail: list[Sample] = []
    rare: list[Sample] = []
    clock: list[tuple[int, float]] = []
    lines: int = 0
    size: int = 0
    problem: str | None = None

    def shift(self, lines: int, offset: int) -> None:
        """Move all places by so many lines and bytes: this scan began in the middle of a file."""
        if not lines and not offset:
            return
        placed: list[Event | Progress | Sample] = [*self.events, *self.progress, *self.tail, *self.rare]
        for item in placed:
            item.line += lines
            item.offset += offset
        for traceback in self.tracebacks:
            node: Traceback | None = traceback
            while node is not None:
                node.line, node.end_line, node.offset = node.line + lines, node.end_line + lines, node.offset + offset
                node = node.cause
        self.clock = [(line + lines, time) for line, time in self.clock]


class Scan:
    """The state of one scan; `feed` it blocks in order, then `finish`."""

    def __init__(self, catalogue: Catalogue, style: Style, budget: int, begins: bool = True) -> None:
        self.catalogue, self.style, self.budget, self.begins = catalogue, style, budget, begins
        self.facts = Facts(events=[], tracebacks=[], progress=[], counts={}, tail=[], rare=[], clock=[])
        self._last: dict[str, list[Event]] = {}
        self._ranks: dict[str, set[int]] = {}
        self._kept: dict[str, int] = {}
        self._tries: dict[str, int] = {}
        self._pending: dict[str, Traceback] = {}
        self._before = b""
        self._parsed = 0

    def feed(self, block: bytes, ahead: bytes, last: bool) -> None:
        """One block that ends at a line end, and the beginning of what follows it."""
        if b"\0" in block[:4096]:
            block = block.replace(b"\0", b" ")  # sparse holes of a log that several writers truncated
        if b"WorkNCCL(" in block:
            block = _FOLDED.sub(rb"\1\2\n\n", block)
        facts = self.facts
        newlines = block.count(b"\n")
        first_line, first_offset = facts.lines + 1, facts.size
        counted, at_line = 0, first_line
        seen: set[tuple[int, int]] = set()
        tries: dict[tuple[int, int], int] = {}
        new: list[Event] = []
        starts: list[tuple[int, int]] = []
        for end, index in self.catalogue.matcher.propose(block):
            rule = self.catalogue.rules[index]
            count = facts.counts.get(rule.id, 0)
            line_start = block.rfind(b"\n", 0, end - 1) + 1 if end else 0
            if count >= COUNT_ONLY or rule.id.startswith(CHATTY) and self._enough(rule, count):
                facts.counts[rule.id] = count + 1
                continue
            start = max(line_start, block.rfind(b"\r", line_start, end - 1) + 1)
            if (index, start) in seen:
                continue
            stop = _stop(block, end - 1)
            low, high = max(start, end - KEEP), min(stop, end + KEEP)
            segment = block[low:high]
            if b"\x1b" in segment:
                segment = _ESCAPES.sub(b"", segment)
            match = verify(rule, segment)
            if match is None:
                tries[index, start] = failed = tries.get((index, start), 0) + 1
                if failed >= MAX_TRIES or (low, high) == (start, stop):
                    seen.add((index, start))  # the whole line was looked at, or enough of a line without an end
                continue
            seen.add((index, start))
            facts.counts[rule.id] = count + 1
            at_line += block.count(b"\n", counted, line_start) if line_start > counted else 0
            counted = max(counted, line_start)
            if rule.id == "python-traceback":
                starts.append((line_start, at_line))
                continue
            groups = {k.rstrip("0123456789"): v.decode("utf-8", "replace").strip()
                      for k, v in match.groupdict().items() if v is not None}
            if groups.get("host") in NO_HOST:
                del groups["host"]
            if not _plausible(groups):
                continue
            event = self._event(rule, block, segment, match.start(), low, line_start, at_line, first_offset)
            event.groups = groups
            if self._keep(rule, event):
                new.append(event)
        quoted = self._tracebacks(starts, block, ahead, first_offset)
        if self.begins and not first_offset:
            quoted |= self._beheaded(block, ahead)
        for event in new:
            event.quoted = event.line in quoted
        facts.events.extend(new)
        self._progress(block, first_line, first_offset, last, newlines)
        self._clock(block, first_line, newlines)
        facts.lines += newlines + int(last and bool(block) and not block.endswith(b"\n"))
        facts.size += len(block)
        if last:
            self._finish(block, first_line + newlines, first_offset)
        self._before = block[-KEEP:]

    def _enough(self, rule: Rule, count: int) -> bool:
        tries = self._tries[rule.id] = self._tries.get(rule.id, 0) + 1
        return count >= CHATTY_COUNT or tries > CHATTY_TRIES

    def _event(self, rule: Rule, block: bytes, segment: bytes, at: int, low: int, line_start: int, line: int,
               base: int) -> Event:
        text = segment.decode("utf-8", "replace")
        speaker = speaker_of(text, at, self.style)
        if speaker.rank is None and low > line_start and not speaker.mark:
            front = speaker_of(block[line_start : line_start + 200].decode("utf-8", "replace"), 0, self.style)
            if front.mark:
                speaker = msgspec.structs.replace(front, time=speaker.time or front.time)
        if speaker.time is None and rule.role != "fact":
            time = self._time_before(block, line_start)
            if time is not None:
                speaker = msgspec.structs.replace(speaker, time=time)
        return Event(rule=rule.id, line=line, offset=base + line_start, text=clean(text)[:2000], speaker=speaker)

    def _time_before(self, block: bytes, at: int) -> float | None:
        """The stamp of the nearest stamped line above, within a few kilobytes."""
        window = block[max(0, at - KEEP) : at] if at > 512 else self._before + block[:at]
        for line in reversed(window.decode("utf-8", "replace").splitlines()[-12:]):
            time = time_of(clean(line), self.style.year)
            if time is not None:
                return time
        return None

    def _keep(self, rule: Rule, event: Event) -> bool:
        kept = self._kept.get(rule.id, 0)
        rank = event.speaker.rank
        ranks = self._ranks.setdefault(rule.id, set())
        if kept < FIRST or (rank is not None and rank not in ranks and len(ranks) < RANKS):
            self._kept[rule.id] = kept + 1
            if rank is not None:
                ranks.add(rank)
            return True
        last = self._last.setdefault(rule.id, [])
        last.append(event)
        if len(last) > LAST:
            del last[0]
        return False

    def _tracebacks(self, starts: list[tuple[int, int]], block: bytes, ahead: bytes, base: int) -> set[int]:
        """Parse the tracebacks that begin in this block; returns the lines that only quote code."""
        quoted: set[int] = set()
        for at, number in starts:
            lines = _lines(block, ahead, at, number, base, back=4)
            index = next(i for i, line in enumerate(lines) if line.number == number)
            speaker = speaker_of(lines[index].text, lines[index].text.find(tracebacks.START), self.style)
            if speaker.time is None:
                speaker = msgspec.structs.replace(speaker, time=self._time_before(block, at))
            found, code = tracebacks.parse(lines, index, speaker)
            quoted |= code
            if found is None:
                continue
            if any(tb.line == found.line for tb in self.facts.tracebacks[-40:]):
                continue  # two starts glued together led to one exception line
            cause = self._pending.pop(speaker.mark, None)
            if cause is not None and cause.end_line < number <= cause.end_line + 8:
                found.cause = cause
                self.facts.tracebacks = [tb for tb in self.facts.tracebacks if tb is not cause]
            if len(self.facts.tracebacks) < 2000:
                self.facts.tracebacks.append(found)
            if tracebacks.chained(lines, found.end_line):
                self._pending[speaker.mark] = found
        return quoted

    def _beheaded(self, block: bytes, ahead: bytes) -> set[int]:
        """The traceback that a log begins in the middle of; returns the lines that only quote code."""
        lines = _lines(block, ahead, 0, 1, 0, back=0)
        found, code = tracebacks.beheaded(lines, speaker_of(lines[0].text, 0, self.style))
        if found is None or any(tb.line == found.line for tb in self.facts.tracebacks):
            return set()
        self.facts.tracebacks.insert(0, found)
        return code

    def _progress(self, block: bytes, first_line: int, base: int, last: bool, newlines: int) -> None:
        """All of it while the budget lasts; then the beginning of each block, and the end of the log."""
        facts = self.facts
        size, half = len(block), self.budget // 2
        if self._parsed + size <= self.budget:
            pieces = [(0, size)]
        else:
            first = min(size, max(half - self._parsed, min(self.budget // 16, GLANCE)))
            pieces = [(0, first)]
            if last:
                pieces.append((max(first, size - half), size))
        for low, high in pieces:
            if low:
                low = block.rfind(b"\n", 0, low) + 1
            if high < size:
                high = max(low, block.rfind(b"\n", 0, high) + 1)  # a torn line has lost fields
            self._parsed += high - low
            found = find_progress(block[low:high], self.style)
            if found:
                lead = first_line + (newlines - block.count(b"\n", low) if low else 0)
                for item in found:
                    item.line += lead
                    item.offset += base + low
                facts.progress.extend(found)

    def _clock(self, block: bytes, first_line: int, newlines: int) -> None:
        for piece, line in ((block[:2000], first_line), (block[-4000:], None)):
            lines = piece.decode("utf-8", "replace").splitlines()
            for index, text in (enumerate(lines[:12]) if line is not None else reversed(list(enumerate(lines)))):
                time = time_of(clean(text), self.style.year)
                if time is not None:
                    number = first_line + index if line is not None else first_line + newlines - (
                        len(lines) - 1 - index) - 1
                    self.facts.clock.append((max(number, first_line), time))
                    break

    def so_far(self, tail: bytes) -> Facts:
        """The facts until here of a log that is still being written; `tail` is the end of what was fed.

        The lists are those of the scan, to be read before it is fed again.
        """
        from diag.artefacts.log_rare import summarise

        facts = self.facts
        last, rare = summarise(tail, facts.lines - tail.count(b"\n") + 1, facts.size - len(tail), self.style)
        events = [*facts.events, *(event for kept in self._last.values() for event in kept)]
        return msgspec.structs.replace(facts, tail=last, rare=rare,
                                       events=sorted(events, key=lambda event: (event.line, event.offset)))

    def _finish(self, block: bytes, end_line: int, base: int) -> None:
        facts = self.facts
        for events in self._last.values():
            facts.events.extend(events)
        facts.events.sort(key=lambda event: (event.line, event.offset))
        low = max(0, len(block) - TAIL)
        low = block.rfind(b"\n", 0, low) + 1 if low else 0
        number = end_line - block.count(b"\n", low)
        from diag.artefacts.log_rare import summarise

        facts.tail, facts.rare = summarise(block[low:], number, base + low, self.style)


def _stop(block: bytes, at: int) -> int:
    """The end of the segment that holds offset `at`: the next CR or LF."""
    newline = block.find(b"\n", at)
    newline = len(block) if newline < 0 else newline
    carriage = block.find(b"\r", at, newline)
    return newline if carriage < 0 else carriage


def _lines(block: bytes, ahead: bytes, at: int, number: int, base: int, back: int) -> list[TextLine]:
    """The lines around a traceback's start at offset `at`, cleaned, a few before and CONTEXT bytes after."""
    low = at
    for _ in range(back):
        if low <= 0:
            break
        low = block.rfind(b"\n", 0, low - 1) + 1
    text = block[low : at + CONTEXT]
    if len(text) < at - low + CONTEXT:
        text += ahead[: CONTEXT]
    number -= block.count(b"\n", low, at)
    result, offset = [], base + low
    for raw in text.split(b"\n"):
        line = raw[:KEEP].rsplit(b"\r", 1)[-1] if b"\r" in raw[:KEEP].rstrip(b"\r") else raw[:KEEP]
        result.append(TextLine(number, offset, clean(line.decode("utf-8", "replace"))))
        number += 1
        offset += len(raw) + 1
    return result


def blocks(stream: BinaryIO, limit: int | None = None, size: int = BLOCK, rest: list[bytes] | None = None,
           ) -> Iterator[bytes]:
    """Blocks that end at line ends (the last one may not). With `limit`, the lines that begin within so many bytes;
    what was read beyond them is put into `rest`. Damage of the stream is raised after what came before it."""
    carry, done = b"", 0
    reads = _reads(stream, size)
    while True:
        new = next(reads, b"")
        data = carry + new if carry else new
        if limit is not None and done + len(data) >= limit:
            cut = data.find(b"\n", max(0, limit - done - 1)) + 1
            if cut or not new or len(data) > MAX_LINE:
                yield data[:cut] if cut else data
                if rest is not None and cut:
                    rest.append(data[cut:])
                return
            carry = data
            continue
        if not new:
            if data:
                yield data
            next(reads, None)
            return
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) < MAX_LINE:
            carry = data
            continue
        cut = cut or len(data)
        yield data[:cut]
        done += cut
        carry = data[cut:]


def _plausible(groups: dict[str, str]) -> bool:
    """False where a number cannot be meant: ranks beyond a million, digits without end in a damaged line."""
    return not any(len(text) > (6 if name in COUNTED else 20) and text.isdigit() for name, text in groups.items())


def _reads(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Pieces of about `size` bytes. When the stream turns out to be damaged: what was read, an empty piece, the error.

    Compressed streams are read in small steps, because a failing read takes its whole step with it.
    """
    from diag.errors import ArtefactError

    step = size if isinstance(getattr(stream, "raw", None), io.FileIO) else STEP
    while True:
        parts: list[bytes] = []
        held = 0
        try:
            while held < size and (part := stream.read(min(step, size - held))):
                parts.append(part)
                held += len(part)
        except (ArtefactError, OSError):
            yield b"".join(parts)
            yield b""
            raise
        if not parts:
            return
        yield parts[0] if len(parts) == 1 else b"".join(parts)


def scan(stream: BinaryIO, catalogue: Catalogue, style: Style, budget: int, limit: int | None = None,
         begins: bool = True) -> Facts:
    """The facts of a stream of text. Damage of the stream ends it: `problem` says so, what came before is kept."""
    from diag.errors import ArtefactError

    state = Scan(catalogue, style, budget, begins)
    rest: list[bytes] = []
    source = blocks(stream, limit, rest=rest)
    current: bytes | None = None
    problem = None
    while True:
        try:
            following = next(source, None)
        except (ArtefactError, OSError) as error:
            following, problem = None, str(error)
        if current is not None:
            state.feed(current, following or b"".join(rest), following is None)
        if following is None:
            break
        current = following
    if current is None:
        state.feed(b"", b"", True)
    state.facts.problem = problem
    return state.facts


__all__ = ["Facts", "blocks", "scan"]
