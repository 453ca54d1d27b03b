"""What else routing tells: a hot expert early, cliff or drift, suspects from curves and weights, who carries it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from diag.artefacts import memory_source
from diag.artefacts.expert_weights import ExpertWeights
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.metrics import read as read_metrics
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_config import read as read_config
from diag.experts import Likeness
from diag.placement import Layout, group_loads, proposal, rank_loads
from diag.routing import Layer, judge
from diag.suspects import suspects
from tests.diag.helpers import config, pdtrain, records, route, write

ONE = [9.0] + [0.0] * 31


def log_of(rows: list[dict]) -> MetricsLog:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    found = read_metrics(memory_source(text.encode(), "metrics.jsonl"))
    assert isinstance(found, MetricsLog)
    return found


def conf(text: str) -> RunConfig:
    found = read_config(memory_source(text.encode(), "config.toml"))
    assert isinstance(found, RunConfig)
    return found


def layer(push: Callable[[int], list[float] | None], steps: int, *, experts: int = 32, top_k: int = 2,
          tokens: int = 64, **extra: Callable[[int], float]) -> Layer:
    rng = np.random.default_rng(3)
    every = range(1, steps + 1)
    rows = list(records(every, (route(experts, top_k, tokens, rng, push(s)) for s in every)))
    for row in rows:
        row.update({key: value(row["step"]) for key, value in extra.items()})
    (found,) = judge(log_of(rows), conf(config(experts=experts, top_k=top_k)))
    return found


@pytest.mark.parametrize("tokens", [16, 64, 512])
def test_a_hot_expert_is_alarmed_within_fifty_steps_even_in_warm_up(tokens: int) -> None:
    found = layer(lambda s: ONE, 48, tokens=tokens)
    assert found.state == "imbalanced" and found.hot is not None and found.hot.expert == 0
    assert found.hot.times == pytest.approx(16, rel=0.1)
    late = layer(lambda s: ONE if s > 200 else None, 222, tokens=tokens)
    assert late.state in ("imbalanced", "collapsed")


def test_another_hot_expert_in_each_step_is_no_hot_expert() -> None:
    found = layer(lambda s: list(np.roll(ONE, s)), 90, tokens=512)
    assert found.hot is None and found.state == "unjudged"


def test_an_expert_that_every_token_visits_is_hot_though_four_times_its_share_is_all_it_can_get() -> None:
    found = layer(lambda s: [9.0] + [0.0] * 31 if s > 150 else None, 220, top_k=8)
    assert found.state == "imbalanced" and found.hot is not None and found.hot.expert == 0


@pytest.mark.parametrize("length, cliff", [(1, True), (20, True), (200, False)])
def test_cliff_and_drift(length: int, cliff: bool) -> None:
    slope = np.linspace(0, 4.0, 32)
    found = layer(lambda s: list(slope * min(max(s - 150, 0) / length, 1)), 500, tokens=2048)
    assert found.rise is not None and found.rise.cliff is cliff
    assert cliff or 80 <= found.rise.steps <= 260


def test_a_drift_towards_the_threshold_is_told_before_it_gets_there() -> None:
    slope = np.linspace(0, 1.6, 32)
    found = layer(lambda s: list(slope * s / 600), 600, tokens=2048)
    assert found.state == "balanced" and found.drift is not None and found.drift < 600
    assert layer(lambda s: list(0.6 * slope), 600, tokens=2048).drift is None


def verdicts(rows: list[dict], onset: int, weights: ExpertWeights | None = None) -> dict[str, str]:
    settings = conf(config(aux_loss=0.05))
    return {s.name: s.verdict for s in suspects(log_of(rows), settings, onset, weights)}


def steady(step: int, **values: object) -> dict:
    return {"step": step, "loss": 2.0, "lr": 1e-3 * min(step / 20, 1), "data_repeated": 0.02,
            "router/1/counts": [4, 4, 4, 4]} | values


def test_a_learning_rate_that_jumped_at_the_onset_is_the_likely_reason() -> None:
    rows = [steady(s, **({"lr": 0.03} if s >= 200 else {})) for s in range(1, 300)]
    assert verdicts(rows, 205)["learning rate"] == "likely"
    assert verdicts(rows, 120)["learning rate"] != "likely"  # long before the jump
    assert verdicts([steady(s) for s in range(1, 300)], 15)["learning rate"] != "likely"  # warm-up rises too


def test_repeated_data_around_the_onset_is_the_likely_reason() -> None:
    rows = [steady(s, data_repeated=0.9 if s >= 190 else 0.02) for s in range(1, 300)]
    assert verdicts(rows, 230)["data"] == "likely" and verdicts(rows, 100)["data"] == "possible"


def test_a_bias_that_spans_more_than_the_scores_ran_away() -> None:
    rows = [steady(s, **{"router/1/bias_range": 0.02 * s}) for s in range(1, 300)]
    assert verdicts(rows, 100)["balancing"] == "likely"


@pytest.mark.parametrize("cosine, verdict", [(0.6, "likely"), (0.02, "unlikely")])
def test_weights_speak_for_or_against_the_initialisation(cosine: float, verdict: str) -> None:
    weights = ExpertWeights(path="run/checkpoints/step_1/manifest.json", format="x", step=40,
                            layers=[Likeness(1, 8, cosine, cosine, (0, 1), 0)])
    assert verdicts([steady(s) for s in range(1, 300)], 1, weights)["expert initialisation"] == verdict


LAYOUT = config(experts=8) + "[parallel]\nranks = 4\n[modules.experts]\nexpert = 2\n"


def test_who_carries_which_expert() -> None:
    layout = Layout.of(conf(LAYOUT))
    assert layout is not None and layout.carriers(1) == [1, 3] and layout.group_of(5, 8) == 1
    log = log_of([{"step": s, "router/1/counts": [1, 1, 1, 1, 9, 1, 1, 1]} for s in range(1, 20)])
    loads = rank_loads(conf(LAYOUT), log)
    assert loads == pytest.approx({0: 0.5, 2: 0.5, 1: 1.5, 3: 1.5})
    assert Layout.of(conf(config())) is None and rank_loads(None, log) == {}


@pytest.mark.parametrize("seed", range(5))
def test_a_proposed_placement_is_a_permutation_with_a_lower_peak(seed: int) -> None:
    counts = np.random.default_rng(seed).pareto(1.2, 32).tolist()
    counts.sort(reverse=True)  # in order, the first rank has all the hot ones
    placed = proposal(counts, 4)
    assert placed is not None and sorted(e for group in placed for e in group) == list(range(32))
    assert {len(group) for group in placed} == {8}
    assert max(sum(counts[e] for e in group) for group in placed) < max(group_loads(counts, 4))
    assert proposal([1.0] * 32, 4) is None and proposal(counts, 5) is None


def test_the_report_names_the_rank_of_the_hot_expert_and_proposes_a_placement(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    push = [0.0] * 4 + [3.0, 3.0, 1.0, 0.0]
    write(tmp_path / "metrics.jsonl", records(range(1, 301), (route(8, 2, 512, rng, push if s > 120 else None)
                                                             for s in range(1, 301))))
    (tmp_path / "config.toml").write_text(LAYOUT)
    finding = pdtrain("diag", "router", tmp_path, "--json").json()["findings"][0]
    (row,) = finding["numbers"]["carriers"]
    assert row["hottest_expert"] in (4, 5) and row["ranks"] == [1, 3] and row["rank_load"] > 1.5
    assert "ranks 1, 3" in finding["summary"] and row["rank_load_then"] < row["rank_load"]


def test_a_run_too_short_to_judge_is_not_called_healthy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = write(tmp_path / "metrics.jsonl", records(range(1, 20), (route(8, 2, 64, rng) for _ in range(19))))
    done = pdtrain("diag", "router", path, "--json")
    report = done.json()
    assert report["verdict"] == "unknown" and done.status == 1
    assert any("cannot be judged yet" in note for note in report["not_checked"])


@pytest.mark.parametrize("shares, judged", [(False, True), (True, False)])
def test_scalars_per_expert_of_another_trainer(tmp_path: Path, shares: bool, judged: bool) -> None:
    rng = np.random.default_rng(0)
    rows = ["step,loss," + ",".join(f"moe/layer_3/expert_{e}/tokens" for e in range(8))]
    for step in range(1, 301):
        counts = np.array(route(8, 2, 512, rng, [6.0, 3.0, 0, 0, 0, 0, 0, 0] if step > 150 else None), dtype=float)
        values = counts / counts.sum() if shares else counts
        rows.append(f"{step},2.0," + ",".join(f"{v:.6g}" for v in values))
    (tmp_path / "log.csv").write_text("\n".join(rows) + "\n")
    report = pdtrain("diag", "router", tmp_path / "log.csv", "--json").json()
    assert [f["cause"] for f in report["findings"]] == (["moe_router_collapse"] if judged else [])
    assert judged or report["verdict"] == "unknown"
