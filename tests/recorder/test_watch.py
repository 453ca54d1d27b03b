"""Time per module, on a clock that only the modules themselves move: every second must be in its place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pdtrain.recorder import watch
from pdtrain.recorder.watch import ModuleTimer
from tests.distributed import run_distributed


class FakeTime:
    """Stands for the `time` module."""

    now = 0.0

    def perf_counter(self):
        return self.now


CLOCK = FakeTime()


@pytest.fixture(autouse=True)
def fake_time(monkeypatch):
    monkeypatch.setattr(watch, "time", CLOCK)


class Spend(torch.autograd.Function):
    """Multiplies by a weight; costs `forward` and `backward` seconds."""

    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        ctx.save_for_backward(x, weight)
        ctx.backward_seconds = backward
        CLOCK.now += forward
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        CLOCK.now += ctx.backward_seconds
        return grad * weight, (grad * x).sum().expand_as(weight), None, None


class Work(nn.Module):
    def __init__(self, forward, backward, inner=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = (forward, backward)
        self.inner = inner

    def forward(self, x):
        if self.inner is not None:
            x = self.inner(x)
        return Spend.apply(x, self.weight, *self.seconds)


class Net(nn.Module):
    """attention → residual → (router, experts, shared) from one input; 1,000 s elsewhere belong to nobody."""

    def __init__(self, recompute=None):
        super().__init__()
        self.attention = Work(1, 2)
        self.router = Work(3, 5)
        self.dispatch = nn.Identity()
        self.experts = Work(7, 11)
        self.combine = nn.Identity()
        self.shared = Work(13, 17)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute is None:
            h = x + self.attention(x)
        else:
            h = x + checkpoint(self.attention, x, use_reentrant=self.recompute == "reentrant")
        CLOCK.now += 1000
        weights = self.router(h)
        rows = self.combine(self.experts(self.dispatch(h * 2)))
        return rows * weights + self.shared(h)

    def groups(self):
        return {name: [getattr(self, name)]
                for name in ("attention", "router", "dispatch", "experts", "combine", "shared")}


def step(model, times=1):
    for _ in range(times):
        model(torch.ones(2, 4, requires_grad=True) * 1).sum().backward()


def split(seconds):
    return {name: (seconds[f"{name}/forward"], seconds[f"{name}/backward"])
            for name in seconds if "/" not in name and seconds[name]}


EXPECTED = {"attention": (1, 2), "router": (3, 5), "experts": (7, 11), "shared": (13, 17)}


def test_each_second_is_counted_for_the_module_that_spent_it():
    model = Net()
    timer = ModuleTimer(model, model.groups())
    step(model)
    seconds = timer.take()
    assert split(seconds) == EXPECTED
    assert seconds["experts"] == 18 and seconds["dispatch"] == seconds["combine"] == 0


class FakeEvent:
    """Stands for torch.cuda.Event: reached by the device when it is recorded."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        FakeEvent.made += 1

    def record(self):
        self.at = CLOCK.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


def test_events_of_a_gpu_are_added_up_and_used_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(watch, "_on_cuda", lambda model: True)
    model = Net()
    timer = ModuleTimer(model, model.groups())
    for number in range(1, 7):
        step(model)
        if number % 2 == 0:
            assert split(timer.take()) == EXPECTED
        timer.end_step(number)
        if number == 2:
            after_one_interval = FakeEvent.made
    assert FakeEvent.made <= after_one_interval + 2, "events of a finished interval are recorded again"


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputation_counts_as_backward(recompute):
    model = Net(recompute)
    timer = ModuleTimer(model, model.groups())
    step(model)
    assert split(timer.take()) == EXPECTED | {"attention": (1, 1 + 2)}


def test_a_module_inside_another_counts_for_itself_only():
    inner = Work(1, 2)
    outer = Work(10, 20, inner)
    timer = ModuleTimer(outer, {"outer": [outer], "inner": [inner]})
    step(outer)
    assert split(timer.take()) == {"outer": (10, 20), "inner": (1, 2)}


