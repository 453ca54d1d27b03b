"""The rule of `pools.rebalance`: what is needed, what is worth it, and no way twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diag.artefacts.pool_records import SETTLING
from diag.pools.gather import LEAST_STEPS
from diag.pools.ratio import Split, choose
from diag.pools.rebalance import MOST_CHANGES, Change, Measured, Proposal, propose
from pdtrain.config.resolved import LEAST_WINDOW


def pools(
    compute: int, update: int, c: float, u: float, step: float, change: Callable[[Measured], Measured] = lambda m: m,
    steps: int = 20,
) -> list[Measured]:
    """Ranks that are busy for `c` and `u` seconds of a step; compute ranks say what they do alone."""
    ranks = [Measured(rank, "compute", steps, step, c, 0.8 * c) for rank in range(compute)]
    ranks += [Measured(compute + rank, "update", steps, step, u, None, 1000) for rank in range(update)]
    return [change(rank) for rank in ranks]


def asked(measured: list[Measured], **changes: Any) -> Proposal:
    settings: dict[str, Any] = {"steps_left": 1000, "cost_seconds": 10.0, "past": ()} | changes
    return propose(measured, settings.pop("legal", lambda c, u: True), **settings)


def test_an_uneven_run_changes_to_the_split_that_diag_recommends() -> None:
    found = asked(pools(2, 2, 0.9, 0.375, 0.94))
    assert found.change and found.choice is not None and found.split is not None
    assert found.choice.best == choose(Split(2, 2, 0.9, 0.375, 0.94), lambda c, u: True).best
    assert found.choice.best.text == "3 + 1" and "56 points apart" in found.why
    assert found.saved_seconds == pytest.approx(1000 * (0.94 - found.choice.best.step_seconds))


def test_twenty_points_are_balanced() -> None:
    assert asked(pools(2, 2, 0.9, 0.7, 1.0)).why == "the pools are balanced"
    assert asked(pools(2, 2, 0.9, 0.69, 1.0)).why != "the pools are balanced"


@pytest.mark.parametrize("changes, words", [
    ({"legal": lambda c, u: False}, "no other split of 4 ranks is nearer to balance"),
    ({"steps_left": 40}, "a change costs about 10 s"),
    ({"cost_seconds": 1000.0}, "a change costs about 1,000 s"),
    ({"past": [Change((2, 2), (3, 1), 0.94), Change((3, 1), (2, 2), 1.2)]}, "the change to 3 + 1 was made before"),
    ({"past": [Change((3, 1), (2, 2), 0.93)]}, "3 + 1 was measured before, at 0.93 s per step, which is no faster"),
    ({"past": [Change((1, 3), (2, 2), 2.0)] * MOST_CHANGES}, "the run has changed its split 3 times"),
])  # fmt: skip
def test_what_speaks_against_it(changes: dict[str, Any], words: str) -> None:
    found = asked(pools(2, 2, 0.9, 0.375, 0.94), **changes)
    assert not found.change and words in found.why


def test_balance_that_costs_time_is_not_wanted() -> None:
    """Pools that take turns: 10 + 2 is even and slower than 8 + 4 (DOMAIN.md: 200 and 80 ms)."""
    found = asked(pools(8, 4, 0.200, 0.080, 0.280))
    assert not found.change and "10 + 2, the most even split, is not predicted to be faster" in found.why


def test_a_split_that_was_left_is_taken_again_when_it_was_faster() -> None:
    """And the way there is not gone a second time: to and fro, once."""
    worse = pools(3, 1, 0.5, 1.35, 1.4)
    assert asked(worse, past=[Change((2, 2), (3, 1), 0.94)]).change
    found = asked(pools(2, 2, 0.9, 0.375, 0.94), past=[Change((2, 2), (3, 1), 0.94), Change((3, 1), (2, 2), 1.4)])
    assert not found.change and "made before" in found.why


def test_a_slow_rank_is_no_reason() -> None:
    """A ratio never makes up for a broken host: without it the pools are even."""
    def slow_compute(rank: Measured) -> Measured:
        return replace(rank, own=0.9) if rank.rank == 1 else replace(rank, own=0.4) if rank.role == "compute" else rank

    found = asked(pools(2, 2, 0.95, 0.5, 1.0, slow_compute))
    assert not found.change and found.slow == [1] and "rank 1 is slow" in found.why

    def slow_update(rank: Measured) -> Measured:
        return replace(rank, busy=0.95) if rank.rank == 3 else rank

    assert found.why == "rank 1 is slow, and the ratio is not at fault"
    uneven = asked(pools(2, 1, 0.95, 0.05, 1.0, slow_compute), legal=lambda c, u: False)
    assert uneven.why == "rank 1 is slow, and no other split of 3 ranks is nearer to balance", "the ratio is bad too"
    found = asked(pools(2, 3, 0.4, 0.4, 1.0, slow_update))
    assert not found.change or found.slow == [3]
    found = asked(pools(2, 2, 0.3, 0.3, 1.0, slow_update))
    assert not found.change and found.slow == [3]

    def owns_more(rank: Measured) -> Measured:
        return replace(rank, busy=0.95, state_bytes=4000) if rank.rank == 3 else rank

    assert asked(pools(2, 2, 0.3, 0.3, 1.0, owns_more)).slow == []


def test_too_few_steps_say_nothing() -> None:
    found = asked(pools(2, 2, 0.9, 0.375, 0.94, steps=LEAST_STEPS - 1))
    assert not found.change and found.split is None
    assert asked([]).change is False and asked(pools(2, 0, 0.9, 0.0, 0.9)).split is None
    assert LEAST_WINDOW == SETTLING + LEAST_STEPS + 1, "the configuration repeats both"
