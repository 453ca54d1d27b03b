"""AdamW with FP32 states, one parameter group per policy row, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from pdtrain.config.schema import Optimizer, Run
from pdtrain.parallel.gradients import RowParameters


def build_optimizer(run: Run, rows: dict[str, RowParameters]) -> torch.optim.AdamW:
    """AdamW over the rows; groups carry `row` and `lr_scale`. Weights are FP32, so states are FP32 as well.

    A row is split further by mesh: a fused step takes tensors of one mesh at a time.
    """
    return optimizer_over(run, {row.row: row.parameters for row in rows.values()})


def optimizer_over(run: Run, rows: Mapping[str, Sequence[torch.nn.Parameter]]) -> torch.optim.AdamW:
    """`build_optimizer` for the parameters, or shards of them, of each row."""
    settings = run.optimizer
    groups = []
    for row, held in rows.items():
        policy = getattr(run.modules, row)
        by_mesh: dict[object, list[torch.nn.Parameter]] = {}
        for parameter in held:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        for parameters in by_mesh.values():
            groups.append(
                {
                    "params": parameters,
                    "row": row,
                    "lr_scale": policy.lr_scale,
                    "weight_decay": settings.weight_decay * policy.weight_decay_scale,
                }
            )
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
    )


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
