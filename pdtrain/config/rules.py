"""The rules that join several keys of a configuration: a list of functions, each yielding mistakes over a `Run`.

Limits of a single key stand in `schema.py`, rules on degrees and ranks in `layout_rules.py`. A rule assumes nothing
about the others: each is asked, and all that they find is shown at once. docs/config.md shows the line that each
prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from pdtrain.config.layout_rules import (
    batch_identity,
    degrees_stand_on_their_rows,
    degrees_stay_in_their_domain,
    expert_divides_experts,
    group_families,
    ranks_factorise,
    sequence_parallel_divides,
    tensor_divides_heads,
    tensor_divides_widths,
)
from pdtrain.config.mistakes import UNKNOWN, Mistake, UnknownValue, around, divisors
from pdtrain.config.resolved import FP32_ROWS, LEAST_WINDOW, rebalance_window, staleness_bound
from pdtrain.config.schema import MODULES, Run
from pdtrain.pools.plan import INDEX_BYTES

Rule = Callable[[Run], Iterator[Mistake]]

#: With bias-update balancing, the auxiliary loss is only a guard: DeepSeek-V3 uses 1e-4 (arXiv 2412.19437, 4.2).
GUARD_AUX_LOSS = 1e-4
#: torch's grouped GEMM wants row strides of a multiple of 16 bytes.
GEMM_ALIGNMENT_BYTES = 16
DTYPE_BYTES = {"fp32": 4, "bf16": 2}


def check(run: Run) -> list[Mistake]:
    """Every mistake and warning of `run` (after `fill`); mistakes first."""
    return sorted(_ask(RULES, run), key=lambda mistake: mistake.warning)


def refusals(run: Run) -> list[Mistake]:
    """What can be planned and dry-run today, but not trained."""
    return _ask(REFUSALS, run)


def _ask(rules: Sequence[Rule], run: Run) -> list[Mistake]:
    found: list[Mistake] = []
    for rule in rules:
        with suppress(UnknownValue):  # it depends on a key that is wrong by itself
            found += [mistake for mistake in rule(run) if mistake.value is not UNKNOWN]
    return found


def capacity_holds_an_even_share(run: Run) -> Iterator[Mistake]:
    factor = run.model.moe.capacity_factor
    if factor is not None and factor < 1:
        yield Mistake(
            "model.moe.capacity_factor", factor, "drops tokens even when routing is perfectly balanced",
            'use at least 1 (start at 1.25), or "none" for dropless',
        )  # fmt: skip


def routing_has_enough_experts(run: Run) -> Iterator[Mistake]:
    moe = run.model.moe
    if moe.top_k > moe.experts:
        yield Mistake("model.moe.top_k", moe.top_k, f"is more than {moe.experts} experts", f"use 1 to {moe.experts}")
    if moe.experts % moe.groups:
        yield Mistake("model.moe.groups", moe.groups, f"does not divide {moe.experts} experts", divisors(moe.experts))
    if moe.top_groups > moe.groups:
        yield Mistake(
            "model.moe.top_groups", moe.top_groups, f"is more than {moe.groups} groups", f"use 1 to {moe.groups}"
        )
    reach = moe.experts // moe.groups * moe.top_groups
    if reach < moe.top_k <= moe.experts and moe.top_groups <= moe.groups:
        yield Mistake(
            "model.moe.top_k", moe.top_k,
            f"is more than the {reach} experts in top_groups {moe.top_groups} of {moe.groups} groups",
            f"use at most {reach}, or more top_groups",
        )  # fmt: skip


def balancing_is_one(run: Run) -> Iterator[Mistake]:
    moe = run.model.moe
    if run.model.layers <= run.model.dense_layers or moe.experts == 1:
        return
    if moe.bias_update_speed and moe.aux_loss > GUARD_AUX_LOSS:
        yield Mistake(
            "model.moe.aux_loss", moe.aux_loss, f"works beside bias_update_speed = {moe.bias_update_speed}",
            f"with bias-update balancing keep the loss at {GUARD_AUX_LOSS:g} or 0, or it steers the main gradient",
            warning=True,
        )  # fmt: skip
    if not moe.bias_update_speed and not moe.aux_loss:
        yield Mistake(
            "model.moe.aux_loss", moe.aux_loss, "and bias_update_speed = 0 leave routing unbalanced",
            "it will likely collapse onto few experts; start with aux_loss = 0.01", warning=True,
        )  # fmt: skip


def layers_fit(run: Run) -> Iterator[Mistake]:
    model = run.model
    if model.dense_layers > model.layers:
        yield Mistake(
            "model.dense_layers", model.dense_layers, f"is more than {model.layers} layers", f"use 0 to {model.layers}"
        )
    if model.dense_layers == model.layers and run.modules.experts.expert > 1:
        yield Mistake(
            "modules.experts.expert", run.modules.experts.expert, "has no effect: every layer is dense",
            "lower model.dense_layers", warning=True,
        )  # fmt: skip
    if run.parallel.pipeline > model.layers:
        yield Mistake(
            "parallel.pipeline", run.parallel.pipeline,
            f"is more than {model.layers} layers", f"use 1 to {model.layers}",
        )  # fmt: skip


def heads_are_whole(run: Run) -> Iterator[Mistake]:
    model = run.model
    if model.attention == "gqa" and model.heads % model.kv_heads:
        yield Mistake("model.kv_heads", model.kv_heads, f"does not divide {model.heads} heads", divisors(model.heads))
    key, dim = (
        ("model.head_dim", model.head_dim)
        if model.attention == "gqa"
        else ("model.mla.qk_rope_head_dim", model.mla.qk_rope_head_dim)
    )
    if dim % 2:
        yield Mistake(key, dim, "is odd; rotary embedding turns pairs", [size for size in (dim - 1, dim + 1) if size])


def grouped_gemm_aligned(run: Run) -> Iterator[Mistake]:
    if run.model.layers <= run.model.dense_layers:
        return
    dtype = run.modules.experts.dtype or run.precision.all
    unit = GEMM_ALIGNMENT_BYTES // DTYPE_BYTES[dtype]
    for key, width in (("model.hidden", run.model.hidden), ("model.moe.expert_hidden", run.model.moe.expert_hidden)):
        if width % unit:
            yield Mistake(
                key, width, f"is no multiple of {unit}, which the experts' grouped GEMM needs in {dtype}",
                around(width, unit),
            )  # fmt: skip


def fp32_rows_stay_fp32(run: Run) -> Iterator[Mistake]:
    reasons = {
        "router": "the first suspect when routing collapses",
        "norm": "a cause of late, slow oscillation of the loss",
    }
    for row in FP32_ROWS:
        if getattr(run.modules, row).dtype == "bf16":
            yield Mistake(f"modules.{row}.dtype", "bf16", f"is {reasons[row]}", "leave it out for fp32", warning=True)


def checkpoints_hold_every_row(run: Run) -> Iterator[Mistake]:
    own = {row: getattr(run.modules, row).checkpoint_every for row in MODULES}
    own = {row: every for row, every in own.items() if every is not None}
    if not own:
        return
    if not run.checkpoint.every and len(own) < len(MODULES):
        row, every = next(iter(own.items()))
        yield Mistake(
            f"modules.{row}.checkpoint_every", every, "has no effect while checkpoint.every = 0 saves only at the end",
            "set checkpoint.every for the other rows",
        )  # fmt: skip
        return
    shortest = min([*own.values(), *([run.checkpoint.every] if len(own) < len(MODULES) else [])])
    cadences = {f"modules.{row}.checkpoint_every": every for row, every in own.items()}
    if len(own) < len(MODULES):
        cadences["checkpoint.every"] = run.checkpoint.every
    for key, every in cadences.items():
        if every % shortest:
            yield Mistake(
                key, every, f"is no multiple of the shortest interval, {shortest}: no save would hold both",
                around(every, shortest),
            )  # fmt: skip


def schedule_reaches_its_peak(run: Run) -> Iterator[Mistake]:
    if run.optimizer.warmup_steps >= run.train.steps > 1:
        yield Mistake(
            "optimizer.warmup_steps", run.optimizer.warmup_steps,
            f"is not below train.steps = {run.train.steps}", "the learning rate never reaches its peak", warning=True,
        )  # fmt: skip


def rewind_has_somewhere_to_go(run: Run) -> Iterator[Mistake]:
    saves = run.checkpoint.every or any(getattr(run.modules, row).checkpoint_every for row in MODULES)
    if run.train.on_spike == "rewind" and not saves:
        yield Mistake(
            "train.on_spike", "rewind", "has no checkpoint to go back to: checkpoint.every = 0 saves only at the end",
            'set checkpoint.every (200, say), or use "skip"',
        )  # fmt: skip


def validation_has_documents(run: Run) -> Iterator[Mistake]:
    if run.train.val_sequences and not run.data.val_share:
        yield Mistake(
            "data.val_share", run.data.val_share, "holds nothing out for validation",
            "use 0.02, or train.val_sequences = 0",
        )  # fmt: skip


def bytes_fit_the_vocabulary(run: Run) -> Iterator[Mistake]:
    tokens = str(run.data.path or "").endswith((".bin", ".idx"))
    if run.data.tokenizer is None and not tokens and run.model.vocab_size < 256:
        yield Mistake("model.vocab_size", run.model.vocab_size, "cannot hold 256 byte values", "use at least 256")


def pools_have_ranks(run: Run) -> Iterator[Mistake]:
    mode, ranks = run.pools.mode, run.pools.update_ranks
    if mode == "off" and ranks:
        yield Mistake(
            "pools.update_ranks", ranks, 'needs an update pool, but pools.mode = "off"',
            'use 0, or pools.mode = "sync", "stream" or "async"',
        )  # fmt: skip
    if mode != "off" and not ranks:
        yield Mistake(
            "pools.mode", mode, "needs an update pool, but pools.update_ranks = 0",
            'use "off", or at least 1 update rank',
        )  # fmt: skip


def kept_state_is_used(run: Run) -> Iterator[Mistake]:
    pools = run.pools
    for key, value in (("restarts", pools.restarts or None), ("keep", pools.keep)):
        if pools.mode == "off" and value is not None:
            yield Mistake(
                f"pools.{key}", value, 'is for a run with pools, but pools.mode = "off"',
                'leave it out, or pools.mode = "sync", "stream" or "async"',
            )  # fmt: skip
    for key, value in (("keep", pools.keep), ("offload", pools.offload)):
        if pools.mode != "off" and value == "":
            yield Mistake(f"pools.{key}", value, "names no folder", 'leave it out, or use "." for the present one')
    if pools.mode != "off" and pools.keep and not pools.restarts:
        yield Mistake(
            "pools.keep", pools.keep, "costs memory for nothing while nobody starts a dead rank again",
            "set pools.restarts (3, say), or start under torchrun --max-restarts", warning=True,
        )  # fmt: skip


def micro_batches_leave_early(run: Run) -> Iterator[Mistake]:
    if run.pools.mode == "sync" and run.pools.granularity == "micro_batch":
        yield Mistake(
            "pools.granularity", "micro_batch", 'has no effect with pools.mode = "sync": all gradients leave together',
            'leave it out, or use pools.mode = "stream"', warning=True,
        )  # fmt: skip


def stale_weights_are_meant(run: Run) -> Iterator[Mistake]:
    pools = run.pools
    staleness = staleness_bound(run)
    if pools.mode != "async":
        if pools.staleness is not None and pools.on_mismatch != "accept":
            yield Mistake(
                "pools.staleness", staleness, f'has no effect with pools.mode = "{pools.mode}": no weights are stale',
                'leave it out, or use pools.mode = "async"', warning=True,
            )  # fmt: skip
        return
    if staleness == 0:
        yield Mistake(
            "pools.staleness", 0, 'makes pools.mode = "async" synchronous', 'use at least 1, or pools.mode = "stream"'
        )
        return
    how = "which is reported to degrade training with Adam" if run.optimizer.name == "adamw" else \
        "which is reported to cost Muon less than Adam, not nothing"
    yield Mistake(
        "pools.mode", "async", f"applies gradients of weights that are {staleness} step{'s' * (staleness > 1)} old, "
        f"{how}", 'pools.mode = "stream" overlaps without that', warning=True,
    )  # fmt: skip


def what_a_payload_takes_is_fed_back(run: Run) -> Iterator[Mistake]:
    pools = run.pools
    if pools.mode == "off":
        return
    if pools.top_k < 1 and not pools.error_feedback:
        yield Mistake(
            "pools.top_k", pools.top_k, f"loses the other {1 - pools.top_k:.3g} of every gradient for good",
            "set pools.error_feedback = true, or use 1",
        )  # fmt: skip
    item = DTYPE_BYTES["fp32" if pools.payload == "fp32" else "bf16"]
    if pools.top_k < 1 and pools.top_k * (item + INDEX_BYTES) >= item:
        yield Mistake(
            "pools.top_k", pools.top_k,
            f"sends no less than 1 does: an index costs {INDEX_BYTES} bytes, a value in {pools.payload} {item}",
            f"use less than {item / (item + INDEX_BYTES):.2g}, or 1", warning=True,
        )  # fmt: skip
    if pools.error_feedback and pools.payload == "fp32" and pools.top_k == 1:
        yield Mistake(
            "pools.error_feedback", True, 'has no effect: payload = "fp32" and top_k = 1 take nothing from a gradient',
            "leave it out", warning=True,
        )  # fmt: skip


def rebalancing_has_its_steps(run: Run) -> Iterator[Mistake]:
    pools, steps = run.pools, run.train.steps
    if pools.rebalance == "off":
        return
    if pools.mode == "off":
        yield Mistake(
            "pools.rebalance", pools.rebalance, 'needs an update pool, but pools.mode = "off"',
            'use "off", or pools.mode = "sync", "stream" or "async"',
        )  # fmt: skip
    every = pools.rebalance_every
    if every is not None and every < LEAST_WINDOW:
        yield Mistake(
            "pools.rebalance_every", every, "steps are too few to measure how busy the pools are",
            f"use at least {LEAST_WINDOW}, or leave it out for 10 % of the steps",
        )  # fmt: skip
    elif rebalance_window(run) >= steps:
        written = "pools.rebalance_every" if every is not None else "pools.rebalance"
        yield Mistake(
            written, every if every is not None else pools.rebalance,
            f"never comes to look: the first time is after step {rebalance_window(run)} of {steps}",
            f"use at most {steps - 1}" if every is not None else "a run this short is measured with pdtrain diag pools",
            warning=every is None,
        )  # fmt: skip


def no_pipeline_yet(run: Run) -> Iterator[Mistake]:
    if run.parallel.pipeline > 1:
        yield Mistake(
            "parallel.pipeline", run.parallel.pipeline, "cannot be trained yet, only planned",
            "use 1, or --dry-run to see the layout",
        )  # fmt: skip


def sequence_parallel_is_on(run: Run) -> Iterator[Mistake]:
    if run.modules.attention.tensor > 1 and not run.parallel.sequence_parallel:
        yield Mistake(
            "parallel.sequence_parallel", False, "cannot be trained yet with tensor parallelism, only planned",
            "use true, or modules.attention.tensor = 1",
        )  # fmt: skip


def no_rewind_of_pools_yet(run: Run) -> Iterator[Mistake]:
    if run.pools.mode != "off" and run.train.on_spike == "rewind":
        yield Mistake(
            "train.on_spike", "rewind", f'cannot be trained yet with pools.mode = "{run.pools.mode}"',
            'use "skip" or "warn", or pools.mode = "off"',
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    tensor_divides_heads,
    tensor_divides_widths,
    sequence_parallel_divides,
    expert_divides_experts,
    ranks_factorise,
    batch_identity,
    group_families,
    degrees_stay_in_their_domain,
    capacity_holds_an_even_share,
    routing_has_enough_experts,
    balancing_is_one,
    layers_fit,
    heads_are_whole,
    grouped_gemm_aligned,
    degrees_stand_on_their_rows,
    fp32_rows_stay_fp32,
    checkpoints_hold_every_row,
    schedule_reaches_its_peak,
    rewind_has_somewhere_to_go,
    validation_has_documents,
    bytes_fit_the_vocabulary,
    pools_have_ranks,
    kept_state_is_used,
    micro_batches_leave_early,
    stale_weights_are_meant,
    what_a_payload_takes_is_fed_back,
    rebalancing_has_its_steps,
)
REFUSALS: tuple[Rule, ...] = (no_pipeline_yet, sequence_parallel_is_on, no_rewind_of_pools_yet)
