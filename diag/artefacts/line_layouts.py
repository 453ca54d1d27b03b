"""Layouts of progress lines, learned from the first lines of each: one regular expression per line from then on.

`log_progress.parse_line` knows what a progress line of any program means, at some ten microseconds a line. A run prints
few layouts and repeats each a million times, so the layout of a line that was understood is learned: its numbers become
groups, the rest stays literal. Further lines of that layout cost one match. The first lines of each layout are parsed
both ways, and a layout that disagrees is given up. Lines of ranks are told apart by their marks, which stay literal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diag.artefacts.log_facts import Progress, Speaker
from diag.artefacts.log_lines import ANSI, Style, clean
from diag.artefacts.log_progress import parse_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

NUMBER = rb"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|(?<![A-Za-z])[-+]?(?:nan|inf|NaN|Inf|NAN|INF)(?![A-Za-z])"
_TOKEN = re.compile(rb"(?<![A-Za-z_\d.])(?:" + NUMBER + rb")")
_GROUP = rb"([-+.\d,]+(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|NaN|Inf|NAN|INF))"
_BEFORE_NAN = (b":", b"=", b",", b"(", b"[", b"'", b'"', b"|")
_BLANKS = re.compile(rb"(?:\\ ){2,}|^(?:\\ )+|(?:\\ )+$")
#: "Batch 17 Loss": the counter is no part of the name.
_COUNTED_KEY = re.compile(r"^(?:batch|step|iter|iteration|epoch|it)_\d+_(?=.)")
_ESCAPES = re.compile(ANSI.pattern.encode())
#: Lines of one layout that are parsed both ways before it is trusted.
TRIALS = 4
MAX_LAYOUTS = 256
#: Lines that look like progress and follow no layout known so far: so many are tried one by one.
MAX_SLOW = 150_000
MAX_LINE = 4000
#: Shapes of lines without a hint that are kept in mind.
REMEMBERED = 20_000
#: Rows are turned into arrays in pieces of this size.
CHUNK = 4096
_DIGITS = bytes.maketrans(b"123456789", b"000000000")


def parse(text: str, style: Style) -> Progress | None:
    """As `parse_line`, without counters in the names of values ("Batch 17 Loss")."""
    item = parse_line(text, style)
    if item is not None and any("0" <= c <= "9" for key in item.values for c in key):
        item.values = {_COUNTED_KEY.sub("", key): value for key, value in item.values.items()}
    return item


@dataclass(slots=True)
class Layout:
    """One layout of progress lines: a pattern, and which group holds which number."""

    pattern: re.Pattern[bytes]
    kind: str
    mark: str
    step: int | None
    total: int | None
    keys: list[tuple[str, int]]
    lines: list[int] = field(default_factory=list)
    rows: list[tuple[bytes, ...]] = field(default_factory=list)
    #: (lines, steps or None, values by key) of rows that were converted
    chunks: list[tuple[Ints, Floats | None, dict[str, Floats]]] = field(default_factory=list)
    last_total: int | None = None
    count: int = 0
    trials: int = 0
    hits: int = 0

    def drain(self) -> None:
        """Convert the rows gathered so far into a chunk of arrays."""
        if not self.rows:
            return
        import numpy as np

        groups = list(zip(*self.rows, strict=True))
        steps = _floats(groups[self.step]) if self.step is not None else None
        if self.total is not None:
            total = number_of(self.rows[-1][self.total])
            self.last_total = int(total) if 0 < total < 1e15 else self.last_total
        self.chunks.append((np.array(self.lines, dtype=np.int64), steps, {k: _floats(groups[i]) for k, i in self.keys}))
        self.count += len(self.rows)
        self.rows, self.lines = [], []

    def probe(self) -> Progress | None:
        """One line of this layout as progress, to ask what its values mean."""
        if not self.chunks:
            return None
        values = {key: float(column[0]) for key, column in self.chunks[0][2].items()}
        return Progress(step=0, line=0, offset=0, text="", speaker=Speaker(), values=values, kind=self.kind)


def number_of(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(text.replace(b",", b""))
    except ValueError:
        return float("nan")


def _floats(texts: tuple[bytes, ...]) -> Floats:
    import numpy as np

    try:
        return np.array(list(map(float, texts)))
    except ValueError:
        return np.array([number_of(text) for text in texts])


def learn(line: bytes, item: Progress) -> Layout | None:
    """The layout of `line`, which means `item`; None when its numbers cannot be found again in it."""
    mark = item.speaker.mark.encode()
    start = line.find(mark) + len(mark) if mark and line.find(mark) >= 0 else 0
    pieces, tokens, at = [re.escape(line[:start])], [], start
    for found in _TOKEN.finditer(line, start):
        if found[0][-1:].isalpha() and line[at : found.start()].rstrip()[-1:] not in _BEFORE_NAN:
            continue  # "number of nan iterations"
        pieces.append(_literal(line[at : found.start()]))
        pieces.append(_GROUP)
        tokens.append((found.start(), found[0], line[at : found.start()]))
        at = found.end()
    pieces.append(_literal(line[at:]))
    if not tokens or len(tokens) > 60:
        return None
    numbers = [number_of(text) for _, text, _ in tokens]
    free = set(range(len(tokens)))

    def pick(value: float, words: tuple[str, ...]) -> int | None:
        same = [i for i in sorted(free) if numbers[i] == value or (value != value and numbers[i] != numbers[i])]
        named = [i for i in same if any(w and w in _normal(tokens[i][2]) for w in words)]
        best = next(iter(named or same), None)
        if best is not None:
            free.discard(best)
        return best

    step = pick(float(item.step), ("iteration", "step", "iter", "batch", "s:")) if item.step >= 0 else None
    if item.step >= 0 and step is None:
        return None
    total = pick(float(item.total), ("/",)) if item.total is not None else None
    keys = []
    for key, value in item.values.items():
        index = pick(value, (key, key.rsplit("/", 1)[-1], key.split("_(")[0]))
        if index is not None:
            keys.append((key, index))
    if not keys:
        return None
    try:
        pattern = re.compile(b"".join(pieces))
    except re.error:
        return None
    return Layout(pattern, item.kind, item.speaker.mark, step, total, keys)


def _literal(text: bytes) -> bytes:
    return _BLANKS.sub(rb" *", re.escape(text)) if b" " in text else re.escape(text)


def _normal(text: bytes) -> str:
    return re.sub(r"\s+", "_", text.decode("utf-8", "replace").strip().lower())


def _hinted(line: bytes) -> bool:
    """Cheap test that most lines fail."""
    return (b"oss" in line or b"iteration" in line or b"step" in line or b"%|" in line or b"Epoch" in line
            or b"ation took" in line or b"grad" in line or b"ppl" in line or b"trl:" in line or b"OSS" in line)


class Lines:
    """Collects the progress of one stream of text; `feed` it blocks that end at line ends."""

    def __init__(self, style: Style) -> None:
        self.style = style
        self.layouts: list[Layout] = []
        self.retired: list[Layout] = []
        self.loose: list[Progress] = []
        self.rejected: set[bytes] = set()
        self.number = 0
        self.slow = 0
        self.unread = 0
        self.blocked = False

    def feed(self, block: bytes) -> None:
        """All lines of `block`."""
        active, rejected = self.layouts, self.rejected
        lines = block.split(b"\n")
        left = self._by_columns(block, len(lines))
        base = self.number + 1
        self.number += len(lines)
        for index in left:
            line = lines[index]
            if len(line) > MAX_LINE:
                continue
            shape = line.translate(_DIGITS)
            if shape in rejected:  # most of what is left: timers, memory, chatter that repeats
                continue
            if not _hinted(line):
                if len(rejected) < REMEMBERED:
                    rejected.add(shape)
                continue
            number = base + index
            for place, layout in enumerate(active):
                match = layout.pattern.fullmatch(line)
                if match is not None:
                    if layout.trials < TRIALS and not self._agrees(layout, match, line):
                        self.retired.append(active.pop(place))
                        self._slowly(line, number)
                        break
                    layout.rows.append(match.groups())
                    layout.lines.append(number)
                    if place:
                        layout.hits += 1
                        if layout.hits % 16 == 0:
                            active[place - 1], active[place] = active[place], active[place - 1]
                    if len(layout.rows) >= CHUNK:
                        layout.drain()
                    break
            else:
                self._slowly(line, number)
        if block.endswith(b"\n"):
            self.number -= 1  # the empty piece behind the last line end

    def _by_columns(self, block: bytes, count: int) -> Iterable[int]:
        """Take the lines of trusted layouts many at once; which of the `count` lines of the block are left."""
        if not any(layout.trials >= TRIALS for layout in self.layouts):
            return range(count)
        import numpy as np

        from diag.artefacts.line_columns import batches

        left = np.ones(count, dtype=bool)
        for layout, numbers, values in batches(block, self._spans):
            steps = values[layout.step] if layout.step is not None else None
            if layout.total is not None:
                layout.last_total = int(values[layout.total][-1]) or layout.last_total
            layout.chunks.append((numbers + self.number + 1, steps, {key: values[i] for key, i in layout.keys}))
            layout.count += len(numbers)
            left[numbers] = False
        places: list[int] = np.flatnonzero(left).tolist()
        return places

    def _spans(self, line: bytes) -> tuple[Layout, list[tuple[int, int]], list[int]] | None:
        if not _hinted(line):
            return None
        for layout in self.layouts:
            if layout.trials >= TRIALS and (match := layout.pattern.fullmatch(line)) is not None:
                wanted = {i for _, i in layout.keys} | {i for i in (layout.step, layout.total) if i is not None}
                return layout, [match.span(i + 1) for i in range(len(match.groups()))], sorted(wanted)
        return None

    def finish(self) -> None:
        """Convert what is left."""
        for layout in [*self.layouts, *self.retired]:
            layout.drain()

    def _agrees(self, layout: Layout, match: re.Match[bytes], line: bytes) -> bool:
        layout.trials += 1
        item = parse(clean(line.decode("utf-8", "replace")), self.style)
        groups = match.groups()
        if item is None or item.kind != layout.kind or item.speaker.mark != layout.mark:
            return False
        if layout.step is not None and int(number_of(groups[layout.step])) != item.step:
            return False
        kept = [(key, i) for key, i in layout.keys if key in item.values and
                (number_of(groups[i]) == item.values[key] or item.values[key] != item.values[key])]
        if len(kept) < len(layout.keys) and any("loss" in key for key, _ in set(layout.keys) - set(kept)):
            return False
        layout.keys = kept
        return bool(kept)

    def _slowly(self, line: bytes, number: int) -> None:
        if b"\r" in line:
            line = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        if b"\x1b" in line:
            line = _ESCAPES.sub(b"", line)
        shape = line.translate(_DIGITS)
        if shape in self.rejected:
            return
        if self.slow >= MAX_SLOW:
            self.unread += 1
            return
        self.slow += 1
        item = parse(clean(line.decode("utf-8", "replace")), self.style)
        if item is None:
            if len(self.rejected) < 200_000:
                self.rejected.add(shape)
            return
        self.blocked = self.blocked or item.kind == "olmo" or item.kind == "megatron" and not item.values
        layout = learn(line, item) if len(self.layouts) < MAX_LAYOUTS else None
        match = layout.pattern.fullmatch(line) if layout is not None else None
        if layout is not None and match is not None and self._agrees(layout, match, line):
            layout.rows.append(match.groups())
            layout.lines.append(number)
            self.layouts.append(layout)
            return
        item.line = number
        self.loose.append(item)
