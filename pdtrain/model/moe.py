"""The mixture-of-experts layer: router -> dispatch -> experts -> combine. Shapes: see pdtrain.model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdtrain.config.schema import Model, Moe
from pdtrain.model import gemm
from pdtrain.model.layers import SwiGlu, maybe_recompute
from pdtrain.model.router import Router, Routing


@dataclass(slots=True)
class Plan:
    """The local order of routed rows.

    `order` [r] indexes the flat (token, choice) pairs, sorted by expert; `counts` [e] are the kept rows per expert;
    `weights` [t, k]; `dropped` is the number of pairs that the capacity left out.
    """

    order: Tensor
    counts: Tensor
    weights: Tensor
    dropped: Tensor


def make_plan(routing: Routing, moe: Moe) -> Plan:
    """Sort the (token, choice) pairs by expert and drop those beyond the capacity, latest positions first.

    Capacity = max(min_capacity, ceil(t * k / e * capacity_factor)) rows per expert and micro-batch (GShard,
    arXiv 2006.16668); without a capacity factor nothing is dropped.
    """
    flat = routing.experts.flatten()
    order = torch.argsort(flat, stable=True)
    counts = routing.counts
    dropped = torch.zeros((), dtype=torch.int64, device=flat.device)
    if moe.capacity_factor is not None:
        even = flat.numel() / moe.experts
        capacity = max(moe.min_capacity, math.ceil(even * moe.capacity_factor))
        starts = counts.cumsum(0) - counts
        position = torch.arange(flat.numel(), device=flat.device) - starts[flat[order]]
        order = order[position < capacity]
        counts = counts.clamp(max=capacity)
        dropped = flat.numel() - counts.sum()
    return Plan(order, counts, routing.weights, dropped)


def gather_rows(x: Tensor, plan: Plan) -> Tensor:
    """Token rows [t, h] -> routed rows [r, h] in the plan's order."""
    return x.index_select(0, plan.order // plan.weights.shape[1])


def scatter_rows(rows: Tensor, plan: Plan) -> Tensor:
    """Routed rows [r, h] -> weighted sum per token [t, h]; a dropped pair contributes nothing."""
    tokens, top_k = plan.weights.shape
    weights = plan.weights.flatten().index_select(0, plan.order).to(rows.dtype)
    out = rows.new_zeros(tokens, rows.shape[1])
    return out.index_add(0, plan.order // top_k, rows * weights.unsqueeze(1))


class Dispatcher(nn.Module):
    """Brings routed rows to their experts and back; this one finds all experts at home.

    Three stages, each replaceable by itself (overlapped, hierarchical, compressed): `prepare` lets the sizes travel,
    `dispatch` and `combine` are modules that move the rows and so can be timed and hooked like any other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dispatch: nn.Module = Stay()
        self.combine: nn.Module = Stay()

    def prepare(self, counts: Tensor) -> Route:
        """Counts [e] of rows that leave here -> the route of this micro-batch."""
        return Route(counts)


@dataclass(slots=True)
class Route:
    """What one micro-batch's exchange looks like; `counts` are the rows per expert held here [local experts]."""

    counts: Tensor


class Stay(nn.Module):
    """Rows [r, h] that need not travel."""

    def forward(self, rows: Tensor, route: Route) -> Tensor:
        return rows


class Experts(nn.Module):
    """Routed SwiGLU experts, their weights stacked on the first dimension and multiplied by one grouped GEMM."""

    def __init__(self, model: Model, dtype: torch.dtype, recompute: bool) -> None:
        super().__init__()
        e, h, f = model.moe.experts, model.hidden, model.moe.expert_hidden
        self.w1 = nn.Parameter(torch.empty(e, h, f))
        self.w3 = nn.Parameter(torch.empty(e, h, f))
        self.w2 = nn.Parameter(torch.empty(e, f, h))
        self.dtype = dtype
        self.recompute = recompute

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [r, h] sorted by expert, counts [experts held here] -> [r, h] in the compute dtype."""
        return maybe_recompute(self._forward, rows, counts, recompute=self.recompute and self.training)

    def _forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        rows = rows.to(self.dtype)
        offsets = counts.cumsum(0).to(torch.int32)
        w1, w3, w2 = (local(w) for w in (self.w1, self.w3, self.w2))
        gate = F.silu(gemm.grouped(rows, w1, offsets)) * gemm.grouped(rows, w3, offsets)
        return gemm.grouped(gate, w2, offsets)


def local(weight: Tensor) -> Tensor:
    """The part of an expert stack that is held here."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


class MoeLayer(nn.Module):
    """One MoE feed-forward layer: routed experts plus an optional shared expert."""

    def __init__(self, model: Model, dtypes: dict[str, torch.dtype], recompute: dict[str, bool]) -> None:
        super().__init__()
        self.moe = model.moe
        self.router = Router(model, dtypes["router"])
        self.dispatcher = Dispatcher()
        self.experts = Experts(model, dtypes["experts"], recompute["experts"])
        shared = model.moe.shared_experts * model.moe.expert_hidden
        self.shared_expert = (
            SwiGlu(model.hidden, shared, dtypes["shared_expert"], recompute["shared_expert"]) if shared else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        plan = make_plan(routing, self.moe)
        if self.training:
            self.router.statistics.add_dropped(plan.dropped)
        route = self.dispatcher.prepare(plan.counts)
        rows = self.dispatcher.dispatch(gather_rows(tokens.to(self.experts.dtype), plan), route)
        rows = self.dispatcher.combine(self.experts(rows, route.counts), route)
        out = scatter_rows(rows, plan)
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens)
        return out.unflatten(0, x.shape[:2])
