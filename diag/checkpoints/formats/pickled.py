"""Shared by the readers whose checkpoints are folders of torch.save files: opening them, and tensors out of them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from typing import Any

from diag.checkpoints.canonical import Checkpoint, Chunk, Container, Item, Tensor
from diag.checkpoints.dtypes import DTYPES
from diag.checkpoints.naming import annotate
from diag.checkpoints.torch_pickle import Opaque, TensorRef
from diag.checkpoints.torch_zip import Archive, open_archive, walk
from diag.errors import ArtefactError

#: Bytes that an object may take to be kept as a value in `Item.value`.
SMALL = 4096


def open_file(checkpoint: Checkpoint, file: str, *, expected: bool = True) -> Archive | None:
    """Open one torch.save file of the checkpoint; what is wrong with it is a problem, and the answer None."""
    checkpoint.files.add(file)
    if expected:
        checkpoint.expected.add(file)
    size = checkpoint.folder.size(file)
    if size is None:
        return None
    container = Container(file, 0, size, "zip")
    try:
        archive = open_archive(checkpoint.folder, container)
    except ArtefactError as error:
        text = str(error)
        hostile = "hostile" in text
        cause = "ckpt_hostile" if hostile else "ckpt_missing_shard" if "LFS" in text else "ckpt_corrupt"
        at = getattr(error, "at", None)
        checkpoint.problem("nothing to execute" if hostile else "archives", text, file=file, cause=cause,
                           byte_range=(at, size) if at is not None else (0, size))
        return None
    checkpoint.containers.append(container)
    return archive


def chunk_of(checkpoint: Checkpoint, archive: Archive, ref: TensorRef, *, name: str, rank: int | None = None,
             offsets: tuple[int, ...] | None = None) -> Chunk | None:
    """The whole tensor `ref` as a chunk at `offsets`; None, and a problem, when its bytes are not there."""
    try:
        place = archive.place(ref)
    except ArtefactError as error:
        checkpoint.problem("sizes", f"{name}: {error}", file=archive.container.file, tensor=name)
        return None
    return Chunk(offsets if offsets is not None else (0,) * len(place.shape), place.shape, archive.container,
                 place.begin, place.nbytes, None, place.strides, rank)


def flat_chunk(whole: Chunk, shape: tuple[int, ...], flat: tuple[int, int], start: int, width: int) -> Chunk:
    """Elements `flat` of a tensor of `shape`, which lie from element `start` on in the one-dimensional `whole`."""
    return Chunk((0,) * len(shape), shape, whole.container, whole.begin + start * width, (flat[1] - flat[0]) * width,
                 flat, None, whole.rank)


def add_tensor(checkpoint: Checkpoint, archive: Archive, ref: TensorRef, name: str,
               rank: int | None = None) -> Tensor | None:
    """`ref` as a whole tensor of its own name; a second one of another file becomes a copy to be compared."""
    chunk = chunk_of(checkpoint, archive, ref, name=name, rank=rank)
    if chunk is None:
        return None
    held = checkpoint.tensors.get(name)
    if held is not None:
        if held.shape == ref.shape and held.dtype == ref.dtype:
            held.copies.append(chunk)
        else:
            checkpoint.problem("ranks agree", f"{name} is {ref.dtype}{list(ref.shape)} in {chunk.file} and "
                               f"{held.dtype}{list(held.shape)} in {held.chunks[0].file if held.chunks else '?'}",
                               file=chunk.file, tensor=name, byte_range=chunk.byte_range)
        return held
    tensor = annotate(Tensor(name, ref.dtype, ref.shape, [chunk]))
    checkpoint.tensors[name] = tensor
    return tensor


def add_tree(checkpoint: Checkpoint, archive: Archive, value: Any, prefix: str = "", rank: int | None = None) -> None:
    """Every tensor and object of nested containers, under dotted names."""
    for name, leaf in walk(value, prefix):
        if isinstance(leaf, TensorRef):
            add_tensor(checkpoint, archive, leaf, name, rank)
        else:
            small = isinstance(leaf, (int, float, str, bool, type(None))) and len(str(leaf)) < SMALL
            checkpoint.items.setdefault(name, Item(name, None, leaf if small else None, rank))


def attributes(value: Any) -> dict[str, Any]:
    """The plain entries of an argparse.Namespace, a dict or a config object; {} for anything else."""
    if isinstance(value, (argparse.Namespace, Opaque)):
        return dict(vars(value))
    return dict(value) if isinstance(value, Mapping) else {}


def number(value: Any) -> int | None:
    """`value` where it is a whole number, or an enum that stands for one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, Opaque) and value.__dict__.get("args") and isinstance(value.__dict__["args"][0], int):
        return int(value.__dict__["args"][0])
    return None


def width(dtype: str) -> int:
    """Bytes per element."""
    return DTYPES[dtype].bits // 8 if dtype in DTYPES else 0


def elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def rank_in(name: str, pattern: str) -> int | None:
    """The number that `pattern` (one group) finds in a file's name."""
    match = re.search(pattern, name)
    return int(match[1]) if match else None
