"""Whether a run should change the split of its ranks now: the rule of `pools.rebalance`, and of nobody else.

The split is that of `diag.pools.ratio`, as `pdtrain diag pools` recommends it. A change is not free, and a measurement
is noisy; so on top of it a change must

 1. be needed: the busy shares are more than `BALANCED_POINTS` apart, slow ranks counted as if they were like the others
    (a ratio never makes up for a broken host);
 2. be worth it: the step is predicted to be shorter by more than `WORTH`, and what that saves until the end of the run
    is at least `WORTH_COST` times what a change costs;
 3. lead somewhere new: no change is made twice, a split that the run has left is taken again only if it was measured to
    be faster than the present one, and there are at most `MOST_CHANGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from diag.pools.gather import COMPUTE, LEAST_STEPS, UPDATE
from diag.pools.members import UNEXPLAINED
from diag.pools.ratio import WORTH, Choice, Split, choose, without
from diag.report.model import rank_list
from diag.steps.ranks import STEP_SHARE

#: Changes in one run.
MOST_CHANGES = 3
#: What a change saves until the end, over what it costs: the prediction knows no exchanges that grow with the pool.
WORTH_COST = 1.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank since the last boundary, medians over `steps` steps, in seconds per step.

    `own`: what a compute rank does alone, without waiting for its like; None where it was not measured. `state_bytes`:
    what an update rank owns.
    """

    rank: int
    role: str
    steps: int
    step: float
    busy: float
    own: float | None = None
    state_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change that was made: (compute, update) ranks before and after, and the step measured before it."""

    before: tuple[int, int]
    after: tuple[int, int]
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the rule says. `why` is a sentence without its full stop; `split` is what was measured.

    `saved_seconds`, until the end of the run, and `cost_seconds` are None where no other split was in question.
    """

    change: bool
    why: str
    split: Split | None = None
    choice: Choice | None = None
    slow: list[int] = field(default_factory=list)
    saved_seconds: float | None = None
    cost_seconds: float | None = None


def propose(
    measured: Sequence[Measured], legal: Callable[[int, int], bool], *, steps_left: int, cost_seconds: float,
    past: Sequence[Change] = (),
) -> Proposal:
    """The rule. `measured`: every rank of both pools; `legal(compute, update)`: the splits that the trainer takes."""
    compute, update = ([m for m in measured if m.role == role] for role in (COMPUTE, UPDATE))
    steps = min((m.steps for m in measured), default=0)
    if not compute or not update or steps < LEAST_STEPS:
        return Proposal(False, f"{steps} steps were measured, {LEAST_STEPS} are needed")
    split = Split(len(compute), len(update), mean(m.busy for m in compute), mean(m.busy for m in update),
                  median(m.step for m in compute))
    if split.balanced:
        return Proposal(False, "the pools are balanced", split)
    excess, slow = _slow_compute(compute, split.step_seconds)
    slow_update = _slow_update(update, split.step_seconds)
    others = [m.busy for m in update if m.rank not in slow_update]
    as_if = without(split, excess, mean(others) if others else split.update_seconds)
    slow = sorted(slow + slow_update)
    choice = choose(as_if, legal)
    if slow and (as_if.balanced or not choice.changes):
        them = f"rank{'s' if len(slow) > 1 else ''} {rank_list(slow)} {'are' if len(slow) > 1 else 'is'}"
        rest = "the ratio is not at fault" if as_if.balanced else \
            f"no other split of {split.ranks} ranks is nearer to balance"
        return Proposal(False, f"{them} slow, and {rest}", split, choice, slow)
    saved = (as_if.step_seconds - choice.best.step_seconds) * steps_left
    why = _against(as_if, choice, saved, steps_left, cost_seconds, past)
    if why is None:
        why = (f"the busy shares are {abs(split.points):.0f} points apart, and {choice.best.text} is predicted to save "
               f"up to {saved:,.0f} s in the remaining {steps_left:,} steps")
        return Proposal(True, why, split, choice, slow, saved, cost_seconds)
    return Proposal(False, why, split, choice, slow, saved, cost_seconds)


def _against(now: Split, choice: Choice, saved: float, steps_left: int, cost: float,
             past: Sequence[Change]) -> str | None:
    """What speaks against a change to `choice.best`; None: nothing."""
    best = choice.best
    here, there = (now.compute, now.update), (best.compute, best.update)
    if not choice.changes:
        return f"no other split of {now.ranks} ranks is nearer to balance"
    if choice.gain <= WORTH:
        return f"{best.text}, the most even split, is not predicted to be faster"
    if any((change.before, change.after) == (here, there) for change in past):
        return f"the change to {best.text} was made before"
    if len(past) >= MOST_CHANGES:
        return f"the run has changed its split {len(past)} times"
    left = [change.step_seconds for change in past if change.before == there]
    if left and left[-1] >= now.step_seconds * (1 - WORTH):
        return f"{best.text} was measured before, at {left[-1]:.3g} s per step, which is no faster"
    if saved < WORTH_COST * cost:
        return (f"{best.text} is predicted to save {max(saved, 0):,.0f} s in the remaining {steps_left:,} steps, and a "
                f"change costs about {cost:,.0f} s")
    return None


def _slow_compute(members: Sequence[Measured], step: float) -> tuple[float, list[int]]:
    """The slow compute ranks, and by how many seconds the slowest holds up the others."""
    found: dict[int, float] = {}
    for member in members:
        others = [m.own for m in members if m.rank != member.rank and m.own is not None]
        if member.own is None or not others:
            continue
        usual = median(others)
        if member.own >= UNEXPLAINED * usual and member.own - usual >= STEP_SHARE * step:
            found[member.rank] = member.own - usual
    return max(found.values(), default=0.0), sorted(found)


def _slow_update(members: Sequence[Measured], step: float) -> list[int]:
    """The update ranks that need longer than their share of the state explains."""
    found = []
    for member in members:
        others = [m for m in members if m.rank != member.rank]
        if not others:
            continue
        usual, state = median(m.busy for m in others), median(m.state_bytes for m in others)
        share = member.state_bytes / state if state > 0 else 1.0
        if member.busy >= UNEXPLAINED * max(share, 1.0) * usual and member.busy - usual >= STEP_SHARE * step:
            found.append(member.rank)
    return found
