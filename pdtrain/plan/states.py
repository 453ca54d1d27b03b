"""Parameters, gradients and optimizer state of every rank, to the byte: where each tensor is split and how.

Every weight matrix is listed once with its shape, the dimension that TP or EP splits and the group that shards it. FSDP
splits dimension 0 into `ceil(n / size)` rows per rank (torch.chunk), so that ranks can differ; expert stacks go along
dimension 1 where it divides. A distributed optimizer (ZeRO-1/2) cuts a flat buffer, so that its share is even.
`pdtrain plan exact` compares the result with the model that the trainer builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pdtrain.config.resolved import takes_muon
from pdtrain.config.schema import MODULES, Model
from pdtrain.plan.extras import extras_of, indexer
from pdtrain.plan.setup import Setup, Stage, stages


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight: policy row, shape, and the dimension that the row's model parallelism splits (None: replicated)."""

    row: str
    shape: tuple[int, ...]
    split: int | None = None
    trained: bool = True


def block_tensors(model: Model, *, dense: bool) -> list[Tensor]:
    """The weights of one block, MLA's latents, norms and routing bias included."""
    return [*_attention(model), *_feed_forward(model, dense), *[Tensor("norm", (model.hidden,))] * 2]


def _attention(model: Model) -> Iterator[Tensor]:
    h, n = model.hidden, model.heads
    if model.attention == "gqa":
        queries, keys = n * model.head_dim, model.kv_heads * model.head_dim
        yield Tensor("attention", (queries, h), 0)
        yield Tensor("attention", (keys, h), 0)
        yield Tensor("attention", (keys, h), 0)
        yield Tensor("attention", (h, queries), 1)
        yield from _attention_extras(model, queries, keys)
        return
    mla = model.mla
    q = n * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank:
        yield Tensor("attention", (mla.q_lora_rank, h))
        yield Tensor("norm", (mla.q_lora_rank,))
        yield Tensor("attention", (q, mla.q_lora_rank), 0)
    else:
        yield Tensor("attention", (q, h), 0)
    yield Tensor("attention", (mla.kv_lora_rank + mla.qk_rope_head_dim, h))
    yield Tensor("norm", (mla.kv_lora_rank,))
    yield Tensor("attention", (n * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank), 0)
    yield Tensor("attention", (h, n * mla.v_head_dim), 1)
    if extras_of(model).index_heads:
        yield from (Tensor("attention", shape) for shape in indexer(model))
        yield from [Tensor("norm", (extras_of(model).index_dim,))] * 2


def _attention_extras(model: Model, queries: int, keys: int) -> Iterator[Tensor]:
    extras = extras_of(model)
    if extras.qkv_bias:
        yield from (Tensor("attention", (size,), 0) for size in (queries, keys, keys))
    if extras.out_bias:
        yield Tensor("attention", (model.hidden,))
    if extras.sinks:
        yield Tensor("attention", (model.heads,), 0)
    if extras.qk_norm != "none":
        full = extras.qk_norm == "full"
        yield from (Tensor("norm", (size if full else model.head_dim,)) for size in (queries, keys))


def _feed_forward(model: Model, dense: bool) -> Iterator[Tensor]:
    h, moe = model.hidden, model.moe
    if dense:
        yield from _swiglu("dense_ffn", h, model.ffn_hidden, split=True)
        return
    yield Tensor("router", (moe.experts, h))
    if moe.bias_update_speed > 0:
        yield Tensor("router", (moe.experts,), trained=False)
    for shape in ((h, moe.expert_hidden), (h, moe.expert_hidden), (moe.expert_hidden, h)):
        yield Tensor("experts", (moe.experts, *shape), 0)
    if moe.shared_experts:
        yield from _swiglu("shared_expert", h, moe.shared_experts * moe.expert_hidden, split=False)
    extras = extras_of(model)
    if extras.router_bias:
        yield Tensor("router", (moe.experts,))
    if extras.expert_bias:
        yield Tensor("experts", (moe.experts, 2 * moe.expert_hidden), 0)
        yield Tensor("experts", (moe.experts, h), 0)
    if extras.shared_gate:
        yield Tensor("shared_expert", (1, h))


def _swiglu(row: str, h: int, f: int, *, split: bool) -> Iterator[Tensor]:
    yield Tensor(row, (f, h), 0 if split else None)
    yield Tensor(row, (f, h), 0 if split else None)
    yield Tensor(row, (h, f), 1 if split else None)


def end_tensors(model: Model, stage: Stage) -> list[Tensor]:
    """Embedding, final norm and head, where the stage has them. A tied head on another stage is a second copy."""
    matrix = Tensor("embed_head", (model.vocab_size, model.hidden), 0)
    found = [matrix] if stage.embedding else []
    if stage.head:
        found.append(Tensor("norm", (model.hidden,)))
        if not (model.tie_embeddings and stage.embedding):
            found.append(matrix)
    return found


@dataclass(frozen=True, slots=True)
class Where:
    """A rank's index in the groups that shard: DP (CP included), EDP, and the stage's token ranks."""

    dp: int = 0
    edp: int = 0
    router: int = 0


