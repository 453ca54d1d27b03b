"""What a run will look like, before any process starts: groups with their ranks, batch, policies and parameter counts.

`as_json` is documented in docs/train.md and is a public interface; `as_text` is for people and may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diag.pools.ratio import split_words
from pdtrain.config.resolved import Resolved, rebalance_window
from pdtrain.config.schema import MODULES
from pdtrain.parallel.layout import Layout
from pdtrain.plan.parameters import Parameters, count
from pdtrain.pools.plan import gradient_bytes
from pdtrain.pools.regroup import splits

SCHEMA = "pdtrain.dryrun/1"
#: Steps and splits that are written out for people.
MOST_SHOWN = 10


def as_json(resolved: Resolved, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Everything resolved, with full rank lists and full digits."""
    layout, counted = Layout.from_run(resolved.run), count(resolved.run.model)
    return {
        "schema": SCHEMA,
        "world": resolved.world,
        "ranks": resolved.ranks,
        "update_ranks": resolved.update_ranks,
        "axes": layout.axes,
        "families": layout.families(),
        "groups": layout.groups(),
        "batch": {
            "micro_batch": resolved.micro_batch,
            "accumulation": resolved.accumulation,
            "data_parallel": resolved.dp,
            "train_batch": resolved.train_batch,
            "tokens_per_step": resolved.tokens_per_step,
        },
        "modules": {row: _row(resolved, counted, row) for row in MODULES},
        "parameters": {
            "total": counted.total,
            "trained": counted.trained,
            "routing_bias": counted.routing_bias,
            "activated": counted.activated,
            "activated_convention": counted.convention,
            "activated_with_embedding": counted.activated_with_embedding,
        },
        "pools": pools_as_json(resolved),
        "warnings": list(warnings),
    }


def pools_as_json(resolved: Resolved) -> dict[str, Any] | None:
    """What the pools will hold and exchange; None without them. Bytes are of all ranks of a pool, per step."""
    settings = resolved.run.pools
    if not resolved.update_ranks:
        return None
    counted = count(resolved.run.model)
    trained = counted.trained
    muon = sum(row.total for name, row in counted.rows.items() if resolved.muon(name, 2))
    each = settings.mode != "sync" and settings.granularity == "micro_batch"
    item = 4 if settings.payload == "fp32" else 2
    up = gradient_bytes(trained, item, settings.top_k)
    return {
        "mode": settings.mode,
        "compute": [0, resolved.ranks - 1],
        "update": [resolved.ranks, resolved.world - 1],
        "payload": settings.payload,
        "staleness": resolved.staleness,
        "state_bytes_per_update_rank": (12 * trained - 4 * muon) // resolved.update_ranks,
        "bytes_up": up * (resolved.accumulation if each else 1),
        "bytes_down": item * trained,
        "rebalance": _rebalance(resolved),
    }


def _rebalance(resolved: Resolved) -> dict[str, Any]:
    """When the split of the ranks is looked at, and which splits layout and batch allow; empty lists when it is not."""
    mode, window = resolved.run.pools.rebalance, rebalance_window(resolved.run)
    steps = range(window, resolved.run.train.steps, window) if mode != "off" else range(0)
    return {"mode": mode, "after_steps": list(steps), "splits": [list(split) for split in splits(resolved.run)]}


