"""Megatron-core's torch_dist: DCP files, `metadata.json` {sharded_backend: "torch_dist"} and, mostly, `common.pt`.

Layers are stacked along axis 0 (`decoder.layers.mlp...` [layers, ...]) unless the model is not homogeneous, then they
are numbered; experts follow on the next axis. Objects that are kept per rank have names like `.../shard_0.1_2.4`: part
(0, 1) of (2, 4). Commit mark: `metadata.json`. Versions seen: megatron-core 0.5 to 0.16.1.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from diag.checkpoints.canonical import Checkpoint
from diag.checkpoints.formats import dcp
from diag.checkpoints.formats.pickled import add_tree, attributes, number, open_file
from diag.checkpoints.naming import is_rng
from diag.checkpoints.steps import step_of_name
from diag.errors import ArtefactError

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "megatron_dist"
MARK = "metadata.json"
_SHARDED = re.compile(r"^(?P<key>.+)/shard_(?P<index>[\d.]+)_(?P<total>[\d.]+)$")
_STACKED = re.compile(r"(?:^|\.)(?:decoder|encoder|transformer)\.layers\.(?!\d)")


def sniff(place: Place) -> bool:
    if place.has(MARK):
        return b"sharded_backend" in place.head(MARK)
    return place.has("common.pt") and (dcp.metadata_name(place) is not None or any(
        name.endswith(".distcp") for name in place.names))


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` for another backend than torch_dist, and when nothing can be read."""
    checkpoint = Checkpoint(place.inside, NAME, committed=True, commit_mark=MARK)
    meta = checkpoint.meta
    meta.framework, meta.step = "megatron", step_of_name(place.folder.name)
    _mark(checkpoint, place)
    dcp.read_into(checkpoint, "", dcp.metadata_name(place))
    if place.has("common.pt"):
        archive = open_file(checkpoint, "common.pt")
        if archive is not None:
            tensors = set(checkpoint.tensors)
            add_tree(checkpoint, archive, archive.value, "common")
            for name in checkpoint.tensors.keys() - tensors:
                checkpoint.tensors[name].role = "state"
            common = archive.value if isinstance(archive.value, dict) else {}
            step = number(common.get("iteration"))
            if step is not None and meta.step is not None and step != meta.step:
                checkpoint.problem("steps equal", f"common.pt says iteration {step:,}, the folder is "
                                                  f"{place.folder.name}",
                                   file="common.pt", cause="ckpt_bad_values")
            meta.step = step if step is not None else meta.step
            _args(checkpoint, attributes(common.get("args")))
    for tensor in checkpoint.tensors.values():
        if tensor.expert_axis is not None and _STACKED.search(tensor.fqn):
            tensor.expert_axis = 1
        if not tensor.shape and tensor.role == "parameter":
            tensor.role = "state"
    _objects(checkpoint)
    return checkpoint


def _args(checkpoint: Checkpoint, args: dict[str, object]) -> None:
    """Degrees and position out of the recorded arguments."""
    meta = checkpoint.meta
    meta.args.update({k: v for k, v in args.items() if isinstance(v, (int, float, str, bool, type(None)))})
    for key, axis in (("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp"),
                      ("expert_model_parallel_size", "ep"), ("context_parallel_size", "cp"), ("data_parallel_size",
                                                                                              "dp")):
        size = number(args.get(key))
        if size is not None:
            meta.layout[axis] = size
    meta.world = number(args.get("world_size"))
    meta.consumed = number(args.get("consumed_train_samples"))


def _mark(checkpoint: Checkpoint, place: Place) -> None:
    if not place.has(MARK):
        checkpoint.committed = False
        checkpoint.problem("commit mark", f"{MARK} is missing: the save was not finished", file=MARK,
                           cause="ckpt_incomplete")
        return
    checkpoint.files.add(MARK)
    checkpoint.expected.add(MARK)
    try:
        said = json.loads(checkpoint.folder.bytes(MARK))
        backend = said["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        checkpoint.problem("metadata", f"{MARK} is damaged", file=MARK)
        return
    if backend not in ("torch_dist", "torch_dcp", "fsdp_dtensor"):
        raise ArtefactError(f"{MARK}: the backend is {backend!r}; only torch_dist is read here")
    if said.get("common_backend") == "torch":
        checkpoint.expected.add("common.pt")


def _objects(checkpoint: Checkpoint) -> None:
    """Every part of the objects that are kept in parts."""
    found: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = defaultdict(set)
    checkpoint.meta.rng.clear()
    for name in checkpoint.items:
        match = _SHARDED.match(name)
        if match is None:
            continue
        index, total = (tuple(int(n) for n in match[g].split(".") if n) for g in ("index", "total"))
        if len(index) == len(total) and all(i < t for i, t in zip(index, total)) and math.prod(total) < 1 << 20:
            found[match["key"], total].add(index)
    for (key, total), parts in found.items():
        missing = sorted(set(itertools.product(*map(range, total))) - parts)
        for part in missing[:20]:
            name = f"{key}/shard_{'.'.join(map(str, part))}_{'.'.join(map(str, total))}"
            checkpoint.problem("rng" if is_rng(key) else "every chunk has bytes", f"{name} is missing; the other "
                               f"{len(parts)} parts of {key} are there", file=dcp.METADATA, tensor=name,
                               cause="ckpt_missing_keys")
        if is_rng(key):
            checkpoint.meta.rng |= set(range(len(parts) + len(missing)))
