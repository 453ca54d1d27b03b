"""Gradient norms by module: one module that dwarfs the others for long, and norms that grow before the loss moves.

Sees: columns `grad_norm/<module>` and `grad_norm` of any run that `diag.series` reads, before clipping. Cannot see:
which layer; anything where only one total norm after clipping is logged. Thresholds below, with their sources.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diag.artefacts import Artefacts
from diag.artefacts.metric_table import HasSeries
from diag.detectors import NotChecked, detector
from diag.schema import Finding, Where
from diag.series import Column, Run, runs

#: A module whose norm is this many times that of the next largest gets no use out of a common limit. Field report:
#: experts at 100 times attention.
DWARFS = 10.0
#: For so many points in a row, and steps, until the end of the run.
DWARFS_POINTS, DWARFS_STEPS = 20, 50
#: A precursor: growth over the stretch, of which the trend of the logarithm explains this much (R squared).
GROWTH = 10.0
TREND = 0.7
GROWTH_POINTS = 24
#: The loss has not moved while its level at the end is within this many scatters, or this share, of the level before.
STILL_SIGMAS, STILL_SHARE = 3.0, 0.03


@detector("loss", needs=HasSeries, subject="gradient norms")
def grad_modules(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """At most one finding of each kind per run."""
    told = False
    for run in runs(artefacts):
        modules = {name.removeprefix("grad_norm/"): column for name, column in run.match("grad_norm/*").items()
                   if column.convention != "after clipping" and (column.values > 0).mean() > 0.5}
        total = run.get("grad_norm")
        if not modules and total is None:
            continue
        told = True
        if len(modules) > 1:
            yield from _dwarfing(run, modules)
        if total is not None and total.convention != "after clipping":
            modules["the whole model"] = total
        yield from _growing(run, modules)
    if not told:
        yield NotChecked("gradients by module: no gradient norms in the metrics")


def _dwarfing(run: Run, modules: dict[str, Column]) -> Iterator[Finding]:
    names, table, steps = _table(modules)
    if len(steps) < DWARFS_POINTS:
        return
    order = np.sort(table, axis=0)
    top = table.argmax(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = order[-1] / order[-2]
    beyond = (ratio >= DWARFS) & (top == top[-1])
    count = len(beyond) if beyond.all() else int(np.argmin(beyond[::-1]))
    first = len(steps) - count
    if count < DWARFS_POINTS or steps[-1] - steps[first] + 1 < DWARFS_STEPS:
        return
    name, middle = names[int(top[-1])], float(np.median(ratio[first:]))
    column = modules[name]
    at = int(np.searchsorted(column.steps, steps[first]))
    since = f"since step {steps[first]:,}" if first else "all the time"
    yield Finding(
        cause="grad_module_imbalance", severity="warning", confidence=0.8,
        summary=f"The gradient norm of {name} is {middle:.0f} times that of the next module, {since}: a common limit "
                "clips only it, or all others with it.",
        where=Where(module=name, step=int(steps[first]) if run.steps_known else None),
        evidence=[run.evidence(column, at, *(f"grad_norm/{other}" for other in names if other != name)),
                  run.evidence(column, len(column) - 1)],
        numbers={"ratio": round(middle, 3), "since_step": int(steps[first]),
                 "norms": {n: float(np.median(table[i, first:])) for i, n in enumerate(names)}},
    )


def _table(modules: dict[str, Column]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Norms [modules, points] at the steps that all modules have, finite ones only."""
    names = sorted(modules)
    steps = modules[names[0]].steps
    for name in names[1:]:
        steps = np.intersect1d(steps, modules[name].steps, assume_unique=True)
    rows = np.stack([modules[name].values[np.searchsorted(modules[name].steps, steps)] for name in names])
    good = np.isfinite(rows).all(axis=0)
    return names, rows[:, good], steps[good]


def _growing(run: Run, modules: dict[str, Column]) -> Iterator[Finding]:
    """The module whose norm has grown most up to the end of the run, while the loss stood still."""
    found = []
    for name, column in modules.items():
        grown = _growth(column.finite())
        if grown is not None and _still(run, int(column.finite().steps[grown[0]])):
            found.append((grown[1], name, column.finite(), grown[0]))
    if not found:
        return
    factor, name, column, first = max(found, key=lambda item: (item[1] != "the whole model", item[0]))
    since = f"since step {column.steps[first]:,}" if run.steps_known else "to the end"
    yield Finding(
        cause="grad_explosion", severity="warning", confidence=0.7,
        summary=f"The gradient norm of {name} grows exponentially {since}, {factor:.0f} times by now, and the loss has "
                "not moved yet.",
        where=Where(module=None if name == "the whole model" else name,
                    step=int(column.steps[first]) if run.steps_known else None),
        evidence=[run.evidence(column, first, "loss"), run.evidence(column, len(column) - 1, "loss")],
        numbers={"growth": round(factor, 3)},
    )


def _growth(column: Column) -> tuple[int, float] | None:
    """(onset, factor) when the logarithm rises in a line over the last points; the longest such stretch."""
    positive = column.values > 0
    if positive.sum() < GROWTH_POINTS or not positive.all():
        return None
    logs = np.log(column.values)
    best = None
    length = GROWTH_POINTS
    while length <= len(logs):
        part = logs[-length:]
        x = np.arange(length) - (length - 1) / 2
        slope = float((x * part).sum() / (x * x).sum())
        spread = float(((part - part.mean()) ** 2).sum())
        explained = slope * slope * float((x * x).sum()) / spread if spread else 0.0
        factor = float(np.exp(np.median(part[-5:]) - np.median(part[:5])))
        if slope > 0 and explained >= TREND and factor >= GROWTH and np.median(part[-5:]) >= np.percentile(logs, 90):
            best = len(logs) - length, factor
        length = max(length + 1, int(length * 1.25))
    return best


def _still(run: Run, step: int) -> bool:
    """Whether the loss since `step` is where it was before."""
    loss = run.get("loss")
    if loss is None:
        return True
    values = loss.finite()
    before, after = values.values[values.steps <= step][-40:], values.values[values.steps > step]
    if len(before) < 5 or len(after) < 5:
        return False
    level = float(np.median(before))
    noise = 1.4826 * float(np.median(np.abs(before - level)))
    return float(np.median(after[-10:])) <= level + max(STILL_SIGMAS * noise, STILL_SHARE * abs(level))
