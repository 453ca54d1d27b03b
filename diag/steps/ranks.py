"""The slow rank of a synchronous job, from each rank's own times.

All ranks of a synchronous job have the same step time, because the fast ones wait for the slow one inside collectives.
So the step time says nothing; what a rank does *between* collectives does: its module times without the exchanges, its
wait for data, its optimizer.

 1. Every rank's own seconds per step are added up over phases that contain no waiting for other ranks, in bins of
    steps common to all ranks, after the first `SETTLING` steps.
 2. A rank's ratio is its own time over the median of the others'. The limit for its median over n bins is `RATIO`, or
    more where the ranks' times scatter: `NOISE_SIGMAS` standard errors of that median.
 3. A rank is slow when from some bin on until the end its median ratio is beyond the limit and nearly every bin is
    beyond half of that median, by an amount that matters for the step (`STEP_SHARE`). That bin is "since when"; the
    phase with the largest excess is "where".

Phases that may contain waiting are left out: forward and backward as a whole (gathers of FSDP, exchanges), the
reduction of norms, dispatch and combine, and under tensor parallelism the modules that it splits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from diag.artefacts.run_events import EventLog
from diag.artefacts.step_times import StepTimes

#: A rank this much above the median of the others is slow. Field practice: exclude a GPU that is 10 % off its peers
#: (playbook straggler); NVIDIA's resiliency extension alarms at 1 / 0.75.
RATIO = 1.10
#: ... and this many standard errors: a shared CPU scatters by tens of per cent from bin to bin, and every rank and
#: every beginning is tried.
NOISE_SIGMAS = 6.0
#: The excess must cost the job this share of its step.
STEP_SHARE = 0.05
#: Bins needed to judge, and the share of them that must agree.
LEAST_BINS = 5
AGREEING = 0.8
#: A rank this much slower may scatter more, as one does that is stopped at times: then so many bins must at least point
#: its way, and most of the first and of the last few.
STRONG, POINTING, MOST = 1.3, 0.8, 0.6
MOST_BINS = 48
#: First steps, in which things are compiled, allocated and cached.
SETTLING = 3
#: Spans in which a rank does not wait for others.
OWN_SPANS = frozenset({"data", "optimizer"})
#: Module times that are nothing but exchanges.
EXCHANGES = frozenset({"dispatch", "combine"})
#: Modules with collectives inside when tensor parallelism is on.
TENSOR_PARALLEL = frozenset({"attention", "dense_ffn", "embed_head"})
#: The phase of a rank that is slow in whatever it computes.
EVERYTHING = "everything"
#: Not part of a training step.
ASIDE = frozenset({"validation", "checkpoint"})


@dataclass(frozen=True, slots=True)
class Slow:
    """One slow rank: how much slower than the median of the others, where, since which step.

    `excess` is seconds per step above the others' median, `share` that of the step; `phases` the excess by phase.
    `phase` is the one that holds at least half of the excess, or `EVERYTHING`.
    """

    rank: int
    ratio: float
    excess: float
    share: float
    since: int
    phase: str
    phases: dict[str, float]
    bins: int


@dataclass(slots=True)
class Job:
    """The ranks of one run directory. `own` [rank][bin][phase] are seconds per step, `first` [bin] the bin's step."""

    logs: dict[int, EventLog]
    hosts: dict[int, str]
    first: list[int] = field(default_factory=list)
    own: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    step: list[float] = field(default_factory=list)
    problem: str | None = None


def jobs(logs: Iterable[EventLog], waiting: Callable[[EventLog], frozenset[str]]) -> list[Job]:
    """Event logs grouped by folder, aligned in bins of steps. `problem` says why a job cannot be judged.

    `waiting` names the modules of a log's run that wait for other ranks, beside the exchanges. Ranks of an update pool
    do another work than these; they are compared among each other (`diag.pools`).
    """
    folders: dict[str, dict[int, EventLog]] = {}
    for log in logs:
        if len(log.ranks) == 1 and not (log.pool is not None and log.pool.role == "update"):
            folders.setdefault(log.directory, {})[log.ranks[0]] = log
    return [_aligned(Job(ranks, _hosts(ranks)), EXCHANGES | waiting(next(iter(ranks.values()))))
            for _, ranks in sorted(folders.items())]


