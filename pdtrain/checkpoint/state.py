"""What is saved: weights, buffers and optimizer states of a policy row under names that do not depend on the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from pdtrain.model.transformer import Transformer, row_of
from pdtrain.optim import moments_of


def row_state(model: Transformer, optimizer: torch.optim.Optimizer, row: str) -> dict[str, Tensor]:
    """Fully qualified key -> live tensor of one row: `model.<fqn>`, `optimizer.<fqn>.step` and the moments: `exp_avg`
    and `exp_avg_sq` where AdamW updates the parameter, `momentum_buffer` where Muon does.

    The tensors are the run's own, so loading into this dictionary restores the run. Optimizer states that do not
    exist yet are created as zeros.
    """
    state: dict[str, Tensor] = {}
    moments = moments_of(optimizer)
    for name, buffer in model.named_buffers():
        if row_of(name) == row:
            state[f"model.{name}"] = buffer
    for name, parameter in model.named_parameters():
        if row_of(name) != row:
            continue
        state[f"model.{name}"] = parameter.detach()
        held = optimizer.state[parameter]
        if not held:
            held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in moments[parameter]:
                held[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for key in (*moments[parameter], "step"):
            state[f"optimizer.{name}.{key}"] = held[key]
    return state
