"""Whose content a file holds: what tells that two files were exchanged, or that weights and optimizer are of two runs.

torch.save writes the file's own name into the archive, and a rounded copy of the weights lies beside their FP32 masters
in every mixed-precision checkpoint. Neither proves a file right; both prove it wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from diag.checkpoints import zips
from diag.checkpoints.canonical import Checkpoint, Chunk, Problem, Tensor
from diag.checkpoints.dtypes import to_float32
from diag.checkpoints.verify.arrays import BLOCK_ELEMENTS, readable, where_of
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural
from diag.errors import ArtefactError

#: Elements of each chunk that are compared without --deep.
HEAD_ELEMENTS = 1 << 14
#: A box of weights that must be put together from several chunks is compared up to this many elements.
GATHERED_ELEMENTS = 1 << 26
#: |master - weight| / |weight| over a chunk. Rounding to bfloat16 gives at most 2^-8; foreign values about 1.4.
FOREIGN = 0.1
#: Roundings of single elements: to nearest, stochastic, or a truncation with the remainder kept apart (2 units).
ROUNDING_UNITS = 2.0


def placed(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """No archive carries the name of another file of the same checkpoint.

    Only names that differ in their numbers count: a copy of `last.pt` as `best.pt` is what people do.
    """
    whole = [c for c in checkpoint.containers if c.kind == "zip" and c.offset == 0
             and c.length == checkpoint.folder.size(c.file)]
    if checkpoint.format == "plain" and not any(name.endswith(".index.json") for name in checkpoint.files):
        whole = []  # several files in a folder are several checkpoints there
    stems = {_stem(c.file): c.file for c in whole}
    named = 0
    for container in whole:
        inner = zips.root_name(checkpoint.folder.bytes(container.file, 0, 512))
        folder, slash, own = _stem(container.file).rpartition("/")
        other = stems.get(folder + slash + inner)
        if inner == own:
            named += 1
        elif inner and other is not None and re.sub(r"\d+", "#", inner) == re.sub(r"\d+", "#", own):
            named += 1
            problems.append(Problem("files in place", f"{container.file} was saved as {other}, by the name inside of "
                                    "it: the files were exchanged or copied over each other", container.file,
                                    _tensor_in(checkpoint, container.file), (0, container.length)))
    if not named:
        raise NotApplicable("no archive carries the name of its file")
    return plural(named, "file")


def _stem(file: str) -> str:
    """Path without the suffix: what torch writes into the archive is the last part of it."""
    return file.rpartition(".")[0] or file


def _tensor_in(checkpoint: Checkpoint, file: str) -> str | None:
    return next((t.name for t in checkpoint.tensors.values() for c in t.chunks if c.file == file), None)


def masters(checkpoint: Checkpoint, options: Options, problems: list[Problem]) -> str:
    """Where both are kept, the FP32 master rounds to the weight.

    A chunk that is something else altogether is an error; one of which many elements are off by more than any rounding
    is a warning (weights and optimizer of two steps).
    """
    jobs = list(_pairs(checkpoint))
    if not jobs:
        raise NotApplicable("no weights beside FP32 masters")

    def work(job: tuple[Tensor, Tensor, Chunk]) -> tuple[float, float] | None:
        return _compared(checkpoint, *job, None if options.deep else HEAD_ELEMENTS)

    count = 0
    with ThreadPoolExecutor(max(1, options.threads)) as pool:
        for (weight, master, chunk), found in zip(jobs, pool.map(work, jobs)):
            if found is None:
                continue
            count += 1
            distance, off = found
            source = weight.chunks[0].file
            if distance > FOREIGN:
                problems.append(Problem("masters", f"{master.name} in {chunk.file} holds other values than the weights "
                                        f"in {source} (|difference| / |weight| {distance:.2g}): one of them is of "
                                        "another rank, parameter or run", **where_of(master, chunk),
                                        cause="ckpt_bad_values"))
            elif off > 1 / 16:
                problems.append(Problem("masters", f"{off:.0%} of {master.name} in {chunk.file} is further from the "
                                        f"{weight.dtype} weights in {source} than rounding explains: weights and "
                                        "optimizer are of different steps", **where_of(master, chunk),
                                        cause="ckpt_bad_values", severity="warning"))
    if not count and not problems:
        raise NotApplicable("no weights beside FP32 masters that can be read")
    return plural(count, "chunk") + ("" if options.deep else f", the first {HEAD_ELEMENTS:,} elements of each")


def _pairs(checkpoint: Checkpoint) -> Iterator[tuple[Tensor, Tensor, Chunk]]:
    """(weight, master, chunk of the master) of every parameter that has both, in the same shape."""
    weights = {t.fqn: t for t in checkpoint.tensors.values() if t.role == "parameter"}
    weights = checkpoint.rounded | weights
    for master in checkpoint.tensors.values():
        weight = weights.get(master.fqn) if master.role == "master" else None
        if weight is None or weight.shape != master.shape or not weight.chunks or not master.elements:
            continue
        if all(t.dtype in ("float32", "float16", "bfloat16") for t in (weight, master)):
            yield from ((weight, master, chunk) for chunk in master.chunks)


def _compared(checkpoint: Checkpoint, weight: Tensor, master: Tensor, chunk: Chunk, limit: int | None
              ) -> tuple[float, float] | None:
    """(relative distance, share of elements that rounding does not explain); None where one cannot be read."""
    mine = readable(checkpoint, master, chunk)
    theirs = _same_place(checkpoint, weight, chunk)
    if mine is None or theirs is None or mine.size != theirs.size:
        return None
    a, b = _flat(mine)[:limit], _flat(theirs)[:limit]
    unit, floor = (2.0**-10, 2.0**-24) if weight.dtype == "float16" else (2.0**-7, 0.0)
    if weight.dtype == "float32":
        unit = 2.0**-23
    squares, total, off, seen = 0.0, 0.0, 0, 0
    for at in range(0, a.size, BLOCK_ELEMENTS):
        m = to_float32(a[at : at + BLOCK_ELEMENTS], master.type)
        w = to_float32(b[at : at + BLOCK_ELEMENTS], weight.type)
        with np.errstate(over="ignore", invalid="ignore"):
            difference = np.abs(m - w)
        good = np.isfinite(difference)  # NaN and infinities are another check's
        difference, w = difference[good], np.abs(w[good])
        off += int(np.count_nonzero(difference > ROUNDING_UNITS * (unit * w + floor)))
        squares += float(np.dot(difference.astype(np.float64), difference))
        total += float(np.dot(w.astype(np.float64), w))
        seen += difference.size
    if not seen:
        return None
    distance = (squares / total) ** 0.5 if total else float(squares > 0)
    return distance, off / seen


def _same_place(checkpoint: Checkpoint, weight: Tensor, chunk: Chunk) -> Any:
    """The weights that `chunk` (of the master) covers, as an array; None when unreadable or too many to gather."""
    for own in weight.chunks:
        if own.offsets == chunk.offsets and own.sizes == chunk.sizes and own.flat in (None, chunk.flat):
            array = readable(checkpoint, weight, own)
            if array is None or own.flat == chunk.flat:
                return array
            return _flat(array)[chunk.flat[0] : chunk.flat[1]] if chunk.flat is not None else None
    if weight.elements > GATHERED_ELEMENTS:
        return None
    try:
        box = checkpoint.read(weight, chunk.offsets, chunk.sizes)
    except ArtefactError:
        return None
    return box if chunk.flat is None else box.reshape(-1)[chunk.flat[0] : chunk.flat[1]]


def _flat(array: Any) -> Any:
    return array.reshape(-1)
