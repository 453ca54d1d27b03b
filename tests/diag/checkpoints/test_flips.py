"""One byte changed anywhere: whatever changes a tensor or the structure is seen by --deep.

What verify passes is loaded with the real library: it must give every tensor as it was. (A flip in the padding of an
archive, or in a date field, changes nothing.)
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from diag.checkpoints.answer import verified
from diag.errors import PdtrainError
from tests.diag.checkpoints import sound

#: Flips in an ordinary run; PDTRAIN_FLIPS=1000 for the whole of it.
FLIPS = int(os.environ.get("PDTRAIN_FLIPS", "60"))


def _load_dcp(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    flat: dict[str, Any] = {}

    def walk(value: Any, prefix: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{prefix}/{key}")
        else:
            flat[prefix] = value

    walk(state, "")
    return flat


def _load_safetensors(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return x.dtype == y.dtype and x.shape == y.shape and torch.equal(
                x.contiguous().reshape(-1).view(torch.uint8), y.contiguous().reshape(-1).view(torch.uint8))
        return type(x) is type(y) and x == y

    return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["titan", "sharded"])
def test_every_flip_that_matters_is_caught(name: str, tmp_path: Path) -> None:
    folder = sound.make(name, tmp_path / "sound")
    load = _load_dcp if name == "titan" else _load_safetensors
    truth = load(folder)
    files = [f for f in sorted(folder.iterdir()) if f.is_file()]
    # Half of the flips over all bytes, the rest over small files and the ends of large ones, where structure lies.
    dice = random.Random(0)
    missed, harmless = [], 0
    for number in range(FLIPS):
        file = dice.choice(files) if number % 2 else dice.choices(files, [f.stat().st_size for f in files])[0]
        size = file.stat().st_size
        at = dice.randrange(size) if number % 4 < 3 else dice.choice([dice.randrange(min(4096, size)),
                                                                      size - 1 - dice.randrange(min(4096, size))])
        old = file.read_bytes()
        file.write_bytes(old[:at] + bytes([old[at] ^ (1 << dice.randrange(8))]) + old[at + 1 :])
        try:
            report = verified(str(folder), deep=True)
            caught = report.exit_status() != 0
        except PdtrainError:
            caught = True
        if not caught:
            try:
                harmless += (same := _same(truth, load(folder)))
            except (Exception, CheckpointException):  # it does not load, and verify said that it is sound
                same = False
            if not same:
                missed.append(f"{file.name}@{at}: {old[max(0, at - 12) : at + 12]!r}")
        file.write_bytes(old)
    assert not missed, missed
    assert harmless < FLIPS / 2  # most bytes are data
    shutil.rmtree(folder)
