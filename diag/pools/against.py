"""A separated run beside one that was not: does separation pay here, from measured numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from diag.artefacts import Artefacts
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_config import RunConfig
from diag.pools.gather import Job
from diag.schema import Finding, Where

#: Step times nearer than this are the same: runs on shared machines differ by as much by chance.
SAME = 0.03
LEAST_POINTS = 8
#: What two runs must have in common to be compared.
_SAME_JOB = ("model", "train.train_batch", "train.sequence_length", "data.path")


@dataclass(frozen=True, slots=True)
class Other:
    """A run without pools: its directory, ranks, and seconds of a usual step."""

    directory: str
    ranks: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Seconds per step with and without, and ranks of each. `pays` is None where the two are alike."""

    seconds: float
    ranks: int
    other: Other

    @property
    def ratio(self) -> float:
        """Rank-seconds per step with pools over those without: the cost of the same batch."""
        return self.seconds * self.ranks / (self.other.step_seconds * self.other.ranks)

    @property
    def pays(self) -> bool | None:
        """Whether the same batch costs less with pools; None within `SAME`."""
        return None if abs(self.ratio - 1.0) <= SAME else self.ratio < 1.0

    @property
    def text(self) -> str:
        """The verdict in one sentence, with both numbers."""
        both = (f"{_seconds(self.seconds)} per step with pools ({self.ranks} ranks) against "
                f"{_seconds(self.other.step_seconds)} without ({self.other.ranks} rank"
                f"{'s' if self.other.ranks > 1 else ''}, {self.other.directory})")
        cost = "" if self.ranks == self.other.ranks else \
            f"; in rank-seconds per step {self.seconds * self.ranks:.3g} against " \
            f"{self.other.step_seconds * self.other.ranks:.3g}"
        if self.pays is None:
            return f"Separation makes no difference here: {both}{cost}."
        return f"Separation {'pays' if self.pays else 'does not pay'} here: {both}{cost}."


def steps_of(log: MetricsLog) -> float | None:
    """Seconds of a usual step over the last half of a run.

    Not by `diag.series.runs`, which takes runs with the same losses for one: a separated run has those of the other.
    """
    column = log.series.get("step_seconds")
    values = [value for value in column.values if math.isfinite(value) and value > 0] if column is not None else []
    return float(median(values[len(values) // 2 :])) if len(values) >= LEAST_POINTS else None


def against(job: Job, artefacts: Artefacts) -> list[Verdict]:
    """The comparison with each run among the inputs that trains the same model on the same batch without pools."""
    ours = job.step_seconds
    if ours is None or job.config is None:
        return []
    found = []
    for log in artefacts.of(MetricsLog):
        config = artefacts.beside(log, RunConfig)
        if config is None or log.directory == job.directory or not _alike(job.config, config):
            continue
        seconds, ranks = steps_of(log), config.number("parallel.ranks")
        if seconds is not None and ranks is not None and ranks >= 1:
            found.append(Verdict(ours, job.size("compute") + job.size("update"),
                                 Other(log.directory, int(ranks), seconds)))
    return found


def _alike(a: RunConfig, b: RunConfig) -> bool:
    return b.get("pools.mode") in (None, "off") and all(a.get(key) == b.get(key) for key in _SAME_JOB)


def verdict_finding(verdict: Verdict) -> Finding:
    """The comparison as a line of the report."""
    return Finding(
        cause="pool_measured", role="context", severity="info", confidence=0.85, where=Where(module="pools"),
        summary=verdict.text,
        numbers={"with_seconds": verdict.seconds, "with_ranks": verdict.ranks,
                 "without_seconds": verdict.other.step_seconds, "without_ranks": verdict.other.ranks,
                 "pays": verdict.pays, "without": verdict.other.directory})


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