def local_shape(tensor: Tensor, setup: Setup) -> tuple[int, ...]:
    """What one rank of the TP or EP group has of `tensor`, before data-parallel sharding."""
    shape = list(tensor.shape)
    if tensor.split is not None:
        shape[tensor.split] //= setup.split(tensor.row)
    return tuple(shape)


def entries(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def sharded_entries(tensor: Tensor, setup: Setup, index: int) -> int:
    """Entries that rank `index` of the sharding group keeps under ZeRO-3 (FSDP2). Buffers are not sharded."""
    shape, size = local_shape(tensor, setup), setup.shard_size(tensor.row)
    if not tensor.trained:
        return entries(shape)
    dim = 1 if len(shape) == 3 and shape[1] % size == 0 else 0
    chunk = -(-shape[dim] // size)
    rows = max(0, min(chunk, shape[dim] - chunk * index))
    return entries(shape) // shape[dim] * rows


@dataclass(frozen=True, slots=True)
class States:
    """Entries and bytes that one rank holds between steps.

    parameters: entries of the weights it keeps; `bytes` by kind: parameters, gradients, optimizer, buffers.
    """

    entries: int
    parameters: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bytes per entry: weight as kept, gradient as accumulated, optimizer state (master copy included)."""

    weight: int
    gradient: int
    optimizer: int


def scheme(setup: Setup, row: str) -> Scheme:
    """How a row's states are kept.

    fsdp (as pdtrain trains): FP32 weights, which are the master copy, FP32 gradients, two moments, or Muon's one.
    megatron: weights in the compute dtype, main gradients in FP32, an FP32 master copy where weights are BF16.
    """
    gradient = setup.options.gradient_bytes or 4
    moments = (1 if takes_muon(setup.run, row, 2) else 2) * setup.options.moment_bytes
    if setup.states == "fsdp":
        return Scheme(4, gradient, moments)
    weight = setup.itemsize(row) if row not in ("router", "norm") else min(setup.itemsize("attention"), 4)
    return Scheme(weight, gradient, moments + (4 if weight < 4 else 0))


def stage_tensors(setup: Setup, stage: Stage) -> list[tuple[Tensor, int]]:
    """(tensor, how many of it) of one stage."""
    model = setup.run.model
    found = [(tensor, 1) for tensor in end_tensors(model, stage)]
    for dense, count in ((True, stage.dense), (False, stage.moe)):
        if count:
            found += [(tensor, count) for tensor in _block(model, dense)]
    return found


@lru_cache(maxsize=64)
def _block(model: Model, dense: bool) -> tuple[Tensor, ...]:
    return tuple(block_tensors(model, dense=dense))


def of_rank(setup: Setup, stage: Stage, where: Where = Where()) -> States:  # noqa: B008 - frozen
    """States of the rank at `where` in `stage`; the first rank of a group holds the most."""
    held = parameters = gradients = optimizer = buffers = 0.0
    sharding = setup.sharding
    for tensor, count in stage_tensors(setup, stage):
        local = count * entries(local_shape(tensor, setup))
        if not tensor.trained:
            buffers += 4 * local
            held += local
            continue
        size = setup.shard_size(tensor.row)
        bytes_of = scheme(setup, tensor.row)
        index = {"experts": where.edp, "router": where.router, "shared_expert": where.router}.get(tensor.row, where.dp)
        if sharding == "zero3":
            kept = float(count * sharded_entries(tensor, setup, index))
            share = (kept, kept, kept)
        else:
            flat = local / size
            share = (
                float(local),
                flat if sharding == "zero2" else float(local),
                flat if sharding in ("zero1", "zero2") else float(local),
            )
        held += share[0]
        parameters += bytes_of.weight * share[0]
        gradients += bytes_of.gradient * share[1]
        optimizer += bytes_of.optimizer * share[2]
    return States(int(held), parameters, gradients, optimizer, buffers)


def mean_over_stages(setup: Setup) -> States:
    """What an average rank holds: tied copies and buffers counted where they are."""
    found = [of_rank(setup, stage) for stage in stages(setup)]
    count = len(found)
    return States(
        sum(s.entries for s in found) // count,
        sum(s.parameters for s in found) / count,
        sum(s.gradients for s in found) / count,
        sum(s.optimizer for s in found) / count,
        sum(s.buffers for s in found) / count,
    )


def rows_entries(setup: Setup, where: Where, stage: Stage) -> dict[str, int]:
    """Trained entries per policy row that a rank keeps under ZeRO-3, or replicated."""
    found = dict.fromkeys(MODULES, 0)
    for tensor, count in stage_tensors(setup, stage):
        if not tensor.trained:
            continue
        index = {"experts": where.edp, "router": where.router, "shared_expert": where.router}.get(tensor.row, where.dp)
        kept = (
            sharded_entries(tensor, setup, index) if setup.sharding == "zero3" else entries(local_shape(tensor, setup))
        )
        found[tensor.row] += count * kept
    return found
