"""The ranks side by side over their latest steps: what `diag.steps.ranks` does for a whole run, for the last minute.

Over a long run a bin of the post-mortem holds hundreds of steps; here each measured step is a bin of its own, so that a
rank that becomes slow is known after `LEAST_BINS` measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from diag.artefacts import Artefacts
from diag.artefacts.run_events import EventLog
from diag.detectors.step_stragglers import judged, waiting_modules
from diag.schema import Finding
from diag.steps.ranks import ASIDE, EXCHANGES, LEAST_BINS, OWN_SPANS, SETTLING, Job
from diag.watch.formats import EventsTail
from diag.watch.tails import Tail

#: Steps of the display's own comparison.
SHOWN_STEPS = 8


def recent_jobs(tails: Iterable[Tail], artefacts: Artefacts) -> list[Job]:
    """One job per folder of events with at least two ranks and enough steps that all of them measured."""
    folders: dict[str, dict[int, EventsTail]] = {}
    for tail in tails:
        if isinstance(tail, EventsTail) and len(tail.log.ranks) == 1 and (tail.spans or tail.modules):
            folders.setdefault(tail.log.directory, {})[tail.log.ranks[0]] = tail
    found = [_job(ranks, artefacts) for ranks in folders.values() if len(ranks) > 1]
    return [job for job in found if job is not None]


def _job(ranks: dict[int, EventsTail], artefacts: Artefacts) -> Job | None:
    timed = all(tail.modules for tail in ranks.values())
    guides = [tail.modules if timed else tail.spans for tail in ranks.values()]
    steps = sorted(step for step in set(guides[0]).intersection(*guides[1:]) if step > SETTLING)
    if len(steps) < LEAST_BINS:
        return None
    waiting = EXCHANGES | waiting_modules(next(iter(ranks.values())).log, artefacts)
    own = {rank: [_own(tail, step, timed, waiting) for step in steps] for rank, tail in ranks.items()}
    if not all(phases for bins in own.values() for phases in bins):
        return None
    whole = [median(sum(v for name, v in tail.spans.get(step, {}).items() if name not in ASIDE)
                    for tail in ranks.values()) for step in steps]
    logs: dict[int, EventLog] = {rank: tail.log for rank, tail in ranks.items()}
    hosts = {rank: starts[-1] for rank, log in logs.items()
             if (starts := [e.fields["host"] for e in log.events if isinstance(e.fields.get("host"), str)])}
    return Job(logs, hosts, first=steps, own=own, step=whole)


def _own(tail: EventsTail, step: int, timed: bool, waiting: frozenset[str]) -> dict[str, float]:
    found = {name: seconds for name, seconds in tail.spans.get(step, {}).items() if name in OWN_SPANS}
    if timed:
        found |= {name: seconds for name, seconds in tail.modules[step].items() if name not in waiting}
    return found


def slow_now(jobs: Iterable[Job], artefacts: Artefacts) -> list[Finding]:
    """Slow ranks of the latest steps, as `diag steps` would name them."""
    return [found for job in jobs if (found := judged(job, artefacts)).severity != "info"]


def slowest(jobs: Iterable[Job]) -> tuple[int, float, int] | None:
    """(rank, own time over the median of the others', ranks compared) of the slowest rank at present."""
    best: tuple[int, float, int] | None = None
    for job in jobs:
        mean = {rank: sum(sum(phases.values()) for phases in bins[-SHOWN_STEPS:]) for rank, bins in job.own.items()}
        worst = max(mean, key=lambda rank: mean[rank])
        others = median(value for rank, value in mean.items() if rank != worst)
        if others > 0 and (best is None or mean[worst] / others > best[1]):
            best = worst, mean[worst] / others, len(mean)
    return best
