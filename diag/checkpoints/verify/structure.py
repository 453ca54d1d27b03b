"""Checks of structure: files, byte ranges, tiling. No tensor byte is read."""

from __future__ import annotations

import math
from collections import defaultdict

from diag.checkpoints.canonical import Checkpoint, Chunk, Problem, Tensor, boxes
from diag.checkpoints.dtypes import DTYPES
from diag.checkpoints.steps import is_leftover
from diag.checkpoints.verify.digests import SCRATCH
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural, some
from diag.errors import ArtefactError

_PAYLOAD = (".distcp", ".pt", ".pth", ".bin", ".ckpt", ".safetensors")
#: Findings of one check beyond this number are counted in the last one.
MANY = 200


def commit(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """The mark that the format writes last is there."""
    if checkpoint.committed is None:
        raise NotApplicable("this format has no commit mark")
    if not checkpoint.committed and not problems:
        problems.append(Problem("commit mark", f"{checkpoint.commit_mark} is missing: the save was not finished",
                                checkpoint.commit_mark, cause="ckpt_incomplete"))
    return checkpoint.commit_mark


def files(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Every file that the metadata, the index or the recorded world call for is there."""
    if not checkpoint.expected:
        raise NotApplicable("nothing says which files there should be")
    owners: dict[str, list[str]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        for chunk in tensor.chunks:
            owners[chunk.file].append(tensor.name)
    told = {p.file for p in checkpoint.problems if p.check in ("files complete", "commit mark")}
    missing = [f for f in sorted(checkpoint.expected) if checkpoint.folder.size(f) is None and f not in told]
    if len(missing) > 2 and not any(n.endswith(_PAYLOAD) for n in checkpoint.expected - set(missing)):
        held = f", which holds {some(owners[missing[0]], 1)}" if owners[missing[0]] else ""
        problems.append(Problem("files complete", f"none of the {len(missing):,} files with tensors is here, the first "
                                f"being {missing[0]}{held}; only what describes them", missing[0],
                                owners[missing[0]][0] if owners[missing[0]] else None, cause="ckpt_missing_shard"))
        return plural(len(checkpoint.expected), "file")
    for name in missing[:MANY]:
        held = f"; it holds {some(owners[name])}" if owners[name] else ""
        problems.append(Problem("files complete", f"{name} is missing{held}", name,
                                owners[name][0] if owners[name] else None, cause="ckpt_missing_shard"))
    if len(missing) > MANY:
        problems.append(Problem("files complete", f"{len(missing) - MANY:,} more files are missing", missing[MANY],
                                cause="ckpt_missing_shard"))
    return plural(len(checkpoint.expected), "file")


def leftovers(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Nothing that an interrupted save leaves behind lies among the files."""
    names = checkpoint.folder.names(_own(checkpoint)) if checkpoint.files or checkpoint.expected else []
    told = {p.file for p in checkpoint.problems} | {SCRATCH}
    for name in [n for n in names if is_leftover(n.rpartition("/")[2]) and n not in told][:MANY]:
        problems.append(Problem("no leftovers", f"{name} is what a save leaves when it is interrupted", name,
                                cause="ckpt_incomplete", severity="warning"))
    return plural(len(names), "file")


def _own(checkpoint: Checkpoint) -> str:
    """The folder below the root that all files of the checkpoint share."""
    first = {name.partition("/")[0] for name in checkpoint.files if "/" in name}
    return first.pop() if len(first) == 1 and all("/" in n for n in checkpoint.files) else ""


def stale(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """No shard lies there that belongs to nothing: what an older save of a larger world leaves."""
    if not checkpoint.expected or checkpoint.committed is False:
        raise NotApplicable("without metadata nothing says which shards belong")
    extra = sorted(checkpoint.files - checkpoint.expected)
    told = {p.file for p in checkpoint.problems}
    for name in [n for n in extra if n.endswith((".distcp", ".pt", ".safetensors", ".bin")) and n not in told][:MANY]:
        problems.append(Problem("no stale shards", f"{name} belongs to nothing that the checkpoint describes; it is of "
                                "another, larger save into the same folder", name, cause="ckpt_stale_shards",
                                severity="warning"))
    return plural(len(checkpoint.files), "file")


def reported(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """For checks that the readers do while they read: their problems are already there."""
    return plural(len(checkpoint.tensors), "tensor")


def index(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """The index of a sharded model names what the files hold."""
    if not any(name.endswith(".index.json") for name in checkpoint.files):
        raise NotApplicable("no index among the files")
    return plural(len(checkpoint.tensors), "tensor")


def headers(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Headers of safetensors files."""
    count = sum(c.kind == "safetensors" for c in checkpoint.containers)
    if not count:
        raise NotApplicable("no safetensors among the files")
    return plural(count, "header")


def holds(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Something to train from: a sound archive of anything else is no checkpoint."""
    if not checkpoint.tensors and not checkpoint.problems:
        what = ", ".join(sorted(checkpoint.files)[:3]) or "the checkpoint"
        problems.append(Problem("holds tensors", f"{what}: sound, but without any tensor: no model",
                                cause="ckpt_incomplete", severity="warning"))
    return plural(len(checkpoint.tensors), "tensor")


def ranks(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """What several ranks' files say about the run agrees."""
    if checkpoint.format not in ("deepspeed", "megatron_legacy"):
        raise NotApplicable("no rank keeps a file of its own")
    return plural(len(checkpoint.files), "file")


def hostile(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """No pickle names code that could run."""
    if not any(c.kind == "zip" for c in checkpoint.containers) and "metadata" in checkpoint.not_applicable:
        raise NotApplicable("no pickles among the files")
    return "restricted unpickler; nothing is ever run"


def places(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Byte ranges lie inside their files and no two overlap."""
    spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for container in checkpoint.containers:
        if container.kind in ("zip", "transformed", "raw"):
            spans[container.file].append((container.offset, container.offset + container.length, container.owner))
    if not spans and not any(c.kind == "safetensors" for c in checkpoint.containers):
        raise NotApplicable("no byte ranges are recorded")
    count = 0
    for file, listed in spans.items():
        size = checkpoint.folder.size(file)
        if size is None:
            continue
        at, before = 0, ""
        for begin, end, owner in sorted(listed):
            count += 1
            if end > size:
                problems.append(Problem("byte ranges", f"{owner or file} should end at byte {end:,} of {file}, which "
                                        f"has {size:,}: the file is cut", file, owner or None, (begin, end)))
            if begin < at:
                problems.append(Problem("byte ranges", f"{owner} begins at byte {begin:,} of {file}, where "
                                                       f"{before} has "
                                        f"not ended (byte {at:,}): they overlap", file, owner or None, (begin, end)))
            at, before = max(at, end), owner
    return plural(count or sum(len(t.chunks) for t in checkpoint.tensors.values()), "range")


def tiling(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """The chunks of every tensor cover its shape exactly: nothing missing, nothing twice."""
    count = 0
    missing = {p.tensor for p in checkpoint.problems if p.check in ("every chunk has bytes", "paths stay inside",
                                                                    "files complete", "byte ranges", "archives")}
    for tensor in checkpoint.tensors.values():
        if tensor.name in missing or not tensor.dtype:
            continue
        count += len(tensor.chunks)
        for text, chunk in tile_problems(tensor):
            where = chunk or (tensor.chunks[0] if tensor.chunks else None)
            problems.append(Problem("chunks tile", f"{tensor.name} {text}", where.file if where else None, tensor.name,
                                    where.byte_range if where else None))
    if not count and not problems:
        raise NotApplicable("no chunks are recorded")
    return plural(count, "chunk")


def tile_problems(tensor: Tensor) -> list[tuple[str, Chunk | None]]:
    """What is wrong with the tiling of one tensor, each with the chunk where it shows.

    Boxes inside the shape whose volumes sum up to it and of which no two meet cover it exactly. Pairs are compared
    along a sweep over the axis with most cuts, so that ten thousand chunks of a row are not a hundred million pairs.
    """
    found: list[tuple[str, Chunk | None]] = []
    volume = 0
    listed: list[tuple[tuple[int, ...], tuple[int, ...], Chunk]] = []
    for offsets, sizes, pieces in boxes(tensor.chunks):
        whole: int = math.prod(sizes)
        if len(offsets) != len(tensor.shape) or any(o + s > n for o, s, n in zip(offsets, sizes, tensor.shape)):
            found.append((f"is {list(tensor.shape)}; its chunk at {list(offsets)} of {list(sizes)} lies outside",
                          pieces[0]))
            continue
        if len(pieces) > 1 or pieces[0].flat is not None:
            at = 0
            for piece in pieces:
                begin, end = piece.flat or (0, whole)
                if begin != at or end > whole:
                    what = f"elements {at:,} to {begin:,} are nowhere" if begin > at else \
                        f"elements {begin:,} to {min(at, end):,} are there twice" if begin < at else \
                        f"a piece ends at element {end:,} of {whole:,}"
                    found.append((f"has pieces that do not follow each other: {what}", piece))
                at = max(at, end)
            if at < whole:
                found.append((f"has {at:,} of its {whole:,} elements; the rest is nowhere", pieces[-1]))
        volume += whole
        if whole:
            listed.append((offsets, sizes, pieces[0]))
    if found:
        return found
    if tensor.elements != volume:
        what = "hold" if len(listed) != 1 else "holds"
        found.append((f"is {list(tensor.shape)}, {tensor.elements:,} elements; its {plural(len(listed), 'chunk')} "
                      f"{what} "
                      f"{volume:,}", listed[0][2] if listed else None))
    overlap = _overlap(listed)
    if overlap is not None:
        a, b = overlap
        found.append((f"has two chunks that overlap: {list(a[1])} at {list(a[0])} and {list(b[1])} at "
                      f"{list(b[0])}", b[2]))
    return found


def _overlap(listed: list[tuple[tuple[int, ...], tuple[int, ...], Chunk]]) -> tuple[
        tuple[tuple[int, ...], tuple[int, ...], Chunk], tuple[tuple[int, ...], tuple[int, ...], Chunk]] | None:
    if len(listed) < 2 or not listed[0][0]:
        return (listed[0], listed[1]) if len(listed) > 1 else None
    axis = max(range(len(listed[0][0])), key=lambda d: len({item[0][d] for item in listed}))
    live: list[tuple[tuple[int, ...], tuple[int, ...], Chunk]] = []
    for item in sorted(listed, key=lambda item: item[0][axis]):
        live = [other for other in live if other[0][axis] + other[1][axis] > item[0][axis]]
        for other in live:
            if all(p < o + s and o < p + t for o, s, p, t in zip(item[0], item[1], other[0], other[1])):
                return other, item
        live.append(item)
    return None


def sizes(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Element type x shape = bytes, for every chunk, as the archives themselves describe it."""
    count = 0
    told = {(p.file, p.tensor) for p in (*checkpoint.problems, *problems)}
    for tensor in checkpoint.tensors.values():
        for chunk in (*tensor.chunks, *tensor.copies):
            size = checkpoint.folder.size(chunk.file)
            if size is None or chunk.byte_range[1] > size or (chunk.file, tensor.name) in told:
                continue
            if chunk.container.kind == "transformed":
                continue
            count += 1
            try:
                checkpoint.locate(tensor, chunk)
            except ArtefactError as error:
                if "is cut" in str(error) or "(byte " in str(error):
                    continue  # the archive check says it
                hostile_text = "hostile" in str(error)
                problems.append(Problem("sizes", str(error), chunk.file, tensor.name, chunk.byte_range,
                                        cause="ckpt_hostile" if hostile_text else "ckpt_corrupt"))
                continue
            expected = DTYPES[tensor.dtype].nbytes(chunk.elements) if tensor.dtype in DTYPES else chunk.nbytes
            if chunk.strides is None and chunk.nbytes != expected:
                problems.append(Problem("sizes", f"{tensor.name} needs {expected:,} bytes in {chunk.file} and has "
                                        f"{chunk.nbytes:,}", chunk.file, tensor.name, chunk.byte_range))
    if not count and not problems:
        raise NotApplicable("no tensor is here to be looked at")
    return plural(count, "chunk")
