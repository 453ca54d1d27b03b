"""Bytes of the source: any box of any recipe, read into a caller's buffer, in memory that does not grow.

Contiguous runs are read with pread straight into the buffer. Anything else goes through the memory map, whose pages
are given back at once: they would count as this process's memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import xxhash

from diag.checkpoints.canonical import Checkpoint, Chunk, Tensor, boxes
from diag.checkpoints.convert.recipe import Ints, Recipe
from diag.checkpoints.files import Folder
from diag.checkpoints.verify.archives import Reader
from diag.errors import ArtefactError

#: Descriptors that one thread keeps open.
MAX_OPEN = 64
#: Above this many boxes the overlapping ones are found by numpy.
_MANY = 48
#: Looks into maps between two releases: about 16 MB of neighbourhoods, three of them for an archive.
_LOOKS = 64
Box = tuple[Ints, Ints, list[Chunk]]


class SparingFolder(Folder):
    """A folder whose maps give their pages back as they are used: every look at a header maps its neighbourhood of
    64 KiB as well, which for many small tensors is all of the file, and counts as this process's memory."""

    _looks = 0

    def map(self, name: str) -> memoryview:
        view = super().map(name)
        self._looks += 1
        if self._looks % _LOOKS == 0:
            with self._lock:
                for held in self._maps.values():
                    _release(held, 0, len(held))
        return view


