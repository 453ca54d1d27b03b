"""Both pools side by side, the link between them and the lag of the weights, as one finding with tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from diag.artefacts.pool_records import Link, Regrouping
from diag.artefacts.run_events import regroups
from diag.pools.exchange import bytes_per_step, exposed, pairs_of, resent
from diag.pools.gather import COMPUTE, UPDATE, Job, Member
from diag.pools.ratio import split_words
from diag.pools.versions import histogram
from diag.report.model import size
from diag.schema import Finding, Where

#: Rows of ranks and links kept; the report is for people.
MOST_ROWS = 256


def side_by_side(job: Job) -> Finding:
    """What was measured of a separated run, for the reader's own eyes."""
    compute, update = job.measured(COMPUTE), job.measured(UPDATE)
    split, out = job.split, exposed(job)
    sent = bytes_per_step(job)
    said = []
    if split is not None:
        said.append(f"compute {split.compute_busy:.0%} busy, update {split.update_busy:.0%}")
    if out is not None:
        said.append(f"{out.share:.1%} of a step on the exchange")
    said += [f"{size(int(sent['up']))} of gradients and {size(int(sent['down']))} of weights per step"] \
        if any(sent.values()) else []
    lags = histogram(job)
    if lags:
        said.append(f"weights at most {max(lags)} step{'s' if max(lags) != 1 else ''} old")
    said += _told_by_events(job) + [_regrouping(job, made) for made in job.regroupings]
    mode = f"mode {job.mode}, " if job.mode else ""
    return Finding(
        cause="pool_measured", role="context", severity="info", confidence=0.9, where=Where(module="pools"),
        summary=f"Two pools, {mode}{job.size(COMPUTE)} compute + {job.size(UPDATE)} update ranks: "
                f"{'; '.join(said) or 'too few steps were recorded to measure'}.",
        numbers={
            "pools": [_row(job, role, members) for role, members in ((COMPUTE, compute), (UPDATE, update)) if members],
            "phases": _phases(compute, update),
            "links": _links(job),
            "version_lag": [{"steps_old": lag, "steps": count} for lag, count in lags.items()][:32],
            "ranks": [_member(m) for m in [*compute, *update][:MOST_ROWS]],
            "step_seconds": job.step_seconds, "resent_share": round(resent(job), 5),
            "bytes_up": sent["up"], "bytes_down": sent["down"],
            "bytes_up_expected": _told(job, "bytes_up"), "bytes_down_expected": _told(job, "bytes_down"),
            "regroupings": [{"after_step": made.step, "from": split_words(made.before), "to": split_words(made.after),
                             "seconds": made.seconds, "failed": made.failed, "why": made.why}
                            for made in job.regroupings],
            "directory": job.directory,
        })


def _regrouping(job: Job, made: Regrouping) -> str:
    """A change of the split, as a fact."""
    what = f"after step {made.step:,} it went from {split_words(made.before)} to {split_words(made.after)} ranks"
    if made.failed:
        return f"{what}, which did not start, and back"
    if made.seconds is None:
        last = made is job.regroupings[-1] and any(regroups(m.log.events) for m in job.members.values())
        return f"{what}{', but was not started again: --resume goes on' if last else ''}"
    return f"{what} ({made.seconds:.3g} s without training)"


def _told_by_events(job: Job) -> list[str]:
    """What the run says it lost when it went on, and which updates were left out."""
    said = []
    restored = [t for m in job.members.values() for t in m.pool.trouble("pool_restored")]
    lost = [n for t in restored if isinstance(n := t.last.get("lost_steps"), int) and n > 0]
    if lost:
        said.append(f"after the restart {max(lost)} step{'s' if max(lost) > 1 else ''} that the update pool had "
                    "reached were computed again")
    skipped = max((t.count for m in job.members.values() for t in m.pool.trouble("pool_skipped")), default=0)
    if skipped:
        said.append(f"{skipped} update{'s were' if skipped > 1 else ' was'} left out by agreement")
    return said


def _told(job: Job, key: str) -> float | None:
    value = job.told.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _row(job: Job, role: str, members: Sequence[Member]) -> dict[str, Any]:
    busy, step = mean(m.busy or 0.0 for m in members), mean(m.step or 0.0 for m in members)
    links = [link for rank, link in pairs_of(job) if job.role_of(rank) == role]
    resident = [m.pool.resident_bytes for m in members if m.pool.resident_bytes is not None]
    state = [m.pool.state_bytes for m in members if m.pool.state_bytes is not None]
    rate = _rate(links)
    return {"pool": role, "ranks": job.size(role), "busy_%": round(100 * busy / step) if step else None,
            "step_ms": _ms(step), "busy_ms": _ms(busy), "waiting_ms": _ms(step - busy),
            "memory": size(int(max(resident))) if resident else "", "state": size(int(max(state))) if state else "",
            "sends": f"{size(int(rate))}/s" if rate else "", "state_rate": _state_rate(role, members)}


def _state_rate(role: str, members: Sequence[Member]) -> str:
    """State bytes over the seconds of the optimizer: how fast the update runs through its memory, or its files."""
    rates = [m.pool.state_bytes / m.phases["optimizer"] for m in members
             if m.pool.state_bytes and m.phases.get("optimizer")] if role == UPDATE else []
    return f"{size(int(min(rates)))}/s" if rates else ""


def _rate(links: Sequence[Link]) -> float | None:
    seconds = sum(link.seconds for link in links)
    return sum(link.bytes for link in links) / seconds if seconds > 0 else None


def _phases(compute: Sequence[Member], update: Sequence[Member]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for m in [*compute, *update] for name in m.phases)
    rows = []
    for name in names:
        row: dict[str, Any] = {"phase": name}
        for role, members in ((COMPUTE, compute), (UPDATE, update)):
            values = [m.phases[name] for m in members if name in m.phases]
            row[f"{role}_ms"] = _ms(mean(values)) if values else None
        rows.append(row)
    return rows


def _links(job: Job) -> list[dict[str, Any]]:
    rows = []
    for rank, link in pairs_of(job)[:MOST_ROWS]:
        errors = sum(t.count for m in job.members.values() if m.rank == link.peer
                     for t in m.pool.trouble("pool_checksum_error")
                     if t.peer == rank and t.direction == link.direction)
        rows.append({"from": rank, "to": link.peer, "direction": link.direction,
                     "bytes_per_step": round(link.bytes / link.steps) if link.steps else None,
                     "bandwidth": f"{size(int(link.bandwidth))}/s" if link.bandwidth else "",
                     "latency_ms": _ms(link.latency / link.steps) if link.steps else None,
                     "queue_depth": round(link.queue), "resends": round(link.resends), "checksum_errors": errors})
    return rows


def _member(member: Member) -> dict[str, Any]:
    return {"rank": member.rank, "pool": member.role, "host": member.host or "",
            "busy_%": round(100 * (member.busy or 0.0) / member.step) if member.step else None,
            "busy_ms": _ms(member.busy), "sending_ms": _ms(member.sending), "steps": member.steps,
            "version": member.pool.version, "last_step": member.pool.last_step}


def _ms(value: float | None) -> float | None:
    return None if value is None else round(1e3 * value, 3)
