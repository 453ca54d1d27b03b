"""What crosses between the pools: how long it holds the compute ranks up, and whether queues grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from diag.artefacts.pool_records import Link
from diag.artefacts.step_times import StepTimes
from diag.pools.gather import COMPUTE, NOUN, UPDATE, Job, Member
from diag.pools.legal import without_pools
from diag.pools.members import GROUP
from diag.report.model import rank_list, size
from diag.schema import Evidence, Finding, Where

#: Exposed exchange above this share of a step calls for deeper buffers, compression or another placement.
COMMUNICATION_SHARE = 0.15
#: A pair is slow below this share of the others' median bandwidth, with so many pairs to compare.
SLOW_LINK, LEAST_PAIRS = 0.5, 3
#: Messages that had to be sent again, as a share of all: beyond it they are worth a word.
RESENT_SHARE = 0.01
#: A queue grows: each third of the run deeper than the one before, in all so many times and so many messages.
GROWTH, GROWTH_MESSAGES, LEAST_BINS = 2.0, 4.0, 12


@dataclass(frozen=True, slots=True)
class Exposed:
    """Seconds per step that compute ranks spend on the exchange: handing gradients over, and waiting for weights for
    longer than the update pool's own work explains."""

    sending: float
    waiting: float
    step: float

    @property
    def share(self) -> float:
        """Share of the step."""
        return (self.sending + self.waiting) / self.step


def exposed(job: Job) -> Exposed | None:
    """The exposed exchange of a usual step; None where one of the pools was not measured."""
    compute, update, step = job.measured(COMPUTE), job.measured(UPDATE), job.step_seconds
    if not compute or not update or not step:
        return None
    work = max(m.work or 0.0 for m in update)
    return Exposed(mean(m.sending for m in compute), max(mean(m.waiting or 0.0 for m in compute) - work, 0.0), step)


def communication(job: Job) -> Iterator[Finding]:
    """At most one finding: the exchange takes too much of a step."""
    found = exposed(job)
    if found is None or found.share <= COMMUNICATION_SHARE:
        return
    slow = slow_pairs(job)
    ranks = _common([(sender, link.peer) for sender, link in slow])
    pairs = f" The slowest link, {_pair(*slow[0])}, carries {size(int(slow[0][1].bandwidth or 0))}/s, less than " \
            "half of what the others do." if slow else ""
    again = resent(job)
    resends = f" {again:.1%} of all messages were sent again." if again > RESENT_SHARE else ""
    compute = job.measured(COMPUTE)[0]
    yield Finding(
        cause="pool_communication", severity="warning", confidence=0.8,
        summary=f"The exchange between the pools takes {found.share:.0%} of a step: {found.sending / found.step:.0%} "
                f"handing gradients over, {found.waiting / found.step:.0%} waiting for weights beyond the update's own "
                f"work.{pairs}{resends}",
        where=Where(ranks=ranks, hosts=job.hosts(ranks), group=GROUP, module="link"),
        evidence=[Evidence(path=compute.log.path, line=compute.pool.last_line or None, rank=compute.rank,
                           text=f"rank {compute.rank}, seconds per step: sending {compute.sending:.4g}, waiting "
                                f"{compute.waiting or 0:.4g}, whole {compute.step or 0:.4g}")],
        fix=mitigation(job, bool(slow)),
        numbers={"share": round(found.share, 4), "sending_seconds": round(found.sending, 6),
                 "waiting_seconds": round(found.waiting, 6), "resent_share": round(again, 5)},
    )


def mitigation(job: Job, slow_link: bool) -> list[str]:
    """What lowers the exposed exchange, in the order in which to try it, without what the run has already."""
    steps = []
    if slow_link:
        steps.append("Look at the slow link first: `pdtrain diag comm` on its two hosts.")
    if job.mode == "sync":
        steps.append("Deeper buffers: --set pools.mode=stream overlaps the exchange with forward and backward, with "
                     "the same result.")
    elif (buffers := _config(job, "pools.buffers")) is not None:
        steps.append(f"Deeper buffers: --set pools.buffers={2 * int(buffers)} (now {int(buffers)}).")
    payload = job.told.get("payload") or (job.config.get("pools.payload") if job.config is not None else None)
    if payload in (None, "fp32"):
        steps.append("Compression: --set pools.payload=bf16 halves the bytes; compare the loss over some hundred "
                     "steps.")
    steps += ["Placement: put both pools on one node or behind one switch.",
              "Priority: give the exchange a stream of lower priority than the compute pool's collectives.",
              "If it stays above 15 %, the job is bound by communication: train without pools "
              f"({without_pools(job.config)}) and compare."]
    return steps


