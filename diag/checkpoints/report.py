"""Outcomes as a Report: one finding per problem, the worst first as root; what did not apply is `not_checked`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from diag.checkpoints.canonical import Checkpoint, Problem
from diag.checkpoints.verify import Outcome, worst_first
from diag.checkpoints.verify.outcome import some
from diag.diagnose import build_report
from diag.schema import Evidence, Finding, Input, Report, Where

#: Findings of one check that are listed one by one; the rest are counted.
MANY = 100


def input_of(checkpoint: Checkpoint, problem: str | None = None) -> Input:
    """The checkpoint as one input: its size is that of its files."""
    total = sum(checkpoint.folder.size(name) or 0 for name in checkpoint.files | checkpoint.expected)
    ranks = sorted({c.rank for t in checkpoint.tensors.values() for c in t.chunks if c.rank is not None})
    return Input(path=str(checkpoint.folder.root), format=checkpoint.format, bytes=total, ranks=ranks, problem=problem)


def finding_of(problem: Problem, root: Path, step: int | None = None) -> Finding:
    """One problem as a finding: `where.file`, `numbers.tensor`, `numbers.byte_range` are the contract."""
    numbers: dict[str, Any] = {"check": problem.check}
    if problem.tensor is not None:
        numbers["tensor"] = problem.tensor
    if problem.byte_range is not None:
        numbers["byte_range"] = list(problem.byte_range)
    evidence = []
    if problem.file is not None:
        evidence = [Evidence(path=str(root / problem.file), text=problem.text,
                             offset=problem.byte_range[0] if problem.byte_range else None)]
    return Finding(cause=problem.cause, severity=problem.severity, role="symptom", confidence=1.0,
                   summary=problem.text, where=Where(file=problem.file, step=step), evidence=evidence, numbers=numbers)


def findings_of(outcomes: list[Outcome], checkpoint: Checkpoint) -> list[Finding]:
    """Findings, the most telling first and as root."""
    found: list[Finding] = []
    told: dict[tuple[str, str], int] = defaultdict(int)
    for problem in worst_first(outcomes):
        key = (problem.check, problem.severity)
        told[key] += 1
        if told[key] <= MANY:
            found.append(finding_of(problem, checkpoint.folder.root, checkpoint.meta.step))
    for (check, severity), count in told.items():
        if count > MANY:
            cause = next(f.cause for f in found if f.numbers["check"] == check)
            found.append(Finding(cause=cause, severity=severity, role="symptom", confidence=1.0,  # type: ignore[arg-type]
                                 summary=f"and {count - MANY:,} more problems of the kind '{check}'",
                                 numbers={"check": check, "count": count - MANY}))
    found.sort(key=lambda f: f.severity == "warning")
    if found:
        found[0].role = "root"
    return found


def table_of(outcomes: list[Outcome], checkpoint: Checkpoint) -> Finding:
    """The checks and their outcomes, as a table."""
    order = {"FAIL": 0, "PASS": 1}
    rows = [{"check": o.check, "outcome": o.status, "looked at": o.note}
            for o in sorted(outcomes, key=lambda o: order.get(o.status, 2)) if o.status != "n/a"]
    passed = sum(o.status == "PASS" for o in outcomes)
    failed = sum(o.status == "FAIL" for o in outcomes)
    what = f"{checkpoint.format}"
    if checkpoint.meta.step is not None:
        what += f", step {checkpoint.meta.step:,}"
    return Finding(cause="ckpt_checked", severity="info", role="context", confidence=1.0,
                   summary=f"{what}: {passed} checks passed, {failed} failed, "
                   f"{sum(o.status == 'n/a' for o in outcomes)} did not apply",
                   where=Where(step=checkpoint.meta.step), numbers={"checks": rows})


def not_checked_of(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.check}: {o.note}" for o in outcomes if o.status == "n/a"]


def unread_of(checkpoint: Checkpoint) -> list[str]:
    """Files of the training state that were seen and not read, as one note."""
    return [f"{some(checkpoint.unread)}: not read"] if checkpoint.unread else []


def report_of(checkpoint: Checkpoint, outcomes: list[Outcome], deep: bool, file: str | None = None) -> Report:
    """The Report of one verified checkpoint, or of the one `file` of it that was given."""
    findings = [*findings_of(outcomes, checkpoint), table_of(outcomes, checkpoint)]
    notes = not_checked_of(outcomes) + unread_of(checkpoint)
    if not deep:
        notes.append("every byte: only a sample of the CRCs was compared; use --deep")
    report = build_report(findings, inputs=[input_of(checkpoint)], not_checked=notes)
    if report.verdict == "healthy":
        how = "whole, and every byte of it was read" if deep else \
            "whole as far as its structure and a sample of its bytes"
        at = f" (step {checkpoint.meta.step:,})" if checkpoint.meta.step is not None else ""
        report.headline = f"{file or checkpoint.folder.root}{at} is {how}."
    return report
