"""A learning rate of 0: in the logs and metrics of several loops, and where it is no fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diag.diagnose import diagnose


def hf(rates: list[float]) -> str:
    return "".join(f"{{'loss': {2.1 + n % 3 / 10}, 'grad_norm': 1.0, 'learning_rate': {rate}, 'epoch': {n / 100}}}\n"
                   for n, rate in enumerate(rates))


def megatron(rates: list[float]) -> str:
    return "".join(
        f" iteration {n:8d}/     500 | consumed samples: {n * 8:12d} | elapsed time per iteration (ms): 3112.4 | "
        f"learning rate: {rate:.6E} | global batch size:     8 | lm loss: {2.1 + n % 3 / 50:.6E} | loss scale: 1.0 | "
        "grad norm: 0.210 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        for n, rate in enumerate(rates, 1))


def metrics(rates: list[float]) -> str:
    return "".join(json.dumps({"step": n, "time": 1.7e9 + n, "loss": 2.1 + n % 3 / 50, "lr": rate}) + "\n"
                   for n, rate in enumerate(rates, 1))


def plain(rates: list[float]) -> str:
    return "".join(f"step {n} | loss {2.1 + n % 3 / 50:.4f} | lr {rate:.3f}\n" for n, rate in enumerate(rates, 1))


def found(folder: Path, text: str) -> list[tuple[str, int | None]]:
    """(verdict, step) of the findings about the learning rate, as whole reports say it."""
    path = folder / ("metrics.jsonl" if text.startswith('{"') else "train.log")
    path.write_text(text)
    report = diagnose([path])
    return [(report.verdict, f.where.step) for f in report.findings if f.cause == "learning_rate_zero"]


@pytest.mark.parametrize("form, step", [(hf, None), (megatron, 1), (metrics, 1)])
def test_a_rate_that_is_never_above_zero(tmp_path: Path, form, step: int | None) -> None:
    assert found(tmp_path, form([0.0] * 40)) == [("degraded", step)]


@pytest.mark.parametrize("form, step", [(hf, None), (megatron, 31), (metrics, 31)])
def test_a_schedule_that_is_over_long_before_the_run(tmp_path: Path, form, step: int | None) -> None:
    assert found(tmp_path, form([1e-4] * 30 + [0.0] * 30)) == [("degraded", step)]


@pytest.mark.parametrize("rates", [
    [0.0] * 6 + [n * 1e-6 for n in range(1, 40)],  # the scale search of fp16, then a warm-up
    [1e-4 * (1 - n / 50) for n in range(51)],  # linear to 0 at the last step
    [1e-4] * 200 + [0.0] * 3,
    [0.0] * 4,
    [1e-5] * 40,
])
def test_the_ends_of_a_schedule_are_healthy(tmp_path: Path, rates: list[float]) -> None:
    for form in (hf, megatron, metrics):
        assert found(tmp_path, form(rates)) == []


def test_a_rate_printed_with_few_digits_is_not_judged(tmp_path: Path) -> None:
    assert found(tmp_path, plain([3e-4] * 40)) == []


def test_a_frozen_group_beside_one_that_learns(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": 2.0, "lr": 0.0, "lr/head": 1e-3} for n in range(1, 41)]
    assert found(tmp_path, "".join(json.dumps(row) + "\n" for row in rows)) == []
