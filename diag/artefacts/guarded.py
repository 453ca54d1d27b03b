"""Child processes in which a reader meets a stranger's bytes: limited in memory and time, several at once.

    for index, answer in run("diag.artefacts.fr_digest:digest_bytes", files, limits=Limits()):
        ...                                  # bytes that the function returned, or `Failed` saying why not

What a hostile or damaged file can do to the C unpickler (take all memory, overflow the C stack, loop for hours) it
does to a child, which the kernel then ends: `RLIMIT_AS` for memory, an interval timer whose signal nobody handles for
time. The rest of the files go on in a new child. Nothing is pickled between the processes: the function takes bytes
and returns bytes. On a platform without these limits the parent's own deadline still ends a child that hangs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from diag.errors import ArtefactError

#: More children than this are limited by the disk, not by the cores.
MAX_CHILDREN = 16
#: status byte, length of the answer
_HEADER = struct.Struct("<BQ")
_DONE, _FAILED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Per file: seconds of wall time, and bytes of address space of the child."""

    seconds: int = 60
    memory: int = 4 << 30


class File(msgspec.Struct, frozen=True):
    """What a child is told: the file, how it is compressed (see `diag.compressed`), and what the function needs."""

    path: str
    compression: str | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """No answer for this file, and why, in words for the user."""

    problem: str


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    job: int
    deadline: float
    received: bytearray = field(default_factory=bytearray)

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


def run(
    function: str, files: Sequence[File], *, limits: Limits | None = None, children: int | None = None
) -> Iterator[tuple[int, bytes | Failed]]:
    """`function(data, hint) -> bytes` on every file; yields (index in `files`, answer) as they come.

    `function` is "module:name"; an `ArtefactError` that it raises becomes `Failed` with its text.
    """
    limits = limits or Limits()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    children = min(children or cores, MAX_CHILDREN, len(files))
    waiting = deque(range(len(files)))
    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(children):
                _start(selector, function, files, waiting, limits)
            while selector.get_map():
                yield from _collect(selector, function, files, waiting, limits)
        finally:
            for key in list(selector.get_map().values()):
                _end(key.data.process)


def _start(selector: selectors.BaseSelector, function: str, files: Sequence[File], waiting: deque[int],
           limits: Limits) -> None:
    if not waiting:
        return
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, function, str(limits.seconds), str(limits.memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=None if os.environ.get("PDTRAIN_STRICT") else subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    child = _Child(process, -1, 0.0)
    _give(child, files, waiting, limits)
    os.set_blocking(child.answers.fileno(), False)
    selector.register(child.answers, selectors.EVENT_READ, child)


def _give(child: _Child, files: Sequence[File], waiting: deque[int], limits: Limits) -> None:
    """Send the next file, or close the child's input, upon which it leaves."""
    assert child.process.stdin is not None
    child.received.clear()
    with contextlib.suppress(BrokenPipeError):  # it died meanwhile; the end of its output says so
        if waiting:
            child.job = waiting.popleft()
            child.deadline = time.monotonic() + limits.seconds + 5
            child.process.stdin.write(msgspec.json.encode(files[child.job]) + b"\n")
            child.process.stdin.flush()
        else:
            child.job = -1
            child.process.stdin.close()


def _collect(selector: selectors.BaseSelector, function: str, files: Sequence[File], waiting: deque[int],
             limits: Limits) -> Iterator[tuple[int, bytes | Failed]]:
    for key, _ in selector.select(timeout=1.0):
        child: _Child = key.data
        block = child.answers.read(1 << 20)
        if block is None:
            continue
        if block:
            child.received += block
            answer = _answer(child.received)
            if answer is not None:
                job = child.job
                _give(child, files, waiting, limits)
                yield job, answer
            continue
        selector.unregister(child.answers)
        _end(child.process)
        if child.job >= 0:
            yield child.job, Failed(_why(child.process.returncode, limits))
            _start(selector, function, files, waiting, limits)
    now = time.monotonic()
    for key in list(selector.get_map().values()):
        if key.data.job >= 0 and now > key.data.deadline:
            key.data.process.kill()  # its end is seen by the next select


def _answer(received: bytearray) -> bytes | Failed | None:
    """The answer in `received`, or None while it is not all there."""
    if len(received) < _HEADER.size:
        return None
    status, length = _HEADER.unpack_from(received)
    if len(received) < _HEADER.size + length:
        return None
    body = bytes(received[_HEADER.size :])
    return body if status == _DONE else Failed(body.decode("utf-8", "replace"))


def _why(status: int | None, limits: Limits) -> str:
    if status == -signal.SIGALRM:
        return f"takes more than {limits.seconds} s to read; that is no run's"
    if status == -signal.SIGKILL:
        return f"its reader was killed, for memory or after {limits.seconds} s"
    if status is not None and status < 0:
        return f"crashed its reader ({signal.Signals(-status).name}); it is damaged, or made to do harm"
    return f"its reader ended early (exit status {status})"


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    if process.poll() is None:
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _child_main(function: str, seconds: int, memory: int) -> None:
    """The life of a child: one JSON line in, one framed answer out, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.disable()  # what a file holds is dropped as a whole; walking it meanwhile costs a third of the time
    module, name = function.split(":")
    work: Callable[[bytes, str], bytes] = getattr(importlib.import_module(module), name)
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles SIGALRM: it ends C code too
        status, answer = _attempt(work, msgspec.json.decode(line, type=File))
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(_HEADER.pack(status, len(answer)) + answer)
        out.flush()


def _attempt(work: Callable[[bytes, str], bytes], file: File) -> tuple[int, bytes]:
    from diag.compressed import open_plain

    try:
        with open_plain(Path(file.path), file.compression) as stream:
            data: Any = stream.read()
        return _DONE, work(data, file.hint)
    except ArtefactError as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except MemoryError:
        problem = "asks for more memory than a reader may take"
    except RecursionError:
        problem = "is nested too deeply"
    except Exception as error:
        if os.environ.get("PDTRAIN_STRICT"):
            raise
        problem = f"pdtrain's reader failed on it ({type(error).__name__}: {error}); please report this"
    return _FAILED, problem.encode()


if __name__ == "__main__":
    _child_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
