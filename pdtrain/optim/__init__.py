"""AdamW, or Muon with AdamW, with FP32 states, parameter groups by policy row, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pdtrain.config.resolved import takes_muon
from pdtrain.config.schema import Optimizer, Run
from pdtrain.optim.muon import MOMENTUM, MuonAdamW
from pdtrain.parallel.gradients import RowParameters

#: AdamW's state tensors, as torch names them.
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(run: Run, rows: dict[str, RowParameters]) -> torch.optim.Optimizer:
    """The optimizer of the run over the rows; groups carry `row` and `lr_scale`. Weights are FP32, so states are too.

    A row is split further by mesh: a fused step takes tensors of one mesh at a time.
    """
    return optimizer_over(run, {row.row: row.parameters for row in rows.values()})


def optimizer_over(run: Run, rows: Mapping[str, Sequence[torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """`build_optimizer` for the parameters, or shards of them, of each row. Groups say which `moments` they keep."""
    settings = run.optimizer
    groups: list[dict[str, Any]] = []
    for row, held in rows.items():
        policy = getattr(run.modules, row)
        by_kind: dict[tuple[bool, object], list[torch.nn.Parameter]] = {}
        for parameter in held:
            muon = takes_muon(run, row, parameter.ndim)
            by_kind.setdefault((muon, getattr(parameter, "device_mesh", None)), []).append(parameter)
        for (muon, _), parameters in by_kind.items():
            groups.append(
                {
                    "params": parameters,
                    "row": row,
                    "lr_scale": policy.lr_scale,
                    "weight_decay": settings.weight_decay * policy.weight_decay_scale,
                    "moments": (MOMENTUM,) if muon else ADAMW_MOMENTS,
                }
                | ({"muon": muon, "momentum": settings.momentum} if settings.name == "muon" else {})
            )
    if settings.name == "muon":
        return MuonAdamW(groups, settings.lr, partial(_adamw, settings))
    return _adamw(settings, groups)


def _adamw(settings: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
    )


def moments_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, tuple[str, ...]]:
    """Parameter -> the names of its state tensors of its own shape."""
    return {p: group["moments"] for group in optimizer.param_groups for p in group["params"]}


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `steps`, before per-module scaling.

    Linear warm-up to the peak, then cosine or linear decay to min_lr_ratio x peak at the last step, or constant.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - settings.warmup_steps) / max(1, steps - 1 - settings.warmup_steps))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's rate to `lr` times its row's scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
