"""Experts: all there, and no two the same.

A save that renumbers local experts from zero on every rank keeps one rank's experts under all ids, and a resume with
the same layout does not notice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from diag.checkpoints.canonical import Checkpoint, Chunk, Problem, Tensor
from diag.checkpoints.naming import expert_family
from diag.checkpoints.verify.arrays import HEAD_BYTES, blocks, digest_of, readable, update, where_of
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural, some


def experts(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Where experts have a tensor each: every id 0...E-1 of every layer, once; E the same wherever the name is."""
    families: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for tensor in checkpoint.tensors.values():
        if tensor.expert is not None:
            families[expert_family(tensor.name)][tensor.expert] = tensor
    stacked = [t for t in checkpoint.tensors.values() if t.expert_axis is not None and t.role == "parameter"]
    if not families and not stacked:
        raise NotApplicable("no experts among the names")
    lost = {p.tensor for p in checkpoint.problems if p.tensor}
    count = max((max(ids) + 1 for ids in families.values()), default=0)
    declared = checkpoint.meta.args.get("num_experts")
    if isinstance(declared, int) and declared > 0:
        count = max(count, declared)
    for family, ids in families.items():
        missing = sorted(set(range(count)) - ids.keys())
        if missing:
            near = ids[min(ids, key=lambda i: abs(i - missing[0]))]
            name = family.replace("*", str(missing[0]), 1)
            if name in lost:
                continue
            problems.append(Problem(
                "experts complete", f"{family} has experts {_ids(ids)}; {_ids(missing)} of 0-{count - 1} "
                f"{'is' if len(missing) == 1 else 'are'} missing", near.chunks[0].file if near.chunks else None, name,
                near.chunks[0].byte_range if near.chunks else None, cause="ckpt_missing_keys"))
    sizes = Counter(t.shape[0] for t in stacked)
    if len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        for tensor in (t for t in stacked if t.shape[0] != usual):
            problems.append(Problem("experts complete", f"{tensor.name} stacks {tensor.shape[0]} experts, others "
                                                        f"{usual}",
                                    **where_of(tensor), cause="ckpt_shape_mismatch"))
    return f"{count or (sizes.most_common(1)[0][0] if sizes else 0)} experts in {len(families) + len(stacked)} matrices"


def _ids(ids: Iterable[int]) -> str:
    listed = sorted(ids)
    if len(listed) > 2 and listed == list(range(listed[0], listed[-1] + 1)):
        return f"{listed[0]}-{listed[-1]}"
    return some(map(str, listed), 6)


def clones(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """No two experts of a layer hold the same weights: trained apart, they cannot."""
    families: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        if tensor.expert is not None and tensor.role in ("parameter", "master") and len(tensor.shape) >= 2:
            families[expert_family(tensor.name)].append((tensor.expert, tensor))
    compared = 0
    for family, members in families.items():
        compared += len(members)
        for a, b in _equal(checkpoint, members):
            first, second = dict(members)[a], dict(members)[b]
            if _constant(checkpoint, first):
                continue
            problems.append(Problem("experts differ", f"experts {a} and {b} of {family} hold the same weights: one was "
                                    "saved over the other", **where_of(second), cause="ckpt_bad_values"))
    for tensor in checkpoint.tensors.values():
        axis = tensor.expert_axis
        if axis in (0, 1) and tensor.role in ("parameter", "master") and tensor.shape[axis] > 1:
            compared += tensor.shape[axis]
            _stacked_clones(checkpoint, tensor, problems)
    if not compared:
        raise NotApplicable("no experts among the names")
    return plural(compared, "expert matrix", "expert matrices")


def _equal(checkpoint: Checkpoint, members: list[tuple[int, Tensor]]) -> Iterable[tuple[int, int]]:
    """Pairs of ids whose tensors are byte for byte equal."""
    heads: dict[bytes, list[tuple[int, Tensor]]] = defaultdict(list)
    for number, tensor in members:
        digest = digest_of(checkpoint, tensor, HEAD_BYTES)
        if digest is not None:
            heads[digest].append((number, tensor))
    for same in heads.values():
        if len(same) < 2:
            continue
        whole: dict[bytes, int] = {}
        for number, tensor in sorted(same):
            digest = digest_of(checkpoint, tensor)
            if digest is None:
                continue
            if digest in whole:
                yield whole[digest], number
            whole.setdefault(digest, number)


def _constant(checkpoint: Checkpoint, tensor: Tensor) -> bool:
    """Whether all elements are the same bits (a fresh norm or bias: equal experts mean nothing then)."""
    first = None
    for chunk in tensor.chunks:
        array = readable(checkpoint, tensor, chunk)
        if array is None:
            return False
        for block in blocks(array):
            if not block.size:
                continue
            first = block[0] if first is None else first
            if (block != first).any():
                return False
    return True


def _stacked_clones(checkpoint: Checkpoint, tensor: Tensor, problems: list[Problem]) -> None:
    """Equal slices along the expert axis: axis 0, or axis 1 where layers are stacked on axis 0 (each by itself)."""
    axis = tensor.expert_axis or 0
    parts: dict[tuple[int, int], list[tuple[tuple[Any, ...], bytes, Chunk, Any]]] = defaultdict(list)
    for chunk in tensor.chunks:
        array = None if chunk.flat is not None else readable(checkpoint, tensor, chunk)
        if array is None:
            return
        for layer in range(chunk.sizes[0] if axis else 1):
            for index in range(chunk.sizes[axis]):
                piece = array[layer, index] if axis else array[index]
                made = xxhash.xxh3_128()
                update(made, piece, HEAD_BYTES)
                place = (chunk.offsets[0] + layer if axis else 0, chunk.offsets[axis] + index)
                box = (chunk.offsets[axis + 1 :], chunk.sizes[axis + 1 :])
                parts[place].append((box, made.digest(), chunk, piece))
    seen: dict[tuple[Any, ...], tuple[int, int]] = {}
    for place in sorted(parts):
        pieces = sorted(parts[place], key=lambda p: p[0])
        key = (place[0], *((box, head) for box, head, _, _ in pieces))
        first = seen.setdefault(key, place)
        if first == place:
            continue
        other = sorted(parts[first], key=lambda p: p[0])
        same = all(np.array_equal(a[3], b[3]) for a, b in zip(other, pieces))
        if same and any((p[3].reshape(-1) != p[3].reshape(-1)[:1]).any() for p in pieces if p[3].size):
            where = f" in layer {place[0]}" if axis else ""
            problems.append(Problem("experts differ", f"experts {first[1]} and {place[1]} of {tensor.name}{where} hold "
                                    "the same weights: one was saved over the other", **where_of(tensor, pieces[0][2]),
                                    cause="ckpt_bad_values"))
