"""The ranks side by side over their latest steps: what `diag.steps.ranks` does for a whole run, for the last minute.

Over a long run a bin of the post-mortem holds hundreds of steps; here each measured step is a bin of its own, so that a
rank that becomes slow is known after `LEAST_BINS` measurements. One that becomes much slower than it was is known after
`SUDDEN` or `FEWEST`: its own past says how much it scatters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from diag.artefacts import Artefacts
from diag.artefacts.run_events import EventLog
from diag.detectors.step_stragglers import judged, waiting_modules
from diag.schema import Finding
from diag.steps.ranks import (
    AGREEING,
    ASIDE,
    EXCHANGES,
    LEAST_BINS,
    OWN_SPANS,
    RATIO,
    SETTLING,
    STEP_SHARE,
    Job,
    Slow,
    medians_of_others,
)
from diag.watch.formats import EventsTail
from diag.watch.tails import Tail

#: Steps of the display's own comparison.
SHOWN_STEPS = 8
#: Measurements in a row whose median is so much above the rank's own past, and so many robust deviations of a median
#: of so many: the fewer there are the more they must be above it.
SUDDEN, SUDDEN_RATIO, SUDDEN_SIGMAS = 4, 1.3, 6.0
#: Three are enough for what is slower by far.
FEWEST, FEWEST_RATIO, FEWEST_SIGMAS = 3, 1.6, 8.0
#: Measurements of a past that can be compared with, and the most that the slow stretch may hold: then it is the past.
PAST, LONGEST = 8, 40


def recent_jobs(tails: Iterable[Tail], artefacts: Artefacts) -> list[Job]:
    """One job per folder of events with at least two ranks and enough steps that all of them measured."""
    folders: dict[str, dict[int, EventsTail]] = {}
    for tail in tails:
        of_update_pool = isinstance(tail, EventsTail) and tail.log.pool is not None and tail.log.pool.role == "update"
        if isinstance(tail, EventsTail) and len(tail.log.ranks) == 1 and (tail.spans or tail.modules) \
                and not of_update_pool:
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
    whole = [median(sum(v for name, v in tail.spans.get(step, {}).items()
                        if name not in ASIDE and not name.startswith("pool_"))
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
    found = []
    for job in jobs:
        finding = judged(job, artefacts)
        if finding.severity == "info" and (slow := sudden(job)):
            finding = judged(job, artefacts, slow)
            finding.numbers["sudden"] = True
        if finding.severity != "info":
            found.append(finding)
    return found


def sudden(job: Job) -> list[Slow]:
    """The ranks that have just become much slower than they were beside the others, the slowest first."""
    if len(job.first) < PAST + FEWEST:
        return []
    totals = {rank: [sum(phases.values()) for phases in bins] for rank, bins in job.own.items()}
    if any(value <= 0 for values in totals.values() for value in values):
        return []
    others = medians_of_others(totals)
    logs = {rank: [math.log(own / other) for own, other in zip(totals[rank], others[rank], strict=True)]
            for rank in totals}
    noise = 1.4826 * median(abs(b - a) for values in logs.values() for a, b in pairwise(values)) / math.sqrt(2)
    found = []
    for rank, values in logs.items():
        for latest in range(FEWEST, min(len(values) - PAST, LONGEST) + 1):
            if (base := _risen(values, latest, noise)) is not None:
                found.append(_described(job, rank, latest, totals[rank], others[rank], base))
                break
    return sorted((slow for slow in found if slow.share >= STEP_SHARE), key=lambda item: -item.excess)


def _risen(values: list[float], latest: int, noise: float) -> float | None:
    """The usual level before the `latest` of `values`, when these lie far above it; `noise` is that of one value.

    They must be above the others besides: a rank that was waited for less while another was slow has not become slow.
    """
    base = median(values[:-latest])
    above = [value - base for value in values[-latest:]]
    ratio, sigmas = (SUDDEN_RATIO, SUDDEN_SIGMAS) if latest >= SUDDEN else (FEWEST_RATIO, FEWEST_SIGMAS)
    limit = max(math.log(ratio), sigmas * noise / math.sqrt(latest))
    agree = sum(value > limit / 2 for value in above) >= AGREEING * latest
    if median(values[-latest:]) < math.log(RATIO):
        return None
    return base if median(above) > limit and agree and median(above[-SUDDEN:]) > limit / 2 else None


def _described(job: Job, rank: int, latest: int, own: list[float], others: list[float], base: float) -> Slow:
    part = range(-latest, 0)
    excess = median(own[i] - max(math.exp(base), 1.0) * others[i] for i in part)
    share = excess / max(median(job.step[-latest:]), excess, 1e-12)
    peers = [bins for other, bins in job.own.items() if other != rank]
    phases = {name: median(job.own[rank][i][name] - median(bins[i].get(name, 0.0) for bins in peers) for i in part)
              for name in job.own[rank][-latest]}
    ratio = median(own[i] / others[i] for i in part)
    return Slow(rank, ratio, excess, share, job.first[-latest], max(phases, key=lambda name: phases[name]), phases,
                latest)


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
