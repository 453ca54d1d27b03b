"""OLMo-core: `stepN/model_and_optim/` (DCP), `stepN/train/rank<R>.pt`, `stepN/.metadata.json` written last."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from diag.checkpoints.canonical import Checkpoint
from diag.checkpoints.formats import dcp
from diag.checkpoints.formats.pickled import add_tree, number, open_file
from diag.checkpoints.steps import step_of_name

if TYPE_CHECKING:
    from diag.checkpoints.formats import Place

NAME = "olmo"
MARK = ".metadata.json"
PART = "model_and_optim"
_RANK = re.compile(r"^train/rank(?P<rank>\d+)\.pt$")


def sniff(place: Place) -> bool:
    return place.has(PART) and (place.folder / PART).is_dir()


def read(place: Place) -> Checkpoint:
    """Raises `ArtefactError` when the metadata of the DCP part cannot be read and nothing else is there."""
    folder = place.inside
    checkpoint = Checkpoint(folder, NAME, committed=True, commit_mark=MARK)
    checkpoint.meta.framework, checkpoint.meta.step = "olmo-core", step_of_name(place.folder.name)
    if place.has(MARK):
        checkpoint.files.add(MARK)
        try:
            said = json.loads(folder.bytes(MARK))
            checkpoint.meta.version = str(said.get("version", ""))
        except (ValueError, AttributeError, RecursionError):
            checkpoint.problem("metadata", f"{MARK} is damaged", file=MARK)
    else:
        checkpoint.committed = False
        checkpoint.problem("commit mark", f"{MARK} is missing: the save was not finished", file=MARK,
                           cause="ckpt_incomplete")
    has = folder.size(f"{PART}/{dcp.METADATA}") is not None
    dcp.read_into(checkpoint, f"{PART}/", dcp.METADATA if has else None)
    ranks: set[int] = set()
    for name in folder.names("train"):
        match = _RANK.match(name)
        if match is None:
            continue
        rank = int(match["rank"])
        ranks.add(rank)
        archive = open_file(checkpoint, name)
        if archive is None:
            continue
        value = archive.value if isinstance(archive.value, dict) else {}
        add_tree(checkpoint, archive, value, f"train.rank{rank}", rank)
        if "rng" in value:
            checkpoint.meta.rng.add(rank)
        if "data_loader" in value:
            checkpoint.meta.loader.add(rank)
        step = number(value.get("global_step"))
        checkpoint.meta.step = step if step is not None else checkpoint.meta.step
        world = number(value.get("world_size"))
        checkpoint.meta.world = world if world is not None else checkpoint.meta.world
    for tensor in checkpoint.tensors.values():
        if tensor.name.startswith("train.rank"):
            tensor.role = "state"
    count = checkpoint.meta.world or (max(ranks) + 1 if ranks else 0)
    checkpoint.expected |= {f"train/rank{rank}.pt" for rank in range(count)}
    return checkpoint
