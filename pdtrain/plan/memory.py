"""What a rank holds at its peak: states, activations in flight, buffers. The peak of one training step, unit by unit.

Without pipeline stages the step is walked through: each unit (norms, attention, FFN ...) is gathered, runs, leaves what
it keeps; backward it is gathered again, its gradient exists whole for a moment and is reduced. The highest point
counts. With stages, the micro-batches in flight of each stage are added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtrain.plan import activations, states
from pdtrain.plan.activations import Device
from pdtrain.plan.setup import Setup, Stage, in_flight, stages

#: Budget rule: plan for at most this share of a device's memory in theory; the watermark includes peaks.
BUDGET, WATERMARK = 0.70, 0.90
#: What the device's context, NCCL's buffers and the allocator take beside tensors: 2 - 4 GB on NVIDIA GPUs (field
#: value).
RUNTIME_BYTES = 3e9


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
    flying = in_flight(setup, stage.index)
    kept = again = 0.0
    for dense, count in ((True, stage.dense), (False, stage.moe)):
        if count:
            block = activations.block(setup, dense=dense, device=device)
            kept += count * block.total
            again = max(again, block.again)
    ends, beside = activations.ends(setup, stage, device=device)
    # the loss is computed and given back within one micro-batch: only its embedding part flies
    moving = setup.tokens * activations.INDEX if stage.embedding else 0.0
    in_air = flying * (kept + moving) + (ends - moving) + max(again, beside)
    buffers = held.buffers + activations.rope_tables(setup, stage) + _gathered(setup, stage)
    return Memory(stage.index, held.parameters, held.gradients, held.optimizer, in_air, buffers)


def unit_entries(setup: Setup, stage: Stage) -> dict[str, int]:
    """Entries of each FSDP unit on one rank before data-parallel sharding: the largest that stand gathered at once."""
    model = setup.run.model
    found: dict[str, int] = {}
    for dense, count in ((True, stage.dense), (False, stage.moe)):
        if not count:
            continue
        own: dict[str, int] = {}
        for tensor in states.block_tensors(model, dense=dense):
            if tensor.trained:
                own[tensor.row] = own.get(tensor.row, 0) + states.entries(states.local_shape(tensor, setup))
        for row, size in own.items():
            found[row] = max(found.get(row, 0), size)
    matrix = model.vocab_size * model.hidden // setup.tp
    if stage.embedding or stage.head:
        found["embed_head"] = matrix
    return found


def _gathered(setup: Setup, stage: Stage) -> float:
    """Bytes of weights gathered for a moment, and of whole gradients before they are reduced."""
    if setup.sharding != "zero3":
        return 0.0
    units = unit_entries(setup, stage)
    if not units:
        return 0.0
    # two units stand gathered while the next is prefetched; the larger one's gradient is whole in both dtypes
    sizes = sorted(((size * setup.itemsize(row), size, row) for row, size in units.items()), reverse=True)
    largest = sizes[0]
    second = sizes[1][0] if len(sizes) > 1 else 0
    moment = largest[0] + second + largest[0] + 4 * largest[1]
    if setup.micro_batches > 1:
        # accumulated gradients stay whole until the last micro-batch reduces them
        whole = sum(
            4 * count * states.entries(states.local_shape(tensor, setup))
            for tensor, count in states.stage_tensors(setup, stage)
            if tensor.trained and setup.shard_size(tensor.row) > 1
        )
        moment += whole
    return float(moment)


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
