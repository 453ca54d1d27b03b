"""Carrying out a plan: threads copy bytes in bounded memory, a journal makes it resumable, a rename commits it.

Everything is written into `<destination>.reshard.tmp` beside the destination. A line of the journal follows each piece
that is written, with its CRC32. When all are, every file is read again and compared with those CRCs; then the commit
marks are written, and the folder gets its name. Killed at any moment, there is either nothing at the destination or
all of it; the temporary folder is taken up again by the same command.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diag.checkpoints.convert.contents import RECORD
from diag.checkpoints.convert.plan import OutFile, Payload, Plan, Span, Zeros
from diag.checkpoints.convert.recipe import box, rows_of_box
from diag.checkpoints.convert.source import Source
from diag.checkpoints.dtypes import DTYPES
from diag.errors import ArtefactError, UsageError

SUFFIX = ".reshard.tmp"
JOURNAL = ".reshard.journal"
_VERSION = "pdtrain.reshard.journal/1"
#: Bytes that a thread copies at a time: it stays in the second-level cache's reach and amortises the system calls.
SLAB = 8 << 20
_LEAST = 1 << 20
#: done, total bytes, phase ("writing", "verifying")
Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Result:
    """What was done: bytes written now, bytes taken over from an interrupted run, CRC32 by file and payload."""

    written: int = 0
    resumed: int = 0
    restarted: bool = False
    crcs: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Limits:
    """threads; `memory` bytes that the whole process may take (None: no limit beyond the slabs)."""

    threads: int = 2
    memory: int | None = None

    def slab(self) -> int:
        """Bytes of one thread's buffer. Raises `UsageError` when the limit leaves no room for any."""
        if self.memory is None:
            return SLAB
        free = self.memory - resident()
        # reading a column out of flat pieces takes a second buffer of the size of whole rows
        slab = min(SLAB, free // (3 * self.threads))
        if slab < _LEAST:
            least = resident() + 3 * self.threads * _LEAST
            raise UsageError(f"--max-memory {self.memory / 1e6:,.6g} MB is too little for {self.threads} threads here; "
                             f"give at least {least / 1e6 + 10:.0f} MB, or fewer threads")
        return slab


def resident() -> int:
    """Bytes of memory this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 100 << 20


def execute(plan: Plan, source: Source, destination: Path, identity: Any, limits: Limits,
            progress: Progress | None = None, check: Callable[[Path, Result], None] | None = None) -> Result:
    """Write `plan` to `destination`. `identity` says which source it is of; `check` looks at the finished temporary
    folder before it is committed.

    Raises `UsageError` (destination exists, no space, another run is at it), `ArtefactError` (source damaged).
    """
    run = _Run(plan, source, destination, identity, limits, progress)
    return run.go(check)


class _Run:
    def __init__(self, plan: Plan, source: Source, destination: Path, identity: Any, limits: Limits,
                 progress: Progress | None) -> None:
        self.plan, self.source, self.destination, self.limits = plan, source, destination, limits
        self.temporary = destination.with_name(destination.name + SUFFIX)
        self.stamp = f"{_VERSION} {plan.fingerprint(identity)}"
        self.progress = progress
        self.slab = limits.slab()
        self.result = Result(crcs={f.name: [-1] * len(f.payloads) for f in plan.files})
        self.left: dict[str, int] = {}
        self.open: dict[str, int] = {}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.done_bytes = 0
        self.resumed: set[tuple[str, int]] = set()
        self.journal = -1

    def go(self, check: Callable[[Path, Result], None] | None) -> Result:
        refuse_existing(self.destination)
        with self._locked():
            self._resume()
            self._space()
            self._prepare()
            self._write(self._todo())
            bad = self._verify()
            if bad and set(bad) <= self.resumed:  # what an interrupted run left was not on the disk after all
                for name, index in bad:
                    self.result.crcs[name][index] = -1
                self._write(bad)
                bad = self._verify()
            if bad:
                name, index = bad[0]
                raise ArtefactError(f"{self.temporary / name}: what was written reads back differently "
                                    f"({len(bad):,} pieces): the disk or its memory is faulty; nothing was committed")
            if check is not None:
                check(self.temporary, self.result)
            self._commit()
        return self.result

    # -- the temporary folder -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Any:
        try:
            if self.temporary.is_symlink():
                raise UsageError(f"{self.temporary}: is a link, and nothing is written through it; remove it")
            self.temporary.mkdir(parents=True, exist_ok=True)
            ours = (self.temporary / JOURNAL).exists() or next(self.temporary.rglob(RECORD), None) is not None
            if not ours and any(self.temporary.iterdir()):
                raise UsageError(f"{self.temporary}: holds files that are not of a conversion; move it away")
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self.journal = os.open(self.temporary / JOURNAL, flags, 0o644)
        except OSError as error:
            raise UsageError(f"{self.temporary}: cannot be written: {error.strerror or error}") from None
        try:
            fcntl.flock(self.journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.journal)
            raise UsageError(f"{self.temporary}: another pdtrain is writing there") from None
        try:
            yield
        except OSError as error:
            raise _words(error, self.temporary) from None
        finally:
            for descriptor in self.open.values():
                os.close(descriptor)
            os.close(self.journal)

    def _resume(self) -> None:
        """Take over what the journal of an interrupted run of the same plan says; else start over."""
        lines = _read_all(self.journal).decode("utf-8", "replace").split("\n")
        if lines[0] == self.stamp:
            files = {str(n): f for n, f in enumerate(self.plan.files)}
            for line in lines[1:-1]:  # the last one may be cut, and is then followed by nothing
                fields = line.split()
                file = files.get(fields[0]) if len(fields) == 3 and all(f.isdigit() for f in fields) else None
                if file is None or int(fields[1]) >= len(file.payloads) or not self._is_there(file):
                    continue
                self.result.crcs[file.name][int(fields[1])] = int(fields[2])
                self.resumed.add((file.name, int(fields[1])))
            if lines[-1]:
                os.write(self.journal, b"\n")
        elif lines != [""] or any(p.name != JOURNAL for p in self.temporary.iterdir()):
            # another conversion's, or one that was killed between giving up its journal and its last rename
            self.result.restarted = True
            for entry in self.temporary.iterdir():
                if entry.name != JOURNAL:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if lines[0] != self.stamp:
            os.ftruncate(self.journal, 0)
            os.write(self.journal, f"{self.stamp}\n".encode())
        self.result.resumed = sum(self._payload(key).nbytes for key in self.resumed)

    def _is_there(self, file: OutFile) -> bool:
        path = self.temporary / file.name
        return path.is_file() and path.stat().st_size == file.size

    def _payload(self, key: tuple[str, int]) -> Payload:
        if not self.left:
            self._by_name = {f.name: f for f in self.plan.files}
        return self._by_name[key[0]].payloads[key[1]]

    def _space(self) -> None:
        """Refuse before writing what will not fit."""
        there = sum(p.stat().st_blocks * 512 for p in self.temporary.rglob("*") if p.is_file())
        need = self.plan.total - there
        state = os.statvfs(self.temporary)
        free = state.f_bavail * state.f_frsize
        if need > free:
            with contextlib.suppress(OSError):
                if not self.resumed:
                    shutil.rmtree(self.temporary)
            raise UsageError(f"{self.destination}: needs {need / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free there")

    def _prepare(self) -> None:
        for file in self.plan.files:
            path = self.temporary / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                os.ftruncate(descriptor, file.size)
                for at, data in file.literals:
                    _pwrite(descriptor, data, at)
            finally:
                os.close(descriptor)

    def _todo(self) -> list[tuple[str, int]]:
        return [(f.name, n) for f in self.plan.files for n in range(len(f.payloads))
                if self.result.crcs[f.name][n] < 0]

    # -- writing --------------------------------------------------------------------------------------------------

    def _write(self, todo: list[tuple[str, int]]) -> None:
        self._by_name = {f.name: f for f in self.plan.files}
        self._number = {f.name: n for n, f in enumerate(self.plan.files)}
        self.left = dict.fromkeys(self._by_name, 0)
        for name, _ in todo:
            self.left[name] += 1
        self.phase, self.total = "writing", sum(self._payload(key).nbytes for key in todo) + self.result.resumed
        self.done_bytes = self.result.resumed
        self.stop.clear()
        queue = iter(todo)
        idle = [f for f in self.plan.files if self.left[f.name] == 0]
        self._threads(lambda: self._worker(queue))
        for file in idle:  # nothing but headers, or all of it written before
            self._finish(file)

    def _threads(self, work: Callable[[], None]) -> None:
        """`work` in every thread; the first exception stops the others and is raised here."""
        with ThreadPoolExecutor(self.limits.threads) as pool:
            futures: list[Future[None]] = [pool.submit(work) for _ in range(self.limits.threads)]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                self.stop.set()
                raise
            if any(future.exception() for future in done):
                self.stop.set()
        for future in futures:
            future.result()

    def _worker(self, queue: Any) -> None:
        buffer = np.empty(self.slab, np.uint8)
        try:
            while not self.stop.is_set():
                with self.lock:
                    key = next(queue, None)
                if key is None:
                    return
                name, index = key
                file = self._by_name[name]
                payload = file.payloads[index]
                crc = self._copy(self._descriptor(name), payload, buffer)
                if crc is None:
                    return
                os.write(self.journal, b"%d %d %d\n" % (self._number[name], index, crc))
                with self.lock:
                    self.result.crcs[name][index] = crc
                    self.result.written += payload.nbytes
                    self.left[name] -= 1
                    last = self.left[name] == 0
                if last:
                    self._finish(file)
        finally:
            self.source.close_thread()

    def _descriptor(self, name: str) -> int:
        with self.lock:
            if name not in self.open:
                self.open[name] = os.open(self.temporary / name, os.O_WRONLY)
            return self.open[name]

    def _copy(self, descriptor: int, payload: Payload, buffer: Any) -> int | None:
        """Stream one payload; its CRC32, None when the run was stopped in between."""
        crc, at = 0, payload.at
        for piece in self._pieces(payload, buffer):
            if self.stop.is_set():
                return None
            crc = zlib.crc32(piece, crc)
            _pwrite(descriptor, piece, at)
            at += len(piece)
            self._advance(len(piece))
        return crc

    def _pieces(self, payload: Payload, buffer: Any) -> Any:
        """The bytes of a payload, in order, in parts that share `buffer`."""
        for segment in payload.segments:
            if isinstance(segment, Span):
                local = box(segment.recipe, segment.offsets, segment.sizes)
                held = np.dtype(DTYPES[local.dtype].held)
                most = max(len(buffer) // held.itemsize, 1)
                for offsets, sizes in rows_of_box(segment.sizes, segment.first, segment.last, most):
                    out = buffer[: int(np.prod(sizes, dtype=np.int64)) * held.itemsize].view(held).reshape(sizes)
                    self.source.fill(local, offsets, out)
                    yield memoryview(out.reshape(-1).view(np.uint8))
            else:
                for start in range(0, segment.nbytes, len(buffer)):
                    out = buffer[: min(len(buffer), segment.nbytes - start)]
                    if isinstance(segment, Zeros):
                        out[:] = 0
                    else:
                        folder = self.source.checkpoints[segment.which].folder
                        self.source.pread(folder, segment.file, segment.begin + start, out)
                    yield memoryview(out)

    def _advance(self, count: int) -> None:
        with self.lock:
            self.done_bytes += count
            done = self.done_bytes
        if self.progress is not None:
            self.progress(done, self.total, self.phase)

    def _finish(self, file: OutFile) -> None:
        descriptor = self._descriptor(file.name)
        for late in file.lates:
            data = late.make(self.result.crcs[file.name])
            if len(data) != late.nbytes:
                raise AssertionError(f"{file.name}: {len(data)} bytes for {late.nbytes}")
            _pwrite(descriptor, data, late.at)
        os.fsync(descriptor)
        with self.lock:
            os.close(self.open.pop(file.name))

    # -- reading back ---------------------------------------------------------------------------------------------

    def _verify(self) -> list[tuple[str, int]]:
        """Read every file again; payloads that differ, with index -1 for a header that does."""
        self.phase, self.total, self.done_bytes = "verifying", sum(f.size for f in self.plan.files), 0
        bad: list[tuple[str, int]] = []
        queue = iter(self.plan.files)

        def work() -> None:
            buffer = np.empty(self.slab, np.uint8)
            while not self.stop.is_set():
                with self.lock:
                    file = next(queue, None)
                if file is None:
                    return
                found = self._verify_file(file, buffer)
                with self.lock:
                    bad.extend(found)

        self._threads(work)
        return sorted(bad)

    def _verify_file(self, file: OutFile, buffer: Any) -> list[tuple[str, int]]:
        crcs, bad = self.result.crcs[file.name], []
        with (self.temporary / file.name).open("rb", buffering=0) as stream:
            if os.fstat(stream.fileno()).st_size != file.size:
                return [(file.name, n) for n in range(len(crcs))] or [(file.name, -1)]
            for index, payload in enumerate(file.payloads):
                crc, at, end = 0, payload.at, payload.at + payload.nbytes
                while at < end and not self.stop.is_set():
                    got = os.preadv(stream.fileno(), [memoryview(buffer)[: min(len(buffer), end - at)]], at)
                    if got == 0:
                        break
                    crc = zlib.crc32(memoryview(buffer)[:got], crc)
                    at += got
                    self._advance(got)
                if crc != crcs[index]:
                    bad.append((file.name, index))
            fixed = [*file.literals, *((late.at, late.make(crcs)) for late in file.lates)]
            bad += [(file.name, -1) for at, data in fixed if os.pread(stream.fileno(), len(data), at) != data]
        return bad

    # -- committing -----------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        write_marks(self.plan, self.temporary)
        (self.temporary / JOURNAL).unlink()
        for folder in {self.temporary, *(p for p in self.temporary.rglob("*") if p.is_dir())}:
            sync_folder(folder)
        refuse_existing(self.destination)
        self.temporary.rename(self.destination)
        sync_folder(self.destination.parent)


def write_marks(plan: Plan, folder: Path) -> None:
    """The commit marks, in their order, into a folder that holds all other files."""
    for file in plan.marks:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b"".join(data for _, data in file.literals)
        if file.finished is not None:
            data = file.finished(folder / plan.home)
        if len(data) != file.size:
            raise AssertionError(f"{file.name}: {len(data)} bytes for {file.size}")
        with path.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())


def refuse_existing(destination: Path) -> None:
    """Raises `UsageError` when something is at the destination; an empty folder is nothing."""
    try:
        empty = not os.path.lexists(destination) or (
            destination.is_dir() and not destination.is_symlink() and not any(destination.iterdir()))
        destination.stat(follow_symlinks=False)  # lexists is silent about names that cannot be
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"{destination}: {getattr(error, 'strerror', None) or error}") from None
    if not empty:
        raise UsageError(f"{destination}: exists; nothing is overwritten, choose another destination")


def sync_folder(path: Path) -> None:
    """fsync of a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pwrite(descriptor: int, data: Any, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _read_all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _words(error: OSError, temporary: Path) -> UsageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(f"{temporary}: the disk is full; make room and run the same command again, it goes on where "
                          "it stopped")
    where = f"{error.filename}: " if error.filename else ""
    return UsageError(f"{where}{error.strerror or error}; {temporary} keeps what is done")
