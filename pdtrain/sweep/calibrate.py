"""The plan's constants fitted to measured trials, and what that gains on trials they were not fitted to.

Fitted, all positive: the share of the peak that products and attention reach (one factor), the memory's rate, the
links' rate, the start of a collective, what a block and what a step cost the host. The fit minimises

    sum over trials of log(predicted / measured)^2  +  PRIOR x sum over constants of log(constant / start)^2

by Gauss-Newton with damping; the second sum keeps a constant where it is that the trials say nothing about. Every
fourth trial is held out: the errors shown are of those alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pdtrain.plan.hardware import Hardware
from pdtrain.plan.setup import Setup
from pdtrain.plan.timing import times

#: Weight of a constant's distance from its start against one trial's error: a factor of e costs as much as 10 %.
PRIOR = 0.01
#: Measured trials below which nothing is fitted, and which part is held out.
FEWEST, HELD_OUT = 6, 4
#: Starts of constants that the catalogue takes as 0, in seconds: a logarithm needs something.
OVERHEAD_START = {"block_overhead": 1e-3, "step_overhead": 5e-3, "latency": 100e-6}
ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Case:
    """One measured trial."""

    label: str
    setup: Setup
    seconds: float
    held_out: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """hardware: with the fitted constants. before, after: predicted seconds per case."""

    hardware: Hardware
    cases: list[Case]
    before: list[float]
    after: list[float]

    def error(self, predicted: list[float], *, held_out: bool) -> float:
        """Median of |predicted / measured - 1|."""
        return statistics.median(abs(seconds / case.seconds - 1)
                                 for seconds, case in zip(predicted, self.cases, strict=True)
                                 if case.held_out == held_out)  # fmt: skip


def split(measured: list[tuple[str, str, Setup, float]]) -> list[Case]:
    """(key, label, setup, seconds) as cases. The key, a hash, decides who is held out: no order of trials does."""
    order = {key: index for index, key in enumerate(sorted(key for key, *_ in measured))}
    return [Case(label, setup, seconds, order[key] % HELD_OUT == HELD_OUT - 1)
            for key, label, setup, seconds in measured]  # fmt: skip


def calibrate(start: Hardware, cases: list[Case]) -> Calibration:
    """Fit to the cases that are not held out."""
    fitted = _fit(start, [case for case in cases if not case.held_out])
    seen = [case for case in cases if not case.held_out]
    fitted = replace(
        fitted,
        source=f"{start.source}; fitted by `pdtrain sweep` to {len(seen)} trials of {seen[0].setup.ranks} ranks",
        date=time.strftime("%Y-%m-%d"),
    )
    return Calibration(fitted, cases, _predict(start, cases), _predict(fitted, cases))


def _predict(hardware: Hardware, cases: list[Case]) -> list[float]:
    return [times(case.setup, hardware)[0].step for case in cases]


def _apply(start: Hardware, logs: list[float]) -> Hardware:
    """`start` with its constants multiplied by e^logs, in the order of `_STARTS`."""
    compute, memory, links, *overheads = (math.exp(value) for value in logs)
    found: dict[str, Any] = {
        name: (getattr(start, name) or OVERHEAD_START[name]) * factor
        for name, factor in zip(OVERHEAD_START, overheads, strict=True)
    }
    return replace(
        start, gemm_efficiency=start.gemm_efficiency * compute,
        attention_efficiency=start.attention_efficiency * compute,
        memory_bandwidth=start.memory_bandwidth * memory, node_bandwidth=start.node_bandwidth * links,
        network_bandwidth=start.network_bandwidth * links, **found,
    )  # fmt: skip


def _fit(start: Hardware, cases: list[Case]) -> Hardware:
    import numpy as np

    count = 3 + len(OVERHEAD_START)
    scale = math.sqrt(PRIOR)

    def residuals(logs: Any) -> Any:
        predicted = _predict(_apply(start, list(logs)), cases)
        errors = [math.log(p / case.seconds) for p, case in zip(predicted, cases, strict=True)]
        return np.array([*errors, *(scale * value for value in logs)])

    logs, damping = np.zeros(count), 1e-2
    now = residuals(logs)
    for _ in range(ROUNDS):
        jacobian = np.stack([(residuals(logs + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(count)], axis=1)
        step = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(count), -jacobian.T @ now)
        tried = np.clip(logs + np.clip(step, -1, 1), -7, 7)
        then = residuals(tried)
        if (then**2).sum() < (now**2).sum():
            gained = (now**2).sum() - (then**2).sum()
            logs, now, damping = tried, then, max(damping / 3, 1e-6)
            if gained < 1e-9:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    return _apply(start, list(logs))


def as_json(found: Calibration) -> dict[str, Any]:
    """Constants, and every case with both predictions."""
    hardware = found.hardware
    return {
        "constants": {name: getattr(hardware, name) for name in CONSTANTS},
        "median_error_before": found.error(found.before, held_out=True),
        "median_error_after": found.error(found.after, held_out=True),
        "median_error_of_fit": found.error(found.after, held_out=False),
        "cases": [
            {"label": case.label, "held_out": case.held_out, "measured_seconds": case.seconds,
             "predicted_before_seconds": before, "predicted_after_seconds": after}
            for case, before, after in zip(found.cases, found.before, found.after, strict=True)
        ],
    }  # fmt: skip


#: What is fitted, by its name in a hardware file.
CONSTANTS = ("gemm_efficiency", "attention_efficiency", "memory_bandwidth", "node_bandwidth", "latency",
             "block_overhead", "step_overhead")  # fmt: skip


def text(found: Calibration) -> Iterator[str]:
    """Predicted against measured, held-out trials first."""
    seen = sum(not case.held_out for case in found.cases)
    yield (f"calibration: fitted to {seen} trials, judged on the {len(found.cases) - seen} held out "
           "(before: rates probed or catalogued, no overheads)")  # fmt: skip
    yield f"  {'measured':>10} {'before':>10} {'error':>7} {'after':>10} {'error':>7}  trial"
    rows = sorted(zip(found.cases, found.before, found.after, strict=True), key=lambda row: not row[0].held_out)
    for case, before, after in rows:
        mark = "" if case.held_out else "  (fitted)"
        yield (
            f"  {case.seconds:>8.3f} s {before:>8.3f} s {before / case.seconds - 1:>+7.0%} {after:>8.3f} s "
            f"{after / case.seconds - 1:>+7.0%}  {case.label}{mark}"
        )
    yield (
        f"median error of the held-out trials: {found.error(found.before, held_out=True):.0%} before, "
        f"{found.error(found.after, held_out=True):.0%} after; of the fitted ones "
        f"{found.error(found.after, held_out=False):.0%} after"
    )
