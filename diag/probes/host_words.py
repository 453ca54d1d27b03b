"""How a judgement about a host becomes a finding: one place for roles, evidence and names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diag.probes.host_facts import HostFacts
from diag.schema import Evidence, Finding, Severity, Where

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Whose facts are judged and where they stand: `path` of a saved file, or None for the live machine.

    `live` says that processes and free space are those of now; `hosts` how many hosts the job has, as far as known.
    """

    facts: HostFacts
    path: str | None = None
    live: bool = True
    hosts: int = 1
    names_host: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def many(self) -> bool:
        """Whether the job spans hosts."""
        world, local = self.facts.world_size, self.facts.local_ranks
        return self.hosts > 1 or bool(world and local and world > local)

    def finding(self, cause: str, severity: Severity, summary: str, *, at: str, text: str = "", line: int | None = None,
                gpus: list[str] | None = None, fix: list[str] | None = None, confidence: float = 0.9,
                **numbers: Any) -> Finding:
        """A state of the machine, not an event of a run: it stands beside what a run's own artefacts say.

        `at` is where the fact comes from (a path, a variable, NVML); `line` its line in a saved output.
        """
        host = self.facts.host
        shown = self.path if self.path is not None else (f"{host}:{at}" if host and self.names_host else at)
        proof = text if self.path is None or line is not None else f"{at}: {text}"
        return Finding(cause=cause, role="context", severity=severity, confidence=confidence, summary=summary,
                       where=Where(hosts=[host] if host else [], gpus=gpus or []),
                       evidence=[Evidence(path=shown, text=proof or summary, line=line)],
                       fix=fix or [], numbers={"standing": True, **numbers})


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def plural(count: int, word: str) -> str:
    """ "1 GPU", "3 GPUs"."""
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count:,} {word}{ending}"
