"""The judgement of routing: chance and blips never alarm, real imbalance and collapse do, with their onset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diag.artefacts import memory_source
from diag.artefacts.metrics import MAX_WINDOWS, MetricsLog, RouterLog, RouterWindow
from diag.artefacts.metrics import read as read_metrics
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_config import read as read_config
from diag.routing import Layer, judge
from tests.diag.helpers import config, records, route, write

HOT = [6.0, 3.0, 0, 0, 0, 0, 0, 0]
SLOPE = np.linspace(0, 3.0, 8).tolist()


def metrics(tmp_path: Path, rows: Iterator[dict]) -> MetricsLog:
    log = read_metrics(memory_source(write(tmp_path / "metrics.jsonl", rows).read_bytes(), "metrics.jsonl"))
    assert isinstance(log, MetricsLog)
    return log


def conf(**values) -> RunConfig:
    found = read_config(memory_source(config(**values).encode(), "config.toml"))
    assert isinstance(found, RunConfig)
    return found


def one_layer(tmp_path: Path, steps: int, push, *, tokens: int = 1024, experts: int = 8, top_k: int = 2,
              first: int = 1, settings: RunConfig | None = None, seed: int = 0, **values) -> Layer:
    """The judged layer of a run whose log-odds at step s are push(s)."""
    rng = np.random.default_rng(seed)
    counts = (route(experts, top_k, tokens, rng, push(s)) for s in range(first, first + steps))
    log = metrics(tmp_path, records(range(first, first + steps), counts, **values))
    (layer,) = judge(log, settings or conf(experts=experts, top_k=top_k))
    return layer


@pytest.mark.parametrize("experts, top_k", [(8, 1), (8, 2), (16, 2), (64, 8), (256, 8)])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 512])
@pytest.mark.parametrize("steps", [1, 5, 40, 300])
def test_uniform_routing_never_alarms(tmp_path: Path, experts: int, top_k: int, tokens: int, steps: int) -> None:
    layer = one_layer(tmp_path, steps, lambda s: None, tokens=tokens, experts=experts, top_k=top_k)
    assert layer.state in ("balanced", "unjudged")
    assert not layer.dead


@pytest.mark.parametrize("tokens, slack", [(1024, 3), (64, 20), (8, 80)])
def test_collapse_is_found_with_its_onset(tmp_path: Path, tokens: int, slack: int) -> None:
    layer = one_layer(tmp_path, 400, lambda s: HOT if s >= 200 else None, tokens=tokens)
    onset = layer.onset()
    assert layer.state == "collapsed" and onset is not None
    assert abs(onset.window.first_step - 200) <= slack


def test_a_slow_rise_is_dated_to_its_beginning_and_an_old_unevenness_is_not(tmp_path: Path) -> None:
    ramp = one_layer(tmp_path, 400, lambda s: [min(max(s - 100, 0) / 60, 1) * x for x in SLOPE])
    assert 115 <= ramp.onset().window.first_step <= 135  # Gini passes 0.3 only at about 150
    mild = [0.45 * x for x in SLOPE]
    step = one_layer(tmp_path, 400, lambda s: HOT if s >= 200 else mild)
    assert step.state == "collapsed" and step.onset().window.first_step == 200


def test_imbalance_is_not_a_collapse(tmp_path: Path) -> None:
    layer = one_layer(tmp_path, 400, lambda s: SLOPE if s >= 100 else None)
    assert layer.state == "imbalanced" and layer.onset().window.first_step == 100


@pytest.mark.parametrize("push", [
    pytest.param(lambda s: HOT if s == 200 else None, id="one blip"),
    pytest.param(lambda s: HOT if 100 <= s < 105 else None, id="five steps"),
    pytest.param(lambda s: HOT if s <= 10 else None, id="during warm-up only"),
    pytest.param(lambda s: np.linspace(0, 1.0, 8).tolist(), id="mild slope"),
    pytest.param(lambda s: np.roll(HOT, s % 8).tolist() if s % 7 == 0 else None, id="now and then"),
])
def test_near_misses_stay_balanced(tmp_path: Path, push) -> None:
    assert one_layer(tmp_path, 400, push).state == "balanced"


def test_a_run_that_recovered_is_not_sick(tmp_path: Path) -> None:
    layer = one_layer(tmp_path, 400, lambda s: HOT if 100 <= s < 200 else None)
    assert layer.state == "recovered" and layer.onset().window.first_step == 100


def test_collapse_that_began_in_warm_up_keeps_its_true_onset(tmp_path: Path) -> None:
    layer = one_layer(tmp_path, 400, lambda s: HOT if s >= 5 else None)
    assert layer.state == "collapsed" and layer.onset().window.first_step == 5


def test_a_run_that_never_left_warm_up_is_not_judged(tmp_path: Path) -> None:
    assert one_layer(tmp_path, 30, lambda s: HOT).state == "unjudged"


def test_a_resumed_run_is_past_its_warm_up(tmp_path: Path) -> None:
    assert one_layer(tmp_path, 30, lambda s: HOT, first=5001).state == "collapsed"


def test_one_hot_expert_among_many_is_seen_though_gini_is_low(tmp_path: Path) -> None:
    layer = one_layer(tmp_path, 300, lambda s: [2.5] + [0.0] * 31 if s > 100 else None, experts=32, top_k=2)
    assert layer.last.excess < 0.3 and layer.state == "imbalanced"


def test_dead_experts_are_counted_after_a_hundred_steps(tmp_path: Path) -> None:
    dead = [0.0] * 7 + [-50.0]
    layer = one_layer(tmp_path, 400, lambda s: dead if s > 250 else None)
    assert layer.dead == (7,) and layer.state == "imbalanced"
    assert not one_layer(tmp_path, 400, lambda s: dead if s > 350 else None).dead


@pytest.mark.parametrize("factor, drop, beyond", [
    (1.0, 0.03, False),   # what uniform routing drops at this capacity anyway
    (1.0, 0.12, True),
    (1.25, 0.03, True),   # with room for a quarter more, 3 % is real
    (1.25, 0.005, False),
    (None, 0.05, False),  # capacity not known: no floor, so only a large rate counts
    (None, 0.2, True),
])
def test_drops_count_above_the_floor_of_the_capacity(tmp_path: Path, factor, drop: float, beyond: bool) -> None:
    layer = one_layer(tmp_path, 200, lambda s: None, settings=conf(capacity=factor), drop_rate=drop)
    assert bool(layer.drop_stretch and layer.drop_stretch.ongoing) is beyond


def test_top_k_is_inferred_from_the_tokens_of_a_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = ({"step": s, "tokens": 512 * s, "router/0/counts": route(8, 4, 512, rng)} for s in range(1, 50))
    log = metrics(tmp_path, rows)
    (layer,) = judge(log, None)
    assert layer.top_k == 4


def test_gini_without_counts_needs_its_floor(tmp_path: Path) -> None:
    def rows(**extra):
        return ({"step": s, "loss": 1.0, "router/0/gini": 0.8} | extra for s in range(1, 200))

    assert judge(metrics(tmp_path, rows()), conf()) == []
    (layer,) = judge(metrics(tmp_path, rows(**{"router/0/gini_floor": 0.1})), conf())
    assert layer.state == "imbalanced"
    (layer,) = judge(metrics(tmp_path, rows(**{"router/0/gini_floor": 0.75})), conf())
    assert layer.state == "balanced"


def test_layers_are_judged_apart_and_experts_of_every_token_not_at_all(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = ({"step": s, "router/1/counts": route(8, 2, 512, rng), "router/5/counts": route(8, 2, 512, rng, HOT)}
            for s in range(1, 200))
    assert [(x.layer, x.state) for x in judge(metrics(tmp_path, rows), conf())] == [(1, "balanced"), (5, "collapsed")]
    rows = ({"step": s, "router/1/counts": [64, 64]} for s in range(1, 50))
    assert judge(metrics(tmp_path, rows), conf(experts=2, top_k=2)) == []


@pytest.mark.parametrize("line", ["top_k = -3", "top_k = nan", "top_k = 1e300", "capacity_factor = inf",
                                  "capacity_factor = -1.0", "experts = true", "top_k = 'two'"])
def test_nonsense_in_the_configuration_is_not_used(tmp_path: Path, line: str) -> None:
    text = config(capacity=1.25)
    key = line.split(" =")[0]
    text = "\n".join(line if row.startswith(f"{key} =") else row for row in text.splitlines())
    settings = read_config(memory_source(text.encode(), "config.toml"))
    assert isinstance(settings, RunConfig)
    assert one_layer(tmp_path, 200, lambda s: None, settings=settings, drop_rate=0.0).state == "balanced"


def test_a_record_of_another_length_is_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = ({"step": s, "router/1/counts": [9] if s == 50 else route(8, 2, 512, rng)} for s in range(1, 200))
    (layer,) = judge(metrics(tmp_path, rows), conf())
    assert (layer.experts, layer.state) == (8, "balanced")


def test_a_long_run_is_folded_without_losing_a_token() -> None:
    log = RouterLog()
    for step in range(1, 10 * MAX_WINDOWS):
        log.append(RouterWindow(step, step, step, step, 1, np.array([step, 1]), {"drop_rate": (0.5, 1)}))
    assert len(log.windows) <= MAX_WINDOWS
    assert [sum(w.counts[i] for w in log.windows) for i in (0, 1)] == [sum(range(1, 10 * MAX_WINDOWS)),
                                                                       10 * MAX_WINDOWS - 1]
    assert log.windows[0].first_step == 1 and log.windows[-1].last_step == 10 * MAX_WINDOWS - 1
    assert all(a.last_step + 1 == b.first_step for a, b in zip(log.windows, log.windows[1:]))
    assert log.windows[5].mean("drop_rate") == 0.5
