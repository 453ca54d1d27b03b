"""Losses that come and go, jump by a printed digit, never find back, or rise with the norm: cases and their twins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diag.artefacts import Artefacts
from diag.correlate import correlate
from diag.diagnose import diagnose
from diag.loss.events import excursions
from diag.loss.signals import above_best, plateau
from diag.schema import SEVERITY_ORDER, Evidence, Finding, Severity, Where
from diag.series import Column

RNG = np.random.default_rng(5)


def found(values: np.ndarray) -> list[tuple[str, bool]]:
    events = excursions(np.arange(len(values)) + 100, values, from_start=False)
    return [(event.kind, event.again) for event in events]


def dips(last: int) -> np.ndarray:
    """A level of 0.01 with dips to 1e-6, of 60 points each, and `last` points of the level at the end."""
    pieces = [np.full(60, 0.01)]
    for _ in range(4):
        fall = 0.01 * np.exp(-9 * (1 - np.exp(-np.arange(60) / 12)))
        pieces += [fall, np.full(60, 0.01)]
    pieces[-1] = np.full(last, 0.01)
    values = np.concatenate(pieces)
    return values * np.exp(0.1 * RNG.standard_normal(len(values)))


def test_a_loss_that_is_as_high_as_it_often_was_has_not_diverged() -> None:
    assert found(dips(40))[-1] == ("open", True)
    assert found(dips(400))[-1] == ("divergence", False)  # it has never stayed up so long


def test_a_jump_of_the_last_printed_digit_is_rounding() -> None:
    values = np.round(np.concatenate([np.geomspace(0.3, 0.0002, 90), np.full(60, 0.0001)]), 4)
    values[130] = 0.0002
    values[140:142] = 0.0003
    assert found(values) == []
    assert found(np.where(np.arange(150) == 140, 0.01, values)) == [("transient", False)]


def test_a_loss_that_never_finds_back_to_its_early_best() -> None:
    noise = np.exp(0.01 * RNG.standard_normal(200))
    up = np.concatenate([np.geomspace(5, 2.3, 20), np.linspace(2.3, 2.95, 40), np.linspace(2.95, 2.62, 140)]) * noise
    seen = above_best(up)
    assert seen is not None and 10 <= seen[0].at <= 35 and 2.8 < seen[1] < 3.1
    hill = np.concatenate([np.geomspace(5, 2.3, 20), np.linspace(2.3, 2.95, 40), np.linspace(2.95, 2.2, 140)]) * noise
    assert above_best(hill) is None
    assert above_best(np.geomspace(5, 2, 200) * noise) is None


def column(values: np.ndarray) -> Column:
    steps = np.arange(len(values))
    return Column("loss", "loss", steps, values, steps)


def test_an_absurd_loss_that_stays_is_a_plateau_after_few_steps() -> None:
    assert plateau(column(np.full(200, 1.5e26))) is not None
    assert plateau(column(np.full(200, 9.0))) is None
    assert plateau(column(np.geomspace(1e26, 1e3, 200))) is None


def test_one_term_of_a_sum_may_climb(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = [f"{i},{100 / (i + 5) + 1:.5f},{0.5 + i / 1000:.5f},{99 / (i + 5) + 0.5:.5f}" for i in range(400)]
    path.write_text("step,mean_loss,border_loss,inner_loss\n" + "\n".join(rows) + "\n")
    assert [f for f in diagnose([path]).findings if SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["warning"]] == []
    path.write_text("step,loss\n" + "\n".join(f"{i},{0.5 + i / 1000:.5f}" for i in range(400)) + "\n")
    assert diagnose([path]).findings[0].cause == "loss_divergence"


@pytest.mark.parametrize("beside", ["ep_rew_mean", "loss_D", "train/value_loss"])
def test_a_loss_whose_target_moves_may_climb(tmp_path: Path, beside: str) -> None:
    path = tmp_path / "progress.csv"
    rows = [f"{i},{0.5 + i / 1000:.5f},{1 + i % 7}" for i in range(400)]
    path.write_text(f"step,loss,{beside}\n" + "\n".join(rows) + "\n")
    assert [f.cause for f in diagnose([path]).findings if f.severity != "info"] == []


def test_a_spike_of_one_term_alone_is_told_and_no_alarm(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    noise = np.exp(0.01 * np.random.default_rng(3).standard_normal(300))
    total, term = 3 * noise, 0.4 * noise
    term[200:204] *= 3
    for beside in (0, 1):
        rows = [f"{i},{a + beside * (b - 0.4):.5f},{b:.5f}" for i, (a, b) in enumerate(zip(total, term, strict=True))]
        path.write_text("step,train_loss,border_loss\n" + "\n".join(rows) + "\n")
        (spike,) = [f for f in diagnose([path]).findings if f.cause == "loss_spike"]
        assert (spike.severity, spike.numbers["column"]) == (("info", "border_loss"), ("warning", "train_loss"))[beside]


@pytest.mark.parametrize("norms, rate, expected", [(4.0, 30.0, True), (4.0, 1.0, True), (1.0, 30.0, False)])
def test_a_rise_within_the_noise_counts_with_the_gradient_norm(tmp_path: Path, norms: float, rate: float,
                                                              expected: bool) -> None:
    """Four points of 4 to 5 scatters: nothing by themselves. With a leap of the learning rate that is what is told."""
    rng = np.random.default_rng(11)
    values, norm, lr = 4 / np.arange(3, 163) ** 0.1, np.exp(0.05 * rng.standard_normal(160)), np.full(160, 0.01)
    values = values * np.exp(0.07 * rng.standard_normal(160))
    values[100:104] = values[80:100].mean() * np.exp([0.29, 0.31, 0.34, 0.28])
    norm[100:104] *= norms
    lr[99:] *= rate
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,grad_norm,lr\n" + "\n".join(
        f"{i},{a:.5f},{b:.5f},{c:.5f}" for i, (a, b, c) in enumerate(zip(values, norm, lr, strict=True), 1)) + "\n")
    spikes = [f for f in diagnose([path]).findings if f.cause == "loss_spike" and f.severity == "warning"]
    assert bool(spikes) is expected
    if expected:
        assert abs((spikes[0].where.step or 0) - 101) <= 2
        assert spikes[0].numbers.get("lr_jump_step") == (100 if rate > 1 else None)
        assert ("schedule" in spikes[0].fix[0]) is (rate > 1)


@pytest.mark.parametrize("jumps, lead", [((101, 101), "loss_spike"), ((101, None), "moe_router_collapse"),
                                         ((None, None), "moe_router_collapse")])
def test_after_a_leap_of_the_learning_rate_the_loss_leads(jumps: tuple[int | None, int | None], lead: str) -> None:
    """Only where both say that the same leap came before them; else a router that collapsed first explains the loss."""
    findings = []
    kinds: list[tuple[str, Severity, int]] = [("loss_spike", "warning", 102), ("moe_router_collapse", "error", 92)]
    for (cause, severity, line), jump in zip(kinds, jumps, strict=True):
        findings.append(Finding(cause=cause, summary="", severity=severity, where=Where(step=line),
                                evidence=[Evidence(path="metrics.jsonl", line=line, text="")],
                                numbers={} if jump is None else {"lr_jump_step": jump}))
    ordered = correlate(findings, Artefacts())
    assert [(f.cause == lead, f.role) for f in ordered] == [(True, "root"), (False, "victim")]
