"""One optimizer step: forward and backward over the micro-batches, gradients made right, clipped, applied."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
from pdtrain.parallel.gradients import (
    RowParameters,
    clip_factors,
    clip_gradients,
    gradient_norms,
    scale_gradients,
)
from pdtrain.parallel.meshes import Meshes
from pdtrain.parallel.tensor import vocabulary_parallel_loss
from pdtrain.spikes import Spike, SpikeGuard

if TYPE_CHECKING:
    from pdtrain.pools.compute import ComputeSide


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
        optimizer: torch.optim.Optimizer | None,
        rows: dict[str, RowParameters],
        data: Data,
        meshes: Meshes | None,
        device: torch.device,
        spans: Spans,
        guard: SpikeGuard | None = None,
        pools: ComputeSide | None = None,
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
        self.pools = pools  # then the update pool has the optimizer
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
        loss = self._gradients(consumed)
        with self.spans.span("reduce_norms"):
            scale_gradients(self.rows.values())
            flag = torch.tensor(float(stop_requested), device=self.device)
            norms, stop = gradient_norms(self.rows, self.meshes, flag)
            loss = self._mean_over_dp(loss)
            spike = self.guard.judge(loss, norms) if self.guard is not None else None
            dropped = spike is not None and spike.action != "warn"
        if self.pools is not None:
            return self._commit(self.pools, loss, norms, stop, spike, lr, dropped)
        assert self.optimizer is not None
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

    def _gradients(self, consumed: int) -> Tensor:
        """Loss and gradients of one step; with pools, of as many attempts as it takes to have them all accepted."""
        if self.pools is None:
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            return self._forward_backward(consumed)
        draws = torch.get_rng_state() if self.resolved.run.model.moe.jitter else None
        for attempt in itertools.count():
            self.pools.begin(again=attempt > 0, consumed=consumed)
            if attempt:
                self._forget_counts()
                if draws is not None:
                    torch.set_rng_state(draws)
            self.model.zero_grad()
            loss = self._forward_backward(consumed)
            if self.pools.deliver():
                break
        return loss

    def _commit(
        self, pools: ComputeSide, loss: Tensor, norms: Tensor, stop: Tensor, spike: Spike | None, lr: float,
        dropped: bool,
    ) -> StepResult:
        """The optimizer's part where it runs elsewhere: say how the step is to be applied, or that it is not."""
        factors = clip_factors(self.rows, norms, self.limits)
        dropped = dropped or pools.left_out
        skip = dropped or not bool(torch.isfinite(norms).all())
        values = dict(zip(self.rows, factors.tolist(), strict=True))
        limited = {} if skip else {row: value for row, value in values.items() if self.limits[row] is not None}
        pools.commit(limited, lr, skip)
        self._update_router_bias(apply=not dropped)
        return StepResult(loss, norms, norms * factors, stop, torch.full_like(stop, float(skip)), spike)

    def _forget_counts(self) -> None:
        """The routing of an attempt that is repeated moves no balancing bias."""
        for layer in self.model.moe_layers().values():
            if layer.router.bias is not None:
                layer.router.statistics.step_counts(self.device)

    def _forward_backward(self, consumed: int) -> Tensor:
        accumulation = self.resolved.accumulation
        total = torch.zeros((), device=self.device)
        self.data_seconds = 0.0
        for index in range(accumulation):
            if self.pools is not None:
                self.pools.next_micro_batch(index)
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
            last = last if self.pools is None else self.pools.reduces(last)
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
