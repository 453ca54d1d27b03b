"""The end of a log, and the lines in it that are unlike the others: what to show when nothing known explains it."""

from __future__ import annotations

import re
from collections import Counter

from diag.artefacts.log_facts import Sample
from diag.artefacts.log_lines import Style, clean, speaker_of

#: Words that make a line worth a look when it is rare. No verdict rests on them.
ERROR_SHAPED = re.compile(
    r"error|exception|\bfail|fatal|abort|panic|\bkill|denied|refused|unable|cannot|can't|could not|couldn't|corrupt"
    r"|timed? ?out|segfault|core dumped|\bnan\b|\binf\b|invalid|mismatch|assert|not found|no such|missing|lost|dead"
    r"|crash|unexpected|unreachable|broken|reset by peer|overflow|exhaust|insufficient|stuck|hang|hung", re.I)
TAIL_LINES = 40
RARE_LINES = 12


def summarise(text: bytes, first_line: int, first_offset: int, style: Style) -> tuple[list[Sample], list[Sample]]:
    """(the last lines, the rare error-shaped lines) of the last part of a log."""
    lines: list[tuple[int, int, str]] = []
    offset = first_offset
    for number, raw in enumerate(text.split(b"\n"), first_line):
        piece = raw.rstrip(b"\r").rsplit(b"\r", 1)[-1][:2000]
        shown = clean(piece.decode("utf-8", "replace"))
        if shown.strip():
            lines.append((number, offset, shown))
        offset += len(raw) + 1
    shapes = Counter(shape(line) for _, _, line in lines)
    tail = [_sample(entry, shapes, style) for entry in lines[-TAIL_LINES:]]
    rare = [entry for entry in lines if shapes[shape(entry[2])] <= 2 and ERROR_SHAPED.search(entry[2])]
    return tail, [_sample(entry, shapes, style) for entry in rare[-RARE_LINES:]]


def shape(line: str) -> str:
    """`line` with what varies taken out: numbers, addresses, paths, quoted words."""
    line = re.sub(r"0x[0-9a-f]+|[\w.-]*[/\\][\w./\\-]+|'[^']*'|\"[^\"]*\"", "~", line[:300])
    return re.sub(r"\d+(?:\.\d+)?", "#", line)


def _sample(entry: tuple[int, int, str], shapes: Counter[str], style: Style) -> Sample:
    number, offset, text = entry
    return Sample(line=number, offset=offset, text=text[:500], speaker=speaker_of(text, 0, style),
                  count=shapes[shape(text)])
