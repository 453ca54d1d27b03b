"""What a rank holds at its peak: states, activations in flight, buffers.

Without pipeline stages, states kept as pdtrain keeps them, the step is walked through unit by unit (walk.py). Else all
states are there from start to end, and the micro-batches in flight of each stage are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtrain.plan import activations, states, walk
from pdtrain.plan.hardware import Device
from pdtrain.plan.setup import Setup, Stage, in_flight, stages

#: Budget rule: plan for at most this share of a device's memory in theory; the watermark includes peaks.
BUDGET, WATERMARK = 0.70, 0.90


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its peak. `activations` includes the loss; `buffers`: gathered weights, whole gradients,
    communication, tables. `runtime` is not torch's (context, NCCL) and is not in `total`."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.buffers


def of_stage(setup: Setup, stage: Stage, *, device: Device = "gpu") -> Memory:
    """The peak of the fullest rank of one stage."""
    held = states.of_rank(setup, stage)
    if setup.pp == 1 and setup.states == "fsdp":
        moment = walk.highest(setup, stage, device=device)
        return Memory(
            stage.index, held.parameters, moment.gradients, held.optimizer, moment.activations,
            held.buffers + moment.buffers,
        )  # fmt: skip
    flying = in_flight(setup, stage.index)
    kept = again = 0.0
    for dense, count in ((True, stage.dense), (False, stage.moe)):
        if count:
            kinds = (0, 1) if setup.options.recompute == "alternate" else (0,)  # blocks that differ in what they keep
            for index in kinds:
                block = activations.block(setup, dense=dense, device=device, policy=setup.block_policy(index))
                kept += count / len(kinds) * block.total
                again = max(again, block.again)
    ends, beside = activations.ends(setup, stage, device=device)
    # the loss is computed and given back within one micro-batch: only its embedding part flies
    moving = setup.tokens * activations.INDEX if stage.embedding else 0.0
    in_air = flying * (kept + moving) + (ends - moving) + max(again, beside)
    buffers = held.buffers + activations.rope_tables(setup, stage)
    return Memory(stage.index, held.parameters, held.gradients, held.optimizer, in_air, buffers)


def peak(setup: Setup, *, device: Device = "gpu") -> tuple[Memory, Memory]:
    """(mean over stages, the fullest stage)."""
    seen: dict[tuple[object, ...], Memory] = {}
    found = []
    for stage in stages(setup):
        key = (stage.dense, stage.moe, stage.embedding, stage.head, in_flight(setup, stage.index))
        if key not in seen:
            seen[key] = of_stage(setup, stage, device=device)
        found.append(Memory(stage.index, *_parts(seen[key])))
    mean = [sum(values) / len(found) for values in zip(*(_parts(m) for m in found))]
    return Memory(-1, *mean), max(found, key=lambda m: m.total)


def _parts(memory: Memory) -> tuple[float, float, float, float, float]:
    return memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.buffers
