"""Who of the pools is slow among its like, and who went away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from diag.artefacts.pool_records import Trouble
from diag.artefacts.run_events import EventLog
from diag.artefacts.step_times import StepTimes
from diag.pools.gather import COMPUTE, SENDING, UPDATE, Job, Member, stamp
from diag.report.model import rank_list
from diag.schema import Evidence, Finding, Where
from diag.steps.ranks import Job as RankJob
from diag.steps.ranks import Slow, align, jobs, slow_ranks

#: An update rank is slow when it needs this many times what its share of the state explains.
UNEXPLAINED = 1.25
#: Group of findings that come from the pools' own records, which name both sides.
GROUP = "pools"
LOST = ("pool_peer_lost", "pool_timeout")


def slow_compute(job: Job, waiting: frozenset[str]) -> list[Slow]:
    """The slow ranks of the compute pool, from what each does alone (`diag.steps.ranks`)."""
    return [slow for found in jobs([m.log for m in job.pool(COMPUTE)], lambda log: waiting)
            for slow in slow_ranks(found)]


def slow_update(job: Job) -> list[Slow]:
    """The slow ranks of the update pool: those whose step takes longer than their share of the state explains."""
    members = job.measured(UPDATE)
    if len(members) < 2:
        return []
    columns: dict[int, dict[str, StepTimes]] = {}
    for member in members:
        columns[member.rank] = {"update": member.pool.times["busy"]}
        if "blocked" in member.pool.times:
            columns[member.rank]["blocked"] = member.pool.times["blocked"]  # part of `SENDING`, and not of busy
        if SENDING in member.log.phases:
            columns[member.rank][SENDING] = _negative(member.log.phases[SENDING])
    logs: dict[int, EventLog] = {m.rank: m.log for m in members}
    guide = {m.rank: {"step": m.pool.times["step"]} for m in members}
    held = align(RankJob(logs, {}), columns, guide, guide)
    shares = {m.rank: share_of_state(job, m) for m in members}
    return [slow for slow in slow_ranks(held) if slow.ratio >= UNEXPLAINED * max(shares[slow.rank] or 1.0, 1.0)]


def _negative(times: StepTimes) -> StepTimes:
    return StepTimes(times.width, {number: [-seconds, steps] for number, (seconds, steps) in times.bins.items()})


def share_of_state(job: Job, member: Member) -> float | None:
    """State bytes of an update rank over the median of the others'; None where they are not known."""
    others = [m.pool.state_bytes for m in job.pool(UPDATE) if m.rank != member.rank and m.pool.state_bytes]
    return member.pool.state_bytes / median(others) if others and member.pool.state_bytes else None


@dataclass(frozen=True, slots=True)
class Report:
    """One rank says of another that it is gone, or does not answer."""

    member: Member
    trouble: Trouble
    peer: int


def lost(job: Job) -> Iterator[Finding]:
    """One finding that names the ranks which the others lost; who reports a loss was alive, and is not accused."""
    reports = [Report(member, trouble, trouble.peer) for member in job.members.values()
               for trouble in member.pool.trouble(*LOST) if trouble.peer is not None]
    if not reports:
        return
    reports.sort(key=lambda report: report.trouble.time or 0.0)
    reports = [report for number, report in enumerate(reports)  # who had reported before it went, went because of that
               if all(earlier.member.rank != report.peer for earlier in reports[:number])]
    if mute := [report for report in reports if report.trouble.first.get("alive") is not True]:
        reports = mute  # who answers, and only waits for others, is not the one
    alive = {report.member.rank for report in reports}
    gone = sorted({report.peer for report in reports} - alive) or [reports[0].peer]
    wordless = [rank for rank in gone if rank not in job.members or not job.members[rank].ended]
    gone = wordless or gone  # who said how it ended did so because of the one that could not
    about = [report for report in reports if report.peer in gone]
    first = about[0]
    went_on = any(event.name == "finished" for member in job.members.values() for event in member.log.events)
    silent = all(report.trouble.name == "pool_timeout" for report in about)
    yield Finding(
        cause="pool_member_lost", severity="warning" if went_on else "error",
        confidence=0.85 if len(gone) == 1 else 0.6,
        summary=_sentence(job, gone, about, silent=silent, went_on=went_on),
        where=Where(ranks=gone, hosts=job.hosts(gone), group=GROUP, step=_step(first.trouble),
                    time=stamp(first.trouble.time)),
        evidence=[_evidence(report) for report in about[:4]] + _last_words(job, gone),
        numbers={"reports": [{"rank": r.member.rank, "lost": r.peer, "step": _step(r.trouble),
                              "reason": str(r.trouble.first.get("reason", ""))[:200]} for r in reports[:32]]},
    )


