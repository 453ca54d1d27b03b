"""The peak of one real training step on this machine's CPU, by torch's MemTracker: what the plan is compared with.

One process stands for one rank: the model, its shards, optimizer and step are the trainer's own; the fake process group
moves nothing, so weights beyond the own shard are whatever memory held and only sizes mean anything. Routed rows arrive
as many as leave (overload factor 1).
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from pdtrain.config.resolved import resolve
from pdtrain.config.schema import Run
from pdtrain.model.loss import cross_entropy
from pdtrain.optim import build_optimizer
from pdtrain.parallel.expert import AllToAllDispatcher, ExchangeRoute
from pdtrain.parallel.gradients import rows_of
from pdtrain.parallel.layout import Layout
from pdtrain.parallel.meshes import create_meshes
from pdtrain.parallel.parallelize import build_parallel_model
from pdtrain.parallel.tensor import vocabulary_parallel_loss


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of states between steps (`parameters`, `gradients` after backward, `optimizer`), and at the peak of a step
    what MemTracker counts beside them; `total` is its sum of everything."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    buffers: int
    other: int
    total: int


def measure(run: Run, rank: int = 0) -> Measured:
    """One warm-up step (it makes the optimizer's state), then one measured step of `rank`."""
    resolved = resolve(run)
    layout = Layout.from_run(run)
    world = layout.ranks
    if world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        meshes = create_meshes(layout, "cpu") if world > 1 else None
        model = build_parallel_model(run, meshes, torch.device("cpu"))
        rows = rows_of(model, meshes)
        optimizer = build_optimizer(run, rows)
        for layer in model.moe_layers().values():
            if isinstance(layer.dispatcher, AllToAllDispatcher):
                layer.dispatcher.__class__ = Balanced
        gradients = 0
        tracking: MemTracker | None = None

        def step() -> None:
            nonlocal gradients
            optimizer.zero_grad()
            for index in range(resolved.accumulation):
                if tracking is not None and index:
                    tracking.reset_mod_stats()
                tokens = torch.randint(
                    0, run.model.vocab_size, (run.train.micro_batch, run.train.sequence_length + 1)
                )
                if meshes is not None and resolved.accumulation > 1:
                    model.set_requires_gradient_sync(index == resolved.accumulation - 1)  # type: ignore[operator]
                with vocabulary_parallel_loss(meshes):
                    loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) / resolved.accumulation
                    loss.backward()
            gradients = sum(_bytes(p.grad) for row in rows.values() for p in row.parameters if p.grad is not None)
            optimizer.step()

        step()
        optimizer.zero_grad()
        tracker = tracking = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step()
        kinds = _kinds(tracker)
        held = sum(_bytes(p) for row in rows.values() for p in row.parameters)
    finally:
        if world > 1:
            dist.destroy_process_group()
        gc.collect()
    return Measured(
        parameters=held, optimizer=kinds["OPT"], gradients=gradients, activations=kinds["ACT"],
        buffers=kinds["BUFFER"], total=kinds["Total"],
        # what is gathered or copied at the peak is counted as parameters there, padding of uneven shards included
        other=kinds["TEMP"] + kinds["OTH"] + kinds.get("GRAD", 0) + kinds["PARAM"] - held,
    )  # fmt: skip


class Balanced(AllToAllDispatcher):
    """As many rows of each expert arrive from every rank as leave for it."""

    @torch.no_grad()
    def prepare(self, counts: Tensor) -> ExchangeRoute:
        per_rank = counts.view(self.size, -1)
        send = per_rank.sum(1).tolist()
        experts = torch.arange(per_rank.shape[1], device=counts.device).repeat(self.size)
        by_expert = torch.argsort(experts.repeat_interleave(per_rank.flatten()), stable=True)
        return ExchangeRoute(per_rank.sum(0), send, send, by_expert)


def _bytes(tensor: Tensor) -> int:
    held: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(held.numel() * held.element_size())


def _kinds(tracker: MemTracker) -> dict[str, int]:
    found: dict[str, int] = {}
    for kinds in tracker.get_tracker_snapshot("peak").values():
        for kind, size in kinds.items():
            name = str(kind).rsplit(".", 1)[-1]
            found[name] = found.get(name, 0) + size
    return found
