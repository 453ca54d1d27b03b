"""What happened on which rank and when, as one inline SVG: a row per rank, a mark per finding or dated evidence line.

Drawn only where it says something: two different times (or steps) at least. Ranks that show nothing are not drawn;
findings that name no rank share the row "every rank".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from diag.report import model
from diag.report.text import printable
from diag.schema import Finding, Report

MAX_ROWS = 40
#: User units of the drawing, chosen so that its text can be read when it is as wide as a phone.
ROW, LEFT, RIGHT, TOP = 26, 112, 16, 10
WIDTH = 460
EVERYONE = -1

#: (time, step) -> position, or None where it is not known
Axis = Callable[[str | None, int | None], float | None]


@dataclass(frozen=True, slots=True)
class Mark:
    """One point: row (a rank, or EVERYONE), position on the axis, the class that colours it, and its tooltip."""

    row: int
    at: float
    role: str
    title: str


def render(report: Report) -> str:
    """The SVG element, or "" where there is nothing to order."""
    for axis in (_seconds, _step):
        marks = [mark for finding in report.findings if _shown(finding) for mark in _marks(finding, axis)]
        if len({mark.at for mark in marks}) >= 2:
            return _svg(marks, dated=axis is _seconds)
    return ""


def _shown(finding: Finding) -> bool:
    return finding.severity != "info" and finding.role != "context"


def _marks(finding: Finding, axis: Axis) -> Iterator[Mark]:
    title = f"{finding.cause}: {finding.summary}"
    rows = finding.where.ranks or [EVERYONE]
    seen: set[tuple[int, float]] = set()
    at = axis(finding.where.time, finding.where.step)
    placed = [(row, at) for row in rows] if at is not None else []
    for item in finding.evidence:
        when = axis(item.time, None)
        if when is not None and (item.rank is not None or len(rows) == 1):
            placed.append((item.rank if item.rank is not None else rows[0], when))
    for row, when in placed:
        if (row, when) not in seen:
            seen.add((row, when))
            witness = finding.role == "root" and row not in rows  # its line proves another's guilt
            yield Mark(row, when, "symptom" if witness else finding.role, title)


def _seconds(time: str | None, step: int | None) -> float | None:
    """Unix seconds of an ISO 8601 or numeric time; a time without a zone is taken as UTC, as all of a report's are."""
    if time is None:
        return None
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        try:
            value = float(time)
        except ValueError:
            return None
        return value if 0 < value < 1e11 else None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _step(time: str | None, step: int | None) -> float | None:
    return float(step) if step is not None else None


def _svg(marks: list[Mark], *, dated: bool) -> str:
    guilty = {mark.row for mark in marks if mark.role == "root"}
    ranks = sorted({mark.row for mark in marks}, key=lambda row: (row not in guilty, row == EVERYONE, row))
    hidden = len(ranks) - MAX_ROWS
    ranks = ranks[:MAX_ROWS]
    first, last = min(mark.at for mark in marks), max(mark.at for mark in marks)
    height = TOP + ROW * len(ranks) + 34

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - first) / (last - first)

    lines = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Timeline of ranks" class="timeline">']
    for index, row in enumerate(ranks):
        y = TOP + ROW * index + ROW / 2
        name = "every rank" if row == EVERYONE else f"rank {row}"
        lines.append(f'<text x="{LEFT - 12}" y="{y + 4:.0f}" text-anchor="end"'
                     f'{" class=guilty" if row in guilty else ""}>{name}</text>')
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.0f}" y2="{y:.0f}" />')
        for mark in sorted((m for m in marks if m.row == row), key=lambda m: m.role == "root"):
            radius = 7 if mark.role == "root" else 5
            lines.append(f'<circle cx="{x(mark.at):.1f}" cy="{y:.0f}" r="{radius}" class="{mark.role}">'
                         f"<title>{escape(printable(mark.title, 200))}</title></circle>")
    foot = height - 10
    left, right = _clocks(first, last) if dated else (f"step {first:,.0f}", f"step {last:,.0f}")
    lines.append(f'<text x="{LEFT}" y="{foot}">{left}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{foot}" text-anchor="end">'
                 f'{right}{f" (+{_span(last - first)})" if dated else ""}</text>')
    lines.append("</svg>")
    if hidden > 0:
        lines.append(f"<p class=dim>{hidden} more ranks are not drawn.</p>")
    return "\n".join(lines)


def _clocks(first: float, last: float) -> tuple[str, str]:
    a, b = datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(last, UTC)
    return a.strftime("%Y-%m-%d %H:%M:%S"), b.strftime("%H:%M:%S" if a.date() == b.date() else "%m-%d %H:%M:%S")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{model.number(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
