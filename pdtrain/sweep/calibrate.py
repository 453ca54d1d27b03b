"""The plan's constants fitted to measured trials, and what that gains on trials they were not fitted to.

Fitted, all positive: the share of the peak that products and attention reach (one factor), the memory's rate, the
links' rate, the start of a collective, what a block and what a step cost the host. The fit minimises

    sum over trials of log(predicted / measured)^2  +  PRIOR x sum over constants of log(constant / start)^2

by Gauss-Newton with damping; the second sum keeps a constant where it is that the trials say nothing about. The errors
shown are of trials that the fit did not see: four fits leave out a quarter each; the constants written are of all.
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
#: Measured trials below which nothing is fitted, and in how many parts they are left out.
FEWEST, FOLDS = 6, 4
#: Starts of constants that the catalogue takes as 0, in seconds: a logarithm needs something.
OVERHEAD_START = {"block_overhead": 1e-3, "step_overhead": 5e-3, "latency": 100e-6}
ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Case:
    """One measured trial; `fold`: the fit that does not see it."""

    label: str
    setup: Setup
    seconds: float
    fold: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """hardware: with the constants fitted to all cases. Predicted seconds per case: before; after, by a fit that did
    not see it; fitted, by `hardware`."""

    hardware: Hardware
    cases: list[Case]
    before: list[float]
    after: list[float]
    fitted: list[float]

    def error(self, predicted: list[float]) -> float:
        """Median of |predicted / measured - 1|."""
        return statistics.median(
            abs(seconds / case.seconds - 1) for seconds, case in zip(predicted, self.cases, strict=True)
        )


def split(measured: list[tuple[str, str, Setup, float]]) -> list[Case]:
    """(key, label, setup, seconds) as cases. The key, a hash, decides about the fold: no order of trials does."""
    order = {key: index for index, key in enumerate(sorted(key for key, *_ in measured))}
    return [Case(label, setup, seconds, order[key] % FOLDS) for key, label, setup, seconds in measured]


def calibrate(start: Hardware, cases: list[Case]) -> Calibration:
    """Fit to all cases, and once to each three quarters of them."""
    found = replace(
        _fit(start, cases),
        source=f"{start.source}; fitted by `pdtrain sweep` to {len(cases)} trials of {cases[0].setup.ranks} ranks",
        date=time.strftime("%Y-%m-%d"),
    )
    after = [0.0] * len(cases)
    for fold in range(FOLDS):
        blind = _fit(start, [case for case in cases if case.fold != fold])
        for place, case in enumerate(cases):
            if case.fold == fold:
                after[place] = times(case.setup, blind)[0].step
    return Calibration(found, cases, _predict(start, cases), after, _predict(found, cases))


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
            if gained < 1e-5:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    return _apply(start, list(logs))


def as_json(found: Calibration) -> dict[str, Any]:
    """Constants, and every case with its predictions."""
    return {
        "constants": {name: getattr(found.hardware, name) for name in CONSTANTS},
        "median_error_before": found.error(found.before),
        "median_error_after": found.error(found.after),
        "median_error_of_fit": found.error(found.fitted),
        "cases": [
            {"label": case.label, "measured_seconds": case.seconds, "predicted_before_seconds": before,
             "predicted_after_seconds": after, "fitted_seconds": fitted}
            for case, before, after, fitted in zip(found.cases, found.before, found.after, found.fitted, strict=True)
        ],
    }  # fmt: skip


#: What is fitted, by its name in a hardware file.
CONSTANTS = ("gemm_efficiency", "attention_efficiency", "memory_bandwidth", "node_bandwidth", "latency",
             "block_overhead", "step_overhead")  # fmt: skip


def text(found: Calibration) -> Iterator[str]:
    """Predicted against measured, every trial."""
    yield (
        f"calibration: {len(found.cases)} trials (before: rates probed or catalogued, no overheads; after: constants "
        "fitted to trials that this one is not among)"
    )
    yield f"  {'measured':>10} {'before':>10} {'error':>7} {'after':>10} {'error':>7}  trial"
    for case, before, after in zip(found.cases, found.before, found.after, strict=True):
        yield (
            f"  {case.seconds:>8.3f} s {before:>8.3f} s {before / case.seconds - 1:>+7.0%} {after:>8.3f} s "
            f"{after / case.seconds - 1:>+7.0%}  {case.label}"
        )
    yield (
        f"median error: {found.error(found.before):.0%} before, {found.error(found.after):.0%} after "
        f"({found.error(found.fitted):.0%} where the fit saw the trial)"
    )
