"""What step times do over a run: real slow-downs are found where they began, noise is not."""

from __future__ import annotations

import numpy as np
import pytest

from diag.series import Column
from diag.steps.cost import Cost, creep, rise, stalls


def cost(values: np.ndarray) -> Cost:
    steps = np.arange(1, len(values) + 1)
    column = Column("step_seconds", "step_seconds", steps, values, steps)
    return Cost(column, steps, values, np.arange(len(values)), True)


def noise(count: int, sigma: float, seed: int = 0) -> np.ndarray:
    return 0.5 * np.exp(np.random.default_rng(seed).normal(0, sigma, count))


@pytest.mark.parametrize("count, at, factor, sigma", [
    (12, 7, 1.06, 0.001), (300, 200, 1.05, 0.01), (2000, 1200, 1.25, 0.03), (50_000, 20_000, 1.05, 0.02),
])
def test_a_rise_for_good_is_found_where_it_began(count: int, at: int, factor: float, sigma: float) -> None:
    values = noise(count, sigma)
    values[at:] *= factor
    found = rise(cost(values))
    assert found is not None and found.ratio == pytest.approx(factor, rel=0.03)
    assert abs(found.point - at) <= max(3, count // 250)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sigma", [0.02, 0.3])
@pytest.mark.parametrize("count", [12, 60, 1500])
def test_noise_is_nothing(count: int, sigma: float, seed: int) -> None:
    measured = cost(noise(count, sigma, seed))
    assert rise(measured) is None and creep(measured) is None and stalls(measured) is None


def test_a_slow_spell_that_ends_is_no_rise_for_good() -> None:
    values = noise(600, 0.02)
    values[200:300] *= 1.5
    assert rise(cost(values)) is None


def test_a_level_that_was_there_before_is_no_rise() -> None:
    values = noise(600, 0.02)
    values[:300] *= 1.5
    values[450:] *= 1.5
    assert rise(cost(values)) is None


def test_a_creep_has_no_moment_at_which_it_began() -> None:
    values = noise(1000, 0.05) * np.linspace(1, 1.4, 1000)
    assert creep(cost(values)) == pytest.approx(1.35, abs=0.08) and rise(cost(values)) is None
    stepped = noise(1000, 0.02)
    stepped[500:] *= 1.4
    assert creep(cost(stepped)) is None


@pytest.mark.parametrize("period", [5, 50])
def test_stalls_at_an_interval(period: int) -> None:
    values = noise(1000, 0.05)
    values[::period] *= 4
    found = stalls(cost(values))
    assert found is not None and found.period == period
    assert found.ratio == pytest.approx(4, rel=0.1) and found.lost == pytest.approx(3 / (period + 3), rel=0.15)


def test_stalls_now_and_then_have_no_interval() -> None:
    values = noise(1000, 0.05)
    values[np.random.default_rng(1).choice(1000, 40, replace=False)] *= 4
    assert stalls(cost(values)) is None
