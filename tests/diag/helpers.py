"""Shared by the doctor's tests: run the command line in this process, and write small metrics files."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdtrain.cli import main


@dataclass(frozen=True)
class Result:
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """stdout, which must be one JSON document and nothing else."""
        return json.loads(self.out)


def pdtrain(*arguments: str | Path) -> Result:
    """Run `pdtrain ARGUMENTS` through the same `main` as the console script."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return Result(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def route(
    experts: int, top_k: int, tokens: int, rng: np.random.Generator, push: Sequence[float] | None = None
) -> list[int]:
    """Counts of one step: each token picks `top_k` distinct experts, uniformly plus the log-odds in `push`."""
    scores = rng.gumbel(size=(tokens, experts)) + (0.0 if push is None else np.asarray(push))
    chosen = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    return np.bincount(chosen.ravel(), minlength=experts).tolist()


def records(steps: range, counts: Iterator[list[int]], layer: int = 1, **values: Any) -> Iterator[dict[str, Any]]:
    """metrics.jsonl records with the counts of one layer."""
    for step in steps:
        yield {"step": step, "time": 1.7e9 + step, "loss": 2.0, f"router/{layer}/counts": next(counts)} | {
            f"router/{layer}/{name}": value for name, value in values.items()}


def write(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    """`rows` as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CONFIG = """\
[model.moe]
experts = {experts}
top_k = {top_k}
aux_loss = {aux_loss}
bias_update_speed = 0.0
min_capacity = 4
{capacity}
[modules.router]
lr_scale = 1.0
{dtype}
[train]
steps = 400
micro_batch = 4
sequence_length = 64
[optimizer]
lr = 0.0003
warmup_steps = 10
"""


def config(experts: int = 8, top_k: int = 2, aux_loss: float = 0.01, capacity: float | None = None,
           dtype: str | None = None) -> str:
    """A config.toml with what the router's diagnosis reads."""
    return CONFIG.format(experts=experts, top_k=top_k, aux_loss=aux_loss,
                         capacity=f"capacity_factor = {capacity}" if capacity else "",
                         dtype=f'dtype = "{dtype}"' if dtype else "")
