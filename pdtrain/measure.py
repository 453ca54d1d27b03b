"""What one step tells the black box about routing and communication, gathered with one collective per interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdtrain.config import Resolved
from pdtrain.model.moe import MoeLayer
from pdtrain.model.router import RouterStatistics
from pdtrain.parallel.expert import Exchange
from pdtrain.parallel.meshes import Meshes


def router_statistics(layers: dict[int, MoeLayer], meshes: Meshes | None, device: torch.device) -> Tensor:
    """Sums over all token ranks since the last call, [layers, e + scalars] FP32 in RouterStatistics' order.

    Collective.
    """
    local = torch.stack([layer.router.statistics.take(device) for layer in layers.values()])
    if meshes is not None:
        dist.all_reduce(local, group=meshes.world.get_group())
    return local


@dataclass(slots=True)
class LayerRouting:
    """One layer's routing in plain numbers: counts [e] per expert, and `measured`: token_entropy (mean, in nat),
    drop_rate, and where they exist aux_loss, z_loss (unscaled) and bias_range."""

    counts: list[int]
    measured: dict[str, Any]


def routing_by_layer(layers: dict[int, MoeLayer], statistics: Tensor) -> dict[int, LayerRouting]:
    """Layer index -> what `router_statistics` gathered. Waits for the device: at logging intervals only."""
    result = {}
    for (index, layer), row in zip(layers.items(), statistics.tolist(), strict=True):
        experts = layer.moe.experts
        sums = dict(zip(RouterStatistics.SCALARS, row[experts:], strict=True))
        tokens = max(sums["tokens"], 1.0)
        measured = {
            "token_entropy": sums["token_entropy"] / tokens,
            "drop_rate": sums["dropped"] / max(sums["assignments"], 1.0),
        }
        if layer.moe.aux_loss:
            measured["aux_loss"] = sums["aux_loss"] / tokens
        if layer.moe.z_loss:
            measured["z_loss"] = sums["z_loss"] / tokens
        if (bias := layer.router.bias) is not None:
            measured["bias_range"] = (bias.max() - bias.min()).item()
        result[index] = LayerRouting([round(count) for count in row[:experts]], measured)
    return result


def all_to_all_bytes(layers: dict[int, MoeLayer]) -> int:
    """Bytes this rank sent in dispatch and combine, backward included, since the last call."""
    total = 0
    for layer in layers.values():
        for exchange in (layer.dispatcher.dispatch, layer.dispatcher.combine):
            if isinstance(exchange, Exchange):
                total += exchange.bytes_sent
                exchange.bytes_sent = 0
    return total


def expected_all_to_all_bytes(resolved: Resolved) -> int:
    """Bytes one rank sends per optimizer step when routing is balanced and nothing is dropped.

    t * k * h * itemsize * (1 - 1/ep) per pass; four passes (dispatch, combine, forward and backward) per MoE layer
    and micro-batch; t = micro_batch * sequence_length / tp.
    """
    run = resolved.run
    tokens = run.train.micro_batch * run.train.sequence_length / resolved.tp
    itemsize = 2 if resolved.dtype("experts") == "bf16" else 4
    one_pass = tokens * run.model.moe.top_k * run.model.hidden * itemsize * (1 - 1 / resolved.ep)
    return round(one_pass * 4 * resolved.moe_layers * resolved.accumulation)
