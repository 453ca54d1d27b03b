"""How a target tensor is put together from source tensors: boxes that are copied, never computed.

    fused = concat([whole(gate), whole(up)], axis=0)          # gate/up fusion
    stack([box(r, (0, 0), (8, 16)) for r in experts])         # stacked experts

A `Recipe` is closed under cutting, joining, stacking, transposing and taking every n-th row, so a mapping from one
family of names to another through a third is again a recipe, and any chunk of it can be filled from the source's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from diag.checkpoints.canonical import Tensor
from diag.checkpoints.dtypes import DTYPES
from diag.errors import ArtefactError

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The box [at, at + sizes) of the target, from `source`.

    axes: for each target axis the source axis it runs along, -1 for an axis of length one that the source lacks.
    start, steps: per source axis, the first index and the distance of one index to the next.
    """

    at: Ints
    sizes: Ints
    source: Tensor
    start: Ints
    axes: Ints
    steps: Ints


@dataclass(frozen=True, slots=True)
class Recipe:
    """A target tensor: element type (torch's name), global shape, and the parts that tile it."""

    dtype: str
    shape: Ints
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].nbytes(self.elements)


def whole(tensor: Tensor) -> Recipe:
    """All of a source tensor, as it is."""
    axes = len(tensor.shape)
    zeros = (0,) * axes
    part = Part(zeros, tensor.shape, tensor, zeros, tuple(range(axes)), (1,) * axes)
    return Recipe(tensor.dtype, tensor.shape, (part,))


def box(recipe: Recipe, offsets: Sequence[int], sizes: Sequence[int]) -> Recipe:
    """The box [offsets, offsets + sizes) of `recipe`."""
    found = []
    for part in recipe.parts:
        low = tuple(map(max, offsets, part.at))
        high = tuple(min(o + s, a + n) for o, s, a, n in zip(offsets, sizes, part.at, part.sizes))
        if any(a >= b for a, b in zip(low, high)):
            continue
        start = list(part.start)
        for axis, source_axis in enumerate(part.axes):
            if source_axis >= 0:
                start[source_axis] += (low[axis] - part.at[axis]) * part.steps[source_axis]
        found.append(replace(part, at=tuple(a - o for a, o in zip(low, offsets)),
                             sizes=tuple(b - a for a, b in zip(low, high)), start=tuple(start)))
    return Recipe(recipe.dtype, tuple(sizes), tuple(found))


def narrow(recipe: Recipe, axis: int, start: int, length: int) -> Recipe:
    """`length` indices of one axis, from `start`."""
    offsets, sizes = [0] * len(recipe.shape), list(recipe.shape)
    offsets[axis], sizes[axis] = start, length
    return box(recipe, offsets, sizes)


def split(recipe: Recipe, pieces: int, axis: int = 0) -> list[Recipe]:
    """`pieces` equal cuts along `axis`. Raises `ArtefactError` when it does not divide."""
    if recipe.shape[axis] % pieces:
        raise ArtefactError(f"{recipe.shape[axis]} rows cannot be cut into {pieces} equal parts")
    length = recipe.shape[axis] // pieces
    return [narrow(recipe, axis, n * length, length) for n in range(pieces)]


def select(recipe: Recipe, index: int, axis: int = 0) -> Recipe:
    """One index of `axis`, without the axis."""
    return _drop(narrow(recipe, axis, index, 1), axis)


def _drop(recipe: Recipe, axis: int) -> Recipe:
    def less(values: Ints) -> Ints:
        return values[:axis] + values[axis + 1 :]

    parts = tuple(replace(p, at=less(p.at), sizes=less(p.sizes), axes=less(p.axes)) for p in recipe.parts)
    return Recipe(recipe.dtype, less(recipe.shape), parts)


def unsqueeze(recipe: Recipe, axis: int = 0) -> Recipe:
    """A new axis of length one."""
    def more(values: Ints, value: int) -> Ints:
        return (*values[:axis], value, *values[axis:])

    parts = tuple(replace(p, at=more(p.at, 0), sizes=more(p.sizes, 1), axes=more(p.axes, -1)) for p in recipe.parts)
    return Recipe(recipe.dtype, more(recipe.shape, 1), parts)


