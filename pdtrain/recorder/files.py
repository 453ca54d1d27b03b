"""The files of a run directory: whole lines, atomic documents, and a full disk that stops the recording only.

A line is appended by one `write` of the complete line to a descriptor opened with O_APPEND, so that a reader, or a
`kill -9`, finds it whole or not at all. (The kernel may cut a write at a page boundary when SIGKILL arrives in the
middle of a line longer than a page: such a last line has no newline, and `LineFile` removes it when it reopens the
file.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

_encode = msgspec.json.Encoder(enc_hook=str).encode
#: How far back from its end a file is searched for its last complete line.
TAIL_BYTES = 16 * 1024 * 1024


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become "NaN", "Infinity", "-Infinity"; containers are walked."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist())
    return str(value)


def line(record: Mapping[str, Any]) -> bytes:
    """`record` as one line of JSON. Floats are written in their shortest form that reads back equal."""
    encoded = _encode(plain(record))
    return encoded + b"\n"


class LineFile:
    """An append-only file of lines. Opened at the first write, so an unused one leaves no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self.last_line: bytes | None = None
        """The last complete line that an earlier process left in the file; None for a new file."""

    def open(self) -> None:
        """Create or reopen the file. A cut last line of a killed process is removed. Raises OSError."""
        if self._fd is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self.last_line = _repair_tail(fd)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def write(self, data: bytes) -> None:
        """Append `data`, which must be whole lines. Raises OSError, after taking back what was written of it."""
        self.open()
        assert self._fd is not None
        written = os.write(self._fd, data)
        if written < len(data):  # the disk is full, or nearly: leave whole lines only
            size = os.fstat(self._fd).st_size
            os.ftruncate(self._fd, size - written)
            raise OSError(28, f"only {written} of {len(data)} bytes fitted", str(self.path))

    def close(self) -> None:
        """Close the file; a later write would reopen it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _repair_tail(fd: int) -> bytes | None:
    """Truncate `fd` after its last newline and return the line before it, if there is one."""
    size = os.fstat(fd).st_size
    start = max(0, size - TAIL_BYTES)
    tail = os.pread(fd, size - start, start)
    end = tail.rfind(b"\n") + 1
    if end < len(tail):
        os.ftruncate(fd, start + end)
    return tail[tail.rfind(b"\n", 0, max(0, end - 1)) + 1 : end] or None


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` as one step: a reader sees the old content or the new. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def attempt(actions: Iterable[Callable[[], Any]]) -> list[Exception]:
    """Run every action, whatever the others do; the exceptions, in order. For clean-up that must reach its end."""
    errors: list[Exception] = []
    for action in actions:
        try:
            action()
        except Exception as error:  # clean-up goes on: the run matters more than its record
            errors.append(error)
    return errors
