"""Rules on degrees, ranks and batch: what must divide what. Listed in `rules.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pdtrain.config.mistakes import NOTHING, Mistake, around, divisors
from pdtrain.config.resolved import TENSOR_ROWS, data_degree, stage_ranks
from pdtrain.config.schema import MODULES, MOST_RANKS, Run
from pdtrain.parallel.layout import Layout

#: Group families beyond which communicators contend: a field report, hence a warning.
MOST_FAMILIES = 3
#: Ranks of one NVLink domain on common hosts: TP beyond it crosses nodes at every layer.
MOST_TENSOR = 8
#: Largest expert-parallel group in field reports and in the DeepSeek-V3 report (arXiv 2412.19437, 3.2).
MOST_EXPERT = 64


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
    if ranks > MOST_RANKS:  # from --world; the key itself has this limit
        yield Mistake("parallel.ranks", ranks, "is out of range", f"expected at most {MOST_RANKS}")
        return
    tensor, expert = run.modules.attention.tensor, run.modules.experts.expert
    unit = pipeline * math.lcm(tensor, expert)
    near = around(ranks, unit)
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
            around(train.train_batch or 0, per_pass),
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
