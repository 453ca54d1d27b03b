"""The values: finite, not constant, no holes, alike in all layers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diag.checkpoints.canonical import Checkpoint, Chunk, Problem, Tensor
from diag.checkpoints.dtypes import non_finite
from diag.checkpoints.verify.arrays import HEAD_BYTES, all_zero, blocks, readable, where_of
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural

_LAYER = re.compile(r"\.(\d+)\.")
#: A buffer of the balancing kind that is constant after this many steps was never updated.
BIAS_STEPS = 50
_BIAS = re.compile(r"e_score_correction_bias|expert_bias")

def finite(checkpoint: Checkpoint, options: Options, problems: list[Problem]) -> str:
    """No NaN and no infinity among the floats: every element with --deep, else the head of each chunk."""
    if not options.finite:
        raise NotApplicable("left out by --no-values")
    jobs = [(t, c) for t in checkpoint.tensors.values() if t.dtype and t.type.is_float for c in (*t.chunks, *t.copies)]
    jobs = [(t, c) for t, c in jobs if checkpoint.folder.size(c.file) is not None]
    if not jobs:
        raise NotApplicable("no floating-point tensor is here")

    def scan(job: tuple[Tensor, Chunk]) -> tuple[int, int, int]:
        tensor, chunk = job
        array = readable(checkpoint, tensor, chunk)
        if array is None:
            return 0, 0, 0
        if not options.deep:
            array = array.reshape(-1)[: HEAD_BYTES // max(1, array.itemsize)] if array.flags["C_CONTIGUOUS"] else array
        bad = 0
        for block in blocks(array):
            bad += non_finite(block, tensor.type)
        return bad, int(array.size), int(array.nbytes)

    count = 0
    with ThreadPoolExecutor(max(1, options.threads)) as pool:
        # In batches: a task for every small chunk would cost more than the chunk.
        size_of = 64 if len(jobs) > 1024 else 1
        batches = [jobs[at : at + size_of] for at in range(0, len(jobs), size_of)]
        results = (found for batch in pool.map(lambda batch: [scan(job) for job in batch], batches) for found in batch)
        for (tensor, chunk), (bad, size, _) in zip(jobs, results):
            count += size
            if bad:
                problems.append(Problem("finite", f"{tensor.name} holds {plural(bad, 'value')} that "
                                        f"{'is' if bad == 1 else 'are'} NaN or infinite, in {chunk.file}",
                                        **where_of(tensor, chunk), cause="ckpt_bad_values"))
    part = "" if options.deep else f", the first {HEAD_BYTES >> 10} KiB of each chunk"
    return f"{plural(len(jobs), 'chunk')}, {count:,} values{part}"


def buffers(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Weights and router biases are not constant: an all-zero matrix was never loaded, a bias of zeros never saved.

    One-dimensional weights may be constant (fresh norms are ones). The balancing bias is judged after `BIAS_STEPS`
    steps, where the step is known.
    """
    weights = [t for t in checkpoint.tensors.values() if t.role in ("parameter", "master") and len(t.shape) >= 2]
    biases = [t for t in checkpoint.tensors.values() if _BIAS.search(t.name) and t.role in ("buffer", "parameter")]
    if not weights and not biases:
        raise NotApplicable("no matrices and no router biases")
    zero = {t.name for t in weights if t.elements > 1 and all_zero(checkpoint, t)}
    alive = {_kind(t.name) for t in weights if t.name not in zero}
    trained = {t.fqn for t in checkpoint.tensors.values() if t.role == "exp_avg" and t.name not in zero
               and all_zero(checkpoint, t) is False}
    for tensor in weights:
        if tensor.name not in zero:
            _holes(checkpoint, tensor, problems)
        elif _kind(tensor.name) in alive or tensor.fqn in trained:  # alone of its kind, or zero though it is trained
            problems.append(Problem("not constant", f"{tensor.name} is all zero: never loaded, or lost at the save",
                                    **where_of(tensor), cause="ckpt_bad_values"))
    if (checkpoint.meta.step or 0) >= BIAS_STEPS:
        for tensor in biases:
            if all_zero(checkpoint, tensor):
                problems.append(Problem("not constant", f"{tensor.name} is all zero after "
                                                        f"{checkpoint.meta.step:,} steps: "
                                        "the balancing bias was never updated or never saved", **where_of(tensor),
                                        cause="ckpt_bad_values", severity="warning"))
    return plural(len(weights) + len(biases), "tensor")


