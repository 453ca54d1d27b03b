"""CUDA memory snapshots: the pickles of `torch.cuda.memory._dump_snapshot`, of any torch from 2.0 on, `.gz` too.

One file per process, usually of one rank. The name tells the rank only where it says "rank" (`rank3_...`), or where
several files differ in one number. What a file is and how its layout changed: `diag.artefacts.memory_snapshot_pickle`.

Small files are read in this process after their opcodes were checked; large ones by a child with limits on memory and
time, which streams the file and sends back only the answer.
"""

from __future__ import annotations

import atexit
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from diag.artefacts import Artefact, Progress, Source, Unreadable, guarded, restricted_pickle
from diag.errors import ArtefactError
from diag.memory.nouns import DeviceMemory, Digest

NAME = "memory-snapshot"
#: Up to so many bytes in all are read in this process.
IN_PROCESS_BYTES = 1 << 20
#: Nothing larger is tried: the reader's memory is limited, and the ring of a run is not that long.
MAX_BYTES = 4 << 30
#: Address space of a reading process: a file of 1 GB needs about three.
MEMORY = 6 << 30
#: Of a large file, so many bytes are read in a second at the very least.
SLOWEST = 4 << 20

_WORDS = (b"device_traces", b"segments", b"total_size", b"segment_type", b"allocated_size", b"active_size",
          b"allocator_settings", b"external_annotations", b"blocks")
_RANK = re.compile(r"rank[-_.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


@dataclass(kw_only=True)
class MemorySnapshot(Artefact):
    """One file's answer. `rank` is None when nothing says it; `device_memory` is what the user says of the card."""

    rank: int | None = None
    layout: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    devices: list[DeviceMemory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    device_memory: int | None = None


ARTEFACT = MemorySnapshot


def sniff(head: bytes, name: str) -> float:
    """Certain when a pickle begins with a memory snapshot's own keys."""
    if head[:1] != b"\x80" and head[:2] not in (b"(d", b"(l", b"}q", b"]q"):
        return 0.0
    return 0.96 if sum(word in head for word in _WORDS) >= 2 else 0.0


def read(source: Source) -> MemorySnapshot | Unreadable:
    """The snapshot in `source`; `Unreadable` with the reason where there is none."""
    return read_many([source], lambda done, total: None)[0]


def read_many(sources: Sequence[Source], progress: Progress) -> list[MemorySnapshot | Unreadable]:
    """All snapshots, in the order of `sources`; one damaged file costs only itself."""
    results: list[MemorySnapshot | Unreadable | None] = [None] * len(sources)
    ranks = _ranks([source.name for source in sources])
    total, done = sum(source.bytes for source in sources), 0
    small = total <= IN_PROCESS_BYTES and not any(source.compression for source in sources)
    outside: list[int] = []
    for index, source in enumerate(sources):
        if source.bytes > MAX_BYTES:
            results[index] = _unreadable(source, ranks[index], f"is {source.bytes:,} bytes long; no more than "
                                         f"{MAX_BYTES >> 30} GiB are read. Record fewer entries (max_entries), or "
                                         'stacks="python"')
        elif small or source.real is None:
            results[index] = _read_here(source, ranks[index])
        else:
            outside.append(index)
            continue
        done += source.bytes
        progress(done, total)
    largest = max((sources[i].bytes for i in outside), default=0)
    limits = guarded.Limits(seconds=60 + largest // SLOWEST, memory=MEMORY)
    files = [guarded.File(os.devnull, None, _hint(sources[i])) for i in outside]
    # a child holds a few times its file: of large ones not all cores' worth at once
    children = max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
                          (1 << 30) // max(largest, 1)))
    for place, answer in guarded.run("diag.artefacts.memory_snapshot:digest_file", files, limits=limits,
                                     children=children):
        source, rank = sources[outside[place]], ranks[outside[place]]
        if isinstance(answer, guarded.Failed):
            results[outside[place]] = _unreadable(source, rank, answer.problem)
        else:
            results[outside[place]] = _made(source, rank, msgspec.msgpack.decode(answer, type=Digest))
        done += source.bytes
        progress(done, total)
    return [item if item is not None else _unreadable(sources[index], ranks[index], "was not read")
            for index, item in enumerate(results)]


#: What a reading process unpickled last; it ends without freeing it.
_LAST: list[object] = []


def digest_file(data: bytes, hint: str) -> bytes:
    """In a child, and only there: the answer about the file that `hint` names, as msgpack. Raises `ArtefactError`."""
    from diag.artefacts.memory_snapshot_pickle import load
    from diag.compressed import open_plain
    from diag.memory.analyse import digest

    path, compression = msgspec.json.decode(hint, type=tuple[str, str | None])
    atexit.unregister(os._exit)
    atexit.register(os._exit, 0)
    _LAST.clear()
    with open_plain(Path(path), compression) as stream:
        return msgspec.msgpack.encode(digest(load(stream, keep=_LAST)))


def parse(data: bytes) -> Digest:
    """The answer about the pickle `data`, whose opcodes are checked first. Raises `ArtefactError`."""
    from diag.artefacts.memory_snapshot_pickle import load
    from diag.memory.analyse import digest

    restricted_pickle.scan(data)
    return digest(load(io.BytesIO(data)))


def _read_here(source: Source, rank: int | None) -> MemorySnapshot | Unreadable:
    try:
        with source.open() as stream:
            data = stream.read(MAX_BYTES)
        return _made(source, rank, parse(data))
    except ArtefactError as error:
        return _unreadable(source, rank, str(error))


def _hint(source: Source) -> str:
    real = str(source.real).replace("/proc/self/", f"/proc/{os.getpid()}/", 1)
    return msgspec.json.encode((real, source.compression)).decode()


def _made(source: Source, rank: int | None, answer: Digest) -> MemorySnapshot:
    return MemorySnapshot(path=source.path, format=NAME, bytes=source.bytes, rank=rank,
                          ranks=[] if rank is None else [rank], layout=answer.layout, settings=answer.settings,
                          devices=answer.devices, notes=answer.notes, device_memory=source.options.device_memory)


def _unreadable(source: Source, rank: int | None, problem: str) -> Unreadable:
    return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=problem,
                      ranks=[] if rank is None else [rank])


def _ranks(names: Sequence[str]) -> list[int | None]:
    """The rank in each name: after the word "rank", or the one number in which several names differ.

    >>> _ranks(["rank3_memory_snapshot.pickle"]), _ranks(["1.3b_snapshot.pickle"]), _ranks(["mem_0.pkl", "mem_1.pkl"])
    ([3], [None], [0, 1])
    """
    found = [int(m[-1]) if (m := _RANK.findall(name)) else None for name in names]
    if len(set(names)) < 2 or any(rank is not None for rank in found):
        return found
    if len({_NUMBER.sub("#", name) for name in names}) > 1:
        return found
    numbers = [tuple(map(int, _NUMBER.findall(name[:200])[:16])) for name in names]
    differing = [place for place in range(len(numbers[0])) if len({n[place] for n in numbers}) > 1]
    if len(differing) != 1 or any(n[differing[0]] > 1 << 20 for n in numbers):
        return found
    return [n[differing[0]] for n in numbers]
