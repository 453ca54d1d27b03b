"""Steps that take longer than they did, stall at intervals, or wait for data; where their time goes.

Sees: step time or throughput of any run that `diag.series` reads: a rise for good, a slow creep, a fall from the first
steps, stalls at an interval, the share of waiting for data, of modules and of all-to-all, low utilisation. Cannot see:
who is slow, which takes each rank's own times (`step_stragglers`). Thresholds and their sources: `diag.steps`.

On a machine without GPUs that the run itself describes, slow-downs are told as information: CPUs are shared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from diag.artefacts import Artefacts
from diag.artefacts.metric_table import HasSeries
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_environment import RunEnvironment
from diag.detectors import NotChecked, detector
from diag.schema import Evidence, Finding, Severity, Where
from diag.series import Run, runs
from diag.steps.cost import Cost, Stalls, cost_of, creep, early_fall, rise, stalls
from diag.steps.shares import ALL_TO_ALL, BOTTLENECK, BYTES_RATIO, DATA_WAIT, LOW_MFU, Shares, shares_of, why_low

#: Stalls that cost less of all time are told, not warned of; below the second they are not worth a line.
STALLS_WARN, STALLS_TELL = 0.05, 0.01
#: A rise is explained by waiting for data when so much of it is.
DATA_EXPLAINS = 0.5
#: Configured intervals that may be met in stalls.
_INTERVALS = {"checkpoint.every": "saving a checkpoint", "train.val_every": "validation",
              "recorder.module_times_every": "measuring module times"}


@detector("steps", needs=HasSeries, wants=(RunConfig, RunEnvironment), subject="step times or throughput")
def step_times(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """For each run: at most one slow-down, one stall, one share of each kind, and one line of figures."""
    told = False
    for run in runs(artefacts):
        cost = cost_of(run)
        if cost is None:
            continue
        told = True
        config = artefacts.beside(run.artefacts[0], RunConfig)
        mild = _without_gpus(artefacts.beside(run.artefacts[0], RunEnvironment))
        shares = shares_of(run)
        slower = _slower(run, cost, shares)
        waiting = [] if slower and slower.cause == "slow_data_io" else list(_waiting(run, shares))
        said = (slower, _stalls(run, cost, config), *waiting, *_parts(run, shares, config))
        found = [finding for finding in said if finding is not None]
        for finding in found:
            if mild and finding.cause in ("slow_node", "throughput_decay", "periodic_stall", "all_to_all_slow"):
                finding.severity, finding.confidence = "info", 0.5
                finding.summary += " (On CPUs, which other work may share.)"
                finding.role = "context"
            yield finding
        if not any(finding.severity != "info" for finding in found):
            yield _steady(cost)
    if not told:
        yield NotChecked("no step times and no throughput in the metrics, or too few")


def _without_gpus(environment: RunEnvironment | None) -> bool:
    return environment is not None and environment.values.get("gpus") == []


def _slower(run: Run, cost: Cost, shares: Shares) -> Finding | None:
    step = rise(cost)
    if step is not None:
        since = _at(run, cost, step.point)
        data = _data_growth(run, cost, step.point)
        if data is not None and data >= DATA_EXPLAINS:
            return _finding(run, cost, step.point, "slow_data_io", 0.75,
                            f"{_noun(cost)} {_longer(step.ratio)}{since}, and {min(data, 1):.0%} of it is waiting "
                            "for data.", ratio=step.ratio)
        return _finding(run, cost, step.point, "slow_node", 0.62,
                        f"{_noun(cost)} {_longer(step.ratio)}{since}, and stay so.", ratio=step.ratio)
    raw = cost.column.values
    if not cost.per_step and early_fall(cost, 1 / float(raw[0]), 1 / float(raw[-1])) \
            and not (shares.data is not None and shares.data < DATA_WAIT / 2):
        first, last = float(raw[0]), float(raw[-1])
        finding = _finding(run, cost, 0, "slow_data_io", 0.6,
                           f"Throughput falls from the first steps on ({first:,.0f} to {last:,.0f}): the ranks "
                           "probably wait for data.", ratio=first / last)
        finding.evidence = [run.evidence(cost.column, index) for index in (1, len(raw) - 1)]
        return finding
    ratio = creep(cost)
    if ratio is not None:
        return _finding(run, cost, 0, "throughput_decay", 0.65,
                        f"Steps get slower and slower: {ratio - 1:.0%} longer at the end than at the beginning, "
                        "without a moment at which it began.", ratio=ratio)
    return None


def _data_growth(run: Run, cost: Cost, point: int) -> float | None:
    """The share of a rise of step time that waiting for data makes up; None where it was not recorded."""
    data = run.get("data_seconds")
    if data is None or not cost.per_step:
        return None
    border = cost.steps[point]
    before, after = data.values[data.steps < border][-40:], data.values[data.steps >= border][:40]
    if len(before) < 3 or len(after) < 3:
        return None
    grown = float(np.median(cost.values[point : point + 40]) - np.median(cost.values[max(0, point - 40) : point]))
    return float(np.mean(after) - np.mean(before)) / grown if grown > 0 else None


def _stalls(run: Run, cost: Cost, config: RunConfig | None) -> Finding | None:
    found = stalls(cost)
    if found is None or found.lost < STALLS_TELL:
        return None
    why, data = _coincidence(run, cost, found, config)
    severity: Severity = "warning" if found.lost >= STALLS_WARN else "info"
    finding = _finding(run, cost, int(found.points[0]), "slow_data_io" if data else "periodic_stall", 0.7,
                       f"Every {found.period:,} steps one takes {found.ratio:.1f} times as long as the others, "
                       f"{found.lost:.1%} of all time: {why}.", period=found.period, lost=found.lost)
    finding.severity = severity
    return finding


def _coincidence(run: Run, cost: Cost, found: Stalls, config: RunConfig | None) -> tuple[str, bool]:
    """What happens at the steps that stall, in words, and whether it is waiting for data."""
    steps = cost.steps[found.points]
    data = run.get("data_seconds")
    if data is not None and cost.per_step:
        at = np.isin(data.steps, steps)
        usual = float(np.median(data.values[~at])) if (~at).any() else 0.0
        excess = float(np.median(cost.values[found.points]) - np.median(cost.values))
        if at.any() and float(np.median(data.values[at])) - usual > DATA_EXPLAINS * excess:
            return "in those steps the run waits for data", True
    for name, what in (("checkpoint_seconds", "a checkpoint is saved"), ("validation_seconds", "validation runs")):
        column = run.get(name)
        near = None if column is None else np.isin(column.steps, np.concatenate((steps, steps - 1)))
        if column is not None and near is not None and near.sum() >= 0.7 * len(column) >= 2:
            return f"in those steps {what}", False
    same = [what for key, what in _INTERVALS.items()
            if config is not None and (every := config.number(key)) and found.period % every == 0
            and (every > 1 or found.period == 1)]
    if same:
        return f"the interval is that of {' or '.join(same[:2])}", False
    return "the interval matches nothing known here; look at checkpoints, evaluation, garbage collection and the " \
           "boundaries of data files", False


def _waiting(run: Run, shares: Shares) -> Iterator[Finding]:
    if shares.data is None or shares.data < DATA_WAIT:
        return
    column = run.columns["data_seconds"]
    yield Finding(cause="slow_data_io", severity="warning", confidence=0.8, where=Where(module="data"),
                  summary=f"{shares.data:.0%} of the time the run waits for data.",
                  evidence=[run.evidence(column, int(np.argmax(column.values)), "step_seconds")],
                  numbers={"data_share": round(shares.data, 4)})


def _parts(run: Run, shares: Shares, config: RunConfig | None) -> Iterator[Finding]:
    if shares.exchange is not None and shares.exchange > ALL_TO_ALL:
        sent = f"; {shares.bytes_ratio:.1f} times the bytes of balanced routing are sent" \
            if shares.bytes_ratio is not None and shares.bytes_ratio > BYTES_RATIO else ""
        yield Finding(cause="all_to_all_slow", severity="warning", confidence=0.7, where=Where(module="all-to-all"),
                      summary=f"All-to-all takes {shares.exchange:.0%} of the {shares.exchange_of}{sent}.",
                      evidence=_last(run, "time/dispatch", "time/combine", "all_to_all_seconds"),
                      numbers={"share": round(shares.exchange, 4)} | (
                          {"bytes_ratio": round(shares.bytes_ratio, 4)} if shares.bytes_ratio else {}))
    top = max(shares.modules, key=lambda name: shares.modules[name], default=None)
    low = shares.mfu is not None and 0 < shares.mfu < LOW_MFU
    bottleneck = top is not None and shares.modules[top] > BOTTLENECK
    if not low and not bottleneck:
        return
    text = ""
    if shares.mfu is not None and low:
        reasons = why_low(shares, config)
        convention = f", {shares.mfu_convention}" if shares.mfu_convention else ""
        text = f"MFU is {shares.mfu:.0%}{convention}; " + (
            "look at " + "; ".join(reasons) if reasons else "the records do not say why") + "."
    if top is not None and bottleneck:
        text = f"{text} {top} takes {shares.modules[top]:.0%} of the step: the bottleneck.".strip()
    yield Finding(cause="low_utilisation", role="context", severity="info", confidence=0.7, summary=text,
                  where=Where(module=top if bottleneck else None),
                  numbers={"modules": {k: round(v, 4) for k, v in shares.modules.items()}} | (
                      {"mfu": shares.mfu} if shares.mfu is not None else {}))


def _last(run: Run, *names: str) -> list[Evidence]:
    for name in names:
        column = run.get(name)
        if column is not None and len(column):
            return [run.evidence(column, len(column) - 1, *(n for n in names if n != name))]
    return []


def _steady(cost: Cost) -> Finding:
    middle = float(np.median(cost.values))
    what = f"a step takes {middle:.3g} s" if cost.per_step else f"{cost.column.key} is {1 / middle:,.4g}"
    return Finding(cause="healthy", role="context", severity="info", confidence=0.8, where=Where(module="steps"),
                   summary=f"Steps keep their pace: {what} in the median of {len(cost.values):,} points.")


def _noun(cost: Cost) -> str:
    return "Steps take" if cost.per_step else "Steps, by their throughput, take"


def _longer(ratio: float) -> str:
    return f"{ratio - 1:.0%} longer" if ratio < 3 else f"{ratio:.3g} times as long"


def _at(run: Run, cost: Cost, point: int) -> str:
    return f" since step {cost.steps[point]:,}" if run.steps_known else ""


def _finding(run: Run, cost: Cost, point: int, cause: str, confidence: float, summary: str,
             **numbers: float) -> Finding:
    places = [run.evidence(cost.column, int(cost.index[point]))]
    if point:
        places.insert(0, run.evidence(cost.column, int(cost.index[point - 1])))
        places.reverse()  # the first evidence is the onset
    step = int(cost.steps[point]) if run.steps_known else None
    return Finding(cause=cause, severity="warning", confidence=confidence, summary=summary, where=Where(step=step),
                   evidence=places, numbers={key: round(value, 4) for key, value in numbers.items()})
