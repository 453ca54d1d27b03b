"""The small model with the same skeleton, and a one-node configuration that rehearses the large job.

Kept: attention kind and ratios, top-k, shared experts, group-limited routing, dense layers first, score function,
loss coefficients, precision, recompute. Shrunk: width, depth, number of experts, vocabulary, batch, degrees. The
stand-in for the 671B shape: hidden 7168 -> 2048, layers 61 -> 16, experts 256 -> 64.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pdtrain.config.mistakes import divisors
from pdtrain.config.resolved import fill
from pdtrain.config.rules import check, refusals
from pdtrain.config.schema import Run
from pdtrain.plan.extras import extras_of, plain
from pdtrain.plan.parameters import count

#: Targets of the stand-in: what is larger comes down to these.
HIDDEN, LAYERS, EXPERTS, HEAD_TOTAL = 2048, 16, 64, 2048
#: Devices of the node that rehearses it.
NODE = 8


def shrink(run: Run, devices: int = NODE) -> Run:
    """`run` as a small model on one node of `devices`, trainable today."""
    run = plain(run)
    small = msgspec.structs.replace(run, model=_model(run))
    tensor = 2 if run.modules.attention.tensor > 1 or devices >= 4 else 1
    tensor = max(d for d in divisors(devices) if d <= tensor and small.model.heads % d == 0
                 and small.model.kv_heads % d == 0)  # fmt: skip
    expert = max(d for d in divisors(devices) if small.model.moe.experts % d == 0 and d <= max(2, devices // 2))
    modules = msgspec.structs.replace(
        run.modules,
        attention=msgspec.structs.replace(run.modules.attention, tensor=tensor),
        experts=msgspec.structs.replace(run.modules.experts, expert=expert),
    )
    parallel = msgspec.structs.replace(run.parallel, ranks=devices, pipeline=1)
    length = min(run.train.sequence_length, 2048)
    train = msgspec.structs.replace(
        run.train, steps=min(run.train.steps, 200), sequence_length=length, micro_batch=1, accumulation=2,
        train_batch=None, log_every=1, val_every=50,
    )  # fmt: skip
    optimizer = msgspec.structs.replace(run.optimizer, warmup_steps=min(20, run.optimizer.warmup_steps))
    checkpoint = msgspec.structs.replace(run.checkpoint, every=50)
    rows = {name: getattr(modules, name) for name in modules.__struct_fields__}
    rows = {name: msgspec.structs.replace(row, checkpoint_every=100 if row.checkpoint_every else None)
            for name, row in rows.items()}  # fmt: skip
    modules = msgspec.structs.replace(modules, **rows)
    return fill(
        msgspec.structs.replace(
            small, modules=modules, parallel=parallel, train=train, optimizer=optimizer, checkpoint=checkpoint,
            pools=msgspec.structs.replace(run.pools, mode="off", update_ranks=0),
        )  # fmt: skip
    )


def _model(run: Run):  # type: ignore[no-untyped-def]
    model, moe = run.model, run.model.moe
    scale = min(1.0, HIDDEN / model.hidden)
    heads = max(1, round(model.heads * scale))
    heads = next(h for h in range(heads, 0, -1) if h & (h - 1) == 0)
    # at least two key/value heads where there were, so that tensor parallelism can be rehearsed
    kv_heads = min(heads, max(min(2, model.kv_heads), round(model.kv_heads * scale)))
    kv_heads = next(k for k in range(kv_heads, 0, -1) if heads % k == 0)
    experts = min(moe.experts, EXPERTS)
    layers = min(model.layers, LAYERS)

    def width(value: int, unit: int = 64) -> int:
        return max(unit, round(value * scale / unit) * unit) if scale < 1 else value

    dense = model.dense_layers
    if layers < model.layers:
        some = min(dense, max(1, round(dense * layers / model.layers))) if dense else 0
        dense = layers if dense == model.layers else some
    mla = model.mla
    if model.attention == "mla":
        mla = msgspec.structs.replace(
            mla, q_lora_rank=width(mla.q_lora_rank) if mla.q_lora_rank else 0, kv_lora_rank=width(mla.kv_lora_rank)
        )
    groups = moe.groups if experts % moe.groups == 0 and experts // moe.groups * moe.top_groups >= moe.top_k else 1
    small = msgspec.structs.replace(
        moe, experts=experts, expert_hidden=width(moe.expert_hidden), groups=groups,
        top_groups=moe.top_groups if groups > 1 else 1, top_k=min(moe.top_k, experts),
    )  # fmt: skip
    vocabulary = min(model.vocab_size, 32_768)
    return msgspec.structs.replace(
        model, hidden=width(model.hidden), heads=heads, kv_heads=kv_heads, layers=layers, dense_layers=dense,
        ffn_hidden=width(model.ffn_hidden), vocab_size=vocabulary, mla=mla, moe=small,
    )  # fmt: skip


def comment(run: Run, small: Run, name: str) -> Iterator[str]:
    """What was kept and what was shrunk, as TOML comments above the configuration."""
    before, after = run.model, small.model
    yield f"# Rehearsal of {name} on one node: the same skeleton, small. Made by `pdtrain plan shrink`."
    yield f"# hidden {before.hidden} -> {after.hidden}, layers {before.layers} -> {after.layers} "\
          f"({after.dense_layers} dense), experts {before.moe.experts} -> {after.moe.experts}, "\
          f"top-{after.moe.top_k} and {after.moe.shared_experts} shared kept"  # fmt: skip
    yield f"# parameters {count(before).total:,} -> {count(after).total:,}"
    yield (
        f"# {small.parallel.ranks} ranks: TP{small.modules.attention.tensor}, EP{small.modules.experts.expert}; "
        "proves data and state sharding, and checkpoints across layouts"
    )
    if left := extras_of(before).named():
        yield f"# left out, this trainer's model has none: {', '.join(left)}"
    if run.parallel.pipeline > 1:
        yield "# pipeline stages are left out: planned today, not trained"
    for mistake in [*check(small), *refusals(small)]:
        yield f"# {'warning' if mistake.warning else 'mistake'}: {mistake.line()}"
