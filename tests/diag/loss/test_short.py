"""Excerpts of a few points: what is so large that it needs no history, and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from diag.loss.findings import findings_of

from .curves import run_of
from .test_findings import only


def test_a_norm_that_rose_tenfold_makes_a_doubled_loss_a_spike() -> None:
    finding = only(run_of(steps=[9101, 9102, 9103], loss=[3.05, 3.12, 7.7], grad_norm=[0.9, 19.0, 18.1]))
    assert finding.cause == "loss_spike" and finding.where.step == 9103 and finding.confidence <= 0.65
    assert finding.numbers["grad_norm_led"] is True and finding.numbers["grad_norm_step"] == 9102


@pytest.mark.parametrize("columns", [
    {"loss": [3.05, 3.12, 7.7], "grad_norm": [0.9, 1.1, 1.3]},  # the norm is calm
    {"loss": [0.5, 0.4, 1.3], "grad_norm": [0.9, 19.0, 18.1]},  # a small batch of a fine-tune
    {"loss": [0.04, 0.02, 0.9]},
    {"loss": [3.05, 2.9, 3.4, 3.1, 2.7]},
    {"loss": [2.0, 2.4, 3.1], "grad_norm": [2.0, 30.0, 25.0]},
])
def test_ordinary_noise_of_few_points_is_silent(columns) -> None:
    count = len(columns["loss"])
    assert findings_of(run_of(steps=np.arange(9101, 9101 + count), **columns)) == []


def test_a_loss_that_grows_tenfold_needs_no_norm() -> None:
    finding = only(run_of(steps=[14100, 14200, 14300, 14400], loss=[1.13, 0.92, 2.3, 95.8]))
    assert finding.cause == "loss_spike" and finding.where.step == 14400
    gone = only(run_of(steps=[4000, 5000, 6000, 7000, 8000], loss=[8.6, 6.9, 1e4, 4.8e9, 7.7e12]))
    assert (gone.cause, gone.severity) == ("loss_divergence", "error")
    assert findings_of(run_of(steps=[1, 2, 3], loss=[0.7, 9.0, 0.6])) == []  # the first steps bounce


def test_millions_from_the_first_point_shown_are_no_loss_that_learns() -> None:
    rng = np.random.default_rng(0)
    steps, size = np.arange(5900, 7600, 100), np.exp(rng.normal(0, 0.3, 17))
    finding = only(run_of(steps=steps, loss=4e8 * size, grad_norm=9e5 * size))
    assert finding.cause == "loss_divergence" and finding.confidence <= 0.7
    assert findings_of(run_of(steps=steps, loss=4e8 * size * np.geomspace(1, 0.1, 17), grad_norm=9e5 * size)) == []
    assert findings_of(run_of(steps=steps, loss=4e8 * size)) == []  # sums over tokens may be large


def test_a_loss_of_exactly_zero_at_the_end_of_an_excerpt_is_no_loss() -> None:
    finding = only(run_of(loss=[1.7328, 0.0], grad_norm=[2e-5, 4e-6]))
    assert finding.cause == "loss_degenerate" and finding.confidence <= 0.6
    assert findings_of(run_of(loss=[0.0, 0.0, 1e-4], grad_norm=[0.2, 0.1, 0.1])) == []  # how GRPO begins
    assert findings_of(run_of(loss=[2.1, 2.0, 1.9, 2.2, 2.0, 0.0])) == []  # one batch without labels


def test_a_loss_beside_the_main_one_may_be_zero() -> None:
    assert findings_of(run_of(loss=np.linspace(0.4, 0.2, 60), unsuper_loss=np.zeros(60))) == []