def _hosts(logs: dict[int, EventLog]) -> dict[int, str]:
    found = {}
    for rank, log in logs.items():
        starts = [e for e in log.events if e.name == "start" and isinstance(e.fields.get("host"), str)]
        if starts:
            found[rank] = starts[-1].fields["host"]
    return found


def _aligned(job: Job, waiting: frozenset[str]) -> Job:
    if len(job.logs) < 2:
        job.problem = "events of one rank only: nobody to compare it with"
        return job
    timed = all(log.modules for log in job.logs.values())
    if not timed and not all(OWN_SPANS & log.phases.keys() for log in job.logs.values()):
        job.problem = "the ranks' events hold neither module times nor spans of data or optimizer"
        return job
    columns = {rank: _columns(log, timed, waiting) for rank, log in job.logs.items()}
    guide = {rank: log.modules if timed else log.phases for rank, log in job.logs.items()}
    spans = {rank: _spans(log) for rank, log in job.logs.items()}
    return align(job, columns, guide, spans)


def align(job: Job, columns: dict[int, dict[str, StepTimes]], guide: dict[int, dict[str, StepTimes]],
          spans: dict[int, dict[str, StepTimes]]) -> Job:
    """Fill `job`: own times from `columns`, whole steps from `spans`, in the bins that all of `guide` have."""
    width = _width(guide, columns)
    binned = {rank: {name: _binned(times, width) for name, times in own.items()} for rank, own in columns.items()}
    whole = {rank: {name: _binned(times, width) for name, times in found.items()} for rank, found in spans.items()}
    common = set.intersection(*(set().union(*(_bins_of(times, width) for times in found.values()))
                                for found in guide.values()))
    numbers = sorted(n for n in common if n * width > SETTLING)
    if len(numbers) < LEAST_BINS:
        job.problem = f"{len(numbers)} measurements of every rank are too few to tell a slow rank from noise"
        return job
    job.first = [max(n * width, 1) for n in numbers]
    job.own = {rank: [{name: times.get(n, 0.0) for name, times in own.items()} for n in numbers]
               for rank, own in binned.items()}
    job.step = [median(sum(times.get(n, 0.0) for times in found.values()) for found in whole.values())
                for n in numbers]
    return job


def _spans(log: EventLog) -> dict[str, StepTimes]:
    """What adds up to a step. Spans of a pool's exchange may lie inside others: there the rank says how long it was."""
    if log.pool is not None and "step" in log.pool.times:
        return {"step": log.pool.times["step"]}
    return {name: times for name, times in log.phases.items() if name not in ASIDE}


def _columns(log: EventLog, timed: bool, waiting: frozenset[str]) -> dict[str, StepTimes]:
    own = {name: times for name, times in log.phases.items() if name in OWN_SPANS}
    if timed:
        own |= {name: times for name, times in log.modules.items() if name not in waiting}
    return own


def _width(guide: dict[int, dict[str, StepTimes]], columns: dict[int, dict[str, StepTimes]]) -> int:
    """Steps per bin: a power of two, at least the widest column's, such that at most `MOST_BINS` are filled."""
    width = max(times.width for own in columns.values() for times in own.values())
    filled = max((len(times.bins) for found in guide.values() for times in found.values()), default=0)
    spread = max((max(times.bins) - min(times.bins) + 1) * times.width // max(len(times.bins), 1)
                 for found in guide.values() for times in found.values() if times.bins)
    while width < spread or (filled * spread / width) > MOST_BINS:
        width *= 2
    return width


