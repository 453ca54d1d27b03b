"""Expert parallelism: each rank of `ep` holds e / ep experts and rows travel to them.

What is split: the expert axis of the stacked weights. Collectives per MoE layer: one small all-to-all of counts, one
all-to-all of rows to the experts (dispatch) and one back (combine); the mirror images of the last two backward.
Bytes sent per rank and pass when balanced: t * k * h * itemsize * (1 - 1 / ep). Must divide: the number of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from pdtrain.model.moe import Dispatcher, Experts, Route
from pdtrain.model.transformer import Transformer


@dataclass(slots=True)
class ExchangeRoute(Route):
    """Row counts of one micro-batch's exchange.

    `send`, `receive`: rows to and from each rank of the group; `by_expert` [received rows]: permutation from arrival
    order (source rank, expert) to expert order.
    """

    send: list[int]
    receive: list[int]
    by_expert: Tensor


class AllToAllDispatcher(Dispatcher):
    """Moves rows over the mesh `ep` with variable splits: nothing is padded, nothing dropped."""

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        self.group = ep.get_group()
        self.size = ep.size()
        self.dispatch = ToExperts(self.group, ep.get_local_rank())
        self.combine = FromExperts(self.group, ep.get_local_rank())

    @torch.no_grad()
    def prepare(self, counts: Tensor) -> ExchangeRoute:
        """Tell every rank how many rows of which of its experts come from here."""
        per_rank = counts.view(self.size, -1)
        arriving = torch.empty_like(per_rank)
        dist.all_to_all_single(arriving, per_rank.contiguous(), group=self.group)
        send, receive = torch.stack((per_rank.sum(1), arriving.sum(1))).tolist()  # the one wait for the device
        experts = torch.arange(per_rank.shape[1], device=counts.device).repeat(self.size)
        by_expert = torch.argsort(experts.repeat_interleave(arriving.flatten()), stable=True)
        return ExchangeRoute(arriving.sum(0), send, receive, by_expert)


class Exchange(nn.Module):
    """Base of the two passes; counts the bytes that leave this rank in training, backward included."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        super().__init__()
        self.group = group
        self.rank = rank
        self.bytes_sent = 0

    def count(self, rows: Tensor, outgoing: list[int], returning: list[int]) -> None:
        """Add one training pass: forward, and backward, whose rows travel the other way."""
        if self.training:
            rows_sent = sum(outgoing) - outgoing[self.rank] + sum(returning) - returning[self.rank]
            self.bytes_sent += rows_sent * rows.shape[1] * rows.element_size()


class ToExperts(Exchange):
    """Rows sorted by expert [r, h] -> rows of the experts held here, sorted by expert."""

    def forward(self, rows: Tensor, route: ExchangeRoute) -> Tensor:
        self.count(rows, route.send, route.receive)
        arrived = all_to_all_single_autograd(rows, route.receive, route.send, self.group)
        return arrived.index_select(0, route.by_expert)


class FromExperts(Exchange):
    """Expert outputs -> the same rows, back home and in the order in which they left."""

    def forward(self, rows: Tensor, route: ExchangeRoute) -> Tensor:
        self.count(rows, route.receive, route.send)
        arrival_order = torch.empty_like(rows).index_copy(0, route.by_expert, rows)
        return all_to_all_single_autograd(arrival_order, route.send, route.receive, self.group) + 0


def apply_expert_parallel(model: Transformer, ep: DeviceMesh) -> None:
    """Leave each rank of `ep` its share of every layer's experts, and let rows travel, in place."""
    for layer in model.moe_layers().values():
        _shard_experts(layer.experts, ep)
        layer.dispatcher = AllToAllDispatcher(ep)


def _shard_experts(experts: Experts, ep: DeviceMesh) -> None:
    for name, weight in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(weight, ep, [Shard(0)], src_data_rank=None)))
