"""Flight-recorder dumps: what each rank's last collectives were, written by torch when a job hangs (or on demand).

One file per rank, `$TORCH_FR_DUMP_TEMP_FILE` (2.9 and later) or `$TORCH_NCCL_DEBUG_INFO_TEMP_FILE` with the global
rank appended; by default `nccl_trace_rank_<rank>` (`comm_lib_trace_rank_<rank>` since 2.9). Any name is accepted
whose last number is the rank, or that has `rank<number>` in it, so that a host may stand in it too. What the file
itself says about its rank (the members that all of its groups have in common) beats the name.

Small sets are read in this process, after the pickle's opcodes were checked; large ones by children with limits, one
per core, each returning only what the analysis needs (`diag.artefacts.fr_digest`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from diag.artefacts import Artefact, Progress, Source, Unreadable, fr_digest, fr_dump, guarded
from diag.artefacts.fr_dump import Dump
from diag.errors import ArtefactError

NAME = "flight-recorder"
#: Up to so many bytes in all are read in this process: starting children costs as much as scanning 1 MiB.
IN_PROCESS_BYTES = 1 << 20
#: No dump is larger: 2,000 entries are about 1 MB, rings of 100,000 entries were seen.
MAX_BYTES = 1 << 30
LIMITS = guarded.Limits(seconds=60, memory=6 << 30)

_WORDS = (b"pg_config", b"entries", b"pg_status", b"profiling_name", b"collective_seq_id", b"record_id",
          b"comm_lib_version", b"nccl_version")
_RANK_WORD = re.compile(r"rank[-_.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\d)\d{1,7}(?!\d)")
_SUFFIX = re.compile(r"\.(?:pkl|pickle|pt\d*|json|bin|dump|trace|txt|log|out|gz|zst)$", re.IGNORECASE)


@dataclass(kw_only=True)
class FlightRecorderDump(Artefact):
    """One rank's dump. `rank` is global, None when neither name nor content says it."""

    rank: int | None
    dump: Dump


ARTEFACT = FlightRecorderDump


def sniff(head: bytes, name: str) -> float:
    """Certain when a pickle or JSON object begins with a flight recorder's own keys."""
    start = head.lstrip()[:2]
    if start[:1] in (b"{", b"["):
        found = sum(b'"%s"' % word in head for word in _WORDS)
    elif start[:1] == b"\x80" or start in (b"(d", b"(l", b"}q", b"]q"):
        found = sum(word in head for word in _WORDS)
    else:
        return 0.0
    return 0.95 if found >= 2 else 0.0


def read(source: Source) -> FlightRecorderDump | Unreadable:
    """The dump in `source`; `Unreadable` with the reason where there is none."""
    return read_many([source], lambda done, total: None)[0]


def read_many(sources: Sequence[Source], progress: Progress) -> list[FlightRecorderDump | Unreadable]:
    """All dumps, in the order of `sources`; one damaged file costs only itself."""
    results: list[FlightRecorderDump | Unreadable | None] = [None] * len(sources)
    total = sum(source.bytes for source in sources)
    done = 0
    outside: list[int] = []
    small = total <= IN_PROCESS_BYTES and not any(source.compression for source in sources)
    for index, source in enumerate(sources):
        if source.bytes > MAX_BYTES:
            results[index] = _unreadable(source, f"is {source.bytes:,} bytes long; no dump is that large")
        elif small or source.real is None:
            results[index] = _read_here(source)
        else:
            outside.append(index)
            continue
        done += source.bytes
        progress(done, total)
    files = [guarded.File(_path(sources[index]), sources[index].compression) for index in outside]
    texts: dict[str, str] = {}
    for place, answer in guarded.run("diag.artefacts.fr_digest:digest_bytes", files, limits=LIMITS):
        source = sources[outside[place]]
        if isinstance(answer, guarded.Failed):
            results[outside[place]] = _unreadable(source, answer.problem)
        else:
            dump = msgspec.msgpack.decode(answer, type=Dump)
            for group in dump.groups:  # the same member lists, a thousand times
                group.ranks = texts.setdefault(group.ranks, group.ranks)
            results[outside[place]] = _named(source, dump)
        done += source.bytes
        progress(done, total)
    return [item if item is not None else _unreadable(sources[index], "was not read")
            for index, item in enumerate(results)]


def _read_here(source: Source) -> FlightRecorderDump | Unreadable:
    try:
        with source.open() as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            return _unreadable(source, f"expands to more than {MAX_BYTES:,} bytes; no dump is that large")
        return _named(source, fr_digest.parse(data))
    except ArtefactError as error:
        return _unreadable(source, str(error))


def _path(source: Source) -> str:
    """A name under which a child can open it too: a pipe was spooled to a file that only this process has open."""
    return str(source.real).replace("/proc/self/", f"/proc/{os.getpid()}/", 1)


def _named(source: Source, dump: Dump) -> FlightRecorderDump:
    rank = rank_of(source.name, dump)
    return FlightRecorderDump(path=source.path, format=NAME, bytes=source.bytes, rank=rank, dump=dump,
                              ranks=[] if rank is None else [rank],
                              problem=None if rank is not None else "does not tell its rank, nor does its name",
                              problem_severity="warning")


def _unreadable(source: Source, problem: str) -> Unreadable:
    rank = rank_in_name(source.name)
    return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=problem,
                      ranks=[] if rank is None else [rank])


def rank_in_name(name: str) -> int | None:
    """The number after the last "rank", else the last number of `name` without its suffix.

    >>> rank_in_name("nccl_trace_rank_13"), rank_in_name("rank7_gpu-node-12.pkl"), rank_in_name("node12-fr-3.json")
    (13, 7, 3)
    """
    while _SUFFIX.search(name):
        name = _SUFFIX.sub("", name)
    numbers = _RANK_WORD.findall(name) or _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def rank_of(name: str, dump: Dump) -> int | None:
    """The global rank: the name's number, unless the groups in the dump say that it is another one."""
    named = rank_in_name(name)
    common: set[int] | None = None
    for group in dump.groups:
        if group.ranks:
            ranks = fr_dump.members(group.ranks)
            common = set(ranks) if common is None else common & set(ranks)
    if not common or named in common:
        return named
    return common.pop() if len(common) == 1 else None
