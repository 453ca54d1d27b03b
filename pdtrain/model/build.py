"""From a run configuration to a model."""

from __future__ import annotations

import torch

from pdtrain.config.schema import MODULES, Run
from pdtrain.model.initialise import initial_value
from pdtrain.model.transformer import Transformer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtypes(run: Run) -> dict[str, torch.dtype]:
    """Compute dtype of each policy row: its own, else precision.all; router and norms default to FP32."""
    table = {}
    for row in MODULES:
        default = "fp32" if row in ("router", "norm") else run.precision.all
        table[row] = DTYPES[getattr(run.modules, row).dtype or default]
    return table


def build_on_meta(run: Run) -> Transformer:
    """The model's structure without storage."""
    recompute = {row: getattr(run.modules, row).recompute == "full" for row in MODULES}
    with torch.device("meta"):
        return Transformer(run.model, compute_dtypes(run), recompute)


def build_model(run: Run, device: torch.device | str = "cpu") -> Transformer:
    """The whole model on one device, initialised from `train.seed`; FP32 weights."""
    model = build_on_meta(run).to_empty(device=device)
    model.tie()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                initial_value(
                    name, parameter.shape, seed=run.train.seed, std=run.model.init_std, layers=run.model.layers
                )
            )
        for buffer in model.buffers():
            buffer.zero_()
    return model
