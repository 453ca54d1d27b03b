"""The nouns of a diagnosis, and the JSON contract `pdtrain.report/1`.

Everything a detector says is a `Finding`; everything a command prints is a `Report`. Fields that are not known are
left out of the JSON (`omit_defaults`), never guessed. The meaning of each key is documented in docs/report.md.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA = "pdtrain.report/1"

Verdict = Literal["failed", "degraded", "healthy", "unknown"]
Role = Literal["root", "victim", "symptom", "context"]
Severity = Literal["fatal", "error", "warning", "info"]

SEVERITY_ORDER: dict[str, int] = {"info": 0, "warning": 1, "error": 2, "fatal": 3}


class Evidence(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One place in one artefact that supports a finding. `line` is 1-based in the file as given."""

    path: str
    text: str
    line: int | None = None
    offset: int | None = None
    time: str | None = None
    rank: int | None = None


class Where(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Who is guilty and where: `ranks` are exactly the guilty ones, empty for a fault of every rank or unknown."""

    ranks: list[int] = []
    hosts: list[str] = []
    gpus: list[str] = []
    module: str | None = None
    step: int | None = None
    group: str | None = None
    file: str | None = None
    line: int | None = None
    time: str | None = None


class Finding(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One thing that a detector saw. `cause` is a slug of causes.py; `explains` indexes the report's findings."""

    cause: str
    summary: str
    severity: Severity
    role: Role = "symptom"
    confidence: float = 0.5
    where: Where = msgspec.field(default_factory=Where)
    evidence: list[Evidence] = []
    explains: list[int] = []
    playbook: str | None = None
    fix: list[str] = []
    numbers: dict[str, Any] = {}


class Input(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One artefact that was looked at. `problem` says why it could not be (wholly) read; `readable` is false, and
    only then present, when nothing of it could be used."""

    path: str
    format: str
    bytes: int = 0
    ranks: list[int] = []
    lines: int | None = None
    problem: str | None = None
    readable: bool = True


class Report(msgspec.Struct, kw_only=True):
    """The whole answer: what broke first, where, and what to do. Findings are in reading order, root first.

    `not_checked` says in words what was not looked at and why ("hang: no flight-recorder dumps among the inputs").
    """

    verdict: Verdict
    headline: str
    inputs: list[Input] = []
    findings: list[Finding] = []
    not_checked: list[str] = []
    schema: str = SCHEMA

    def nothing_read(self) -> bool:
        """True when there were inputs and none of them could be used."""
        return bool(self.inputs) and not any(item.readable for item in self.inputs)

    def exit_status(self) -> int:
        """0 when nothing is at warning or above; 1 for findings at warning or above, or an unknown verdict; 2 when
        no input could be read."""
        if self.nothing_read():
            return 2
        worst = max((SEVERITY_ORDER[f.severity] for f in self.findings), default=0)
        return int(worst >= SEVERITY_ORDER["warning"] or self.verdict == "unknown")


def to_json(report: Report, *, indent: int = 2, more: dict[str, Any] | None = None) -> str:
    """`report` as JSON text with the contract's keys; finding keys that the contract always promises are kept.

    `more` are keys of one command's own, after the contract's.
    """
    plain = msgspec.to_builtins(report)
    findings = []
    for finding in report.findings:
        item = msgspec.to_builtins(finding)
        promised = {
            "cause": finding.cause, "role": finding.role, "severity": finding.severity,
            "confidence": round(finding.confidence, 3), "summary": finding.summary,
            "where": {}, "evidence": [], "explains": [], "playbook": None, "fix": [], "numbers": {},
        }
        findings.append(promised | item | {"confidence": round(finding.confidence, 3)})
    ordered = {"schema": report.schema, "verdict": report.verdict, "headline": report.headline,
               "inputs": plain["inputs"], "findings": findings, "not_checked": report.not_checked}
    ordered = ordered | {key: value for key, value in (more or {}).items() if key not in ordered}
    try:
        encoded = msgspec.json.encode(ordered)
    except UnicodeEncodeError:  # a file name, or a name in a file, that is no UTF-8
        encoded = msgspec.json.encode(_encodable(ordered))
    return msgspec.json.format(encoded, indent=indent).decode()


def _encodable(value: Any) -> Any:
    """`value` with what UTF-8 cannot hold (lone surrogates) written as \\udcff."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, (list, tuple)) else value
