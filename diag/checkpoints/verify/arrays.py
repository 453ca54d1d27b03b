"""Looking at the bytes of tensors: views, digests, zeros; in blocks, so that temporaries stay small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from diag.checkpoints.canonical import Checkpoint, Chunk, Tensor
from diag.errors import ArtefactError

#: Bytes of a tensor that are compared first; only where these are equal is the rest read.
HEAD_BYTES = 1 << 16
#: Elements looked at at a time: 4 Mi of FP32 are 16 MiB.
BLOCK_ELEMENTS = 1 << 22

def readable(checkpoint: Checkpoint, tensor: Tensor, chunk: Chunk) -> Any:
    """The chunk as an array, None when its bytes are not there or damaged (other checks tell)."""
    size = checkpoint.folder.size(chunk.file)
    if size is None or chunk.byte_range[1] > size or not tensor.dtype or chunk.container.kind == "transformed":
        return None
    try:
        return checkpoint.view(tensor, chunk)
    except ArtefactError:
        return None


def blocks(array: Any) -> Iterable[Any]:
    """`array` in pieces of at most `BLOCK_ELEMENTS`, so that temporary masks stay small."""
    flat = array.reshape(-1) if array.flags["C_CONTIGUOUS"] else np.ascontiguousarray(array).reshape(-1)
    for at in range(0, flat.size, BLOCK_ELEMENTS):
        yield flat[at : at + BLOCK_ELEMENTS]


def where_of(tensor: Tensor, chunk: Chunk | None = None) -> dict[str, Any]:
    chunk = chunk or (tensor.chunks[0] if tensor.chunks else None)
    return {"tensor": tensor.name, "file": chunk.file if chunk else None,
            "byte_range": chunk.byte_range if chunk else None}


def digest_of(checkpoint: Checkpoint, tensor: Tensor, limit: int | None = None) -> bytes | None:
    """A digest of the elements in chunk order, of the first `limit` bytes of each chunk; None when unreadable."""
    made = xxhash.xxh3_128(repr(tensor.shape).encode())
    for chunk in tensor.chunks:
        array = readable(checkpoint, tensor, chunk)
        if array is None:
            return None
        update(made, array, limit)
    return bytes(made.digest())


def update(made: Any, array: Any, limit: int | None = None) -> None:
    """Feed the row-major bytes of `array` (the first `limit`) to a hash."""
    flat = array.reshape(-1) if array.flags["C_CONTIGUOUS"] else np.ascontiguousarray(array).reshape(-1)
    if limit is not None:
        flat = flat[: max(1, limit // max(1, flat.itemsize))]
    made.update(np.ascontiguousarray(flat).view(np.uint8).data)


def all_zero(checkpoint: Checkpoint, tensor: Tensor) -> bool | None:
    """Whether every element is zero; stops at the first that is not. None when unreadable."""
    for chunk in tensor.chunks:
        array = readable(checkpoint, tensor, chunk)
        if array is None:
            return None
        with np.errstate(invalid="ignore"):  # a signalling NaN is no zero, and nothing to warn of
            for block in blocks(array):
                # A first look at a few elements spares the rest nearly always.
                if block[:4096].any() or block.any():
                    return False
    return bool(tensor.chunks)
