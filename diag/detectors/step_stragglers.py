"""One rank, or one host, that the others wait for, from each rank's own spans and module times.

Sees: which ranks need longer than their peers for what they do alone, since which step, in which phase
(`diag.steps.ranks`). Cannot see: why a rank is slow; ranks that left no events; slowness inside collectives (a bad
link), which lengthens everybody's waiting alike. Experts that get more tokens are slow for a reason that is not the
rank's: where the load explains the time, the finding is an imbalance and not a straggler.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from diag.artefacts import Artefact, Artefacts
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_events import EventLog
from diag.detectors import NotChecked, detector
from diag.placement import rank_loads
from diag.schema import Evidence, Finding, Where
from diag.steps.ranks import EVERYTHING, TENSOR_PARALLEL, Job, Slow, jobs, slow_ranks

_A = TypeVar("_A", bound=Artefact)

#: Share of the excess that lies in the experts, and share of it that more tokens explain: then the load is to blame.
MOSTLY = 0.6
EXPLAINED = 0.5
#: What to do where the rank waits for its data; for all else the playbook's steps fit.
_DATA_FIX = [
    "Look at the mount of {hosts}, its cache and its network before the storage itself: the other ranks read well.",
    "Compare what the ranks read: a shard that is larger, remote or damaged, documents that take longer to tokenise.",
    "Stage the data on local disk, or give that rank's loader more workers and prefetch (playbook slow-data).",
]
_WHAT = {"data": "waiting for data", "optimizer": "in the optimizer", EVERYTHING: "in everything it computes"}


@detector("steps", needs=EventLog, wants=(RunConfig, MetricsLog), subject="events of the ranks (events/rank_R.jsonl)")
def step_stragglers(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """At most one finding per job, naming all its slow ranks; one line for a job without any."""
    for job in jobs(artefacts.of(EventLog), lambda log: waiting_modules(log, artefacts)):
        if job.problem:
            yield NotChecked(f"slow ranks: {job.problem}")
        else:
            yield judged(job, artefacts)


def waiting_modules(log: EventLog, artefacts: Artefacts) -> frozenset[str]:
    """The modules of a log's run that wait for other ranks, beside the exchanges."""
    config = _of_run(log, artefacts, RunConfig)
    tensor = config.number("modules.attention.tensor") if config else None
    return TENSOR_PARALLEL if tensor is not None and tensor > 1 else frozenset()


def judged(job: Job, artefacts: Artefacts, slow: list[Slow] | None = None) -> Finding:
    """What there is to say about the ranks of a job that can be judged, or about those found `slow` in it."""
    slow = slow_ranks(job) if slow is None else slow
    if not slow:
        return _even(job)
    log = next(iter(job.logs.values()))
    loaded = _loaded(slow, _of_run(log, artefacts, RunConfig), _of_run(log, artefacts, MetricsLog))
    return _imbalance(job, slow, loaded) if loaded is not None else _straggler(job, slow)


def _of_run(log: EventLog, artefacts: Artefacts, kind: type[_A]) -> _A | None:
    """The artefact of the run directory above events/."""
    folder = str(Path(log.directory).parent)
    return next((item for item in artefacts.of(kind) if item.directory == folder), None)


def _loaded(slow: list[Slow], config: RunConfig | None, log: MetricsLog | None) -> dict[int, float] | None:
    """Relative expert load of the slow ranks where it explains why they are slow; None where it does not."""
    loads = rank_loads(config, log)
    if not loads:
        return None
    for item in slow:
        beyond = item.phases.get("experts", 0.0) / max(sum(v for v in item.phases.values() if v > 0), 1e-12)
        if beyond < MOSTLY or loads.get(item.rank, 1.0) - 1 < EXPLAINED * (item.ratio - 1):
            return None
    return {item.rank: loads[item.rank] for item in slow}


def _even(job: Job) -> Finding:
    return Finding(cause="healthy", role="context", severity="info", confidence=0.9, where=Where(module="steps"),
                   summary=f"No rank is slower than the others: {len(job.logs)} ranks compared over "
                           f"{len(job.first)} stretches of steps.")


