"""Which split of N ranks into a compute and an update pool balances them, from measured seconds. Plain arithmetic.

The model, stated wherever a prediction is shown: the global batch stays, so that the work of a pool is constant and is
divided by its ranks. A compute rank that is busy for `c` seconds per step among C is busy for c·C/C' among C'; an
update rank likewise, since state, gradients and weights are sharded over the pool. What the two pools do at the same
time keeps its share of the shorter one, at best; at worst it lasts as long as now, because an update of fresh weights
hides only behind the work that comes before the first of them are needed, which no other split makes longer. A wait
that neither explains (latency, the link) stays as it was.

It does not know about processors that ranks share, exchanges inside the compute pool that grow with it, or work that
every rank repeats: measure again after a change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: Busy shares that differ by less are balanced. Field practice: beyond it change the ratio, or give the idle pool work.
BALANCED_POINTS = 20.0
#: A predicted gain of a step below this is noise.
WORTH = 0.02


def split_words(split: tuple[int, int]) -> str:
    """`4 + 2`: compute ranks, then update ranks."""
    return f"{split[0]} + {split[1]}"


@dataclass(frozen=True, slots=True)
class Split:
    """Ranks of both pools, and seconds per step: what one rank of each is busy for (mean), and the step.

    `longest_seconds`: of a predicted step, at worst; None where it was measured.
    """

    compute: int
    update: int
    compute_seconds: float
    update_seconds: float
    step_seconds: float
    longest_seconds: float | None = None

    @property
    def ranks(self) -> int:
        """Ranks of both pools."""
        return self.compute + self.update

    @property
    def compute_busy(self) -> float:
        """Share of the step that the compute pool is busy."""
        return self.compute_seconds / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def update_busy(self) -> float:
        """Share of the step that the update pool is busy."""
        return self.update_seconds / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def points(self) -> float:
        """How far the busy shares are apart, in points of a hundred; positive: the compute pool is the busier one."""
        return 100.0 * (self.compute_busy - self.update_busy)

    @property
    def balanced(self) -> bool:
        """Whether the busy shares differ by at most `BALANCED_POINTS`."""
        return abs(self.points) <= BALANCED_POINTS + 1e-9

    @property
    def text(self) -> str:
        """See `split_words`."""
        return split_words((self.compute, self.update))

    @property
    def work_ratio(self) -> float:
        """Compute ranks that keep one update rank as busy as they are: work of the one pool over that of the other."""
        work = self.update_seconds * self.update
        return self.compute_seconds * self.compute / work if work > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """What there is instead of the split `now`. `best`: of the legal ones within `BALANCED_POINTS` the fastest, or,
    where none is (`balances` false), the one nearest to balance. `fastest`: by predicted step time, balanced or not."""

    now: Split
    best: Split
    fastest: Split
    balances: bool

    @property
    def changes(self) -> bool:
        """Whether `best` is another split than `now`."""
        return (self.best.compute, self.best.update) != (self.now.compute, self.now.update)

    @property
    def gain(self) -> float:
        """Share of the step that `best` is predicted to save; negative where balance costs time."""
        return 1.0 - self.best.step_seconds / self.now.step_seconds if self.now.step_seconds > 0 else 0.0


def predicted(now: Split, compute: int, update: int) -> Split:
    """The same job on other numbers of ranks."""
    ours, theirs = now.compute_seconds * now.compute / compute, now.update_seconds * now.update / update
    together = now.compute_seconds + now.update_seconds - now.step_seconds
    shorter = min(now.compute_seconds, now.update_seconds)
    if together > 0 and shorter > 0:
        step = ours + theirs - min(together / shorter, 1.0) * min(ours, theirs)
    else:
        step = ours + theirs - min(together, 0.0)
    step = max(step, ours, theirs)
    return Split(compute, update, ours, theirs, step, max(step, ours + theirs - min(together, ours, theirs)))


def without(now: Split, excess: float, update_seconds: float) -> Split:
    """`now` as if its slow ranks were like the others: a ratio must not make up for a broken rank.

    `excess`: seconds by which the slowest compute rank holds up each step; `update_seconds`: of the update ranks that
    are not slow.
    """
    ours = now.compute_seconds - excess
    saved = excess + max(now.update_seconds - update_seconds, 0.0)
    return Split(now.compute, now.update, max(ours, 1e-9), update_seconds,
                 max(now.step_seconds - saved, ours, update_seconds))


def splits(now: Split, legal: Callable[[int, int], bool], ranks: int | None = None) -> Iterator[Split]:
    """Every legal split of `ranks` (default: as many as now), predicted; the present one as it was measured."""
    total = now.ranks if ranks is None else ranks
    for update in range(1, total):
        if (total - update, update) == (now.compute, now.update):
            yield now
        elif legal(total - update, update):
            yield predicted(now, total - update, update)


def choose(now: Split, legal: Callable[[int, int], bool], ranks: int | None = None) -> Choice:
    """The split of `ranks` to change to. `legal(compute, update)` says which the layout and the batch allow."""
    found = list(splits(now, legal, ranks)) or [now]
    fastest = min(found, key=lambda split: (split.step_seconds, split.update))
    even = [split for split in found if split.balanced]
    best = min(even, key=lambda split: (split.step_seconds, abs(split.points))) if even else \
        min(found, key=lambda split: (abs(split.points), split.step_seconds))
    return Choice(now, best, fastest, bool(even))


def unseparated(now: Split, legal: Callable[[int], bool] = lambda ranks: True) -> tuple[int, float] | None:
    """(ranks, seconds per step) of the same work on one pool of at most as many ranks, from the seconds measured.

    An estimate: nothing is exchanged between pools then, and each rank does its part of both kinds of work. None where
    no number of ranks is legal.
    """
    work = now.compute_seconds * now.compute + now.update_seconds * now.update
    ranks = next((n for n in range(now.ranks, 0, -1) if legal(n)), None)
    return None if ranks is None else (ranks, work / ranks)
