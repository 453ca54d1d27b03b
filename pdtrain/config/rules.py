"""The rules that join several keys of a configuration: a list of functions, each yielding mistakes over a `Run`.

Limits of a single key stand in `schema.py`. A rule assumes nothing about the others: each is asked, and all
that they find is shown at once. docs/config.md shows the line that each prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from pdtrain.config.mistakes import NOTHING, Mistake, UnknownValue, divisors
from pdtrain.config.resolved import FP32_ROWS, TENSOR_ROWS, data_degree, stage_ranks
from pdtrain.config.schema import MODULES, Run
from pdtrain.parallel.layout import Layout

Rule = Callable[[Run], Iterator[Mistake]]

#: Group families beyond which communicators contend (DOMAIN, module separation; a field report, hence a warning).
MOST_FAMILIES = 3
#: Ranks of one NVLink domain on common hosts: TP beyond it crosses nodes at every layer.
MOST_TENSOR = 8
#: Largest expert-parallel group in field reports and in the DeepSeek-V3 report (arXiv 2412.19437, 3.2).
MOST_EXPERT = 64
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
            found += list(rule(run))
    return found


def tensor_divides_heads(run: Run) -> Iterator[Mistake]:
    tensor, model, heads = run.modules.attention.tensor, run.model, _splittable_heads(run)
    if model.heads % tensor:
        yield Mistake("modules.attention.tensor", tensor, f"does not divide {model.heads} heads", divisors(heads))
    elif heads % tensor:
        what = f"does not divide {model.kv_heads} key/value heads"
        yield Mistake("modules.attention.tensor", tensor, what, divisors(heads))


def _splittable_heads(run: Run) -> int:
    model = run.model
    return math.gcd(model.heads, model.kv_heads) if model.attention == "gqa" else model.heads


def _tensor_is_legal(run: Run) -> bool:
    """False when tensor_divides_heads has spoken: what else that degree would break is noise."""
    return _splittable_heads(run) % run.modules.attention.tensor == 0


def tensor_divides_widths(run: Run) -> Iterator[Mistake]:
    tensor, model = run.modules.attention.tensor, run.model
    widths = {"model.vocab_size": (model.vocab_size, "the embedding's rows")}
    if model.dense_layers:
        widths["model.ffn_hidden"] = (model.ffn_hidden, "the dense FFN's width")
    for key, (width, noun) in widths.items():
        if width % tensor and _tensor_is_legal(run):
            yield Mistake(
                key, width, f"({noun}) is not divisible by modules.attention.tensor = {tensor}",
                f"use a multiple of {tensor}, such as {-(-width // tensor) * tensor}",
            )  # fmt: skip


def sequence_parallel_divides(run: Run) -> Iterator[Mistake]:
    tensor, length = run.modules.attention.tensor, run.train.sequence_length
    if run.parallel.sequence_parallel and length % tensor and _tensor_is_legal(run):
        yield Mistake(
            "train.sequence_length", length,
            f"is not divisible by modules.attention.tensor = {tensor}, which sequence parallel needs",
            f"use {-(-length // tensor) * tensor}, or parallel.sequence_parallel = false",
        )  # fmt: skip


def expert_divides_experts(run: Run) -> Iterator[Mistake]:
    expert, experts = run.modules.experts.expert, run.model.moe.experts
    if experts % expert:
        yield Mistake("modules.experts.expert", expert, f"does not divide {experts} experts", divisors(experts))


def ranks_factorise(run: Run) -> Iterator[Mistake]:
    ranks, pipeline = run.parallel.ranks, run.parallel.pipeline
    if ranks < 1:
        what = f"leaves no compute rank in a job of {ranks + run.pools.update_ranks}"
        yield Mistake("pools.update_ranks", run.pools.update_ranks, what, "start more processes")
        return
    tensor, expert = run.modules.attention.tensor, run.modules.experts.expert
    unit = pipeline * math.lcm(tensor, expert)
    near = _around(ranks, unit)
    for degree, whole, kind, name, key in (
        (tensor, _splittable_heads(run), "DP x tensor", "attention", "modules.attention.tensor"),
        (expert, run.model.moe.experts, "EDP x expert", "experts", "modules.experts.expert"),
    ):
        if ranks % (pipeline * degree) and whole % degree == 0:
            product = f"pipeline {pipeline} x {kind} {degree}" if pipeline > 1 else f"{kind} {degree}"
            smaller = divisors(math.gcd(ranks // pipeline, whole)) if ranks % pipeline == 0 else []
            lower = f", or {key} = {smaller[-1]}" if smaller else ""
            advice = f"use {' or '.join(map(str, near))}{lower}"
            yield Mistake("parallel.ranks", ranks, f"is not {product} ({name})", advice)


def batch_identity(run: Run) -> Iterator[Mistake]:
    train, dp = run.train, data_degree(run)
    per_pass = train.micro_batch * dp
    if stage_ranks(run) % run.modules.attention.tensor or run.parallel.ranks % run.parallel.pipeline:
        return  # DP is unknown: ranks_factorise says so
    if train.accumulation is None:
        yield Mistake(
            "train.train_batch", train.train_batch,
            f"is not micro_batch {train.micro_batch} x accumulation x DP {dp}: no multiple of {per_pass}",
            _around(train.train_batch or 0, per_pass),
        )  # fmt: skip
    elif train.train_batch != per_pass * train.accumulation:
        advice = f"use train.train_batch = {per_pass * train.accumulation}"
        if train.train_batch and train.train_batch % per_pass == 0:
            advice += f", or train.accumulation = {train.train_batch // per_pass}"
        yield Mistake(
            "train.train_batch", train.train_batch,
            f"is not micro_batch {train.micro_batch} x accumulation {train.accumulation} x DP {dp}"
            f" = {per_pass * train.accumulation}",
            f"{advice}, or leave one of them out",
        )  # fmt: skip


def _around(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, without 0."""
    below = value // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def group_families(run: Run) -> Iterator[Mistake]:
    try:
        families = Layout.from_run(run).families()
    except ValueError:
        return  # no layout: ranks_factorise says so
    if len(families) > MOST_FAMILIES:
        yield Mistake(
            "[parallel]", NOTHING, f"needs {len(families)} group families ({' + '.join(families)})",
            f"more than {MOST_FAMILIES} contend for communicators and can be slower than no separation", warning=True,
        )  # fmt: skip


