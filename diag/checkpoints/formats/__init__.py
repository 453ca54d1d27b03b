"""One reader per format, recognised by what lies in the folder (or by the head of the file given), not by its name.

A reader module has

    NAME                                  its name in reports
    def sniff(place: Place) -> bool       looks at names and a few bytes, opens no pickle
    def read(place: Place) -> Checkpoint  structure only; defects that leave something readable are problems in it

and raises `ArtefactError` only when nothing of the checkpoint can be read. Adding a format is a row in `READERS`, in
the order of asking: a more telling sign comes first.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType

from diag.checkpoints.canonical import Checkpoint
from diag.checkpoints.files import Folder
from diag.checkpoints.steps import TRACKERS
from diag.errors import ArtefactError, UsageError

READERS = ("pdtrain_run", "megatron_dist", "olmo", "dcp", "universal", "deepspeed", "megatron_legacy", "safetensors",
           "plain")


@dataclass(frozen=True)
class Place:
    """A folder that may be a checkpoint, and the one file of it that the user named, if he did."""

    folder: Path
    file: str = ""
    names: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def inside(self) -> Folder:
        return Folder(self.folder)

    def has(self, *names: str) -> bool:
        """Whether any of `names` lies directly in the folder."""
        return any(name in self.names for name in names)

    def head(self, name: str, count: int = 4096) -> bytes:
        """The first bytes of a file, b"" when it cannot be read."""
        try:
            return self.inside.head(name, count)
        except ArtefactError:
            return b""


def place_of(path: object) -> Place:
    """`path` as a place; a tracker stands for the steps beside it. Raises `UsageError` when nothing is there."""
    if not str(path):
        raise UsageError("the path of the checkpoint is empty")
    given = Path(str(path))
    try:
        if given.is_dir():
            return Place(given, "", frozenset(os.listdir(given)))  # noqa: PTH208 - names only, no stat per entry
        if given.exists() and not given.is_file():  # opening a pipe would wait for its writer
            raise UsageError(f"{given}: is neither a file nor a folder")
        if given.exists() and given.name in TRACKERS:
            return place_of(given.parent)
        if given.exists():
            return Place(given.parent, given.name, frozenset({given.name}))
    except OSError as error:
        raise UsageError(f"{given}: cannot be read: {error.strerror or error}") from None
    raise UsageError(f"{given}: no such file or directory")


def reader_of(place: Place) -> ModuleType | None:
    """The reader that recognises `place`, None when none does."""
    for name in READERS:
        module = importlib.import_module(f"{__name__}.{name}")
        if module.sniff(place):
            return module
    return None


def read(path: object, *, format: str | None = None) -> Checkpoint:
    """See `diag.checkpoints.open_checkpoint`."""
    place = place_of(path)
    if format is not None:
        if format not in READERS:
            raise UsageError(f"--format {format!r}: choose one of {', '.join(READERS)}")
        return _read(importlib.import_module(f"{__name__}.{format}"), place)
    reader = reader_of(place)
    if reader is None:
        from diag.checkpoints.steps import newest

        step = newest(place)
        if step is None:
            raise ArtefactError(f"{path}: no checkpoint that is known here; known are torch DCP, "
                                "safetensors, DeepSpeed, Megatron, OLMo-core, this trainer's, and .pt files")
        return read(step)
    return _read(reader, place)


def _read(reader: ModuleType, place: Place) -> Checkpoint:
    checkpoint: Checkpoint = reader.read(place)
    from diag.checkpoints.naming import settle

    settle(checkpoint)
    return checkpoint
