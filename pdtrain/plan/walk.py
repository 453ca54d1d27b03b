"""The peak of one step without pipeline stages: forward, loss, then backward unit by unit, as FSDP2 holds memory.

What is held at a moment:

    weights and moments of this rank; gradients of the units that backward has passed
    what forward kept of the blocks that backward has not passed
    gathered weights: of the unit at work; the all-gather's buffer is held until the next one
    whole gradients of the unit at work, and of the unit before it the buffer that is being reduced
    while micro-batches accumulate: whole FP32 gradients of everything
    replicated (parallel.fsdp = false): a second copy of all weights in the compute dtype
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdtrain.plan import activations, states
from pdtrain.plan.hardware import Device
from pdtrain.plan.setup import Setup, Stage

#: Gradients of activations inside a unit at work, as a share of what it keeps.
FLOW = 0.15


@dataclass(frozen=True, slots=True)
class Unit:
    """One sharding unit in forward order: entries on this rank gathered and sharded, size of its group, itemsize of its
    compute dtype; bytes its forward pass kept, and that its backward pass brings back."""

    row: str
    gathered: int
    sharded: int
    size: int
    item: int
    kept: float = 0.0
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The highest point: bytes of gradients, activations and buffers then."""

    gradients: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.buffers


def units(setup: Setup, stage: Stage, device: Device) -> Iterator[Unit]:
    """Units in forward order, with what their modules keep."""
    model, inventory = setup.run.model, activations.inventory_of(setup)
    tensors = states.end_tensors(model, stage)
    if stage.embedding:
        yield _unit(setup, "embed_head", [tensors[0]], kept=setup.tokens * activations.INDEX)
    attention, short = activations.attention(setup, device, inventory)
    for index in range(stage.layers):
        dense = index < stage.dense
        block = states.block_tensors(model, dense=dense)
        policy = setup.block_policy(index)
        kept = activations.block(setup, dense=dense, device=device, inventory=inventory, policy=policy)

        def of(row: str, block: list[states.Tensor] = block) -> list[states.Tensor]:
            return [tensor for tensor in block if tensor.row == row and tensor.trained]

        if policy in ("full", "op"):
            yield _unit(setup, "norm", of("norm"), kept=kept.norms, again=kept.again)
            first, second = 0.0, 0.0
            again_first = again_second = 0.0
        else:
            yield _unit(setup, "norm", of("norm"), kept=kept.norms)
            first, second = kept.attention, kept.feed_forward
            again_first = attention - short if setup.recompute("attention") == "full" else 0.0
            again_second = _again(setup, inventory, dense)
            if setup.options.drop:
                again_second = max(again_second, kept.again)
        yield _unit(setup, "attention", of("attention"), kept=first, again=again_first)
        if dense:
            yield _unit(setup, "dense_ffn", of("dense_ffn"), kept=second, again=again_second)
            continue
        yield _unit(setup, "router", of("router"))
        yield _unit(setup, "experts", of("experts"), kept=second, again=again_second)
        if of("shared_expert"):
            yield _unit(setup, "shared_expert", of("shared_expert"))
    if stage.head:
        ends, _ = activations.ends(setup, stage, device=device)
        norm = [tensor for tensor in tensors if tensor.row == "norm"]
        yield _unit(setup, "norm", norm)
        head = [tensors[-1]] if len(tensors) > 2 or not stage.embedding else []
        lookup = setup.tokens * activations.INDEX if stage.embedding else 0.0
        yield _unit(setup, "embed_head", head, kept=ends - lookup)


def _again(setup: Setup, inventory: activations.Inventory, dense: bool) -> float:
    if dense:
        kept, short = activations.dense_ffn(setup, inventory)
        return kept - short if setup.recompute("dense_ffn") == "full" else 0.0
    return activations.moe_layer(setup, inventory)[1]


def _unit(setup: Setup, row: str, tensors: list[states.Tensor], kept: float = 0.0, again: float = 0.0) -> Unit:
    gathered = sum(states.entries(states.local_shape(tensor, setup)) for tensor in tensors)
    zero3 = setup.sharding == "zero3"
    sharded = sum(states.sharded_entries(tensor, setup, 0) for tensor in tensors) if zero3 else gathered
    return Unit(row, gathered, sharded, setup.shard_size(row), setup.itemsize(row), kept, again)


def highest(setup: Setup, stage: Stage, *, device: Device = "gpu") -> Moment:
    """The moment at which the step needs most beside weights and moments."""
    return max(moments(setup, stage, device=device), key=lambda moment: moment.total)


def moments(setup: Setup, stage: Stage, *, device: Device = "gpu") -> Iterator[Moment]:
    """The loss, then each unit of the backward pass at work."""
    found = list(units(setup, stage, device))
    gradient = setup.options.gradient_bytes or 4
    parallel = setup.stage_ranks > 1
    fixed = activations.rope_tables(setup, stage)
    if parallel and setup.sharding != "zero3":
        fixed += sum(unit.gathered * unit.item for unit in found)  # the replicas' copy that computes
    whole = setup.micro_batches > 1 and not (setup.options.reduce_each and setup.sharding == "zero3")
    # reduced shards of the micro-batches before, where they are not kept whole
    earlier = setup.micro_batches > 1 and not whole
    waiting = sum((unit.gathered if whole else unit.sharded) * gradient for unit in found) if whole or earlier else 0.0
    done = waiting if earlier else 0.0
    kept = sum(unit.kept for unit in found)
    _, beside = activations.ends(setup, stage, device=device)
    last = found[-1].gathered * found[-1].item if parallel and setup.sharding == "zero3" else 0.0
    yield Moment(waiting, kept + beside, fixed + last)
    reducing = before = 0.0
    stream = setup.local_tokens * setup.run.model.hidden * setup.itemsize("attention")
    for unit in reversed(found):
        gathered = unit.gathered * unit.item if parallel and setup.sharding == "zero3" else 0.0
        own = unit.gathered * unit.item
        flow = FLOW * (unit.kept + unit.again) + 2 * stream
        held = waiting if whole else done
        if gathered:  # what the all-gather brought is copied into the weights that compute
            # while the unit before it may still hold its own, gradient included
            yield Moment(held, kept + 2 * stream, fixed + 2 * gathered + 2 * before + reducing)
        yield Moment(held + own, kept + unit.again + flow, fixed + gathered + reducing)
        kept -= unit.kept
        if parallel:
            # gradient whole in the compute dtype, its FP32 copy that is reduced, this rank's share of the result
            reducing = gradient * unit.gathered
            before = gathered
            yield Moment(held + own, kept + 2 * stream, fixed + reducing)
        done += 0.0 if earlier else gradient * unit.sharded