def _straggler(job: Job, slow: list[Slow]) -> Finding:
    worst = slow[0]
    ranks = sorted(item.rank for item in slow)
    hosts, whole = _hosts(job, ranks)
    where = _phase(worst.phase)
    at = f" on {hosts[0]}" if len(hosts) == 1 and len(set(job.hosts.values())) > 1 else ""
    who = f"All ranks of host {hosts[0]} are" if whole else f"Rank{'s' if len(ranks) > 1 else ''} " \
        f"{', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}{at} {'are' if len(ranks) > 1 else 'is'}"
    since = f"since step {worst.since:,}" if worst.since > job.first[0] else "from the start"
    summary = (f"{who} {worst.ratio - 1:.0%} slower than the others {since}, {where}; "
               f"that is {worst.share:.0%} of each step, in which the other ranks wait.")
    log = job.logs[worst.rank]
    return Finding(
        cause="straggler", severity="warning", confidence=0.85 if worst.bins >= 10 else 0.75, summary=summary,
        where=Where(ranks=ranks, hosts=hosts, module=None if worst.phase in _WHAT else worst.phase, step=worst.since),
        evidence=_evidence(job, worst, log), fix=_fix(worst, hosts),
        numbers={"slow": [_row(item) for item in slow], "ranks_compared": len(job.logs)},
    )


def _imbalance(job: Job, slow: list[Slow], loads: dict[int, float]) -> Finding:
    worst = slow[0]
    ranks = sorted(loads)
    summary = (f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} compute experts "
               f"{worst.ratio - 1:.0%} longer than the others: they carry {loads[worst.rank]:.1f} times an even share "
               f"of the tokens. The routing is uneven, the rank is not slow.")
    return Finding(cause="moe_expert_imbalance", severity="warning", confidence=0.75, summary=summary,
                   where=Where(ranks=ranks, hosts=_hosts(job, ranks)[0], module="experts", step=worst.since),
                   evidence=_evidence(job, worst, job.logs[worst.rank]),
                   numbers={"slow": [_row(item) for item in slow], "loads": {str(r): v for r, v in loads.items()}})


def _hosts(job: Job, ranks: list[int]) -> tuple[list[str], bool]:
    """The hosts of the slow ranks, and whether they are exactly one whole host of several."""
    hosts = sorted({job.hosts[rank] for rank in ranks if rank in job.hosts})
    several = len(set(job.hosts.values())) > 1
    whole = len(hosts) == 1 and several and len(ranks) > 1 and ranks == sorted(
        rank for rank, host in job.hosts.items() if host == hosts[0])
    return hosts, whole


def _phase(name: str) -> str:
    return ("" if name == EVERYTHING else "mostly ") + _WHAT.get(name, f"computing {name}")


def _fix(worst: Slow, hosts: list[str]) -> list[str]:
    if worst.phase != "data":
        return []
    return [step.replace("{hosts}", ", ".join(hosts) or "the rank's host") for step in _DATA_FIX]


def _evidence(job: Job, worst: Slow, log: EventLog) -> list[Evidence]:
    """The onset and the end of the slow stretch: own time of the slow rank beside the others'."""
    found = []
    begin = job.first.index(worst.since)
    for index in dict.fromkeys((begin, len(job.first) - 1)):
        spent = {rank: sum(bins[index].values()) if worst.phase == EVERYTHING else bins[index].get(worst.phase, 0.0)
                 for rank, bins in job.own.items()}
        own, others = spent.pop(worst.rank), list(spent.values())
        what = "own time" if worst.phase == EVERYTHING else worst.phase
        text = (f"step {job.first[index]}: {what} {own:.4g} s per step on rank {worst.rank}, "
                f"{min(others):.4g} to {max(others):.4g} s on the others")
        found.append(Evidence(path=log.path, text=text, rank=worst.rank))
    return found


def _row(item: Slow) -> dict[str, object]:
    return {"rank": item.rank, "ratio": round(item.ratio, 3), "excess_seconds": round(item.excess, 6),
            "share_of_step": round(item.share, 3), "since_step": item.since, "phase": item.phase}