def _bins_of(times: StepTimes, width: int) -> set[int]:
    return {number * times.width // width for number in times.bins}


def _binned(times: StepTimes, width: int) -> dict[int, float]:
    """Mean seconds per recorded step in each bin of `width` steps."""
    sums: dict[int, list[float]] = {}
    for number, (seconds, steps) in times.bins.items():
        entry = sums.setdefault(number * times.width // width, [0.0, 0.0])
        entry[0] += seconds
        entry[1] += steps
    return {number: seconds / steps for number, (seconds, steps) in sums.items() if steps}


def slow_ranks(job: Job) -> list[Slow]:
    """The slow ranks, the slowest first."""
    if job.problem:
        return []
    totals = {rank: [sum(phases.values()) for phases in bins] for rank, bins in job.own.items()}
    others = medians_of_others(totals)
    ratios = {rank: logs for rank in totals if (logs := _ratios(totals[rank], others[rank])) is not None}
    noise = _noise(ratios.values())
    found = [slow for rank, logs in ratios.items()
             if (slow := _slow(rank, logs, noise, job, totals[rank], others[rank])) is not None]
    return sorted(found, key=lambda item: -item.excess)


def medians_of_others(totals: dict[int, list[float]]) -> dict[int, list[float]]:
    """The median of the other ranks in each bin, for each rank; one sorting per bin, as ranks may be thousands."""
    found: dict[int, list[float]] = {rank: [] for rank in totals}
    for column in zip(*totals.values(), strict=True):
        ordered = sorted(column)
        half, odd = divmod(len(ordered) - 1, 2)
        for rank, own in zip(totals, column, strict=True):
            gap = bisect_left(ordered, own)  # the others are `ordered` without this place
            upper = ordered[half + (half >= gap)]
            found[rank].append(upper if odd else (ordered[half - 1 + (half - 1 >= gap)] + upper) / 2)
    return found


def _ratios(own: Sequence[float], others: Sequence[float]) -> list[float] | None:
    """Logarithm of a rank's own time over the others' median in each bin."""
    pairs = list(zip(own, others, strict=True))
    return None if any(min(pair) <= 0 for pair in pairs) else [math.log(mine / other) for mine, other in pairs]


def _noise(ratios: Iterable[Sequence[float]]) -> float:
    """A robust standard deviation of a ratio in one bin, from the differences between neighbouring bins."""
    steps = [abs(b - a) for logs in ratios for a, b in zip(logs, logs[1:])]
    return 1.4826 * median(steps) / math.sqrt(2) if steps else 0.0


def _slow(rank: int, logs: Sequence[float], noise: float, job: Job, own: Sequence[float],
          medians: Sequence[float]) -> Slow | None:
    others = [r for r in job.own if r != rank]
    pairs = list(zip(own, medians, strict=True))
    begin = _begin(logs, noise)
    if begin is None:
        return None
    ratio = math.exp(median(logs[begin:]))
    excess = median([mine - other for mine, other in pairs[begin:]])
    share = excess / max(median(job.step[begin:]), excess)
    if share < STEP_SHARE:
        return None
    phases = {name: median(job.own[rank][i][name] - median(job.own[r][i].get(name, 0.0) for r in others)
                           for i in range(begin, len(job.first))) for name in job.own[rank][begin]}
    worst = max(phases, key=lambda name: phases[name])
    if 2 * phases[worst] < sum(value for value in phases.values() if value > 0):
        worst = EVERYTHING
    return Slow(rank, ratio, excess, share, job.first[begin], worst, phases, len(logs) - begin)


def _begin(logs: Sequence[float], noise: float) -> int | None:
    """The first bin from which the ratio is beyond the limit until the end, in nearly every bin; None if never."""
    for begin in range(len(logs) - LEAST_BINS + 1):
        part = logs[begin:]
        middle = median(part)
        limit = max(math.log(RATIO), NOISE_SIGMAS * 1.25 * noise / math.sqrt(len(part)))
        if middle <= limit or part[0] <= middle / 2:
            continue
        if _agree(part, middle / 2, AGREEING, AGREEING) or \
                middle >= math.log(STRONG) and _agree(part, middle / 10, POINTING, MOST):
            return begin
    return None


def _agree(part: Sequence[float], bound: float, share: float, ends: float) -> bool:
    """Whether such shares of the bins, and of the first and of the last few, are beyond `bound`."""
    beyond = [value > bound for value in part]
    return sum(beyond) >= share * len(part) and sum(beyond[:LEAST_BINS]) >= ends * LEAST_BINS \
        and sum(beyond[-LEAST_BINS:]) >= ends * LEAST_BINS
