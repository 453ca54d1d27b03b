"""How long one optimizer step takes: a roofline per block, what communication nothing hides, the bubble, the optimizer.

    step = micro-batches x slowest stage (matrix products + attention + element-wise traffic + exposed TP, EP, CP, PP)
           x (1 + bubble) + exposed DP + optimizer

Matrix products run at a share of the peak that falls with narrow matrices; element-wise work (norms, SwiGLU, residuals,
dispatch) moves what the block keeps twice forward and three times backward. How good that is: docs/plan.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdtrain.config.schema import Model
from pdtrain.plan import activations, states
from pdtrain.plan.communication import Traffic, overlap, traffic
from pdtrain.plan.flops import per_token
from pdtrain.plan.hardware import Hardware
from pdtrain.plan.setup import Setup, Stage, bubble, stages

#: A matrix dimension at which products reach half of the device's share: narrow TP slices and small experts cost.
HALF_WIDTH = 192
#: Grouped products of experts against one product of the same size.
GROUPED = 0.85
#: Passes over what a block keeps: written and read once forward; read, and gradients written and read, backward.
FORWARD_PASSES, BACKWARD_PASSES = 2.0, 3.0
#: Share of the memory bandwidth that element-wise kernels reach.
MEMORY_EFFICIENCY = 0.7
#: Bytes that an optimizer step moves per byte of state: each is read, all but the gradient are written.
OPTIMIZER_PASSES = 1.75


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one optimizer step; `compute` includes recomputation, `exposed` is communication nothing hides."""

    compute: float
    recompute: float
    exposed: float
    bubble: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.bubble + self.optimizer


def _product_seconds(setup: Setup, hardware: Hardware, row: str, flop: float, width: float) -> float:
    share = hardware.gemm_efficiency * width / (width + HALF_WIDTH)
    return flop / (hardware.peak(setup.dtype(row)) * share)


def block_forward(setup: Setup, hardware: Hardware, *, dense: bool) -> dict[str, float]:
    """Seconds of one block's forward pass over one micro-batch on one rank, by module."""
    model, t = setup.run.model, setup.tokens
    h, bandwidth = model.hidden, hardware.memory_bandwidth * MEMORY_EFFICIENCY
    projections = attention_entries(model)
    if model.attention == "mla":
        dims = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
    else:
        dims = 2 * model.head_dim
    core = 2 * setup.run.train.sequence_length * model.heads / setup.tp * dims / 2 * t
    kept = activations.block(activations.undropped(setup), dense=dense)
    plain = kept.total + kept.again
    found = {
        "attention": _product_seconds(
            setup, hardware, "attention", 2 * t * projections / setup.tp, min(h, model.heads * dims / 2 / setup.tp)
        ),
        "core attention": core / (hardware.peak(setup.dtype("attention")) * hardware.attention_efficiency),
        "element-wise": FORWARD_PASSES * plain / bandwidth,
    }
    if dense:
        width = min(h, model.ffn_hidden / setup.tp)
        flop = 2 * t * 3 * h * model.ffn_hidden / setup.tp
        found["feed forward"] = _product_seconds(setup, hardware, "dense_ffn", flop, width)
        return found
    moe = model.moe
    _, arriving = activations.routed_rows(setup)
    rows_per_expert = arriving * setup.ep / moe.experts
    width = min(h, moe.expert_hidden, rows_per_expert)
    experts = _product_seconds(setup, hardware, "experts", 2 * arriving * 3 * h * moe.expert_hidden, width) / GROUPED
    shared = 0.0
    if moe.shared_experts:
        hidden = moe.shared_experts * moe.expert_hidden
        flop = 2 * setup.local_tokens * 3 * h * hidden
        shared = _product_seconds(setup, hardware, "shared_expert", flop, min(h, hidden, setup.local_tokens))
    router = 2 * setup.local_tokens * h * moe.experts / (hardware.peak("fp32") * 0.3)
    # weights of the experts are read once per pass, however few rows there are
    reading = moe.experts / setup.ep * 3 * h * moe.expert_hidden * setup.itemsize("experts") / bandwidth
    return found | {"experts": max(experts, reading), "shared expert": shared, "router": router}


def attention_entries(model: Model) -> int:
    """Entries of one attention's projections."""
    return sum(states.entries(t.shape) for t in states.block_tensors(model, dense=True) if t.row == "attention")


def head_forward(setup: Setup, hardware: Hardware) -> float:
    """Seconds of head and loss over one micro-batch."""
    model, t = setup.run.model, setup.tokens
    flop = 2 * t * model.hidden * model.vocab_size / setup.tp
    product = _product_seconds(setup, hardware, "embed_head", flop, min(model.hidden, model.vocab_size / setup.tp))
    loss = 4 * t * model.vocab_size / setup.tp * 4 / (hardware.memory_bandwidth * MEMORY_EFFICIENCY)
    return product + loss


def _dropped_seconds(setup: Setup, hardware: Hardware, seconds: dict[str, float], *, dense: bool) -> float:
    """Seconds of the parts that `Options.drop` has computed again: products, or passes over what is not kept."""
    if not setup.options.drop:
        return 0.0
    whole = activations.undropped(setup)
    lost = activations.block(whole, dense=dense).total - activations.block(setup, dense=dense).total
    found = FORWARD_PASSES * lost / (hardware.memory_bandwidth * MEMORY_EFFICIENCY)
    model = setup.run.model
    if activations.drops(setup, "mla-up") and model.attention == "mla":
        mla = model.mla
        up = mla.q_lora_rank * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        up = model.heads * (up + mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim))
        found += seconds["attention"] * up / attention_entries(model)
    if activations.drops(setup, "moe") and not dense:
        found += seconds["experts"] + seconds["shared expert"] + seconds["router"]
    return found