def _kind(name: str) -> str:
    """`name` without the numbers of layer and expert."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


#: A run of zeros of this many bytes, page-aligned in the file, is a hole that a crash or a copy left.
HOLE_BYTES = 4096


def _holes(checkpoint: Checkpoint, tensor: Tensor, problems: list[Problem]) -> None:
    """Whole pages of the file that are zero inside a dense weight matrix (only with enough bytes to be sure)."""
    if re.search(r"embed|wte|lm_head|output\.weight|word_", tensor.name):
        return  # rows of tokens that never occurred may be zero
    for chunk in tensor.chunks:
        array = readable(checkpoint, tensor, chunk)
        if array is None or chunk.strides is not None or array.nbytes < 2 * HOLE_BYTES or not tensor.type.is_float:
            continue
        raw = np.frombuffer(checkpoint.folder.map(chunk.file), np.uint8, chunk.nbytes, chunk.begin)
        first = -chunk.begin % HOLE_BYTES
        pages = (raw.size - first) // HOLE_BYTES
        if pages <= 0:
            continue
        words = raw[first : first + pages * HOLE_BYTES].reshape(pages, HOLE_BYTES)
        empty = [int(page) for page in np.flatnonzero(~words[:, ::512].any(axis=1)) if not words[page].any()]
        if not empty or len(empty) * 2 > pages:
            continue
        last = empty[0]
        while last + 1 in empty:
            last += 1
        a, b = first + empty[0] * HOLE_BYTES, first + (last + 1) * HOLE_BYTES
        # A dead row is zero as well, but does not begin and end just where a page of the file does.
        if raw[max(0, a - 8) : a].any() and raw[b : b + 8].any():
            begin, end = chunk.begin + a, chunk.begin + b
            problems.append(Problem("not constant", f"{tensor.name} has a hole of zeros: whole pages, bytes {begin:,} "
                                    f"to {end:,} of {chunk.file}", chunk.file, tensor.name, (begin, end),
                                    cause="ckpt_bad_values", severity="warning"))


def layers(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """The same matrix of all layers has the same shape and type: one that differs alone was relabelled.

    Only what no architecture does is said: as many elements in another shape, float16 among bfloat16.
    """
    families: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        if tensor.dtype and tensor.shape and (_LAYER.search(tensor.name) or tensor.expert is not None):
            families[_kind(tensor.name)].append(tensor)
    compared = {name: held for name, held in families.items() if len(held) >= 3}
    if not compared:
        raise NotApplicable("fewer than three layers of a kind")
    for family, held in compared.items():
        shapes = Counter(t.shape for t in held)
        usual, votes = shapes.most_common(1)[0]
        for tensor in held if votes == len(held) - 1 else []:
            if tensor.shape != usual and tensor.elements == math.prod(usual):
                problems.append(Problem("layers agree", f"{tensor.name} is {list(tensor.shape)}, {family} elsewhere "
                                        f"{list(usual)}: as many elements in another shape", **where_of(tensor),
                                        cause="ckpt_shape_mismatch"))
        types = Counter(t.dtype for t in held)
        usual_type, votes = types.most_common(1)[0]
        for tensor in held if votes == len(held) - 1 else []:
            if tensor.dtype != usual_type and {tensor.dtype, usual_type} <= _SAME_WIDTH.get(usual_type, set()):
                problems.append(Problem("layers agree", f"{tensor.name} is {tensor.dtype}, {family} elsewhere "
                                        f"{usual_type}: the same bits read as another type", **where_of(tensor),
                                        cause="ckpt_shape_mismatch"))
    return plural(len(compared), "family", "families")


_SAME_WIDTH: dict[str, set[str]] = {
    name: group for group in ({"float16", "bfloat16", "int16", "uint16"}, {"float32", "int32", "uint32"},
                              {"float64", "int64", "uint64"}) for name in group
}
