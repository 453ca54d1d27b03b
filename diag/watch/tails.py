"""Growing files, read from where the last reading ended; `formats` has one class per format.

A tail keeps the artefact that its reader would have made of the whole file, and adds what is new. Only whole lines (or
records) are taken; a line that is being written waits. Formats that cannot be read on (a JSON document that is
replaced, a dump) are read anew when they changed, the more rarely the longer that takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from diag.artefacts import Artefact, Reader, Source, Unreadable
from diag.errors import ArtefactError

#: Read at one go, so that a GB that was there before does not stop everything else.
MAX_READ = 16 << 20
#: A line without an end for this long is damage; it is taken as it is.
MAX_LINE = 16 << 20
#: Reading a file anew may take this share of the time.
REREAD_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    """A training point that just appeared. `time` is its own stamp in Unix seconds, where it has one."""

    step: int | None
    loss: float | None
    grad_norm: float | None
    time: float | None


@dataclass(slots=True)
class Growth:
    """What one reading brought: whether anything changed, the new points, and lines that should be looked at soon."""

    changed: bool = False
    urgent: bool = False
    points: list[Point] = field(default_factory=list)
    #: the points of all files, each with its path
    news: list[tuple[str, Point]] = field(default_factory=list)


class Tail:
    """One file that is read on. `identity` is device and inode; `offset` counts the bytes that were taken.

    `whole` formats override `read`; the others `feed`.
    """

    #: false for documents that are replaced as a whole: another inode is the next version, not another file
    first_identity_counts = True

    def __init__(self, source: Source, reader: Reader, info: os.stat_result) -> None:
        self.source = source
        self.reader = reader
        self.path = source.path
        self.identity = (info.st_dev, info.st_ino)
        self.seen: tuple[int, int] = (-1, 0)  # size and mtime at the last reading
        self.offset = 0
        self.size = 0
        self.carry = b""
        self.head = b""
        self.missing_since: float | None = None

    # -- reading ---------------------------------------------------------------------------------------------------

    def due(self, info: os.stat_result, now: float) -> bool:
        """Whether there is something to read."""
        return (info.st_size, info.st_mtime_ns) != self.seen or bool(self.behind)

    @property
    def behind(self) -> int:
        """Bytes that were there at the last reading and are not taken yet."""
        return max(0, self.size - self.offset - len(self.carry))

    def shrunk(self, info: os.stat_result) -> bool:
        """Whether the file is shorter than what was taken of it: cut, or written anew. A torn last line that its
        writer took back is neither."""
        return info.st_size < self.offset

    def read(self, now: float) -> Growth | None:
        """Take what is new. None when the file is no longer the one that was read (written anew in place)."""
        growth = Growth()
        with Path(self.path).open("rb") as stream:
            info = os.fstat(stream.fileno())
            if (info.st_dev, info.st_ino) != self.identity:
                return None
            if self.head and stream.read(len(self.head)) != self.head:
                return None
            if not self.head or len(self.head) < 64:
                stream.seek(0)
                self.head = stream.read(64)
            if info.st_size < self.offset + len(self.carry):
                self.carry = self.carry[: max(0, info.st_size - self.offset)]
            self.size = info.st_size
            start = self.offset + len(self.carry)
            stream.seek(start)
            data = self.carry + stream.read(min(MAX_READ, max(0, info.st_size - start)))
        self.seen = (info.st_size, info.st_mtime_ns)
        cut = self.whole(data)
        if not cut and len(data) > MAX_LINE:
            cut = len(data)
        if cut:
            growth.changed = True
            self.feed(data[:cut], growth, now)
        self.offset += cut
        self.carry = data[cut:]
        return growth

    def whole(self, data: bytes) -> int:
        """How many of the first bytes of `data` are whole lines or records."""
        return data.rfind(b"\n") + 1

    def feed(self, block: bytes, growth: Growth, now: float) -> None:
        """Take `block`, which is whole."""
        raise NotImplementedError

    def settle(self, growth: Growth, now: float) -> None:
        """Nothing came for a while: take what was held back."""

    def artefact(self) -> Artefact | None:
        """What was read so far; None while that is nothing."""
        raise NotImplementedError


class WholeTail(Tail):
    """A document that is replaced, or a format that is not read on: read anew when it changed."""

    first_identity_counts = False
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, source: Source, reader: Reader, info: os.stat_result) -> None:
        super().__init__(source, reader, info)
        self.latest: Artefact | None = None
        self.next = float("-inf")

    def due(self, info: os.stat_result, now: float) -> bool:
        return (info.st_size, info.st_mtime_ns) != self.seen and now >= self.next

    def shrunk(self, info: os.stat_result) -> bool:
        return False

    def read(self, now: float) -> Growth | None:
        from diag.discover import open_file

        info = Path(self.path).stat()
        self.identity = (info.st_dev, info.st_ino)
        began = self.clock()
        source = open_file(self.path, options=self.source.options, given=self.source.given)
        found: Artefact = source if isinstance(source, Unreadable) else self._read(source)
        self.next = now + (self.clock() - began) / REREAD_SHARE
        self.seen = (info.st_size, info.st_mtime_ns)
        self.size = self.offset = info.st_size
        if isinstance(found, Unreadable):
            return Growth()  # it is being written: what was read before stands
        self.latest = found
        return Growth(changed=True)

    def _read(self, source: Source) -> Artefact:
        try:
            many = getattr(self.reader, "read_many", None)
            return many([source], lambda done, total: None)[0] if many is not None else self.reader.read(source)
        except ArtefactError as error:
            return Unreadable(path=source.path, format=self.reader.NAME, problem=str(error))

    def artefact(self) -> Artefact | None:
        if self.latest is not None:
            self.latest.path = self.path
        return self.latest
