"""Every archive proven: its structure always, the CRC32 of its members by sample or, with --deep, of every byte.

torch.load does not compare the CRCs that torch.save wrote: a bit that flips in a tensor loads without a word. Reading
is by `preadv` into one buffer per thread that stays in the processor's cache; `isal` computes CRC32 several times as
fast as zlib and both release the interpreter's lock.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from diag.checkpoints import zips
from diag.checkpoints.canonical import Checkpoint, Problem, Tensor
from diag.checkpoints.files import Folder
from diag.checkpoints.verify.outcome import NotApplicable, Options, plural
from diag.errors import ArtefactError

BLOCK = 1 << 20
#: Without --deep: this many bytes of members are read, spread over the files.
SAMPLE_BYTES = 256 << 20
#: Progress(bytes done, bytes in all), called from the main thread.
Progress = Callable[[int, int], None]


def _zlib() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:  # no wheel for this platform
        import zlib

        return zlib
    return isal_zlib


@dataclass(frozen=True, slots=True)
class Task:
    """One member to be read. `tensor` is the name it belongs to, where that is known."""

    file: str
    member: zips.Member
    tensor: str


def structure(checkpoint: Checkpoint, _: Options, problems: list[Problem]) -> str:
    """Directory, headers and descriptors of every archive agree, and every byte of it belongs to something."""
    containers = [c for c in checkpoint.containers if c.kind == "zip"]
    if not containers:
        raise NotApplicable("no zip archives among the files")
    known = {(p.file, p.tensor) for p in checkpoint.problems}
    count = 0
    for container in containers:
        size = checkpoint.folder.size(container.file)
        if size is None or container.offset + container.length > size or (container.file, container.owner) in known:
            continue  # missing and cut files are told of by other checks
        try:
            count += len(zips.members(checkpoint.folder.map(container.file), container.offset, container.length))
        except zips.ZipDamage as damage:
            owner = container.owner or None
            problems.append(Problem(
                "archives", f"{container.file}: {damage}" + (f" in what belongs to {owner}" if owner else ""),
                container.file, owner, (container.offset, container.offset + container.length)))
        except ArtefactError as error:
            problems.append(Problem("archives", str(error), container.file, container.owner or None))
    return f"{plural(len(containers), 'archive')}, {plural(count, 'member')}"


def tasks(checkpoint: Checkpoint) -> Iterator[Task]:
    """Every member of every sound archive, with the tensor it belongs to."""
    owners = _owners(checkpoint)
    for container in checkpoint.containers:
        size = checkpoint.folder.size(container.file)
        if container.kind != "zip" or size is None or container.offset + container.length > size:
            continue
        try:
            listed = zips.members(checkpoint.folder.map(container.file), container.offset, container.length)
        except ArtefactError:
            continue
        for member in listed:
            yield Task(container.file, member, container.owner or owners.get((container.file, member.begin), ""))


def _owners(checkpoint: Checkpoint) -> dict[tuple[str, int], str]:
    """(file, where a member's bytes begin) -> tensor, for archives that hold many."""
    owners: dict[tuple[str, int], str] = {}
    for tensor in checkpoint.tensors.values():
        for chunk in (*tensor.chunks, *tensor.copies):
            if chunk.begin >= 0 and not chunk.container.owner:
                owners.setdefault((chunk.file, chunk.begin), tensor.name)
    return owners


def crc(checkpoint: Checkpoint, options: Options, problems: list[Problem], progress: Progress | None = None) -> str:
    """CRC32 of archive members against the CRC that the archive holds: all of them with --deep."""
    if not any(c.kind == "zip" for c in checkpoint.containers):
        raise NotApplicable("safetensors carry no checksums of their own")
    bare = "; the safetensors carry none" if any(c.kind == "safetensors" for c in checkpoint.containers) else ""
    every = list(tasks(checkpoint))
    chosen = every if options.deep else sample(every, options.seed)
    total = sum(task.member.size for task in chosen)
    reader = Reader(checkpoint.folder)
    try:
        done = 0
        with ThreadPoolExecutor(max(1, options.threads)) as pool:
            # Small members are grouped: a task per ten-byte member would cost more than its bytes.
            for batch, bad in pool.map(lambda batch: (batch, [t for t in batch if reader.crc(t) != t.member.crc]),
                                       _batches(chosen)):
                done += sum(task.member.size for task in batch)
                if progress is not None:
                    progress(done, total)
                for task in bad:
                    problems.append(_damaged(checkpoint, task))
    finally:
        reader.close()
    part = f"{total / (sum(t.member.size for t in every) or 1):.0%} of the bytes" if not options.deep else "every byte"
    return f"{plural(len(chosen), 'member')} of {len(every):,}, {part}{bare}"


def sample(every: list[Task], seed: int) -> list[Task]:
    """Members of about `SAMPLE_BYTES` at random, small ones all."""
    if sum(task.member.size for task in every) <= SAMPLE_BYTES:
        return every
    order = list(range(len(every)))
    random.Random(seed).shuffle(order)
    chosen, total = [], 0
    for index in order:
        size = every[index].member.size
        if total + size <= SAMPLE_BYTES:
            chosen.append(index)
            total += size
    return [every[index] for index in sorted(chosen)]


def _batches(chosen: list[Task], size: int = 8 << 20, count: int = 512) -> Iterator[list[Task]]:
    batch: list[Task] = []
    total = 0
    for task in chosen:
        batch.append(task)
        total += task.member.size
        if total >= size or len(batch) >= count:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _damaged(checkpoint: Checkpoint, task: Task) -> Problem:
    name = task.tensor or _inside(checkpoint, task)
    what = f"tensor {name}" if name else f"member {task.member.name}"
    begin, end = task.member.begin, task.member.begin + task.member.size
    return Problem("CRC32", f"{task.file}: the bytes {begin:,} to {end:,} of {what} do not have the CRC32 that "
                            "was saved "
                   "with them: they changed since", task.file, name or None, (begin, end))


def _inside(checkpoint: Checkpoint, task: Task) -> str:
    """The first tensor whose bytes lie in the member (a storage shared by several)."""
    begin, end = task.member.begin, task.member.begin + task.member.size
    for tensor in checkpoint.tensors.values():
        for chunk in (*tensor.chunks, *tensor.copies):
            if chunk.file == task.file and begin <= chunk.begin < end:
                return tensor.name
    return ""


class Reader:
    """Reads ranges of the checkpoint's files by `preadv`, a buffer per thread; safe to use from several threads."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.zlib = _zlib()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    def crc(self, task: Task) -> int:
        """CRC32 of the member, -1 when it cannot be read."""
        value = 0
        for block in self.blocks(task.file, task.member.begin, task.member.size):
            value = self.zlib.crc32(block, value)
        return value

    def blocks(self, file: str, begin: int, size: int) -> Iterator[memoryview]:
        """The bytes in pieces of at most `BLOCK`, each valid until the next is asked for; short when the file is."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(BLOCK))
        descriptor = self._descriptor(file)
        at, end = begin, begin + size
        while at < end:
            part = buffer[: min(BLOCK, end - at)]
            got = os.preadv(descriptor, [part], at)
            if got <= 0:
                return
            yield part[:got]
            at += got

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                if len(self._open) >= 128:
                    # Threads work through files in order: the oldest is no longer in use by any of a few.
                    os.close(self._open.pop(next(iter(self._open))))
                self._open[file] = self.folder.open(file)
            return self._open[file]

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def owner_of(checkpoint: Checkpoint, file: str, at: int) -> Tensor | None:
    """The tensor whose bytes include byte `at` of `file`."""
    for tensor in checkpoint.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file == file and chunk.byte_range[0] <= at < chunk.byte_range[1]:
                return tensor
    return None
