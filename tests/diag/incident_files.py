"""The labelled incidents of `tests/diag/incidents`: near-real logs, written anew after public failure reports.

A file holds several: a line "### name | cause[,also] [| ranks=0,3 hosts=a,b]" and the log below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "incidents"


@dataclass
class Incident:
    """One log with what a post-mortem must say of it."""

    name: str
    causes: list[str]
    ranks: list[int] | None = None
    hosts: list[str] | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines).strip("\n") + "\n"


def incidents() -> list[Incident]:
    """All incidents, in file order."""
    found: list[Incident] = []
    for path in sorted(FOLDER.glob("*.txt")):
        for line in path.read_text("utf-8").split("\n"):
            if line.startswith("### "):
                found.append(_header(line[4:], path.stem))
            elif found:
                found[-1].lines.append(line)
    return found


def _header(text: str, stem: str) -> Incident:
    name, causes, *rest = [part.strip() for part in text.split("|")]
    incident = Incident(f"{stem}/{name}", causes.split(","))
    for word in " ".join(rest).split():
        key, _, value = word.partition("=")
        if key == "ranks":
            incident.ranks = [int(n) for n in value.split(",")]
        elif key == "hosts":
            incident.hosts = value.split(",")
    return incident
