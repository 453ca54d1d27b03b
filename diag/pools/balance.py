"""Is one pool idle while the other works, who waits for whom, and which split of the ranks would even it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from diag.pools.gather import COMPUTE, UPDATE, Job, Member
from diag.pools.legal import Limits, command, command_without
from diag.pools.members import GROUP, share_of_state
from diag.pools.ratio import BALANCED_POINTS, WORTH, Choice, Split, choose, predicted, splits, unseparated, without
from diag.report.model import rank_list
from diag.schema import Evidence, Finding, Where
from diag.steps.ranks import EVERYTHING, Slow

#: A pool waits for the other in earnest from this share of the step on: the same twenty points.
LATE_SHARE = BALANCED_POINTS / 100
#: Rows of the table of splits.
MOST_SPLITS = 12


def balance(job: Job, slow_compute: Sequence[Slow], slow_update: Sequence[Slow]) -> Iterator[Finding]:
    """Late weights, late gradients, and pools that are out of balance."""
    split, step = job.split, job.step_seconds
    if split is None or not step:
        return
    choice = choice_of(job, split, slow_compute, slow_update)
    if (slow_update or split.points < -BALANCED_POINTS) and \
            (late := _weights_late(job, step, slow_update, choice)) is not None:
        yield late
    if slow_compute and 1 - split.update_busy >= LATE_SHARE:
        yield _gradients_late(job, slow_compute, split)
    if not split.balanced:
        yield _imbalance(job, split, choice, alike=not (slow_compute or slow_update))


def choice_of(job: Job, split: Split, slow_compute: Sequence[Slow], slow_update: Sequence[Slow]) -> Choice:
    """The split to change to, as if the slow ranks were like the others."""
    return choose(_without(job, split, slow_compute, slow_update), Limits.of(job.config).split)


def _without(job: Job, split: Split, slow_compute: Sequence[Slow], slow_update: Sequence[Slow]) -> Split:
    """The split as it would be if the slow ranks were like the others."""
    if not slow_compute and not slow_update:
        return split
    slow = {item.rank for item in slow_update}
    update = [m.busy for m in job.measured(UPDATE) if m.rank not in slow and m.busy is not None]
    excess = max((item.excess for item in slow_compute), default=0.0)
    return without(split, excess, mean(update) if update else split.update_seconds)


def _weights_late(job: Job, step: float, slow: Sequence[Slow], choice: Choice) -> Finding | None:
    compute, update = job.measured(COMPUTE), job.measured(UPDATE)
    waiting = mean(m.waiting or 0.0 for m in compute)
    work = max(m.work or 0.0 for m in update)
    if min(waiting, work) < LATE_SHARE * step:
        return None
    guilty = [item.rank for item in slow] or ([update[0].rank] if job.size(UPDATE) == 1 else [])
    summary = f"Compute ranks wait {waiting / step:.0%} of each step for weights: "
    if slow:
        worst = slow[0]
        state = share_of_state(job, job.members[worst.rank])
        owns = f" (it owns {state:.2g} times as much state)" if state is not None and state > 1.1 else ""
        others = f", {worst.ratio:.1f} times as long as the other update ranks{owns}"
        since = f", since step {worst.since:,}" if worst.since > 10 else ""
        summary += f"{job.name(guilty)} needs {_seconds(job.members[worst.rank].busy)} for its part{others}{since}."
    elif guilty:
        summary += f"{job.name(guilty)}, the whole update pool, is busy for {_seconds(update[0].busy)} of " \
                   f"{_seconds(step)}."
    else:
        summary += f"all {job.size(UPDATE)} update ranks are busy for {_seconds(mean(m.busy or 0 for m in update))} " \
                   f"of {_seconds(step)}."
    fix = ["Look at {hosts} first: clocks, other processes, the storage of offloaded state (pdtrain diag env)."] \
        if slow else []
    fix = [text.replace("{hosts}", ", ".join(job.hosts(guilty)) or f"rank {rank_list(guilty)}'s host") for text in fix]
    return Finding(
        cause="pool_weights_late", severity="warning", confidence=0.85 if slow else 0.7, summary=summary,
        where=Where(ranks=guilty, hosts=job.hosts(guilty), group=GROUP, step=slow[0].since if slow else None),
        evidence=_evidence(compute[:1]) + _evidence([job.members[r] for r in guilty] or update[:2]),
        fix=fix + ([] if slow else _advice(job, choice)),
        numbers={"waiting_share": round(waiting / step, 4), "update_seconds": round(work, 6)},
    )


def _gradients_late(job: Job, slow: Sequence[Slow], split: Split) -> Finding:
    worst, guilty = slow[0], sorted(item.rank for item in slow)
    what = "in everything it computes" if worst.phase == EVERYTHING else f"mostly in {worst.phase}"
    since = f" since step {worst.since:,}" if worst.since > 10 else ""
    return Finding(
        cause="pool_gradients_late", severity="warning", confidence=0.8,
        summary=f"The update pool waits {1 - split.update_busy:.0%} of each step for gradients: {job.name(guilty)} is "
                f"{worst.ratio - 1:.0%} slower than the other compute ranks{since}, {what}.",
        where=Where(ranks=guilty, hosts=job.hosts(guilty), group=GROUP, step=worst.since),
        evidence=_evidence([job.members[rank] for rank in guilty[:2]]),
        numbers={"slow": [{"rank": s.rank, "ratio": round(s.ratio, 3), "excess_seconds": round(s.excess, 6),
                           "since_step": s.since, "phase": s.phase} for s in slow]},
    )


def _imbalance(job: Job, split: Split, choice: Choice, *, alike: bool) -> Finding:
    idle = "update" if split.points > 0 else "compute"
    longest = choice.best.longest_seconds
    summary = (f"The pools are out of balance: compute ranks are busy {split.compute_busy:.0%} of a step, update ranks "
               f"{split.update_busy:.0%}. {verdict(choice)}")
    numbers: dict[str, Any] = {
        "compute_busy": round(split.compute_busy, 4), "update_busy": round(split.update_busy, 4),
        "gap_points": round(split.points, 1), "compute_ranks_per_update_rank": round(split.work_ratio, 2),
        "balances": choice.balances, "recommended_compute": choice.best.compute,
        "recommended_update": choice.best.update, "longest_step_seconds": longest and round(longest, 6),
        "splits": table(job, choice),
    }
    return Finding(
        cause="pool_imbalance", severity="warning", confidence=0.85 if alike else 0.5, summary=summary,
        where=Where(group=GROUP, module=f"{idle} pool"),
        evidence=_evidence([*job.measured(COMPUTE)[:1], *job.measured(UPDATE)[:1]]), fix=_advice(job, choice),
        numbers=numbers)


def verdict(choice: Choice) -> str:
    """In one sentence what the ratio arithmetic says."""
    now, best = choice.now, choice.best
    per = now.work_ratio
    keeps = f"one update rank keeps up with {_count(per)}" if per >= 1 else \
        f"one compute rank keeps {1 / max(per, 1e-9):,.3g} update ranks busy"
    if not choice.balances:
        near = f"; the nearest is {best.text} ({abs(best.points):.0f} points apart)" if choice.changes else ""
        return f"No split of {now.ranks} ranks evens that out{near}: {keeps}."
    if not choice.changes:
        return f"With every rank as fast as its like, {now.text} would balance."
    step, most = _seconds(best.step_seconds), _seconds(best.longest_seconds or 0.0)
    to = f" to {most}" if most != step and best.longest_seconds else ""
    costs = f"; predicted step {step}{to} against {_seconds(now.step_seconds)}"
    slower = ", so balance costs time: idle ranks are better given other work" if choice.gain < -WORTH else ""
    return f"{best.text} (compute + update) would balance{costs}{slower}: {keeps}."


def _advice(job: Job, choice: Choice) -> list[str]:
    """What to do about the ratio, the exact command first."""
    best, now, steps = choice.best, choice.now, []
    limits = Limits.of(job.config)
    # the better of two splits that do not balance is still worth a change only when it is faster
    if choice.changes and (choice.balances or choice.gain > WORTH):
        steps.append(f"Change the split from {now.text} to {best.text}: "
                     f"{command(limits, job.directory, best.compute, best.update)}")
    if now.points > 0:
        if not choice.balances and (fewer := fewest_update(now)) < now.update and limits.split(now.compute, fewer):
            steps.append(f"{fewer} update rank{'s are' if fewer > 1 else ' is'} enough, {now.update - fewer} can go: "
                         f"{command(limits, job.directory, now.compute, fewer)}")
        steps.append("Give the idle update pool other work (checkpoints, data preparation), or add compute ranks: one "
                     f"update rank keeps up with {_count(now.work_ratio)}.")
        estimate = unseparated(now, limits.compute)
        if estimate is not None and (not choice.balances or choice.gain < -WORTH):
            steps.append(f"Consider not to separate: the same work on {estimate[0]} ranks without pools is about "
                         f"{_seconds(estimate[1])} per step (estimated from these seconds). Measure it: "
                         f"{command_without(limits, job.directory, estimate[0], job.config)}")
    elif job.mode == "sync":
        steps.append("Let the update overlap with the backward pass: --set pools.mode=stream.")
    steps.append(f"Measure again: pdtrain diag pools {job.directory}")
    return steps


def fewest_update(now: Split) -> int:
    """The fewest update ranks with which the step is not predicted to get longer."""
    return next((update for update in range(1, now.update)
                 if predicted(now, now.compute, update).step_seconds <= now.step_seconds * (1 + WORTH)), now.update)


def table(job: Job, choice: Choice) -> list[dict[str, Any]]:
    """The splits around the present one and the best, as rows: busy in per cent, seconds of a step."""
    legal = Limits.of(job.config).split
    found = list(splits(choice.now, legal))
    marks = (choice.now.update, choice.best.update, choice.fastest.update)
    found.sort(key=lambda s: min(abs(s.update - mark) for mark in marks))
    rows = []
    for split in sorted(found[:MOST_SPLITS], key=lambda s: s.update):
        what = [word for word, is_it in (("now", split.update == choice.now.update),
                                         ("recommended", choice.changes and split.update == choice.best.update),
                                         ("fastest", split.update == choice.fastest.update)) if is_it]
        rows.append({"compute": split.compute, "update": split.update,
                     "compute_busy_%": round(100 * split.compute_busy), "update_busy_%": round(100 * split.update_busy),
                     "apart_points": round(abs(split.points)), "step_seconds": round(split.step_seconds, 6),
                     "note": ", ".join(what)})
    return rows


def _evidence(members: Sequence[Member]) -> list[Evidence]:
    found = []
    for member in members:
        phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in
                           sorted(member.phases.items(), key=lambda kv: -kv[1])[:5])
        text = f"{member.role} rank {member.rank}: busy {_seconds(member.busy)} of {_seconds(member.step)} per step" \
               + (f" ({phases})" if phases else "")
        found.append(Evidence(path=member.log.path, line=member.pool.last_line or None, text=text, rank=member.rank))
    return found


def _count(ranks: float) -> str:
    """Compute ranks, which need not be a whole number of them: "1.4 compute ranks", "310 compute ranks"."""
    return f"{ranks:.0f} compute ranks" if ranks >= 10 else f"{ranks:.2g} compute rank{'s' if ranks >= 1.05 else ''}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