@dataclass(frozen=True, slots=True)
class Again:
    """The last start of a job followed the death of a rank (event `pool_restart` of `member`)."""

    member: Member
    trouble: Trouble

    @property
    def failures(self) -> list[tuple[int, int, str]]:
        """(start, rank, how) of each start that ended by a death, as the launcher knows it; the last one last."""
        said = self.trouble.first.get("failures")
        found = []
        for one in said if isinstance(said, list) else ():
            if isinstance(one, dict) and _number(one.get("start")) and _number(one.get("rank")):
                found.append((one["start"], one["rank"], str(one.get("how", "died"))[:300]))
        return found[-64:]

    def whole(self, key: str) -> int | None:
        """A whole number of the event."""
        value = self.trouble.first.get(key)
        return value if isinstance(value, int) and _number(value) else None

    @property
    def cost(self) -> str:
        """Where the run went on, and what was done twice."""
        record = self.trouble.first
        step, lost = self.whole("step"), self.whole("lost_steps")
        where = {"kept": f"they went on after step {step}, which the update pool had kept",
                 "checkpoint": f"they went back to the checkpoint of step {step}",
                 "beginning": "they began anew, without any checkpoint"}.get(str(record.get("source")), "they went on")
        done = "no step was lost" if not lost else f"{lost} step{'s' if lost != 1 else ''} had to be computed again"
        seconds = record.get("seconds")
        took = f", {seconds:.0f} s passed" if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9 else ""
        return f"{where}; {done}{took}"

    def finding(self, job: Job) -> Finding:
        """A rank died, and the run went on without it having cost more than this."""
        failures = self.failures
        ranks = sorted({rank for _, rank, _ in failures[-1:]})
        earlier = "".join(f" Before, {job.name([rank])} {how} (start {start})." for start, rank, how in failures[-4:-1])
        who = f"{_who(job, ranks)} {failures[-1][2]}" if failures else "A rank died, torchrun knows which"
        return Finding(
            cause="pool_restarted", severity="warning", confidence=0.9,
            summary=f"{who}, and all ranks were started again (start {self.whole('start')}): {self.cost}."
                    + earlier,
            where=Where(ranks=ranks, hosts=job.hosts(ranks), group=GROUP, step=_step(self.trouble),
                        time=stamp(self.trouble.time)),
            evidence=[Evidence(path=self.member.log.path, line=self.trouble.line, rank=self.member.rank,
                               text=f"pool_restart: start {self.whole('start')}, {self.cost}"[:400])],
            numbers={"failures": [{"start": s, "rank": rank, "how": how} for s, rank, how in failures],
                     "lost_steps": self.whole("lost_steps")},
        )


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def restarted(job: Job) -> Iterator[Finding]:
    """At most one finding: the last start of the job followed the death of a rank."""
    for member in job.members.values():
        for trouble in member.pool.trouble("pool_restart"):
            yield Again(member, trouble).finding(job)
            return


def _step(trouble: Trouble) -> int | None:
    """The step of a loss: its own field, or what was waited for."""
    said = re.search(r"\bstep (\d{1,12})\b", str(trouble.first.get("waiting_for", "")))
    return trouble.step if trouble.step is not None else int(said[1]) if said else None


def _sentence(job: Job, gone: list[int], about: list[Report], *, silent: bool, went_on: bool) -> str:
    reporters = sorted({report.member.rank for report in about})
    waiting = about[0].trouble.first.get("waiting_for")
    what = f" while waiting for {waiting[:120]}" if isinstance(waiting, str) else ""
    does = "does not answer" if silent else "went away"
    if any(report.trouble.first.get("alive") is True for report in about):
        does = "answers, but sends nothing"
    if len(gone) > 1:
        does = "do not answer" if silent else "went away"
    said = [rank for rank in gone if rank in job.members and job.members[rank].ended]
    unseen = [rank for rank in gone if rank not in job.members]
    own = "" if said or silent else "; nothing it recorded is among the inputs: its own log may say how it ended" \
        if unseen and len(gone) == 1 else "; it left no word of its own: killed from outside, or by the kernel" \
        if len(gone) == 1 else "; they left no word of their own"
    end = " The run went on." if went_on else ""
    return (f"{_who(job, gone)} {does}: rank{'s' if len(reporters) > 1 else ''} {rank_list(reporters)} noticed"
            f"{what}{own}.{end}")


def _who(job: Job, ranks: list[int]) -> str:
    text = job.name(ranks)
    return text[0].upper() + text[1:]


def _evidence(report: Report) -> Evidence:
    record = report.trouble.first
    reason = record.get("reason")
    text = f"{report.trouble.name}: peer {report.peer}" + (f", {reason}" if isinstance(reason, str) else "")
    waiting = record.get("waiting_for")
    text += f", waiting for {waiting}" if isinstance(waiting, str) else ""
    return Evidence(path=report.member.log.path, line=report.trouble.line, text=text[:400], rank=report.member.rank,
                    time=stamp(report.trouble.time))


def _last_words(job: Job, gone: list[int]) -> list[Evidence]:
    """What the lost ranks themselves said last."""
    found = []
    for rank in gone[:2]:
        member = job.members.get(rank)
        if member is None:
            continue
        events = [event for event in member.log.events if event.name in ("exception", "signal", "interrupted")]
        for event in events[:1]:
            text = f"{event.name}: {event.fields.get('type') or event.fields.get('signal') or ''} " \
                   f"{event.fields.get('message') or ''}".strip()
            found.append(Evidence(path=member.log.path, line=event.line, text=text[:400], rank=rank,
                                  time=stamp(event.time)))
        if not events and member.pool.last_line:
            found.append(Evidence(path=member.log.path, line=member.pool.last_line, rank=rank,
                                  text=f"the last record of rank {rank}: step {member.pool.last_step}"))
    return found
