"""The online detector: what it lets pass, what it stops, and that it is not blinded by what it stopped."""

from __future__ import annotations

import math
import random

import pytest

from diag.watch.online import NEW_LEVEL, WARM_UP, OnlineDetector

Points = list[tuple[float | None, float | None]]


def noisy(count: int, level: float = 2.5, noise: float = 0.03, seed: int = 0) -> Points:
    """A healthy stretch: losses around `level`, norms around 0.5."""
    draw = random.Random(seed)
    return [(level * math.exp(draw.gauss(0, noise)), 0.5 * math.exp(draw.gauss(0, 0.2))) for _ in range(count)]


def found(points: Points) -> list[int]:
    return [index for index, verdict in enumerate(OnlineDetector().feed(points)) if verdict is not None]


def test_a_healthy_run_is_silent() -> None:
    descent = [(10 / (1 + 0.02 * step) + 2, 3 / (1 + 0.01 * step)) for step in range(2000)]
    assert found(descent) == []  # type: ignore[arg-type]
    assert found(noisy(20_000, seed=1)) == []
    assert found([*noisy(100), (2.5, 3.5), *noisy(50)]) == []  # one large gradient: clipping is there for it
    assert found([(2.0, 0.5)] * 500) == []  # no scatter at all
    assert found([(2.0, 0.5)] * 200 + [(2.1, 0.6)]) == []  # within the floor


@pytest.mark.parametrize("bad, kind", [((4.0, 0.5), "loss"), ((2.5, 9.0), "grad_norm"), ((math.nan, 0.5), "nan"),
                                       ((2.5, math.inf), "nan"), ((4.0, None), "loss")])
def test_one_bad_step_is_stopped(bad: tuple[float, float | None], kind: str) -> None:
    verdicts = OnlineDetector().feed([*noisy(100), bad, *noisy(50, seed=2)])
    assert [(i, v.kind) for i, v in enumerate(verdicts) if v is not None] == [(100, kind)]


def test_the_first_steps_are_let_off_but_for_nan() -> None:
    assert found([(9.0, 50.0), (2.0, 0.1)] * (WARM_UP // 2 - 1)) == []
    assert found([(9.0, 1.0), (math.nan, 1.0)]) == [1]


def test_rejected_steps_do_not_become_the_reference() -> None:
    spike = [(5.0, 0.5)] * (NEW_LEVEL - 1)
    assert found([*noisy(100), *spike, *noisy(20, seed=3), (5.0, 0.5)]) == [*range(100, 100 + len(spike)), 135]


def test_a_new_level_is_accepted_in_the_end() -> None:
    assert found([*noisy(100), *noisy(400, level=4.0, seed=4)]) == list(range(100, 100 + NEW_LEVEL))


def test_a_fall_is_no_spike() -> None:
    assert found([*noisy(100), *noisy(100, level=1.0, seed=5)]) == []


def test_judging_changes_nothing() -> None:
    detector = OnlineDetector()
    detector.feed(noisy(60))
    assert [detector.judge(9.0) is not None for _ in range(5)] == [True] * 5
    assert detector.judge(2.5, 0.5) is None


def test_losses_that_may_be_negative_are_not_judged() -> None:
    assert found([(-1.0, None)] * 50 + [(0.0, None)] * 50 + [(-3.0, None)] * 50) == []