def concat(recipes: Iterable[Recipe], axis: int = 0) -> Recipe:
    """Joined along `axis`. Raises `ArtefactError` when element types or the other axes differ."""
    listed = list(recipes)
    if len(listed) == 1:
        return listed[0]
    first = listed[0]
    parts: list[Part] = []
    at = 0
    for recipe in listed:
        others = recipe.shape[:axis] + recipe.shape[axis + 1 :]
        if recipe.dtype != first.dtype or others != first.shape[:axis] + first.shape[axis + 1 :]:
            raise ArtefactError(f"{recipe.dtype}{list(recipe.shape)} cannot be joined to "
                                f"{first.dtype}{list(first.shape)}")
        for part in recipe.parts:
            parts.append(replace(part, at=(*part.at[:axis], part.at[axis] + at, *part.at[axis + 1 :])))
        at += recipe.shape[axis]
    shape = (*first.shape[:axis], at, *first.shape[axis + 1 :])
    return Recipe(first.dtype, shape, tuple(parts))


def stack(recipes: Iterable[Recipe], axis: int = 0) -> Recipe:
    """Joined along a new axis."""
    return concat([unsqueeze(recipe, axis) for recipe in recipes], axis)


def transpose(recipe: Recipe, order: Sequence[int] | None = None) -> Recipe:
    """Axes in another order; the last two exchanged by default."""
    axes = len(recipe.shape)
    chosen = tuple(order) if order is not None else (*range(axes - 2), axes - 1, axes - 2)

    def turn(values: Ints) -> Ints:
        return tuple(values[a] for a in chosen)

    parts = tuple(replace(p, at=turn(p.at), sizes=turn(p.sizes), axes=turn(p.axes)) for p in recipe.parts)
    return Recipe(recipe.dtype, turn(recipe.shape), parts)


def every(recipe: Recipe, first: int, step: int, axis: int = 0) -> Recipe:
    """Indices first, first + step, ... of `axis`."""
    parts = []
    length = len(range(first, recipe.shape[axis], step))
    for part in recipe.parts:
        low = part.at[axis]
        begin = 0 if low <= first else -((first - low) // step)
        end = len(range(first, low + part.sizes[axis], step))
        if end <= begin:
            continue
        skipped = first + begin * step - low
        start, steps = list(part.start), list(part.steps)
        source_axis = part.axes[axis]
        if source_axis >= 0:
            start[source_axis] += skipped * steps[source_axis]
            steps[source_axis] *= step
        parts.append(replace(part, at=(*part.at[:axis], begin, *part.at[axis + 1 :]),
                             sizes=(*part.sizes[:axis], end - begin, *part.sizes[axis + 1 :]),
                             start=tuple(start), steps=tuple(steps)))
    shape = (*recipe.shape[:axis], length, *recipe.shape[axis + 1 :])
    return Recipe(recipe.dtype, shape, tuple(parts))


def rows_of_box(sizes: Ints, first: int, last: int, limit: int) -> Iterable[tuple[Ints, Ints]]:
    """Boxes (offsets, sizes) of at most `limit` elements that follow each other through elements first..last of a box.

    Row-major order; this is what turns any range of a tensor into pieces that fit a buffer.
    """
    if first >= last:
        return
    if not sizes:
        yield (), ()
        return
    row = math.prod(sizes[1:])
    at = first
    while at < last:
        index, inside = divmod(at, row)
        if inside == 0 and last - at >= row and row <= limit:
            count = min((last - at) // row, max(limit // row, 1))
            yield (index, *(0,) * (len(sizes) - 1)), (count, *sizes[1:])
            at += count * row
            continue
        stop = min(row, inside + last - at)
        for offsets, extent in rows_of_box(sizes[1:], inside, stop, limit):
            yield (index, *offsets), (1, *extent)
        at += stop - inside