def spare(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, read in memory that does not grow."""
    checkpoint.folder = SparingFolder(checkpoint.folder.root)
    return checkpoint


class Source:
    """Reads recipes over one or several checkpoints. Safe to use from several threads."""

    def __init__(self, checkpoints: list[Checkpoint]) -> None:
        self.checkpoints = checkpoints
        self._owner: dict[int, Checkpoint] = {}
        for checkpoint in checkpoints:
            for tensor in checkpoint.tensors.values():
                self._owner[id(tensor)] = checkpoint
        self._boxes: dict[int, tuple[list[Box], Any]] = {}
        self._local = threading.local()
        self._lock = threading.Lock()

    def fill(self, recipe: Recipe, offsets: Ints, out: Any) -> None:
        """Fill `out` (held type, any strides) with the box of `recipe` that begins at `offsets` and has its shape.

        Raises `ArtefactError` when the source does not hold all of it.
        """
        filled = 0
        for part in recipe.parts:
            low = tuple(map(max, offsets, part.at))
            high = tuple(min(o + s, a + n) for o, s, a, n in zip(offsets, out.shape, part.at, part.sizes))
            if any(a >= b for a, b in zip(low, high)):
                continue
            target = out[(*(slice(a - o, b - o) for a, b, o in zip(low, high, offsets)), ...)]
            start = list(part.start)
            order: list[int] = [-1] * len(start)
            for axis, source_axis in enumerate(part.axes):
                if source_axis >= 0:
                    start[source_axis] += (low[axis] - part.at[axis]) * part.steps[source_axis]
                    order[source_axis] = axis
            kept = [axis for axis in range(target.ndim) if part.axes[axis] >= 0]
            dropped = tuple(0 if part.axes[axis] < 0 else slice(None) for axis in range(target.ndim))
            turned = target[(*dropped, ...)] if len(kept) < target.ndim else target
            place = {axis: n for n, axis in enumerate(kept)}
            turned = turned.transpose([place[axis] for axis in order if axis >= 0])
            for source_axis, axis in enumerate(order):
                if axis < 0:
                    turned = np.expand_dims(turned, source_axis)
            filled += self._read(part.source, tuple(start), part.steps, turned)
        if filled != out.size:
            names = sorted({part.source.name for part in recipe.parts})
            raise ArtefactError(f"{', '.join(names[:3])}: its chunks hold {filled:,} of {out.size:,} elements")

    def read(self, recipe: Recipe) -> Any:
        """All of a small recipe as an array of the held type."""
        from diag.checkpoints.dtypes import DTYPES

        out = np.empty(recipe.shape, DTYPES[recipe.dtype].held)
        self.fill(recipe, (0,) * len(recipe.shape), out)
        return out

    def _read(self, tensor: Tensor, start: Ints, steps: Ints, out: Any) -> int:
        """Copy elements start, start + step, ... of `tensor` into `out`; how many were there."""
        filled = 0
        for offsets, sizes, pieces in self._overlapping(tensor, start, steps, out.shape):
            first, count, skip = [], [], []
            for s, step, n, o, size in zip(start, steps, out.shape, offsets, sizes):
                begin = max(0, -((s - o) // step))
                end = min(n, max(0, (o + size - 1 - s) // step + 1))
                skip.append(begin)
                count.append(end - begin)
                first.append(s + begin * step - o)
            if min(count, default=1) <= 0:
                continue
            view = out[(*(slice(a, a + n) for a, n in zip(skip, count)), ...)]
            if len(pieces) == 1 and pieces[0].flat is None:
                self._copy(tensor, pieces[0], tuple(first), steps, view)
                filled += view.size
            else:
                filled += self._flat(tensor, sizes, pieces, tuple(first), steps, view)
        return filled

    def _overlapping(self, tensor: Tensor, start: Ints, steps: Ints, shape: Ints) -> list[Box]:
        found = self._boxes.get(id(tensor))
        if found is None:
            listed = list(boxes(tensor.chunks))
            edges = None
            if len(listed) > _MANY and tensor.shape:
                edges = np.array([[b[0], [o + n for o, n in zip(b[0], b[1])]] for b in listed], np.int64)
            found = self._boxes[id(tensor)] = (listed, edges)
        listed, edges = found
        if edges is None:
            return listed
        last = np.array([s + (n - 1) * step for s, n, step in zip(start, shape, steps)])
        hit = np.all((edges[:, 0] <= last) & (edges[:, 1] > np.array(start)), axis=1)
        return [listed[n] for n in np.flatnonzero(hit)]

    def _copy(self, tensor: Tensor, chunk: Chunk, first: Ints, steps: Ints, view: Any) -> None:
        folder = self._locate(tensor, chunk)
        plain = chunk.strides is None and view.flags.c_contiguous
        if plain and _is_run(first, view.shape, steps, chunk.sizes):
            at = 0
            for index, size in zip(first, chunk.sizes):
                at = at * size + index
            self.pread(folder, chunk.file, chunk.begin + at * view.itemsize, view)
            return
        slices = tuple(slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(first, view.shape, steps))
        view[...] = self._owner[id(tensor)].view(tensor, chunk)[(*slices, ...)]
        row = chunk.nbytes // max(chunk.sizes[0], 1) if chunk.sizes and chunk.strides is None else 0
        if row:
            begin = chunk.begin + first[0] * row
            self._release(tensor, chunk.file, begin, ((view.shape[0] - 1) * steps[0] + 1) * row)
        else:
            self._release(tensor, chunk.file, chunk.begin, chunk.nbytes)

    def _flat(self, tensor: Tensor, sizes: Ints, pieces: list[Chunk], first: Ints, steps: Ints, view: Any) -> int:
        """From pieces that hold ranges of the box's row-major order: read whole rows, then take what is asked for."""
        if not sizes:
            folder = self._locate(tensor, pieces[0])
            self.pread(folder, pieces[0].file, pieces[0].begin, view)
            return 1
        row = math.prod(sizes[1:])
        rows = (view.shape[0] - 1) * steps[0] + 1
        low, high = first[0] * row, (first[0] + rows) * row
        tail = (1,) * (len(sizes) - 1)
        direct = view.flags.c_contiguous and view.shape[1:] == sizes[1:] and steps == (1, *tail)
        band = view.reshape(-1) if direct else np.empty(rows * row, view.dtype)
        got = 0
        for piece in pieces:
            a, b = piece.flat or (0, math.prod(sizes))
            begin, end = max(a, low), min(b, high)
            if begin < end:
                folder = self._locate(tensor, piece)
                at = piece.begin + (begin - a) * view.itemsize
                self.pread(folder, piece.file, at, band[begin - low : end - low])
                got += end - begin
        if got != high - low:
            return 0
        if not direct:
            inner = tuple(slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(first[1:], view.shape[1:], steps[1:]))
            view[...] = band.reshape((rows, *sizes[1:]))[(slice(None, None, steps[0]), *inner)]
        return int(view.size)

    def _locate(self, tensor: Tensor, chunk: Chunk) -> Folder:
        """Find the chunk's bytes in its container; the folder that its file is in."""
        if chunk.begin < 0:
            self._owner[id(tensor)].locate(tensor, chunk)
            self._release(tensor, chunk.file, chunk.container.offset, chunk.container.length)
        if chunk.flat is None and chunk.strides is None and chunk.nbytes != tensor.type.nbytes(chunk.elements):
            raise ArtefactError(f"{chunk.file}: {tensor.name} has {chunk.nbytes:,} bytes where its shape needs "
                                f"{tensor.type.nbytes(chunk.elements):,}")
        return self._owner[id(tensor)].folder

    def pread(self, folder: Folder, file: str, at: int, view: Any) -> None:
        """Fill a contiguous array from `file[at:]`. Raises `ArtefactError` when the file ends before."""
        target = memoryview(view.reshape(-1).view(np.uint8)) if view.size else memoryview(b"")
        descriptor = self._descriptor(folder, file)
        done = 0
        while done < len(target):
            got = os.preadv(descriptor, [target[done:]], at + done)
            if got == 0:
                raise ArtefactError(f"{file}: ends at byte {at + done:,}, {len(target) - done:,} bytes too early")
            done += got

    def _descriptor(self, folder: Folder, file: str) -> int:
        if not hasattr(self._local, "open"):
            self._local.open = OrderedDict()
        cache: OrderedDict[tuple[int, str], int] = self._local.open
        key = (id(folder), file)
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
        try:
            cache[key] = os.open(folder.path(file), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ArtefactError(f"{file}: cannot be read: {error.strerror or error}") from None
        if len(cache) > MAX_OPEN:
            os.close(cache.popitem(last=False)[1])
        return cache[key]

    def unequal_copy(self, checkpoint: Checkpoint) -> str | None:
        """The first tensor of which two ranks keep different bytes, in words. In memory that does not grow."""
        reader = Reader(checkpoint.folder)

        def digest(tensor: Tensor, chunk: Chunk) -> bytes:
            self._locate(tensor, chunk)
            made = xxhash.xxh3_128()
            for block in reader.blocks(chunk.file, chunk.begin, chunk.nbytes):
                made.update(block)
            return bytes(made.digest())

        try:
            for tensor in checkpoint.tensors.values():
                plain = [c for c in (*tensor.chunks, *tensor.copies) if c.strides is None] if tensor.copies else []
                first: dict[Any, tuple[str, bytes]] = {}
                for chunk in plain:
                    found = digest(tensor, chunk)
                    file, wanted = first.setdefault(chunk.key, (chunk.file, found))
                    if found != wanted:
                        return f"{tensor.name} is replicated, and {chunk.file} holds other values than {file}"
        finally:
            reader.close()
        return None

    def close_thread(self) -> None:
        """Close this thread's descriptors."""
        for descriptor in getattr(self._local, "open", {}).values():
            os.close(descriptor)
        self._local.open = OrderedDict()

    def _release(self, tensor: Tensor, file: str, begin: int, length: int) -> None:
        """Give the pages of a range of the map back; they stay in the page cache."""
        _release(self._owner[id(tensor)].folder.map(file), begin, length)


def _release(view: memoryview, begin: int, length: int) -> None:
    mapped = view.obj
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        # faults map whole neighbourhoods of 64 KiB
        first = max(begin - (begin % mmap.PAGESIZE) - (64 << 10), 0)
        stop = min(begin + length + (64 << 10), len(mapped))
        if first < stop:
            with contextlib.suppress(OSError, ValueError):
                mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)


def _is_run(first: Ints, counts: Ints, steps: Ints, sizes: Ints) -> bool:
    """Whether the elements asked for lie next to each other in a row-major chunk."""
    if any(step != 1 and n > 1 for step, n in zip(steps, counts)):
        return False
    lead = next((axis for axis, n in enumerate(counts) if n != 1), len(counts))
    return all(counts[axis] == sizes[axis] for axis in range(lead + 1, len(sizes)))
