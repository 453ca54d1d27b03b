"""The files of one checkpoint: names that stay inside its folder, sizes, memory maps."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path, PurePosixPath

from diag.errors import ArtefactError, PdtrainError, UsageError

#: Maps kept open; a checkpoint may have more files than a process may have descriptors.
MAX_MAPS = 256


class Folder:
    """`root` and what lies in it. Every name that a file of the checkpoint mentions goes through `inside` first.

    A file that this user may not read is no damage: `UsageError`, wherever it is met.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        self._sizes: dict[str, int | None] = {}
        self._inside: dict[str, str] = {}
        self._lock = threading.Lock()

    def inside(self, name: str) -> str:
        """`name` as it may be used. Raises `ArtefactError` for one that leaves the folder.

        Symbolic links that lie in the folder are followed (a model hub's cache is made of them); names are not.
        """
        known = self._inside.get(name)
        if known is not None:
            return known
        pure = PurePosixPath(name.replace("\\", "/"))
        if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts or (len(name) > 1 and name[1] == ":"):
            raise ArtefactError(f"refers to a file outside of the checkpoint, {name!r}; refused")
        self._inside[name] = str(pure)
        return self._inside[name]

    def path(self, name: str) -> Path:
        return self.root / self.inside(name)

    def size(self, name: str) -> int | None:
        """Bytes of a regular file, None when there is no such file."""
        if name not in self._sizes:
            try:
                path = self.path(name)
                self._sizes[name] = path.stat().st_size if path.is_file() else None
            except PermissionError as error:
                raise self.unreadable(name, error) from None
            except OSError:
                self._sizes[name] = None
        return self._sizes[name]

    def names(self, under: str = "") -> list[str]:
        """Every regular file below `root/under`, relative to root, sorted. Links to directories are not followed."""
        found = []
        start = self.root / under if under else self.root
        for folder, names, files in os.walk(start):
            names.sort()
            base = Path(folder).relative_to(self.root)
            found += [(base / file).as_posix() for file in sorted(files)]
        return found

    def head(self, name: str, count: int) -> bytes:
        """The first `count` bytes. Raises `ArtefactError`."""
        return self.bytes(name, 0, count)

    def bytes(self, name: str, offset: int = 0, count: int = -1) -> bytes:
        """A copy of some bytes, fewer at the end of the file. Raises `ArtefactError`."""
        try:
            with os.fdopen(self.open(name), "rb") as file:
                file.seek(offset)
                return file.read(count)
        except OSError as error:
            raise self.unreadable(name, error) from None

    def open(self, name: str) -> int:
        """A descriptor to read from, the caller's to close. Raises `ArtefactError`."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not make us wait
        except OSError as error:
            raise self.unreadable(name, error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ArtefactError(f"{name}: is not a regular file")
        return descriptor

    def unreadable(self, name: str, error: OSError | ValueError) -> PdtrainError:
        """What to raise for a file that cannot be opened or read."""
        if isinstance(error, PermissionError):
            return UsageError(f"{self.root / name}: cannot be read: {error.strerror}; nothing is said about a "
                              "checkpoint of which a part is not readable")
        return ArtefactError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}")

    def map(self, name: str) -> memoryview:
        """The whole file, read-only, mapped. Raises `ArtefactError`."""
        with self._lock:
            if name in self._maps:
                self._maps.move_to_end(name)
                return self._maps[name]
            try:
                with os.fdopen(self.open(name), "rb") as file:
                    length = os.fstat(file.fileno()).st_size
                    view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if length else b"")
            except (OSError, ValueError) as error:
                raise self.unreadable(name, error) from None
            self._maps[name] = view
            if len(self._maps) > MAX_MAPS:
                self._maps.popitem(last=False)  # arrays over it keep the map alive; it closes with the last of them
            return view