def _recompute_share(setup: Setup, hardware: Hardware, seconds: dict[str, float], *, dense: bool) -> float:
    """Seconds of a block's forward pass that the backward pass repeats."""
    if setup.repeated_blocks:
        return sum(seconds.values()) * setup.repeated_blocks
    if setup.options.recompute == "op":
        return seconds["element-wise"] + _second_products(setup, seconds, dense=dense)
    total = _dropped_seconds(setup, hardware, seconds, dense=dense)
    policy = setup.recompute("attention")
    if policy == "full":
        total += seconds["attention"] + seconds["core attention"]
    elif policy == "selective":
        total += seconds["core attention"]
    if dense and setup.recompute("dense_ffn") == "full":
        total += seconds["feed forward"]
    if not dense and setup.recompute("experts") == "full":
        total += seconds["experts"]
    if not dense and setup.recompute("shared_expert") == "full":
        total += seconds["shared expert"]
    return total


def _second_products(setup: Setup, seconds: dict[str, float], *, dense: bool) -> float:
    """Seconds of every second matrix product, and of the experts' grouped ones, which are all repeated."""
    products = activations.products(setup.run.model, dense=dense)
    found = sum(seconds.get(name, 0.0) for name in ("experts", "router"))
    for module in ("attention", "feed forward" if dense else "shared expert"):
        own = [(number, rows * columns) for number, (name, rows, columns) in enumerate(products, 1) if name == module]
        total = sum(size for _, size in own)
        if total:
            found += seconds[module] * sum(size for number, size in own if number % 2 == 0) / total
    return found


def stage_pass(setup: Setup, hardware: Hardware, stage: Stage) -> tuple[float, float]:
    """(seconds, of which recomputation) of one micro-batch forward and backward through one stage, compute alone."""
    total = again = 0.0
    for dense, count in ((True, stage.dense), (False, stage.moe)):
        if not count:
            continue
        seconds = block_forward(setup, hardware, dense=dense)
        light = seconds["element-wise"]
        heavy = sum(seconds.values()) - light
        core = seconds["core attention"]
        repeated = _recompute_share(setup, hardware, seconds, dense=dense)
        # flash attention's backward pass recomputes scores: 2.5 times its forward pass
        once = heavy * 3 + 0.5 * core + light * (1 + BACKWARD_PASSES / FORWARD_PASSES) + repeated
        total += count * (once + hardware.block_overhead)
        again += count * repeated
    if stage.head:
        total += 3 * head_forward(setup, hardware)
    return total, again


def times(setup: Setup, hardware: Hardware) -> tuple[Times, list[Traffic]]:
    """The step's seconds, and the traffic of the slowest stage."""
    slowest: tuple[float, float, float, Stage, list[Traffic]] | None = None
    seen: set[tuple[int, int, bool, bool]] = set()
    for stage in stages(setup):
        shape = (stage.dense, stage.moe, stage.embedding, stage.head)
        if shape in seen:
            continue
        seen.add(shape)
        seconds, again = stage_pass(setup, hardware, stage)
        moved = traffic(setup, stage, hardware)
        per_batch = sum(t.exposed for t in moved if not t.group.startswith(("DP", "EDP"))) / setup.micro_batches
        if slowest is None or seconds + per_batch > slowest[0] + slowest[2]:
            slowest = (seconds, again, per_batch, stage, moved)
    assert slowest is not None
    seconds, again, per_batch, stage, moved = slowest
    batches = setup.micro_batches
    idle = bubble(setup) * batches * (seconds + per_batch)
    # DP hides under the passes that it has to wait for: all of them with ZeRO-3, else the first and last of a step
    hidden = overlap(setup, "DP")
    cover = seconds * (batches if setup.sharding == "zero3" else 1) * hidden
    data_parallel = sum(t.seconds for t in moved if t.group.startswith(("DP", "EDP")))
    exposed_dp = max(data_parallel * (1 - hidden), data_parallel - cover)
    held = states.of_rank(setup, stage)
    if setup.run.pools.update_ranks:
        optimizer = 0.0  # the update pool's work
    else:
        moved_states = held.parameters + held.gradients + held.optimizer
        if setup.sharding in ("zero1", "zero2"):
            # only its share of weights and gradients
            moved_states = held.optimizer * 1.75
        optimizer = moved_states * OPTIMIZER_PASSES / (hardware.memory_bandwidth * MEMORY_EFFICIENCY)
    optimizer += hardware.step_overhead
    found = Times(seconds * batches, again * batches, per_batch * batches + exposed_dp, idle, optimizer)
    return found, moved


def mfu(setup: Setup, hardware: Hardware, step_seconds: float, *, causal: bool = True) -> float:
    """Model FLOP utilisation: FLOP of the model (no recomputation) per second over the peak of all compute ranks."""
    flop = per_token(setup.run.model, setup.run.train.sequence_length, causal=causal) * setup.tokens_per_step
    return flop / (step_seconds * setup.ranks * hardware.peak(setup.run.precision.all))
