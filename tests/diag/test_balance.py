"""The balance measures on loads known by hand, and their sampling floors against seeded simulation."""

from __future__ import annotations

import numpy as np
import pytest

from diag import balance

#: (experts, top_k, tokens): from toy to DeepSeek-V3 shape, down to one token per expert.
SHAPES = [(256, 8, 4096), (16, 2, 128), (8, 2, 64), (8, 2, 16), (8, 2, 4), (8, 1, 8), (64, 8, 16), (256, 8, 32),
          (4, 2, 32), (128, 1, 1024), (2, 1, 100), (64, 6, 2048), (8, 4, 64), (8, 6, 64)]


def uniform_routing(experts: int, top_k: int, tokens: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Counts [draws, E] when each token picks `top_k` distinct experts uniformly."""
    counts = np.empty((draws, experts), int)
    for i in range(draws):
        chosen = np.argpartition(rng.random((tokens, experts)), top_k - 1, axis=1)[:, :top_k]
        counts[i] = np.bincount(chosen.ravel(), minlength=experts)
    return counts


@pytest.mark.parametrize("experts, top_k, tokens", SHAPES)
def test_floors_match_simulation(experts: int, top_k: int, tokens: int) -> None:
    draws = 200 if tokens * experts > 100_000 else 1500
    counts = uniform_routing(experts, top_k, tokens, draws, np.random.default_rng([experts, top_k, tokens])).tolist()
    shape = experts, top_k, tokens * top_k / experts

    def simulated(measure) -> float:
        return float(np.mean([measure(row) for row in counts]))

    assert balance.gini_floor(*shape) == pytest.approx(simulated(balance.gini), rel=0.03)
    assert balance.cv_floor(*shape) == pytest.approx(simulated(balance.cv), rel=0.04)
    assert balance.max_vio_floor(*shape) == pytest.approx(simulated(balance.max_vio), rel=0.08)
    assert balance.load_entropy_floor(*shape) == pytest.approx(simulated(balance.load_entropy),
                                                                abs=0.005 if shape[2] >= 2 else 0.025)


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("experts, top_k, tokens", [(8, 2, 64), (16, 2, 512), (64, 8, 256)])
def test_drop_floor_matches_simulation(experts: int, top_k: int, tokens: int, factor: float) -> None:
    capacity = -(-tokens * top_k * factor // experts)
    counts = uniform_routing(experts, top_k, tokens, 1500, np.random.default_rng([experts, tokens]))
    dropped = np.maximum(counts - capacity, 0).sum() / counts.sum()
    assert balance.drop_floor(experts, top_k, tokens, capacity) == pytest.approx(dropped, abs=0.004)


@pytest.mark.parametrize("counts, gini, cv, max_vio, entropy", [
    ([5, 5, 5, 5], 0.0, 0.0, 0.0, 1.0),
    ([0, 0, 0, 8], 0.75, 3**0.5, 3.0, 0.0),
    ([0, 0, 4, 4], 0.5, 1.0, 1.0, 0.5),
    ([0, 0, 0, 0], 0.0, 0.0, 0.0, 1.0),
])
def test_measures_by_hand(counts: list[int], gini: float, cv: float, max_vio: float, entropy: float) -> None:
    found = balance.gini(counts), balance.cv(counts), balance.max_vio(counts), balance.load_entropy(counts)
    assert found == pytest.approx((gini, cv, max_vio, entropy), abs=1e-12)


def test_floors_vanish_with_tokens_and_where_nothing_can_vary() -> None:
    assert balance.gini_floor(8, 2, 1e9) < 1e-4
    assert balance.max_vio_floor(8, 2, 1e9) < 1e-3
    assert balance.gini_floor(4, 4, 100) < 1e-6
    assert balance.drop_floor(4, 4, 100, 100) < 1e-6
