"""Router values that other trainers log as scalars (TensorBoard, W&B, CSV, console), as the windows that are judged.

    moe/layer_3/expert_5/tokens_per_expert        one scalar per expert: together the counts of a step
    router/3/gini, router/3/gini_floor            what this trainer's event files hold, which know no lists

Counts must be tokens. Shares (that add up to about one) tell no number of tokens, so the floor of chance is not known
and nothing is judged from them. A balancing loss alone (Megatron-LM's `load_balancing_loss`) is no measure of balance
without its normalisation, and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from diag.artefacts.metrics import MetricsLog, RouterLog, RouterWindow
from diag.series import Column, Run

_COUNT = re.compile(r"(?:.*[/._])?layers?[/._]?(\d{1,5})[/._](?:.*[/._])?experts?[/._]?(\d{1,5})"
                    r"(?:[/._](?:num_|routed_)?(?:tokens?|counts?|load|tokens_per_expert|token_count))?")
_SCALAR = re.compile(r"router/(\d{1,5})/(\w+)")
#: Sums below this are shares, not tokens.
LEAST_TOKENS = 8.0


def router_logs(runs: Iterable[Run]) -> Iterator[MetricsLog]:
    """For each run that did not come from a metrics file with lists: its router values, where it has any."""
    for run in runs:
        if any(isinstance(item, MetricsLog) and item.routers for item in run.artefacts):
            continue
        routers = dict(_from_counts(run)) or dict(_from_scalars(run))
        if routers:
            steps = [w.last_step for router in routers.values() for w in router.windows]
            yield MetricsLog(path=run.path, format=run.format, routers=routers, first_step=min(steps),
                             last_step=max(steps), steps_known=run.steps_known)


def _from_counts(run: Run) -> Iterator[tuple[int, RouterLog]]:
    layers: dict[int, dict[int, Column]] = {}
    for name, column in run.columns.items():
        if (match := _COUNT.fullmatch(name)) is not None:
            layers.setdefault(int(match[1]), {})[int(match[2])] = column
    for layer, columns in sorted(layers.items()):
        experts = sorted(columns)
        if len(experts) < 2 or experts != list(range(experts[0], experts[0] + len(experts))):
            continue
        steps = columns[experts[0]].steps
        for expert in experts[1:]:
            steps = np.intersect1d(steps, columns[expert].steps, assume_unique=True)
        if not len(steps):
            continue
        table = np.stack([columns[e].values[np.searchsorted(columns[e].steps, steps)] for e in experts], axis=1)
        good = np.asarray(np.isfinite(table).all(axis=1) & (table >= 0).all(axis=1))
        if not good.any() or np.median(table[good].sum(axis=1)) < LEAST_TOKENS:
            continue
        first = columns[experts[0]]
        records = first.records[np.searchsorted(first.steps, steps)]
        log = RouterLog()
        for step, record, counts, usable in zip(steps.tolist(), records.tolist(), table, good.tolist(), strict=True):
            if usable:
                line = run.place(record)[1] or 0
                log.append(RouterWindow(step, step, line, line, 1, np.rint(counts).astype(np.int64)))
        yield layer, log


def _from_scalars(run: Run) -> Iterator[tuple[int, RouterLog]]:
    layers: dict[int, dict[str, Column]] = {}
    for name, column in run.columns.items():
        if (match := _SCALAR.fullmatch(name)) is not None:
            layers.setdefault(int(match[1]), {})[match[2]] = column
    for layer, columns in sorted(layers.items()):
        if not {"gini", "gini_floor"} <= columns.keys():
            continue
        log = RouterLog()
        gini = columns["gini"]
        for index, step in enumerate(gini.steps.tolist()):
            sums: dict[str, tuple[float, int]] = {}
            for name, column in columns.items():
                at = int(np.searchsorted(column.steps, step))
                if at < len(column) and column.steps[at] == step and np.isfinite(column.values[at]):
                    sums[name] = float(column.values[at]), 1
            line = run.place(int(gini.records[index]))[1] or 0
            log.append(RouterWindow(step, step, line, line, 1, None, sums))
        yield layer, log
