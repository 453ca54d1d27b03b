"""Scanning many logs on all cores: forked children take shares of the work and send facts back through pipes.

`fork` keeps the compiled catalogue and the open sources without copying or pickling; children never touch the
parent's streams and leave with `os._exit`, so threads of the parent (a progress bar) cannot block them.
"""

from __future__ import annotations

import os
import selectors
import signal
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from diag.artefacts import Progress as Report
from diag.artefacts import Source
from diag.artefacts.log_lines import style_of
from diag.artefacts.log_scan import Facts, scan
from diag.signatures import Catalogue

#: A plain file larger than this is scanned in pieces.
PIECE = 64 << 20
#: Below this much text a fork costs more than it saves.
FORK_BYTES = 6 << 20
#: Text searched for progress lines over all logs together; beyond it each log is sampled.
PROGRESS_BYTES = 3 << 20
PROGRESS_LEAST = 16 << 10


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of one source: `source` is its index; `length` None means to the end."""

    source: int
    piece: int
    start: int
    length: int | None
    weight: int


def plan(sources: Sequence[Source]) -> list[Task]:
    """Every source in pieces; compressed ones whole."""
    tasks = []
    for index, source in enumerate(sources):
        if source.compression is None and source.real is not None and source.bytes > PIECE:
            count = -(-source.bytes // PIECE)
            tasks += [Task(index, i, i * PIECE, PIECE if i < count - 1 else None,
                           min(PIECE, source.bytes - i * PIECE)) for i in range(count)]
        else:
            tasks.append(Task(index, 0, 0, None, source.bytes * (1 if source.compression is None else 10)))
    return tasks


def run(sources: Sequence[Source], catalogue: Catalogue, report: Report, workers: int | None = None,
        ) -> list[list[Facts]]:
    """The facts of each source, piece by piece in order."""
    tasks = plan(sources)
    total = sum(task.weight for task in tasks)
    budget = max(PROGRESS_LEAST, PROGRESS_BYTES // max(1, len(tasks)))
    workers = min(workers or _cores(), len(tasks))
    results: dict[tuple[int, int], Facts] = {}
    size = sum(source.bytes for source in sources)
    done = 0

    def finished(task: Task, facts: Facts) -> None:
        nonlocal done
        results[task.source, task.piece] = facts
        done += task.weight
        report(size * done // max(1, total), size)

    if workers < 2 or total < FORK_BYTES or not hasattr(os, "fork"):
        for task in tasks:
            finished(task, work(sources[task.source], task, catalogue, budget))
    else:
        _ = catalogue.matcher  # deserialised once; children get it with the fork
        _forked(sources, catalogue, tasks, workers, budget, finished, sources[0].options.meanwhile)
    return [[results[key] for key in sorted(k for k in results if k[0] == index)] for index in range(len(sources))]


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def work(source: Source, task: Task, catalogue: Catalogue, budget: int) -> Facts:
    """Scan one piece. A piece that begins inside a file starts at the first line that begins in it; the line that
    crosses its start belongs to the piece before."""
    try:
        stream = source.open()
    except OSError as error:
        return Facts(problem=f"could no longer be opened: {error.strerror or error}")
    with stream:
        if task.start:
            stream.seek(task.start - 1)
            skipped = len(stream.readline(1 << 26)) - 1
            limit = None if task.length is None else task.length - skipped
            if limit is not None and limit <= 0:
                return Facts()
            return scan(stream, catalogue, style_of(source.head), budget, limit, begins=False)
        return scan(stream, catalogue, style_of(source.head), budget, task.length)


def _shares(tasks: list[Task], workers: int) -> list[list[int]]:
    """Task numbers per worker: the largest first to whoever has least."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for number in sorted(range(len(tasks)), key=lambda n: -tasks[n].weight):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += tasks[number].weight + 4096
    return shares


def _forked(sources: Sequence[Source], catalogue: Catalogue, tasks: list[Task], workers: int, budget: int,
            finished: Callable[[Task, Facts], None], meanwhile: Callable[[], object] | None) -> None:
    children: dict[int, int] = {}
    buffers: dict[int, bytearray] = {}
    missing = set(range(len(tasks)))
    with selectors.DefaultSelector() as selector:
        try:
            for share in _shares(tasks, workers):
                reading, writing = os.pipe()
                pid = os.fork()
                if pid == 0:
                    _child(writing, [reading, *buffers], sources, catalogue, tasks, share, budget)
                os.close(writing)
                children[reading] = pid
                buffers[reading] = bytearray()
                selector.register(reading, selectors.EVENT_READ)
            if meanwhile is not None:
                meanwhile()
            while selector.get_map():
                for key, _ in selector.select():
                    pipe = key.fd
                    data = os.read(pipe, 1 << 20)
                    if not data:
                        selector.unregister(pipe)
                        continue
                    buffers[pipe] += data
                    for number, facts in _frames(buffers[pipe]):
                        missing.discard(number)
                        finished(tasks[number], facts)
        except BaseException:
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)
            raise
        finally:
            for pipe, pid in children.items():
                os.close(pipe)
                os.waitpid(pid, 0)
    for number in sorted(missing):  # a child was killed (by the out-of-memory killer, say): do its share here
        finished(tasks[number], work(sources[tasks[number].source], tasks[number], catalogue, budget))


def _child(pipe: int, close: list[int], sources: Sequence[Source], catalogue: Catalogue, tasks: list[Task],
           share: list[int], budget: int) -> None:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for other in close:
            os.close(other)
        for number in share:
            task = tasks[number]
            body = msgspec.msgpack.encode(work(sources[task.source], task, catalogue, budget))
            _write(pipe, struct.pack("<IQ", number, len(body)) + body)
        status = 0
    finally:
        os._exit(status)


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view[: 1 << 20]):]


def _frames(buffer: bytearray) -> list[tuple[int, Facts]]:
    """Take the complete results off the front of `buffer`."""
    found = []
    header = struct.calcsize("<IQ")
    while len(buffer) >= header:
        number, length = struct.unpack_from("<IQ", buffer)
        if len(buffer) < header + length:
            break
        found.append((number, msgspec.msgpack.decode(memoryview(buffer)[header : header + length], type=Facts)))
        del buffer[: header + length]
    return found
