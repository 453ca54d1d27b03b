"""Megatron-core torch_dist: `iter_<N>/` with DCP files, `common.pt` and `metadata.json`, and the tracker beside.

Weights lie under the model's own keys, optimizer states in model space (`optimizer.state.exp_avg.<key>`, what
Megatron calls fully reshardable), so any TP, PP and EP loads it; `--tp --pp --ep` decide how the chunks are cut and in
how many files they lie. The optimizer's parameter groups (learning rate and so on) and RNG states are not there: load
with `--no-load-rng`, and `--override-opt_param-scheduler` where the schedule must come from the arguments.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

from diag.checkpoints.convert.archive import add_archive
from diag.checkpoints.convert.contents import Contents, Entry
from diag.checkpoints.convert.layout import Axes, axes_of, stage_of, stages
from diag.checkpoints.convert.mapping import Family
from diag.checkpoints.convert.plan import Plan
from diag.checkpoints.convert.recipe import Ints, Recipe
from diag.checkpoints.convert.targets import Options
from diag.checkpoints.convert.targets.dcp import DcpWriter, others
from diag.errors import UsageError

NAME = "megatron"


def plan(contents: Contents, entries: dict[str, Entry], family: Family | None, options: Options) -> Plan:
    """Raises `UsageError` when a degree does not divide what it cuts."""
    if family is None:
        raise UsageError("--to megatron: the source's names are of no known family; name one with --from-names")
    out = Plan(home=f"iter_{contents.step or 0:07d}")
    by_layer = stages(contents, entries, family, options.pp)
    writer = DcpWriter(out, options.tp * options.pp * options.ep)
    optimizer = contents.has_optimizer()
    for entry in entries.values():
        axes = axes_of(entry.name, family, contents)
        states = dict(entry.states)
        states["weight"] = entry.weight
        if optimizer and not entry.buffer:
            states["master"] = entry.main  # Megatron asks for it, whatever the weights' type
        elif "master" in states and not optimizer:
            del states["master"]
        for state, recipe in states.items():
            key = family.key(entry.name, state)
            writer.tensor(key, recipe, _cuts(entry.name, recipe, axes, by_layer, options))
        if entry.step is not None:
            writer.tensor(family.key(entry.name, "step"), entry.step, [(0, (), ())] if not entry.step.shape else None)
    add_archive(out.file("common.pt"), {
        "args": argparse.Namespace(**arguments(contents, options)), "checkpoint_version": 3.0,
        "iteration": contents.step or 0,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    })
    others(contents, out)
    if optimizer:
        out.dropped.append("param_groups (learning rate, betas, weight decay): they come from Megatron's arguments")
    writer.metadata(".metadata")
    out.mark("metadata.json", json.dumps({
        "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1}).encode())
    out.mark("latest_checkpointed_iteration.txt", str(contents.step or 0).encode(), at_root=True)
    return out


def arguments(contents: Contents, options: Options) -> dict[str, Any]:
    """The arguments that Megatron compares or takes over from a checkpoint, as far as they are known."""
    facts = contents.facts
    known = {"num_layers": facts.get("layers"), "hidden_size": facts.get("hidden"),
             "num_attention_heads": facts.get("heads"), "num_query_groups": facts.get("kv_heads"),
             "kv_channels": facts.get("head_dim"), "consumed_train_samples": contents.consumed,
             "iteration": contents.step or 0, "swiglu": True}  # the tables of Megatron's names are of gated FFNs
    degrees = {"tensor_model_parallel_size": options.tp, "pipeline_model_parallel_size": options.pp,
               "expert_model_parallel_size": options.ep}
    return {k: v for k, v in known.items() if v is not None} | degrees


def _cuts(name: str, recipe: Recipe, axes: Axes, by_layer: dict[int, int],
          options: Options) -> list[tuple[int, Ints, Ints]]:
    """(rank, offsets, sizes) of a tensor's chunks: one per layer, expert-parallel and tensor-parallel rank."""
    shape = recipe.shape
    counts = [1] * len(shape)
    if axes.layers is not None:
        counts[0] = shape[0]
    if axes.experts is not None:
        _divides(name, "--ep", options.ep, shape[axes.experts])
        counts[axes.experts] = options.ep
    if axes.split is not None and axes.split < len(shape):
        _divides(name, "--tp", options.tp * axes.pieces, shape[axes.split])
        counts[axes.split] = options.tp * axes.pieces
    found = []
    for index in itertools.product(*map(range, counts)):
        sizes = tuple(n // c for n, c in zip(shape, counts))
        layer = index[0] if axes.layers is not None else None
        pp = by_layer[layer] if layer is not None else stage_of(name, axes, by_layer, options.pp)
        ep = index[axes.experts] if axes.experts is not None else 0
        tp = index[axes.split] % options.tp if axes.split is not None and axes.split < len(shape) else 0
        rank = (pp * options.ep + ep) * options.tp + tp
        found.append((rank, tuple(i * n for i, n in zip(index, sizes)), sizes))
    return found


def _divides(name: str, option: str, degree: int, length: int) -> None:
    if length % degree:
        raise UsageError(f"{option}: {length} of {name} cannot be cut into {degree} equal parts")