def degrees_stay_in_their_domain(run: Run) -> Iterator[Mistake]:
    tensor, expert = run.modules.attention.tensor, run.modules.experts.expert
    if tensor > MOST_TENSOR:
        yield Mistake(
            "modules.attention.tensor", tensor, f"leaves an NVLink domain of {MOST_TENSOR}",
            "every layer then waits for the network between nodes", warning=True,
        )  # fmt: skip
    if expert > MOST_EXPERT:
        yield Mistake(
            "modules.experts.expert", expert, f"is above {MOST_EXPERT}",
            "the all-to-all of larger groups is seldom hidden", warning=True,
        )  # fmt: skip


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
                _around(width, unit),
            )  # fmt: skip


def degrees_stand_on_their_rows(run: Run) -> Iterator[Mistake]:
    attention = run.modules.attention.tensor
    for row in MODULES:
        policy = getattr(run.modules, row)
        if row != "experts" and policy.expert > 1:
            yield Mistake(
                f"modules.{row}.expert", policy.expert, "has no meaning: only routed experts are expert parallel",
                "set modules.experts.expert",
            )  # fmt: skip
        if row in TENSOR_ROWS and row != "attention" and policy.tensor not in (1, attention):
            yield Mistake(
                f"modules.{row}.tensor", policy.tensor, f"differs from modules.attention.tensor = {attention},"
                " which this row follows", "leave it out",
            )  # fmt: skip
        if row not in TENSOR_ROWS and policy.tensor > 1:
            what = "routed experts are split by expert, not by tensor" if row == "experts" else "this row is replicated"
            yield Mistake(f"modules.{row}.tensor", policy.tensor, f"has no meaning: {what}", "leave it out")


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
                _around(every, shortest),
            )  # fmt: skip


def schedule_reaches_its_peak(run: Run) -> Iterator[Mistake]:
    if run.optimizer.warmup_steps >= run.train.steps > 1:
        yield Mistake(
            "optimizer.warmup_steps", run.optimizer.warmup_steps,
            f"is not below train.steps = {run.train.steps}", "the learning rate never reaches its peak", warning=True,
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


def no_pools_yet(run: Run) -> Iterator[Mistake]:
    if run.pools.mode != "off" and run.pools.update_ranks:
        yield Mistake(
            "pools.mode", run.pools.mode, "cannot be trained: phase separation is not built yet",
            'use "off" with update_ranks = 0, or --dry-run to see the layout',
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
    validation_has_documents,
    bytes_fit_the_vocabulary,
    pools_have_ranks,
)
REFUSALS: tuple[Rule, ...] = (no_pipeline_yet, sequence_parallel_is_on, no_pools_yet)
