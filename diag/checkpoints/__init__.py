"""Checkpoints of any trainer: read, prove whole, list, compare. Imports no torch.

    from diag.checkpoints import open_checkpoint
    checkpoint = open_checkpoint("runs/a/checkpoints/step_00000200")   # diag.checkpoints.canonical.Checkpoint
    checkpoint.tensors["model.layers.0.attention.wq.weight"].shape

`canonical` is the one form that every format is read into, `formats` has one reader per format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the canonical form needs numpy: what only looks at names is imported without
    from diag.checkpoints.canonical import Checkpoint, Chunk, Container, Tensor

__all__ = ["Checkpoint", "Chunk", "Container", "Tensor", "open_checkpoint"]


def open_checkpoint(path: object, *, format: str | None = None) -> Checkpoint:
    """The checkpoint at `path` in canonical form; its format is recognised by content unless named.

    Raises `UsageError` when nothing is at `path`, `ArtefactError` when it is no checkpoint that is known here.
    """
    from diag.checkpoints.formats import read

    return read(path, format=format)


def __getattr__(name: str) -> object:
    if name in ("Checkpoint", "Chunk", "Container", "Tensor"):
        from diag.checkpoints import canonical

        return getattr(canonical, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
