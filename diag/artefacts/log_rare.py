"""The end of a log, and the lines in it that are unlike the others: what to show when nothing known explains it."""

from __future__ import annotations

import re
from collections import Counter

from diag.artefacts.log_facts import Sample
from diag.artefacts.log_lines import Style, clean, front_speaker

#: Words that make a line worth a look when it is rare. No verdict rests on them.
ERROR_SHAPED = (
    "error", "exception", "fail", "fatal", "abort", "panic", "kill", "denied", "refused", "unable", "cannot", "can't",
    "could not", "couldn't", "corrupt", "timed out", "timeout", "segfault", "core dumped", "invalid", "mismatch",
    "assert", "not found", "no such", "missing", "lost", "dead", "crash", "unexpected", "unreachable", "broken",
    "reset by peer", "overflow", "exhaust", "insufficient", "stuck", "hang", "hung", "= nan", ": nan", "=nan", " inf ",
)
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
    suspects = [(shape(entry[2]), entry) for entry in lines if error_shaped(entry[2])]
    shapes = Counter(form for form, _ in suspects)
    rare = [(form, entry) for form, entry in suspects if shapes[form] <= 2]
    tail = [_sample(entry, 1, style) for entry in lines[-TAIL_LINES:]]
    return tail, [_sample(entry, shapes[form], style) for form, entry in rare[-RARE_LINES:]]


def error_shaped(line: str) -> bool:
    """Whether a line has a word of trouble in it."""
    low = line.lower()
    return any(word in low for word in ERROR_SHAPED)


def shape(line: str) -> str:
    """`line` with what varies taken out: numbers, addresses, paths, quoted words."""
    line = re.sub(r"0x[0-9a-f]+|[\w.-]*[/\\][\w./\\-]+|'[^']*'|\"[^\"]*\"", "~", line[:300])
    return re.sub(r"\d+(?:\.\d+)?", "#", line)


def _sample(entry: tuple[int, int, str], count: int, style: Style) -> Sample:
    number, offset, text = entry
    return Sample(line=number, offset=offset, text=text[:500], speaker=front_speaker(text, style), count=count)
