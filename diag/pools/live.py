"""What a live screen shows of a separated run: busy shares over time, and the state of the link."""

from __future__ import annotations

from statistics import mean

from diag.pools.exchange import bytes_per_step
from diag.pools.gather import Job
from diag.report.model import size


def busy_history(job: Job, role: str) -> list[float]:
    """The busy share of a pool, mean over its ranks, oldest first; as many values as all of them have."""
    columns = []
    for member in job.pool(role):
        step, busy = member.pool.times.get("step"), member.pool.times.get("busy")
        if step is None or busy is None:
            continue
        columns.append([min(busy.bins[n][0] / step.bins[n][0], 1.0) for n in sorted(step.bins)
                        if n in busy.bins and step.bins[n][0] > 0])
    length = min(map(len, columns), default=0)
    return [mean(values) for values in zip(*(column[-length:] for column in columns), strict=True)] if length else []


def link_note(job: Job) -> tuple[str, str] | None:
    """(bytes per step, the rest in words) of the exchange; None before anything crossed."""
    sent = bytes_per_step(job)
    if not any(sent.values()):
        return None
    members = list(job.members.values())
    depth = [values for m in members if (values := m.pool.times.get("queue")) is not None and values.bins]
    deepest = max((total / count for times in depth for total, count in [times.bins[max(times.bins)]]), default=0.0)
    lag = max((value for m in members for value in m.pool.lags), default=0)
    again = sum(m.pool.totals.get("resends", 0.0) for m in members)
    return (f"{size(int(sum(sent.values())))} per step",
            f"queue {deepest:.0f}, weights at most {lag} steps old, {again:.0f} sent again")