def test_seconds_are_per_step_whatever_the_accumulation_and_the_interval():
    model = Net()
    timer = ModuleTimer(model, model.groups())
    for number in (1, 2, 3):
        step(model, times=2)
        timer.end_step(number)
    step(model, times=2)  # the fourth, still under way when it is read
    assert split(timer.take()) == {name: (2 * f, 2 * b) for name, (f, b) in EXPECTED.items()}
    assert timer.take() == {}
    timer.end_step(4)
    assert timer.take() == {}


def test_only_every_nth_step_is_measured():
    model = Net()
    timer = ModuleTimer(model, model.groups(), every=3, steps_done=4)
    for number in (5, 6, 7):
        model.attention.seconds = (number, 0)
        step(model)
        timer.end_step(number)
    assert timer.take()["attention"] == 6


def test_evaluation_is_not_measured():
    model = Net()
    timer = ModuleTimer(model, model.groups())
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert timer.take() == {}


def test_an_error_in_a_module_does_not_shift_later_steps():
    model = Net()
    timer = ModuleTimer(model, model.groups())
    model.experts.seconds = (None, None)
    with pytest.raises(TypeError):
        step(model)
    timer.end_step(1)
    timer.take()
    model.experts.seconds = (7, 11)
    step(model)
    assert split(timer.take()) == EXPECTED


@dataclass(slots=True)
class Answer:
    scores: torch.Tensor
    counts: torch.Tensor


class InDataclass(Work):
    def forward(self, x):
        return Answer(super().forward(x), torch.zeros(3, dtype=torch.int64))


def test_outputs_inside_dataclasses_are_followed():
    router, head = InDataclass(1, 2), Work(4, 8)
    model = nn.ModuleList([router, head])
    timer = ModuleTimer(model, {"router": [router], "head": [head]})
    head(router(torch.ones(2, 4, requires_grad=True) * 1).scores).sum().backward()
    assert split(timer.take()) == {"router": (1, 2), "head": (4, 8)}


def test_gradients_are_untouched_and_hooks_come_off():
    torch.manual_seed(0)
    plain, watched = Net("non-reentrant"), Net("non-reentrant")
    watched.load_state_dict(plain.state_dict())
    timer = ModuleTimer(watched, watched.groups())
    step(plain)
    step(watched)
    for (name, a), (_, b) in zip(plain.named_parameters(), watched.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    timer.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    step(watched)
    timer.end_step(1)


def sharded(rank, recompute):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    watch.time = CLOCK
    model = Net(recompute)
    timer = ModuleTimer(model, model.groups())
    mesh = init_device_mesh("cpu", (2,))
    for name in ("attention", "experts"):
        fully_shard(getattr(model, name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    late = Net(recompute)  # watched after it was sharded
    for name in ("attention", "experts"):
        fully_shard(getattr(late, name), mesh=mesh)
    fully_shard(late, mesh=mesh)
    late_timer = ModuleTimer(late, late.groups())
    found = []
    for net, watcher in ((model, timer), (late, late_timer)):
        for number in (1, 2):
            step(net)
            watcher.end_step(number)
        found.append(split(watcher.take()))
    return found


def test_sharded_and_recomputed(tmp_path):
    for found in run_distributed(sharded, 2, tmp_path, "non-reentrant"):
        assert found == [EXPECTED | {"attention": (1, 3)}] * 2


def test_what_a_measured_step_costs_is_counted_per_step_whenever_the_times_are_taken():
    model = nn.Sequential(Work(1, 1), Work(1, 1))
    timer = ModuleTimer(model, {"work": list(model)})
    for step in range(1, 4):
        model(torch.ones(4, requires_grad=True)).sum().backward()
        timer.take()  # as the trainer does, before the step is ended
        timer.end_step(step)
        assert timer.cost_seconds == pytest.approx(2 * watch.CALL_SECONDS)
    timer.every = 2
    timer.end_step(4)
    model(torch.ones(4, requires_grad=True)).sum().backward()
    assert timer.take() == {}
