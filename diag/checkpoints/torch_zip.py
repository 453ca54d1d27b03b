"""Archives of torch.save, from directory and data.pkl: the objects in them, with tensors as places in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diag.checkpoints import torch_pickle, zips
from diag.checkpoints.canonical import Container
from diag.checkpoints.dtypes import DTYPES
from diag.checkpoints.files import Folder
from diag.checkpoints.torch_pickle import TensorRef
from diag.errors import ArtefactError

#: Before 1.6 torch wrote a row of pickles: this is the magic number that leads them.
OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: A Git LFS pointer where a file should be.
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of an archive: bytes `[begin, begin + nbytes)` of the file. `strides` only where not row-major; then
    nbytes reaches to the end of the storage."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    strides: tuple[int, ...] | None
    storage: str


@dataclass(slots=True)
class Archive:
    """One torch.save archive: `value` is its object with every tensor as a `TensorRef`; `place` says where one lies."""

    container: Container
    members: dict[str, zips.Member]
    value: Any
    foreign: set[str]

    def place(self, tensor: TensorRef) -> Placed:
        """Where `tensor` lies. Raises `ArtefactError` when its storage is not there or too small."""
        member = self.members.get(f"data/{tensor.storage.key}")
        if member is None:
            raise ArtefactError(f"{self.container.file}: the storage {tensor.storage.key} of a tensor is not in it")
        if tensor.dtype not in DTYPES:
            raise ArtefactError(f"{self.container.file}: a tensor is of an unknown type, {tensor.dtype!r}")
        kind, held = DTYPES[tensor.dtype], DTYPES[tensor.storage.dtype]
        if held.nbytes(tensor.storage.elements) != member.size:
            raise ArtefactError(f"{self.container.file}: storage {tensor.storage.key} should be "
                                f"{held.nbytes(tensor.storage.elements):,} bytes ({tensor.storage.elements:,} of "
                                f"{held.name}), its member has {member.size:,}")
        width = kind.bits // 8
        elements: int = math.prod(tensor.shape)
        first = tensor.offset * width
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides)) if elements else -1
        if first + (last + 1) * width > member.size:
            raise ArtefactError(f"{self.container.file}: a tensor of shape {list(tensor.shape)} reaches beyond its "
                                f"storage {tensor.storage.key}")
        plain = row_major(tensor.shape, tensor.strides)
        size = elements * width if plain else (last + 1) * width
        return Placed(tensor.dtype, tensor.shape, member.begin + first, size, None if plain else tensor.strides,
                      tensor.storage.key)


def row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements lie in row-major order without gaps; the stride of an axis of length one means nothing."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != step and 0 not in shape:
            return False
        step *= size
    return True


def open_archive(folder: Folder, container: Container) -> Archive:
    """Read directory and data.pkl of `container`. Raises `ArtefactError` (`ZipDamage` with the byte)."""
    data = folder.map(container.file)
    head = bytes(data[container.offset : container.offset + 24])
    if head.startswith(LFS_POINTER):
        raise ArtefactError(f"{container.file}: is a Git LFS pointer, not the file; run git lfs pull")
    if head.startswith(OLD_FORMAT[:16]):
        raise ArtefactError(f"{container.file}: is in the format of torch before 1.6, which carries no checksums and "
                            "is not read here; save it again with a newer torch")
    try:
        listed = zips.members(data, container.offset, container.length)
    except zips.ZipDamage as error:
        raise error.within(container.file) from None
    by_name = {member.name.partition("/")[2]: member for member in listed}
    pickled = by_name.get("data.pkl")
    if pickled is None:
        raise ArtefactError(f"{container.file}: is an archive, but not of torch.save: it has no data.pkl")
    order = by_name.get("byteorder")
    if order is not None and bytes(data[order.begin : order.begin + order.size]) != b"little":
        raise ArtefactError(f"{container.file}: is of a big-endian machine, which is not read here")
    try:
        # Safe on a stranger's file: our own loader over the restricted unpickler, not torch's or pickle's.
        value, foreign = torch_pickle.load(bytes(data[pickled.begin : pickled.begin + pickled.size]))
    except ArtefactError as error:
        raise ArtefactError(f"{container.file}: its data.pkl {error}") from None
    return Archive(container, by_name, value, foreign)


def sole_tensor(folder: Folder, container: Container) -> Placed:
    """The one tensor of a slice of a .distcp. Raises `ArtefactError`."""
    archive = open_archive(folder, container)
    if not isinstance(archive.value, TensorRef):
        raise ArtefactError(f"{container.file}: bytes {container.offset:,} to {container.offset + container.length:,} "
                            "hold no tensor")
    return archive.place(archive.value)


def walk(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of nested dicts, lists and tuples; a leaf is whatever is none of those."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from walk(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from walk(item, f"{prefix}.{index}" if prefix else str(index))
    else:
        yield prefix, value