def _pools(resolved: Resolved) -> Iterator[str]:
    found = pools_as_json(resolved)
    if found is None:
        return
    first, last = found["update"]
    members = f"rank {first}" if first == last else f"ranks {first}-{last}"
    yield (
        f"pools: {found['mode']}; forward and backward on ranks 0-{resolved.ranks - 1}, optimizer state and step on "
        f"{members}: about {found['state_bytes_per_update_rank'] / 1e6:,.1f} MB of FP32 masters and moments each"
    )
    yield (
        f"  per step {found['bytes_up'] / 1e6:,.1f} MB of gradients up and {found['bytes_down'] / 1e6:,.1f} MB of "
        f"weights down ({found['payload']}), over all ranks of a pool, whatever the DP degree"
    )
    again = found["rebalance"]
    if again["mode"] != "off":
        does = "starts the ranks again with another split" if again["mode"] == "auto" else "says which split is better"
        when = ", ".join(f"{step:,}" for step in again["after_steps"][:MOST_SHOWN])
        when = f"after steps {when}{', ...' if len(again['after_steps']) > MOST_SHOWN else ''}" if when else "never"
        others = [split_words((c, u)) for c, u in again["splits"] if (c, u) != (resolved.ranks, resolved.update_ranks)]
        what = f"splits that layout and batch allow: {', '.join(others[:MOST_SHOWN])}" if others else \
            "layout and batch allow no other split"
        yield (
            f"  rebalance: {again['mode']}: looks at the busy shares {when}, and {does} where that is worth it; {what}"
            f"{', ...' if len(others) > MOST_SHOWN else ''}"
        )


def _row(resolved: Resolved, counted: Parameters, row: str) -> dict[str, Any]:
    return {
        "tensor": resolved.tensor(row),
        "expert": resolved.expert(row),
        "dtype": resolved.dtype(row),
        "recompute": resolved.policy(row).recompute,
        "lr": resolved.lr(row),
        "weight_decay": resolved.weight_decay(row),
        "clip": resolved.clip(row),
        "checkpoint_every": resolved.checkpoint_every(row),
        "parameters": counted.rows[row].total,
        "activated": counted.rows[row].activated,
    }


def as_text(resolved: Resolved) -> str:
    """The same for people."""
    parts = [Layout.from_run(resolved.run).text(), *_batch(resolved), *_pools(resolved)]
    return "\n".join([*parts, *_modules(resolved), *_counts(resolved)])


def _batch(resolved: Resolved) -> Iterator[str]:
    yield (
        f"batch: {resolved.train_batch:,} sequences of {resolved.run.train.sequence_length:,}"
        f" = {resolved.tokens_per_step:,} tokens per step"
        f" = micro-batch {resolved.micro_batch} x accumulation {resolved.accumulation} x DP {resolved.dp}"
    )


def _modules(resolved: Resolved) -> Iterator[str]:
    counted = count(resolved.run.model)
    yield (
        f"  {'module':<14}{'layout':<18}{'dtype':<6}{'recompute':<10}{'lr':>8} {'decay':>6} {'clip':>5}"
        f" {'save every':>10} {'parameters':>19} {'activated':>16}"
    )
    for row in MODULES:
        policy, clip, every = resolved.policy(row), resolved.clip(row), resolved.checkpoint_every(row)
        yield (
            f"  {row:<14}{_placement(resolved, row):<18}{resolved.dtype(row):<6}{policy.recompute:<10}"
            f"{resolved.lr(row):>8.2g} {resolved.weight_decay(row):>6.2g} {'-' if clip is None else f'{clip:g}':>5}"
            f" {every or 'at end':>10} {counted.rows[row].total:>19,} {counted.rows[row].activated:>16,}"
        )


def _placement(resolved: Resolved, row: str) -> str:
    if row == "experts":
        return f"EP {resolved.ep} x EDP {resolved.edp}"
    if row in ("router", "shared_expert"):
        return f"DP {resolved.ranks // resolved.pipeline}"
    return f"TP {resolved.tp} x DP {resolved.dp}" if resolved.tensor(row) > 1 else f"DP {resolved.dp}"


def _counts(resolved: Resolved) -> Iterator[str]:
    counted = count(resolved.run.model)
    bias = counted.routing_bias
    split = f" = {counted.trained:,} trained + {bias:,} routing-bias entries" if bias else ""
    yield f"parameters: {counted.total:,}{split}"
    yield f"activated: {counted.activated:,} ({counted.convention}); {counted.activated_with_embedding:,} with it"
