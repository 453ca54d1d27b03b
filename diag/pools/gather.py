"""The separated runs among what was read: who belongs to which pool, and what a usual step of each rank looks like."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePath
from statistics import mean, median
from typing import Any

from diag.artefacts import Artefacts
from diag.artefacts.pool_records import PoolLog, Regrouping
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_environment import RunEnvironment
from diag.artefacts.run_events import EventLog
from diag.artefacts.step_times import StepTimes
from diag.pools.ratio import Split
from diag.report.model import clip_list, rank_list
from diag.steps.ranks import ASIDE

#: Measured steps of each rank below which nothing is said about times.
LEAST_STEPS = 8
COMPUTE, UPDATE = "compute", "update"
#: Spans in which a rank hands something to the links, and in which it waits for the other pool.
SENDING, WAITING = "pool_send", {COMPUTE: "pool_wait_weights", UPDATE: "pool_wait_gradients"}
NOUN = {COMPUTE: "compute", UPDATE: "update", "up": "gradients", "down": "weights"}


@dataclass(frozen=True, slots=True)
class Member:
    """One rank. Seconds are those of a usual step: the median over the last half of what was measured.

    `busy` is neither waiting for the other pool nor, `blocked`, for the link to take what is sent. `work` is what it
    does besides sending and waiting. None where nothing was measured.
    """

    rank: int
    role: str
    host: str | None
    log: EventLog
    pool: PoolLog
    steps: int = 0
    step: float | None = None
    busy: float | None = None
    blocked: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def sending(self) -> float:
        """Seconds per step of handing payload to the links, waiting for a free buffer included."""
        return self.phases.get(SENDING, 0.0)

    @property
    def work(self) -> float | None:
        """Seconds per step of neither waiting for the other pool nor sending to it."""
        return None if self.busy is None else max(self.busy - max(self.sending - self.blocked, 0.0), 0.0)

    @property
    def waiting(self) -> float | None:
        """Seconds per step of waiting for the other pool."""
        return None if self.busy is None or self.step is None else max(self.step - self.busy - self.blocked, 0.0)

    @property
    def ended(self) -> bool:
        """Whether it said how it ended, since its last start."""
        return any(event.name in ("end", "exception", "interrupted", "finished") for event in self.log.events)


@dataclass(slots=True)
class Job:
    """One separated run. `told` is environment.json's own description of its pools, `bound` the staleness allowed.

    `announced` are the ranks of each pool that the run says it has, whether or not they left records.
    """

    directory: str
    members: dict[int, Member]
    config: RunConfig | None
    told: dict[str, Any]
    mode: str | None
    bound: int | None
    announced: dict[str, list[int]]

    def pool(self, role: str) -> list[Member]:
        """The members of one pool that left records, by rank."""
        return [member for _, member in sorted(self.members.items()) if member.role == role]

    def measured(self, role: str) -> list[Member]:
        """Those of them with enough measured steps."""
        return [m for m in self.pool(role) if m.steps >= LEAST_STEPS and m.step and m.busy is not None]

    def host(self, rank: int) -> str | None:
        """The host of a rank, where it said so."""
        member = self.members.get(rank)
        return member.host if member is not None else None

    def hosts(self, ranks: list[int]) -> list[str]:
        """The hosts of these ranks, each once."""
        return sorted({host for rank in ranks if (host := self.host(rank)) is not None})

    def role_of(self, rank: int) -> str | None:
        """The pool of a rank, where the run or the rank says it."""
        if rank in self.members:
            return self.members[rank].role
        return next((role for role, ranks in self.announced.items() if rank in ranks), None)

    def name(self, ranks: list[int]) -> str:
        """"update rank 2 (node-b)"; ranks of both pools are only ranks."""
        roles, hosts = {self.role_of(rank) for rank in ranks}, self.hosts(ranks)
        moved = any(rank in self.moved for rank in ranks)  # what is said may be of the time before
        role = roles.pop() if len(roles) == 1 and not moved else None
        at = f" ({clip_list(hosts, 3)})" if hosts else ""
        return f"{role + ' ' if role else ''}rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}{at}"

    @property
    def regroupings(self) -> list[Regrouping]:
        """The changes of the split of this run, in their order."""
        return max((member.pool.regroupings for member in self.members.values()), key=len, default=[])

    @property
    def moved(self) -> range:
        """The ranks that were in either pool at some time."""
        sizes = [split[0] for made in self.regroupings for split in (made.before, made.after)]
        return range(min(sizes), max(sizes)) if sizes else range(0)

    def size(self, role: str) -> int:
        """Ranks of a pool: as announced, else as seen."""
        return len(self.announced[role]) or len(self.pool(role))

    @property
    def split(self) -> Split | None:
        """Both pools as they went, means over their ranks; None where one of them was not measured."""
        compute, update = self.measured(COMPUTE), self.measured(UPDATE)
        if not compute or not update:
            return None
        return Split(self.size(COMPUTE), self.size(UPDATE), mean(m.busy or 0.0 for m in compute),
                     mean(m.busy or 0.0 for m in update), self.step_seconds or 0.0)

    @property
    def step_seconds(self) -> float | None:
        """A usual step of the job: that of its compute ranks, which all have the same, else that of all."""
        steps = [m.step for m in self.measured(COMPUTE) or self.measured(UPDATE) if m.step]
        return median(steps) if steps else None

    @property
    def last_step(self) -> int | None:
        """The last step that any rank recorded."""
        return max((m.pool.last_step for m in self.members.values() if m.pool.last_step is not None), default=None)


def separated(artefacts: Artefacts) -> list[Job]:
    """Every run whose ranks recorded pools, or that says it is separated, by directory."""
    found: dict[str, dict[int, EventLog]] = {}
    for log in artefacts.of(EventLog):
        if len(log.ranks) == 1:
            found.setdefault(run_of(log), {})[log.ranks[0]] = log
    jobs = []
    for directory, logs in sorted(found.items()):
        config = next((c for c in artefacts.of(RunConfig) if c.directory == directory), None)
        environment = next((e for e in artefacts.of(RunEnvironment) if e.directory == directory), None)
        told = environment.values.get("pools") if environment is not None else None
        told = told if isinstance(told, dict) else {}
        announced = _announced(told)
        members = {rank: member for rank, log in logs.items() if (member := _member(rank, log, announced)) is not None}
        mode = _mode(told, config, members)
        if members or (mode not in (None, "off")):
            jobs.append(Job(directory, members, config, told, mode, _bound(told, config, mode), announced))
    return jobs


def run_of(log: EventLog) -> str:
    """The run directory of events/rank_R.jsonl."""
    return str(PurePath(log.directory).parent)


def _member(rank: int, log: EventLog, announced: dict[str, list[int]]) -> Member | None:
    pool = log.pool
    role = None if pool is None else pool.role or next((r for r, ranks in announced.items() if rank in ranks), None)
    if pool is None or role is None:
        return None
    hosts = [e.fields["host"] for e in log.events if e.name == "start" and isinstance(e.fields.get("host"), str)]
    step, busy = pool.times.get("step"), pool.times.get("busy")
    since = _middle(step)
    phases = {name: value for name, times in log.phases.items()
              if name not in ASIDE and (value := usual(times, since)) is not None}
    return Member(rank, role, hosts[-1] if hosts else None, log, pool,
                  steps=int(sum(count for _, count in step.bins.values())) if step else 0,
                  step=usual(step, since), busy=usual(busy, since),
                  blocked=usual(pool.times.get("blocked"), since) or 0.0, phases=phases)


def _middle(times: StepTimes | None) -> int:
    """The step at which the last half begins."""
    if times is None or not times.bins:
        return 0
    return (min(times.bins) + max(times.bins) + 1) // 2 * times.width


def usual(times: StepTimes | None, since: int = 0) -> float | None:
    """The median of the means per step of the bins from step `since` on; None where there is none."""
    if times is None:
        return None
    values = [total / count for number, (total, count) in times.bins.items()
              if count and (number + 1) * times.width > since]
    return median(values) if values else None


def _mode(told: dict[str, Any], config: RunConfig | None, members: dict[int, Member]) -> str | None:
    said = [told.get("mode"), *(m.pool.mode for m in members.values()),
            config.get("pools.mode") if config is not None else None]
    return next((mode for mode in said if isinstance(mode, str)), None)


def _bound(told: dict[str, Any], config: RunConfig | None, mode: str | None) -> int | None:
    """Steps by which weights may lag; None where the run does not say."""
    if mode in ("sync", "stream"):
        return 0
    for value in (told.get("staleness"), config.number("pools.staleness") if config is not None else None):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9:
            return int(value)
    return None


def _announced(told: dict[str, Any]) -> dict[str, list[int]]:
    found = {}
    for role in (COMPUTE, UPDATE):
        ranks = told.get(role)
        ranks = ranks if isinstance(ranks, list) and len(ranks) <= 1 << 20 else []
        found[role] = sorted({r for r in ranks if isinstance(r, int) and not isinstance(r, bool) and r >= 0})
    return found


def stamp(seconds: float | None) -> str | None:
    """Unix seconds as the recorder's own logs print them."""
    if seconds is None or not 0 <= seconds < 1e11:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
