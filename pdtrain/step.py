"""One optimizer step: forward and backward over the micro-batches, gradients made right, clipped, applied."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pdtrain.config import Resolved
from pdtrain.data import Data
from pdtrain.data.repeats import RepeatMeter
from pdtrain.evaluate import plain
from pdtrain.model.loss import cross_entropy
from pdtrain.model.transformer import Transformer
from pdtrain.optim import set_learning_rate
from pdtrain.parallel.gradients import RowParameters, clip_gradients, gradient_norms, scale_gradients
from pdtrain.parallel.meshes import Meshes
from pdtrain.parallel.tensor import vocabulary_parallel_loss
from pdtrain.spikes import Spike, SpikeGuard


class Spans(Protocol):
    """Whoever wants to know how long each phase takes."""

    def span(self, name: str) -> AbstractContextManager[object]: ...


@dataclass(slots=True)
class StepResult:
    """loss: global mean in nat/token; norms, clipped: L2 per row in table order; stop: ranks that ask to stop;
    skipped: 1.0 when the update was left out, for a non-finite gradient or a spike; spike: what a guard decided.

    Tensors stay on the device: reading one waits for it.
    """

    loss: Tensor
    norms: Tensor
    clipped: Tensor
    stop: Tensor
    skipped: Tensor
    spike: Spike | None = None


class TrainStep:
    """Everything that one step needs, bound together once."""

    def __init__(
        self,
        resolved: Resolved,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        rows: dict[str, RowParameters],
        data: Data,
        meshes: Meshes | None,
        device: torch.device,
        spans: Spans,
        guard: SpikeGuard | None = None,
    ) -> None:
        self.resolved = resolved
        self.model = model
        self.optimizer = optimizer
        self.rows = rows
        self.data = data
        self.meshes = meshes
        self.device = device
        self.spans = spans
        self.guard = guard
        self.limits = {row: resolved.clip(row) for row in rows}
        #: Host seconds that the last step waited for data.
        self.data_seconds = 0.0
        #: How much of its data this rank has read before.
        self.repeats = RepeatMeter()
        self.dp_rank = 0 if meshes is None else meshes.dp.get_local_rank()
        # Each DP rank's loss is a mean over its tokens; the routers of a tensor group see 1/tp of them each.
        for layer in model.moe_layers().values():
            layer.router.loss_weight = 1 / (resolved.accumulation * resolved.tp)

    def __call__(self, consumed: int, lr: float, stop_requested: bool) -> StepResult:
        """One optimizer step on sequences `consumed` … `consumed + train_batch - 1`; collective."""
        self.optimizer.zero_grad()
        loss = self._forward_backward(consumed)
        with self.spans.span("reduce_norms"):
            scale_gradients(self.rows.values())
            flag = torch.tensor(float(stop_requested), device=self.device)
            norms, stop = gradient_norms(self.rows, self.meshes, flag)
            loss = self._mean_over_dp(loss)
            spike = self.guard.judge(loss, norms) if self.guard is not None else None
            dropped = spike is not None and spike.action != "warn"
        with self.spans.span("optimizer"):
            clipped = clip_gradients(self.rows, norms, self.limits)
            # The fused step leaves weights and states alone where this is 1, without asking the host. Norms are
            # global, so all ranks decide alike.
            skipped = torch.ones_like(stop) if dropped else 1.0 - torch.isfinite(norms).all().float()
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            self._update_router_bias(apply=not dropped)
        return StepResult(loss, norms, clipped, stop, skipped, spike)

    def _forward_backward(self, consumed: int) -> Tensor:
        accumulation = self.resolved.accumulation
        total = torch.zeros((), device=self.device)
        self.data_seconds = 0.0
        for index in range(accumulation):
            began = time.perf_counter()
            with self.spans.span("data"):
                tokens = self._micro_batch(consumed, index)
            self.data_seconds += time.perf_counter() - began
            self._synchronise_gradients(index == accumulation - 1)
            with vocabulary_parallel_loss(self.meshes):
                with self.spans.span("forward"):
                    loss = cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:]) / accumulation
                with self.spans.span("backward"):
                    loss.backward()
            total += plain(loss.detach())
        return total

    def _micro_batch(self, consumed: int, index: int) -> Tensor:
        """Sequences [micro_batch, s + 1] of this DP rank; the global batch does not depend on the layout."""
        micro = self.resolved.micro_batch
        start = consumed + (index * self.resolved.dp + self.dp_rank) * micro
        sequences = self.data.sequences(start, micro)
        self.repeats.add(sequences)
        return torch.from_numpy(sequences).to(self.device, non_blocking=True)

    def _synchronise_gradients(self, last: bool) -> None:
        """Gradients of earlier micro-batches add up locally; only the last one is reduced."""
        if self.meshes is not None and self.resolved.accumulation > 1:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]

    def _update_router_bias(self, *, apply: bool) -> None:
        """Bias-update balancing from the whole step's counts over all token ranks; one collective for all layers.

        Not `apply`: the counts are taken, so that the next step has its own only, and dropped.
        """
        layers = [layer for layer in self.model.moe_layers().values() if layer.router.bias is not None]
        if not layers:
            return
        counts = torch.stack([layer.router.statistics.step_counts(self.device) for layer in layers])
        if not apply:
            return
        if self.meshes is not None:
            dist.all_reduce(counts, group=self.meshes.world.get_group())
        for layer, row in zip(layers, counts, strict=True):
            layer.router.update_bias(row)

    def _mean_over_dp(self, loss: Tensor) -> Tensor:
        if self.meshes is None:
            return loss
        dist.all_reduce(loss, group=self.meshes.dp.get_group())
        return loss / self.resolved.dp
