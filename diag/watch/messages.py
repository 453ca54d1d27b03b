"""An alarm as one JSON object, and as one line of text; both for machines and for people who read logs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec

from diag.report.text import printable
from diag.watch.alarms import Alarm, Change


def record(change: Change) -> dict[str, Any]:
    """`event`, `time` (ISO 8601, UTC) and the finding with the keys of docs/report.md; `reason` of a cleared one."""
    finding = change.alarm.finding
    promised: dict[str, Any] = {"where": {}, "evidence": [], "explains": [], "playbook": None, "fix": [], "numbers": {}}
    plain = promised | msgspec.to_builtins(finding) | {"role": finding.role, "confidence": round(finding.confidence, 3)}
    plain.pop("explains")  # indexes of a report that is not here
    head: dict[str, Any] = {"event": change.event, "time": _iso(change.time)}
    if change.event == "cleared":
        head |= {"raised": _iso(change.alarm.raised or change.time), "reason": change.alarm.reason}
    return head | plain


def encode(change: Change) -> bytes:
    """`record` as one line of JSON."""
    try:
        return msgspec.json.encode(record(change)) + b"\n"
    except (TypeError, ValueError):  # a NaN among the numbers is none in JSON
        return json.dumps(record(change), default=str).encode() + b"\n"


def line(change: Change) -> str:
    """One line: time, what happened, cause, summary."""
    finding = change.alarm.finding
    clock = datetime.fromtimestamp(change.time).strftime("%H:%M:%S")
    if change.event == "cleared":
        return f"{clock} cleared  {finding.cause}: {change.alarm.reason}"
    return f"{clock} {finding.severity}  {finding.cause}: {printable(finding.summary)}"


def details(alarm: Alarm) -> list[tuple[str, str]]:
    """What else to say about an alarm: (label, text) of where, first fix step and playbook."""
    finding = alarm.finding
    where = finding.where
    parts = [f"rank{'s' if len(where.ranks) > 1 else ''} {', '.join(map(str, where.ranks[:8]))}" if where.ranks else "",
             f"host{'s' if len(where.hosts) > 1 else ''} {', '.join(where.hosts[:4])}" if where.hosts else "",
             where.module or "", f"step {where.step:,}" if where.step is not None else ""]
    found = [("where", ", ".join(part for part in parts if part))]
    if finding.evidence:
        first = finding.evidence[0]
        place = f"{first.path}:{first.line}" if first.line is not None else first.path
        found.append(("see", place))
    if finding.fix:
        found.append(("fix", finding.fix[0]))
    if finding.playbook:
        found.append(("more", f"pdtrain playbook show {finding.playbook}"))
    return [(label, printable(text)) for label, text in found if text]


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unread_of(unread: dict[str, str]) -> str:
    """One line about files of which nothing is known."""
    more = f"; and {len(unread) - 3} more" if len(unread) > 3 else ""
    return "; ".join(f"{printable(path)}: {printable(problem)}" for path, problem in list(unread.items())[:3]) + more
