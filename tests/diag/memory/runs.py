"""Programs that run on the allocator of `allocator.py`: training steps, a leak, holes, one long batch."""

from __future__ import annotations

import random

from tests.diag.memory.allocator import MIB, Allocator, OutOfMemory, frames

LIB = "/env/lib/python3.11/site-packages/torch"
LOOP = ("train.py:20 main",)
MODULE = f"{LIB}/nn/modules/module.py:1751 _call_impl"
FORWARD = [frames("model/attention.py:57 forward", MODULE, "model/block.py:12 forward", MODULE, *LOOP),
           frames(f"{LIB}/nn/modules/linear.py:125 forward", MODULE, "model/moe.py:88 forward", MODULE, *LOOP)]
BACKWARD = [{"filename": "", "line": 0, "name": "torch::autograd::generated::MmBackward0::apply(std::vector)"},
            {"filename": "", "line": 0, "name": "torch::autograd::Engine::thread_main(std::shared_ptr)"}]
OPTIMIZER = frames(f"{LIB}/optim/adamw.py:101 _init_group", f"{LIB}/optim/optimizer.py:485 wrapper", "train.py:31 main")
PARAMETERS = frames(f"{LIB}/nn/modules/module.py:1328 convert", f"{LIB}/nn/modules/module.py:900 _apply",
                    "train.py:9 build")
LEAK = frames("metrics.py:44 remember", "train.py:33 main")


def model(device: Allocator, layers: int = 4, size: int = 24 * MIB) -> list[int]:
    """Parameters that live for ever."""
    return [device.alloc(size, PARAMETERS) for _ in range(layers)]


def step(device: Allocator, rng: random.Random, *, layers: int = 4, size: int = 12 * MIB, first: bool = False,
         leak: int = 0, factor: float = 1.0, annotated: bool = False) -> None:
    """One training step: activations per layer, freed in reverse; gradients and states stay from the first step on."""
    if annotated:
        device.annotate("START", "ProfilerStep#1")
    kept = []
    for _ in range(layers):
        for stack in FORWARD:
            kept.append(device.alloc(int(factor * size) + rng.randrange(0, 4096), stack))
        device.free(device.alloc(int(factor * 3 * MIB), FORWARD[0]))
        kept.append(device.alloc(rng.randrange(100, 200_000), FORWARD[1]))
    for address in reversed(kept):
        scratch = device.alloc(2 * MIB + rng.randrange(0, 9999), BACKWARD)
        device.free(address)
        device.free(scratch)
    if first:
        for _ in range(layers):
            device.alloc(size, BACKWARD)
            device.alloc(2 * size, OPTIMIZER)
    device.free(device.alloc(5 * MIB, OPTIMIZER))
    if leak:
        device.alloc(leak, LEAK)
    if annotated:
        device.annotate("END", "ProfilerStep#1")


def training(steps: int = 12, *, leak: int = 0, seed: int = 0, annotated: bool = False, late: int = 0,
             capacity: int = 80 << 30, layers: int = 4) -> Allocator:
    """A run of `steps`; with `late` the recording begins before that step."""
    rng = random.Random(seed)
    device = Allocator(capacity)
    model(device)
    for number in range(steps):
        if number == late and late:
            device.start_recording()
        step(device, rng, first=number == 0, leak=leak, annotated=annotated, layers=layers)
    return device


def fragmented(*, expandable: bool = False) -> Allocator:
    """Short-lived tensors between long-lived ones, in segments that both share; then the short-lived ones go."""
    device = Allocator(1 << 30, expandable=expandable)
    model(device, layers=2)
    drop = []
    for _ in range(45):
        drop.append(device.alloc(9 * MIB + 100, FORWARD[1]))
        device.alloc(4 * MIB, FORWARD[0])
        drop.append(device.alloc(6 * MIB - 7, FORWARD[1]))
    for address in drop:
        device.free(address)
    return device


def run_out(device: Allocator, size: int) -> Allocator:
    """Ask for `size` bytes, which fails."""
    try:
        device.alloc(size, FORWARD[1])
    except OutOfMemory:
        return device
    raise AssertionError("the request was served")
