"""Runs made from arrays, for the tests of the loss."""

from __future__ import annotations

import numpy as np

from diag.artefacts import Artefacts
from diag.artefacts.metric_table import MetricTable
from diag.series import Run, runs


def run_of(steps=None, resumes=(), **columns) -> Run:
    """A run with these columns; `steps` default to 1, 2, ..."""
    table = MetricTable(path="metrics.jsonl", format="metrics", resumes=list(resumes))
    for key, values in columns.items():
        values = np.asarray(values, dtype=float)
        at = np.arange(1, len(values) + 1) if steps is None else np.asarray(steps)
        table.column(key.replace("__", "/")).extend(at[: len(values)], np.arange(1, len(values) + 1), values)
    return runs(Artefacts([table]))[0]


def healthy(n=600, seed=0, scale=0.01):
    """A falling loss with noise [n]."""
    rng = np.random.default_rng(seed)
    return (2.0 + 8.0 * (1 + np.arange(n) / 60) ** -0.5) * np.exp(rng.normal(0, scale, n))
