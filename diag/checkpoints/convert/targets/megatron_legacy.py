"""Megatron's `iter_<N>/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, one folder per model-parallel rank.

Layers count from zero in every pipeline stage, experts in every expert-parallel rank; linear_fc1 of a tensor-parallel
rank holds its part of both halves. Only weights go over: the optimizer of this format is kept by the position of its
parameters, which depends on the model's code; `--to megatron` carries it. Format 3.0, from its description.
"""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from typing import Any

from diag.checkpoints.convert.archive import add_archive
from diag.checkpoints.convert.contents import Contents, Entry
from diag.checkpoints.convert.layout import axes_of, stage_of, stages, tensor_slice
from diag.checkpoints.convert.mapping import Family
from diag.checkpoints.convert.plan import Plan
from diag.checkpoints.convert.targets import Options
from diag.checkpoints.convert.targets.dcp import others
from diag.checkpoints.convert.targets.megatron import arguments
from diag.checkpoints.convert.targets.universal import stored
from diag.errors import UsageError

NAME = "megatron-legacy"


def plan(contents: Contents, entries: dict[str, Entry], family: Family | None, options: Options) -> Plan:
    """Raises `UsageError` when a degree does not divide what it cuts."""
    if family is None:
        raise UsageError("--to megatron-legacy: the source's names are of no known family; name one with --from-names")
    out = Plan(home=f"iter_{contents.step or 0:07d}")
    by_layer = stages(contents, entries, family, options.pp)
    per_stage = max(len(by_layer) // options.pp, 1)
    experts = 1 + max((axes.expert for name in entries
                       if (axes := axes_of(name, family, contents)).expert is not None), default=-1)
    if experts % options.ep:
        raise UsageError(f"--ep {options.ep}: does not divide {experts} experts")
    local = max(experts // options.ep, 1)
    for tp in range(options.tp):
        for pp in range(options.pp):
            for ep in range(options.ep):
                model: OrderedDict[str, Any] = OrderedDict()
                for entry in entries.values():
                    axes = axes_of(entry.name, family, contents)
                    if stage_of(entry.name, axes, by_layer, options.pp) != pp:
                        continue
                    if axes.expert is not None and axes.expert // local != ep:
                        continue
                    name = entry.name
                    if axes.expert is not None:
                        name = re.sub(r"(local_experts\.)\d+", rf"\g<1>{axes.expert % local}", name)
                    if axes.layer is not None:
                        name = re.sub(r"(layers\.)\d+", rf"\g<1>{axes.layer % per_stage}", name, count=1)
                    recipe = tensor_slice(entry.name, entry.weight, axes, options.tp, tp)
                    model[name] = stored(recipe, f"{entry.name} of rank {tp}, {pp}, {ep}")
                folder = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if options.pp > 1 else "") + (
                    f"_{ep:03d}" if options.ep > 1 else "")
                add_archive(out.file(f"{folder}/model_optim_rng.pt"), {
                    "args": argparse.Namespace(**arguments(contents, options)), "checkpoint_version": 3.0,
                    "iteration": contents.step or 0, "model": model})
    if contents.has_optimizer():
        out.dropped.append("the optimizer's states: this format keeps them by position, which the model's code "
                           "decides; --to megatron carries them")
    others(contents, out)
    out.mark("latest_checkpointed_iteration.txt", str(contents.step or 0).encode(), at_root=True)
    return out
