"""The report for a terminal: headline, where, evidence, victims folded, what to do, what was not checked."""

from __future__ import annotations

from diag.report.text import printable
from diag.schema import Report


def render(report: Report, *, width: int = 80, colour: bool = False, wrap: bool = False) -> str:
    """`report` as text of at most `width` columns (evidence lines may be longer unless `wrap`)."""
    lines = [f"{report.verdict.upper()}: {printable(report.headline)}"]
    for finding in report.findings:
        lines.append(f"  [{finding.role}] {finding.cause}: {printable(finding.summary)}")
        lines += [f"    {printable(e.path)}:{e.line}  {printable(e.text)}" for e in finding.evidence]
    lines += [f"  not checked: {printable(note)}" for note in report.not_checked]
    return "\n".join(lines) + "\n"
