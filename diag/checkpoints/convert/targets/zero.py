"""DeepSpeed ZeRO-1 and 2: `mp_rank_MM_model_states.pt`, `zero_pp_rank_D_mp_rank_MM_optim_states.pt`, `latest`.

One parameter group: all parameters in their order as one flat FP32 vector, padded to twice the data-parallel ranks and
cut into equal pieces (deepspeed 0.19.8, stage_1_and_2.py), moments alike. DeepSpeed restores by position, not by name:
a model whose parameters come in another order, or an optimizer with several groups, wants `--to universal` instead.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from diag.checkpoints.convert.archive import add_archive
from diag.checkpoints.convert.contents import Contents, Entry
from diag.checkpoints.convert.layout import axes_of, tensor_slice
from diag.checkpoints.convert.mapping import Family
from diag.checkpoints.convert.pickles import Global, New, Stored
from diag.checkpoints.convert.plan import Plan, Segment, Span, Zeros, all_of
from diag.checkpoints.convert.recipe import Recipe
from diag.checkpoints.convert.targets import Options
from diag.checkpoints.convert.targets.dcp import others
from diag.checkpoints.convert.targets.universal import masters, model_states, stored
from diag.errors import ArtefactError, UsageError

NAME = "zero"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")


def plan(contents: Contents, entries: dict[str, Entry], family: Family | None, options: Options) -> Plan:
    """Raises `ArtefactError` (no FP32, moments of some parameters only), `UsageError` (--tp without a known split)."""
    out = Plan(home=f"global_step{contents.step or 0}")
    masters(entries, out, options.to, keeps_weights=True)
    for entry in entries.values():
        left = entry.states.keys() - {"weight", "master", *_MOMENTS}
        if left:
            out.dropped.append(f"{entry.name}: its state {', '.join(sorted(left))}")
    trained = [e for e in entries.values() if not e.buffer]
    have = [e for e in trained if all(m in e.states for m in _MOMENTS)]
    if have and len(have) < len(trained):
        lacking = next(e for e in trained if e not in have)
        raise ArtefactError(f"{lacking.name}: has no moments and other parameters have; ZeRO's flat vectors need all "
                            "or none")
    half = any(e.weight.dtype == "bfloat16" for e in trained)
    for rank in range(options.tp):
        own = [_sliced(e, family, contents, options.tp, rank) for e in entries.values()]
        module = OrderedDict((e.name, stored(e.weight, e.name)) for e in own)
        name = f"mp_rank_{rank:02d}_model_states.pt"
        add_archive(out.file(name), model_states(contents, own, options, module))
        _partitions(out, contents, [e for e in own if not e.buffer], options, rank, "bf16_" if half else "", bool(have))
    if not have:
        out.notes.append("the source has no moments: load with load_optimizer_states=False")
    others(contents, out)
    out.mark("latest", out.home.encode(), at_root=True)
    out.notes.append("DeepSpeed restores ZeRO by the order of the parameters in one group")
    return out


def _sliced(entry: Entry, family: Family | None, contents: Contents, tp: int, rank: int) -> Entry:
    if tp == 1:
        return entry
    if family is None or not any(row.split is not None for row in family.rows):
        raise UsageError("--tp: how tensor parallelism cuts these names is not known; give --names megatron-legacy, or "
                         "a --mapping with split")
    axes = axes_of(entry.name, family, contents)
    states = {k: tensor_slice(entry.name, r, axes, tp, rank) for k, r in entry.states.items()}
    return Entry(entry.name, states, entry.step, entry.buffer)


def _partitions(out: Plan, contents: Contents, entries: list[Entry], options: Options, mp: int, prefix: str,
                moments: bool) -> None:
    total = sum(e.main.elements for e in entries)
    aligned = -(-total // (2 * options.dp)) * 2 * options.dp
    length = aligned // options.dp
    steps = {contents.source.read(e.step).tobytes() for e in entries if e.step is not None}
    if len(steps) > 1:
        raise ArtefactError("the parameters have taken different numbers of optimizer steps; ZeRO keeps one")
    step = next((e.step for e in entries if e.step is not None), None)
    for rank in range(options.dp):
        low, high = min(rank * length, total), min((rank + 1) * length, total)
        group: dict[str, Any] = {}
        if moments:
            if step is not None:
                group["step"] = Stored(step.dtype, (), [all_of(step)], step.nbytes, f"step of rank {rank}")
            for key in _MOMENTS:
                group[key] = _flat([e.states[key] for e in entries], low, high, length, f"{key} of rank {rank}")
        state = {
            "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0,
            "base_optimizer_state": [group], "base_optimizer_state_step": contents.step or 0,
            "single_partition_of_fp32_groups": [_flat([e.main for e in entries], low, high, length,
                                                     f"fp32 of rank {rank}")],
            "zero_stage": int(options.to[-1]), "group_paddings": [0],
            "partition_count": [options.dp], "ds_version": "0.19.8",
            "param_slice_mappings": [_mapping(entries, low, high)],
        }
        file = out.file(f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
        add_archive(file, {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"})


def _flat(recipes: list[Recipe], low: int, high: int, length: int, label: str) -> Stored:
    """Elements low..high of the recipes one after the other, padded to `length`.

    The padding is written out: told of one, DeepSpeed adds it to every tensor of the state, the step count included.
    """
    segments: list[Segment] = []
    at = 0
    for recipe in recipes:
        first, last = max(low - at, 0), min(high - at, recipe.elements)
        if first < last:
            segments.append(Span(recipe, (0,) * len(recipe.shape), recipe.shape, first, last))
        at += recipe.elements
    if length > high - low:
        segments.append(Zeros(4 * (length - high + low)))
    return Stored("float32", (length,), segments, 4 * length, label)


def _mapping(entries: list[Entry], low: int, high: int) -> OrderedDict[str, Any]:
    """name -> fragment_address(numel, start) of what lies in this partition."""
    found: OrderedDict[str, Any] = OrderedDict()
    at = 0
    for entry in entries:
        first, last = max(low, at), min(high, at + entry.main.elements)
        if first < last:
            found[entry.name] = New(_ADDRESS, {"numel": last - first, "start": first - low})
        at += entry.main.elements
    return found
