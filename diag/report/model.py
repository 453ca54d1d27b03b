"""What every reporter needs from a Report, in words: one place, so that the forms cannot disagree.

Nothing here judges; it only turns nouns into short texts. All texts are raw: each form escapes them its own way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from diag.causes import CAUSES
from diag.schema import Evidence, Finding, Report, Where

#: Rows of a table, evidence lines and folded findings shown in a human form; the JSON has them all.
MAX_ROWS = 16
MAX_EVIDENCE = 5
MAX_FOLDED = 8
MAX_NOTES = 3
#: How a finding was made, not what it found: of use to programs, noise to a person.
BOOKKEEPING = {"lines", "signatures", "times", "at_peak", "timeline", "standing"}

#: "hang, router: no dumps among the inputs"
_TOPICS = re.compile(r"([a-z]+(?:, [a-z]+)*): ")
#: What tells the same line of two ranks apart: rank and process prefixes, time of day, how long it waited, a port.
_SPEAKER = re.compile(r"\[?\b(?:default|[Rr]ank)[ :=]?\d+\]?:?|\(?\bpid[ :=]+\d+\)?|\d\d:\d\d:\d\d[.,\d]*"
                      r"|^\[?[EWIF]\d{4}\b|(?<=ran for )\d+|(?<=\]:)\d{4,5}\b")

Table = tuple[str, list[str], list[list[str]]]


def root_of(report: Report) -> Finding | None:
    """The root finding, if there is one."""
    return next((f for f in report.findings if f.role == "root"), None)


def explained_by_root(report: Report) -> list[Finding]:
    """What the root accounts for, in order: its `explains`, and victims that nothing else claims."""
    root = root_of(report)
    if root is None:
        return []
    listed = [report.findings[i] for i in root.explains if 0 <= i < len(report.findings)]
    return [f for f in report.findings if f is not root and (f in listed or f.role == "victim")]


def leading(report: Report) -> Finding | None:
    """The finding that the headline speaks of: the root, or of an unknown verdict the one that says what is unknown."""
    if report.verdict != "unknown":
        return root_of(report)
    return next((f for f in report.findings if f.summary == report.headline), None)


def others(report: Report) -> list[Finding]:
    """Findings that stand beside the leading one: symptoms first, context and infos after them."""
    root, folded = leading(report), explained_by_root(report)
    rest = [f for f in report.findings if f is not root and not any(f is g for g in folded)]
    return sorted(rest, key=lambda f: (f.severity == "info", f.role == "context"))


def not_checked(report: Report, limit: int = MAX_NOTES) -> list[str]:
    """What was not checked: each reason where there are few, else the topics in one line, and other notes.

    Where all are of one topic, as of a probe, its name alone would say nothing: the first reasons stand there then.
    """
    if len(report.not_checked) <= limit:
        return list(report.not_checked)
    topics: dict[str, None] = {}
    rest = []
    for note in report.not_checked:
        found = _TOPICS.match(note)
        if found is None:
            rest.append(note)
        else:
            topics.update(dict.fromkeys(found[1].split(", ")))
    if len(topics) == 1 and not rest:
        return [*report.not_checked[:limit], f"and {len(report.not_checked) - limit} more in --json"]
    names = [f"{', '.join(topics)}: in whole or in part, for want of inputs; reasons in --json"]
    return (names if topics else []) + rest


def where_words(where: Where) -> list[str]:
    """Parts such as "rank 3", "host n12", "step 120", most telling first."""
    parts = []
    if where.ranks:
        parts.append(f"rank{'s' if len(where.ranks) > 1 else ''} {rank_list(where.ranks)}")
    if where.hosts:
        parts.append(f"host{'s' if len(where.hosts) > 1 else ''} {clip_list(where.hosts)}")
    if where.gpus:
        parts.append(f"GPU{'s' if len(where.gpus) > 1 else ''} {clip_list(where.gpus)}")
    if where.module:
        parts.append(f"module {where.module}")
    if where.step is not None:
        parts.append(f"step {where.step:,}")
    if where.group:
        parts.append(where.group if where.group.startswith("group ") else f"group {where.group}")
    if where.file:
        parts.append(f"{where.file}:{where.line}" if where.line is not None else where.file)
    if where.time:
        parts.append(where.time)
    return parts


def cause_prefix(finding: Finding) -> str:
    """The slug in front of a folded finding; nothing where the slug only says that nobody knows."""
    cause = CAUSES.get(finding.cause)
    return "" if cause is not None and cause.verdict == "unknown" else finding.cause


def alike(items: Sequence[Evidence]) -> list[list[Evidence]]:
    """Evidence in order; lines of one file that differ only in who says it and when stand with the first of them.

    256 ranks that time out print one line 256 times. Sizes, sequence numbers and losses are never taken for alike.
    """
    groups: dict[tuple[str, str], list[Evidence]] = {}
    for item in items:
        groups.setdefault((item.path, _SPEAKER.sub("", item.text).strip()), []).append(item)
    return list(groups.values())


def like_it(items: Sequence[Evidence]) -> str:
    """What to print of the lines that are like one shown above them: ":50, :63 alike (ranks 1, 2)"."""
    places = clip_list([f":{item.line}" if item.line is not None else f"@{item.offset}" for item in items], 8)
    ranks = sorted({item.rank for item in items if item.rank is not None})
    who = f" (rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)})" if ranks else ""
    return f"{places} alike{who}"


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as ranges: [0, 1, 2, 5] -> "0-2, 5"; long lists end in "… (N in all)"."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in spans]
    if len(words) > 12:
        return f"{', '.join(words[:12])}, … ({len(set(ranks))} in all)"
    return ", ".join(words)


def clip_list(items: Sequence[str], limit: int = 6) -> str:
    """Items joined by commas; beyond `limit` they are counted."""
    if len(items) <= limit:
        return ", ".join(items)
    return f"{', '.join(items[:limit])} and {len(items) - limit} more"


def tables(finding: Finding) -> list[Table]:
    """(name, columns, rows) for each list of flat rows in `finding.numbers`, all texts."""
    found = []
    for name, value in finding.numbers.items():
        if _is_table(value):
            columns = list(dict.fromkeys(key for row in value for key in row))
            found.append((name, columns, [[number(row.get(key)) for key in columns] for row in value]))
    return found


def scalars(finding: Finding) -> list[tuple[str, str]]:
    """(name, text) of the numbers that are no tables; the doctor's own bookkeeping is left to the JSON."""
    return [(name, number(value)) for name, value in finding.numbers.items()
            if not _is_table(value) and name not in BOOKKEEPING]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def number(value: Any) -> str:
    """A value as a person reads it: three digits of a float, thousands separated, lists joined."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value == int(value) and abs(value) < 1e15:
            return number(int(value)) if abs(value) >= 1 else "0"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return clip_list([number(item) for item in value], 12)
    if isinstance(value, dict):
        return clip_list([f"{key} {number(item)}" for key, item in value.items()], 8)
    return str(value)


def numeric(text: str) -> bool:
    """True for what `number` makes of a number, and for the empty cell: such cells are set to the right."""
    return not text or text.lstrip("-").replace(",", "").replace(".", "").replace("e-", "").replace("e+", "").isdigit()


def place(path: str, line: int | None, offset: int | None = None) -> str:
    """`path:line`, or `path@offset` for binary files."""
    if line is not None:
        return f"{path}:{line}"
    return f"{path}@{offset}" if offset is not None else path


def size(count: int) -> str:
    """Bytes in binary units: 1.5 MiB."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def inputs_line(report: Report) -> str:
    """ "12 inputs, 3.4 MiB: 8 log, 4 flight-recorder" """
    counts: dict[str, int] = {}
    for item in report.inputs:
        counts[item.format] = counts.get(item.format, 0) + 1
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda kv: -kv[1]))
    total = sum(item.bytes for item in report.inputs)
    return f"{len(report.inputs):,} input{'s' if len(report.inputs) != 1 else ''}, {size(total)}: {kinds}"