def _config(job: Job, key: str) -> float | None:
    return job.config.number(key) if job.config is not None else None


def pairs_of(job: Job) -> list[tuple[int, Link]]:
    """(sender, link) of every pair and direction that was recorded."""
    return [(rank, link) for rank, member in sorted(job.members.items())
            for _, link in sorted(member.pool.links.items())]


def slow_pairs(job: Job) -> list[tuple[int, Link]]:
    """Pairs whose bandwidth is far below that of the others of their direction, the slowest first."""
    found = []
    for direction in ("up", "down"):
        timed = [(rank, link) for rank, link in pairs_of(job) if link.direction == direction and link.bandwidth]
        if len(timed) < LEAST_PAIRS:
            continue
        for rank, link in timed:
            others = median(other.bandwidth or 0.0 for _, other in timed if other is not link)
            if (link.bandwidth or 0.0) < SLOW_LINK * others:
                found.append((rank, link))
    return sorted(found, key=lambda item: item[1].bandwidth or 0.0)


def _pair(sender: int, link: Link) -> str:
    return f"rank {sender} to {link.peer} ({NOUN[link.direction]})"


def _common(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The one rank that all of several pairs have in common; both of a single pair."""
    if not pairs:
        return []
    shared = set(pairs[0]).intersection(*pairs[1:])
    return sorted(shared) if len(pairs) == 1 or len(shared) == 1 else []


def resent(job: Job) -> float:
    """Messages sent again over messages sent."""
    totals = [member.pool.totals for member in job.members.values()]
    sent = sum(t.get("messages_sent", 0.0) for t in totals)
    return sum(t.get("resends", 0.0) for t in totals) / sent if sent else 0.0


def queues(job: Job) -> Iterator[Finding]:
    """At most one finding: the ranks whose messages pile up, and the one that does not take them."""
    growing: list[tuple[Member, float, float]] = []
    for _, member in sorted(job.members.items()):
        found = grown(member.pool.times.get("queue"))
        if found is not None:
            growing.append((member, *found))
    if not growing:
        return
    growing.sort(key=lambda item: -item[2])
    member, first, last = growing[0]
    peers = set(member.pool.peers or [link.peer for link in member.pool.links.values()])
    for other, _, _ in growing[1:]:
        peers &= set(other.pool.peers or [link.peer for link in other.pool.links.values()])
    guilty = sorted(peers) if len(peers) == 1 else []
    senders = [item[0].rank for item in growing]
    late = f"; all of them send to {job.name(guilty)}, which does not keep up" if guilty and len(senders) > 1 else \
        f"; {job.name(guilty)} does not keep up" if guilty else ""
    yield Finding(
        cause="pool_queue_growth", severity="warning", confidence=0.7,
        summary=f"Messages pile up on {job.name(senders)}: {last:.0f} wait or are unacknowledged now, {first:.0f} in "
                f"the first third of the run{late}.",
        where=Where(ranks=guilty, hosts=job.hosts(guilty), group=GROUP),
        evidence=[Evidence(path=m.log.path, line=m.pool.last_line or None, rank=m.rank,
                           text=f"queue depth of rank {m.rank}: {a:.3g} at first, {b:.3g} at last")
                  for m, a, b in growing[:3]],
        numbers={"queue_first": round(first, 2), "queue_last": round(last, 2), "senders": rank_list(senders)},
    )


def grown(times: StepTimes | None) -> tuple[float, float] | None:
    """The depth in the first and in the last third when it grew all along; else None."""
    if times is None or len(times.bins) < LEAST_BINS:
        return None
    values = [total / count for _, (total, count) in sorted(times.bins.items()) if count]
    third = len(values) // 3
    first, middle, last = median(values[:third]), median(values[third:-third]), median(values[-third:])
    if last >= GROWTH * first and last - first >= GROWTH_MESSAGES and first < middle < last \
            and max(values[:third]) < last and values[-1] > middle:
        return first, last
    return None


def bytes_per_step(job: Job) -> dict[str, float]:
    """Bytes sent per step over all pairs by direction, from the links."""
    found = {"up": 0.0, "down": 0.0}
    for _, link in pairs_of(job):
        if link.steps:
            found[link.direction] += link.bytes / link.steps
    return found

