"""Time per group of modules, forward and backward, through hooks that read nothing from the device.

How time is shared out. There is one clock and, at any moment, at most one group that it counts for.
 1. Forward: a module's pre-hook turns the clock to its group, its hook turns it back to what counted before. So a
    watched module inside another counts for itself only.
 2. Backward: the clock turns to a group when the gradient of one of its outputs is about to be used, and stops
    counting for it when the gradient of one of its inputs is complete (or another group begins, or the pass ends).
    Gradient hooks sit on tensors, not on modules: `register_full_backward_hook` would insert copies into the graph.
 3. Forward code that runs inside the backward pass is recomputation and counts as backward.

On a CPU turning the clock reads `perf_counter`; on a GPU it records a CUDA event on the current stream, and `take`
computes the times, once per logging interval. Communication on other streams counts only where it is waited for.
Modules in evaluation mode are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[[Tensor], None]

_NOBODY = -1
_FORWARD, _BACKWARD = 0, 1
#: What the hooks of one call of a watched module cost in a measured step, forward and backward (2 cores, torch 2.13).
CALL_SECONDS = 80e-6
#: A GPU run that never calls `take` must not collect events for ever.
MAX_EVENTS = 100_000


class ModuleTimer:
    """Watches groups of modules of one model. `every`: measure each step whose number this divides."""

    def __init__(
        self, model: nn.Module, modules: Mapping[str, Sequence[nn.Module]], *, every: int = 1, steps_done: int = 0
    ) -> None:
        self.names = tuple(modules)
        self.every = max(1, every)
        """Steps from one that is measured to the next; `end_step` goes by it."""
        self._clock: _Clock = _CudaClock() if _on_cuda(model) else _CpuClock()
        self._clock.reset(2 * len(self.names))
        self._before: list[int] = []  # what counted before each forward that is under way
        self._in_backward = False
        self._measured, self._touched = 0, False
        self._calls = self._calls_of_a_step = 0
        self._active = (steps_done + 1) % self.every == 0
        self._handles = []
        for index, group in enumerate(modules.values()):
            forward, backward = 2 * index + _FORWARD, 2 * index + _BACKWARD
            begins, ends = partial(self._begin_backward, backward), partial(self._end_backward, backward)
            for module in group:
                self._handles.append(module.register_forward_pre_hook(
                    partial(self._begin, forward, backward, ends), with_kwargs=True))
                self._handles.append(module.register_forward_hook(partial(self._end, begins)))

    def take(self) -> dict[str, float]:
        """Seconds per measured step in each group since the last call; `<group>/forward` and `/backward` beside it.

        Waits for the device. Empty when no step was measured.
        """
        steps = self._measured + self._touched
        self._count_calls()
        self._measured, self._touched = 0, False
        sums = self._clock.take()
        if not steps:
            return {}
        found: dict[str, float] = {}
        for index, name in enumerate(self.names):
            forward, backward = sums[2 * index] / steps, sums[2 * index + 1] / steps
            found |= {name: forward + backward, f"{name}/forward": forward, f"{name}/backward": backward}
        return found

    def end_step(self, step: int) -> None:
        """Step `step` is over; decides whether the next one is measured."""
        if self._touched:
            self._clock.turn(_NOBODY)
            self._count_calls()
            self._measured += 1
            self._touched = False
        self._before.clear()
        self._in_backward = False
        self._active = (step + 1) % self.every == 0

    def _count_calls(self) -> None:
        """A measured step is over, or as good as over."""
        if self._touched:
            self._calls_of_a_step, self._calls = self._calls, 0

    @property
    def cost_seconds(self) -> float:
        """About what measuring a step adds to it on this rank; 0 before one was measured."""
        return self._calls_of_a_step * CALL_SECONDS

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._active = False

    # The hooks. They run some hundred times per step: no work when the step is not measured.

    def _begin(self, forward: int, backward: int, ends: Hook, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._active or not module.training:
            return
        self._touched = True
        self._calls += 1
        self._before.append(self._clock.counting)
        self._clock.turn(backward if self._in_backward else forward)
        if torch.is_grad_enabled():
            for tensor in _with_history(args):
                tensor.register_hook(ends)
            if kwargs:
                for tensor in _with_history(kwargs):
                    tensor.register_hook(ends)

    def _end(self, begins: Hook, module: nn.Module, args: Any, output: Any) -> None:
        if not self._before or not self._active or not module.training:
            return
        self._clock.turn(self._before.pop())
        if torch.is_grad_enabled():
            for tensor in _with_history(output):
                if not any(tensor is given for given in args):  # what is passed through has no backward here
                    tensor.register_hook(begins)

    def _begin_backward(self, group: int, grad: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_ends)  # type: ignore[attr-defined]
        if self._active and self._clock.counting != group:
            self._clock.turn(group)

    def _end_backward(self, group: int, grad: Tensor) -> None:
        if self._clock.counting == group:
            self._clock.turn(_NOBODY)

    def _pass_ends(self) -> None:
        self._in_backward = False
        if self._active:
            self._clock.turn(_NOBODY)


class _Clock:
    """Adds the time between two turns to the entry that counted in between."""

    counting = _NOBODY

    def reset(self, entries: int) -> None:
        self.sums = [0.0] * entries

    def turn(self, entry: int) -> None:
        """From now on count for `entry`."""
        raise NotImplementedError

    def take(self) -> list[float]:
        """The sums in seconds; they start again from zero."""
        raise NotImplementedError


class _CpuClock(_Clock):
    _since = 0.0

    def turn(self, entry: int) -> None:
        now = time.perf_counter()
        if self.counting != _NOBODY:
            self.sums[self.counting] += now - self._since
        self.counting, self._since = entry, now

    def take(self) -> list[float]:
        self.turn(self.counting)
        sums, self.sums = self.sums, [0.0] * len(self.sums)
        return sums


class _CudaClock(_Clock):
    def __init__(self) -> None:
        self._turns: list[tuple[int, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []

    def turn(self, entry: int) -> None:
        if len(self._turns) >= MAX_EVENTS:
            return
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._turns.append((entry, event))
        self.counting = entry

    def take(self) -> list[float]:
        self.turn(self.counting)
        sums, turns = [0.0] * len(self.sums), self._turns
        if turns:
            turns[-1][1].synchronize()
        for (entry, start), (_, stop) in zip(turns, turns[1:]):
            if entry != _NOBODY:
                sums[entry] += start.elapsed_time(stop) / 1e3  # milliseconds
        self._turns = turns[-1:]
        self._spare += [event for _, event in turns[:-1]]
        return sums


def _on_cuda(model: nn.Module) -> bool:
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.is_cuda


def _with_history(value: Any) -> list[Tensor]:
    """The tensors in an input or output that a backward pass will visit; looks into containers and dataclasses."""
    if isinstance(value, Tensor):  # hooks on a leaf would stay there from step to step
        return [value] if value.requires_grad and not value.is_leaf else []
    if isinstance(value, (tuple, list)):
        items: Any = value
    elif isinstance(value, dict):
        items = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        items = [getattr(value, name) for name in value.__dataclass_fields__]
    else:
        return []
    return [tensor for item in items for tensor in _with_history(item)]
