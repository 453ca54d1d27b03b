"""DeepSpeed universal: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, by name, for any DP, TP and PP.

FP32 is all it holds: 16-bit weights beside their masters are left out, DeepSpeed rounds them again. The parameter
groups' hyper-parameters stay those of the run that loads it. Layout of deepspeed 0.14 to 0.19.8.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

from diag.checkpoints.convert.archive import add_archive
from diag.checkpoints.convert.contents import Contents, Entry
from diag.checkpoints.convert.mapping import Family
from diag.checkpoints.convert.pickles import Stored, size
from diag.checkpoints.convert.plan import Plan, all_of
from diag.checkpoints.convert.recipe import Recipe
from diag.checkpoints.convert.targets import Options
from diag.checkpoints.convert.targets.dcp import others
from diag.errors import ArtefactError

NAME = "universal"
#: DeepSpeed pairs its parameter groups with these; empty ones change nothing.
_GROUPS = 64
#: NAME_MAX of the usual file systems, in bytes.
_LONGEST = 255


def plan(contents: Contents, entries: dict[str, Entry], family: Family | None, options: Options) -> Plan:
    """Raises `ArtefactError` for weights that are not FP32 and have no FP32 master."""
    out = Plan(home=f"global_step{contents.step or 0}_universal")
    masters(entries, out, "universal")
    for entry in entries.values():
        _refuse_as_folder(entry.name)
        states: dict[str, Recipe | None] = {"fp32": entry.main}
        states |= {k: r for k, r in entry.states.items() if k not in ("weight", "master")} | {"step": entry.step}
        for state, recipe in states.items():
            if recipe is None:
                continue
            tensor = stored(recipe, f"{entry.name}.{state}")
            value: Any = tensor if state == "step" else {"cat_dim": 0, "param": tensor}
            add_archive(out.file(f"zero/{entry.name}/{state}.pt"), value)
    shared: dict[str, Any] = {"dynamic_loss_scale": False, "overflow": False, "partition_count": [1],
                              "ds_version": "0.19.8", "param_groups": [{} for _ in range(_GROUPS)]}
    add_archive(out.file("zero/optimizer_state.pt"), shared)
    add_archive(out.file("mp_rank_00_model_states.pt"), model_states(contents, list(entries.values()), options, {}) | {
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}})
    others(contents, out)
    out.mark("latest_universal", f"{out.home}".encode(), at_root=True)
    out.notes.append(f"load it with load_universal_checkpoint and tag {out.home}")
    return out


def _refuse_as_folder(name: str) -> None:
    """Raises `ArtefactError` for a parameter that cannot give a folder its name, which is how the format names it."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(os.fsencode(name)) > _LONGEST:
        raise ArtefactError(f"{name[:80]!r}: universal keeps a parameter in a folder of its name, and no folder can "
                            "have this one; choose another format")


def stored(recipe: Recipe, label: str) -> Stored:
    """The whole of a recipe as a tensor of an archive."""
    return Stored(recipe.dtype, recipe.shape, [all_of(recipe)], recipe.nbytes, label)


def masters(entries: dict[str, Entry], out: Plan, target: str, *, keeps_weights: bool = False) -> None:
    """Every parameter must have FP32 values; says that 16-bit weights stay behind. Raises `ArtefactError`."""
    rounded = 0
    for entry in entries.values():
        if entry.main.dtype != "float32" and not entry.buffer:
            raise ArtefactError(f"{entry.name}: is {entry.main.dtype} and the source has no FP32 master of it, which "
                                f"{target} needs; a conversion would be arithmetic, which is not done here")
        rounded += entry.weight.dtype != entry.main.dtype
    if rounded and not keeps_weights:
        out.dropped.append(f"the 16-bit weights of {rounded:,} parameters: {target} holds FP32, they are rounded again "
                           "when it is loaded")


def model_states(contents: Contents, entries: list[Entry], options: Options, module: dict[str, Any]) -> dict[str, Any]:
    """What `mp_rank_MM_model_states.pt` holds beside the module, with the keys that DeepSpeed asks for."""
    return {
        "module": OrderedDict(module), "buffer_names": [e.name for e in entries if e.buffer], "optimizer": None,
        "param_shapes": [OrderedDict((e.name, size(e.main.shape)) for e in entries if not e.buffer)],
        "frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None, "lr_scheduler": None,
        "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": [], "skipped_steps": 0,
        "global_steps": contents.step or 0, "global_samples": contents.consumed or 0, "dp_world_size": options.dp,
        "mp_world_size": options.tp, "ds_config": {}, "ds_version": "0.19.8",
    }
