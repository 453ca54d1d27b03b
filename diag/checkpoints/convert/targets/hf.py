"""Hugging Face safetensors: `model.safetensors`, or numbered files with `model.safetensors.index.json`.

Weights only is all that transformers reads. Optimizer states go into a folder `optimizer/` of the same form beside
them, which transformers does not look at and this converter reads back; `--weights-only` leaves them out.
"""

from __future__ import annotations

import json
import math

from diag.checkpoints.convert.contents import STATES_FOLDER, Contents, Entry
from diag.checkpoints.convert.mapping import Family
from diag.checkpoints.convert.plan import Plan, all_of
from diag.checkpoints.convert.recipe import Recipe
from diag.checkpoints.convert.targets import Options
from diag.checkpoints.convert.targets.dcp import others
from diag.checkpoints.dtypes import SAFETENSORS
from diag.errors import ArtefactError

NAME = "hf"
_NAMES = {ours: theirs for theirs, ours in SAFETENSORS.items()}


def plan(contents: Contents, entries: dict[str, Entry], family: Family | None, options: Options) -> Plan:
    """Raises `ArtefactError` for an element type that safetensors lacks."""
    out = Plan()
    weights = {entry.name: entry.weight for entry in entries.values()}
    states: dict[str, Recipe] = {}
    for entry in entries.values():
        for state, recipe in (*entry.states.items(), *((("step", entry.step),) if entry.step else ())):
            if state == "weight" or (state == "master" and "weight" not in entry.states):
                continue
            states[f"optimizer.state.{entry.name}.{state}"] = recipe
    _write(out, "", "model", weights, options.shard)
    if states:
        _write(out, f"{STATES_FOLDER}/", "optimizer", states, options.shard)
        out.carried.append(f"optimizer states in {STATES_FOLDER}/, which transformers does not read")
    others(contents, out)
    return out


def _write(out: Plan, folder: str, stem: str, tensors: dict[str, Recipe], limit: int) -> None:
    """Files of at most `limit` bytes of tensors each (one tensor at least), and their index when there are several."""
    groups: list[dict[str, Recipe]] = [{}]
    size = 0
    for name, recipe in tensors.items():
        if groups[-1] and size + recipe.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = recipe
        size += recipe.nbytes
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        file = out.file(folder + name)
        # larger elements first keep every tensor aligned to its own element, as the library does
        order = sorted(group.items(), key=lambda item: -_width(item[1]))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for key, recipe in order:
            if recipe.dtype not in _NAMES:
                raise ArtefactError(f"{key}: safetensors has no element type for {recipe.dtype}")
            header[key] = {"dtype": _NAMES[recipe.dtype], "shape": list(recipe.shape),
                           "data_offsets": [at, at + recipe.nbytes]}
            at += recipe.nbytes
            index[key] = name
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.raw(len(text).to_bytes(8, "little") + text)
        for key, recipe in order:
            file.add([all_of(recipe)], label=key)
    if len(groups) > 1:
        total = sum(recipe.nbytes for recipe in tensors.values())
        listing = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=2)
        out.mark(f"{folder}{stem}.safetensors.index.json", listing.encode())


def _width(recipe: Recipe) -> int:
    return recipe.nbytes // max(math.prod(recipe.shape), 1)
