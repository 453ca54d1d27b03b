"""What the time of a step goes into: modules, all-to-all, data; and why utilisation is low."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diag.artefacts.run_config import RunConfig
from diag.series import Column, Run

#: A module beyond this share of the step is the bottleneck (docs: procedure for a first run on one node).
BOTTLENECK = 0.5
#: Dispatch and combine beyond this share of the forward time: the EP layout needs a change. Field report: 35 % at
#: EP 32 across nodes, 18 % after hierarchical and overlapped exchanges.
ALL_TO_ALL = 0.3
#: Time spent waiting for data: healthy loaders stay below 5 % (playbook slow-data); twice that is a warning.
DATA_WAIT = 0.10
#: Model FLOP utilisation worth a word. Published dense runs reach 35 to 55 % (PaLM 46 %, Llama 3 38 to 43 %);
#: mixtures of experts less.
LOW_MFU = 0.30
#: Bytes sent over bytes expected of balanced routing.
BYTES_RATIO = 1.2
LEAST_POINTS = 5


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a step over the last half of the run; what was not recorded is None or absent.

    `modules`: share of the step by module; `exchange`: dispatch and combine as share of the measured forward time, or
    of the step (`exchange_of` says which); `data`: waiting for data; `bytes_ratio`: all-to-all bytes over expected.
    """

    modules: dict[str, float]
    exchange: float | None
    exchange_of: str
    data: float | None
    bytes_ratio: float | None
    mfu: float | None
    mfu_convention: str | None


def shares_of(run: Run) -> Shares:
    """The shares over the last half of `run`."""
    step = _level(run.get("step_seconds"))
    modules: dict[str, float] = {}
    forward: dict[str, float] = {}
    for name, column in run.match("time/*").items():
        part = name.removeprefix("time/")
        level = _level(column)
        if level is None:
            continue
        if "/" not in part and step:
            modules[part] = level / step
        elif part.endswith("/forward"):
            forward[part.removesuffix("/forward")] = level
    exchange, of = None, "forward time"
    if {"dispatch", "combine"} <= forward.keys() and sum(forward.values()) > 0:
        exchange = (forward["dispatch"] + forward["combine"]) / sum(forward.values())
    elif (seconds := _level(run.get("all_to_all_seconds"))) is not None and step:
        exchange, of = seconds / step, "step"
    sent, expected = _level(run.get("all_to_all_bytes")), _level(run.get("all_to_all_bytes_expected"))
    mfu = run.get("mfu")
    return Shares(modules, exchange, of, _data_share(run), sent / expected if sent and expected else None, _level(mfu),
                  mfu.convention if mfu is not None else None)


def _level(column: Column | None) -> float | None:
    """The median over the last half, of at least `LEAST_POINTS` points."""
    if column is None:
        return None
    values = column.values[np.isfinite(column.values)]
    half = values[len(values) // 2 :]
    return float(np.median(half)) if len(half) >= LEAST_POINTS else None


def _data_share(run: Run) -> float | None:
    """Seconds of waiting over seconds of steps, summed over the last half: a rare long wait counts as it should."""
    data, step = run.get("data_seconds"), run.get("step_seconds")
    if data is None or step is None:
        return None
    _, left, right = np.intersect1d(data.steps, step.steps, assume_unique=True, return_indices=True)
    left, right = left[len(left) // 2 :], right[len(right) // 2 :]
    waited, whole = data.values[left], step.values[right]
    good = np.isfinite(waited) & np.isfinite(whole) & (whole > 0)
    if good.sum() < LEAST_POINTS:
        return None
    return float(waited[good].sum() / whole[good].sum())


def why_low(shares: Shares, config: RunConfig | None) -> list[str]:
    """Likely reasons for low utilisation in the order in which to look: communication, then recomputation, data."""
    found = []
    if shares.exchange is not None and shares.exchange > ALL_TO_ALL / 2:
        found.append(f"all-to-all takes {shares.exchange:.0%} of the {shares.exchange_of}")
    named = sum(shares.modules.values())
    if shares.modules and named < 0.7:
        found.append(f"{1 - named:.0%} of the step lies outside of all modules: waiting for gathers and reductions")
    recomputed = [row for row in ("attention", "experts", "dense_ffn")
                  if config is not None and config.get(f"modules.{row}.recompute") == "full"]
    if recomputed:
        found.append(f"full recomputation of {', '.join(recomputed)}")
    if shares.data is not None and shares.data > DATA_WAIT / 2:
        found.append(f"{shares.data:.0%} of the time waiting for data")
    return found
