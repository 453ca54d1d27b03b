"""Masters and moments in memory-mapped files: what a step does not touch need not be in memory.

The kernel reads a page when the step reaches it, writes changed ones behind the step, and gives memory back when it is
short. The files lose their names at once, so they are gone with the process, however it ends: what must survive is in
the checkpoints.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from diag.errors import UsageError

#: Allocations from this size on are the system's own, where memory is short.
LARGE_BYTES = 1 << 19


def mapped_zeros(folder: Path, rank: int) -> Callable[[tuple[int, ...]], Tensor]:
    """`torch.zeros` for FP32 tensors that live in files of `folder`.

    Raises UsageError: the folder cannot be written, or its disk is full.
    """
    number = itertools.count()

    def zeros(shape: tuple[int, ...]) -> Tensor:
        path = folder / f"pdtrain_offload_rank{rank}_{next(number)}.tmp"
        elements = max(1, prod(shape))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as stream:
                _reserve(stream.fileno(), 4 * elements)
            flat = torch.from_file(str(path), shared=True, size=elements, dtype=torch.float32)
            path.unlink()
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                path.unlink()
            raise UsageError(f"pools.offload = {str(folder)!r} cannot be used: {error}") from None
        return flat[: prod(shape)].view(shape)

    return zeros


def return_freed_memory() -> None:
    """From here on large freed tensors go back to the system at once, instead of into the C library's own stock.

    Buckets come in on one thread and are freed on another, so that glibc's arenas keep about as much again as is in
    use. Costs a page fault per 4 KiB of each new tensor; nothing happens where the C library is not glibc.
    """
    threshold = -3  # M_MMAP_THRESHOLD of mallopt(3); setting it also stops its growing
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(threshold, LARGE_BYTES)


def _reserve(descriptor: int, size: int) -> None:
    """Take the room now: a full disk met through the mapping would be a SIGBUS in the middle of a step."""
    os.posix_fallocate(descriptor, 0, size)
