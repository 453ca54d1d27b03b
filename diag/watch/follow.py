"""Which files there are: found, recognised, followed through rotation, renaming, cutting and deletion.

Files are told apart by device and inode. A file that moved (`train.log` to `train.log.1`) stays what it was under its
new name, and what now has the old name is another file. One that got shorter, or begins differently, was written anew.
Folders are listed again only when they changed, so that waiting costs one `stat` per file and folder.
"""

from __future__ import annotations

import glob
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from diag.artefacts import Artefact, ReadOptions, Unreadable, recognise
from diag.discover import SKIPPED_DIRECTORIES, open_file
from diag.errors import UsageError
from diag.watch.formats import tail_of
from diag.watch.tails import Growth, Tail

#: Weights are `diag ckpt`'s business; listing them again and again would cost more than all the rest.
_NOT_WALKED = {*SKIPPED_DIRECTORIES, "checkpoints", "wandb", "code"}
_NOT_READ = {"expert-weights", "memory-snapshot"}
MAX_FILES = 20_000
#: A folder that changed so shortly before it was listed may have changed again within the clock's tick.
TICK_SECONDS = 2.0
#: Looking for new files may take this share of the time.
SCAN_SHARE = 0.002
#: A file that says too little to be recognised for good is looked at again when it has grown to this.
CERTAIN_BYTES = 8192


class Follower:
    """Everything under `paths`. `poll` reads what is new; `artefacts` is what there is so far."""

    def __init__(self, paths: Iterable[str], *, options: ReadOptions | None = None, wait: bool = False,
                 stopwatch: Callable[[], float] = time.perf_counter) -> None:
        self.paths = [str(path) for path in paths]
        self.options = options or ReadOptions()
        self.stopwatch = stopwatch
        self.tails: dict[str, Tail] = {}
        self._by_identity: dict[tuple[int, int], Tail] = {}
        self._folders: dict[str, tuple[int, list[str], list[str]]] = {}  # mtime, folders and files in it
        self._unknown: dict[str, tuple[int, int]] = {}  # path -> size and mtime at which it was not recognised
        self._unread: dict[str, str] = {}  # path -> why nothing of it is known
        self._sizes: dict[str, int] = {}  # path -> size at which it was recognised
        self._next_scan = float("-inf")
        if not wait:
            for path in self.paths:
                if not os.path.lexists(path) and not (glob.has_magic(path) and glob.glob(path, recursive=True)):  # noqa: PTH207
                    raise UsageError(f"{path}: no such file or directory; --wait waits for it")

    # -- reading ---------------------------------------------------------------------------------------------------

    def poll(self, now: float) -> Growth:
        """Look for new files when it is time to, and read what has been appended anywhere."""
        total = Growth()
        began = self.stopwatch()
        if now >= self._next_scan:
            self._scan(now, total)
            self._next_scan = now + (self.stopwatch() - began) / SCAN_SHARE
        for tail in list(self.tails.values()):
            self._advance(tail, now, total)
        return total

    def _advance(self, tail: Tail, now: float, total: Growth) -> None:
        try:
            info = Path(tail.path).stat()
        except OSError:
            if tail.missing_since is None:
                tail.missing_since = now
                self._next_scan = float("-inf")  # renamed, perhaps
            return
        tail.missing_since = None
        if (info.st_dev, info.st_ino) != tail.identity and tail.first_identity_counts:
            self._replaced(tail, total)
            self._next_scan = float("-inf")
            return
        if tail.shrunk(info):
            self._anew(tail, total)
            return
        growth: Growth | None = Growth()
        if tail.due(info, now):
            try:
                growth = tail.read(now)
            except OSError:
                return
            if growth is None:
                self._anew(tail, total)
                return
            small = self._sizes.get(tail.path, CERTAIN_BYTES) < CERTAIN_BYTES
            if small and info.st_size >= CERTAIN_BYTES and self._recognise_again(tail):
                total.changed = True
                return
        assert growth is not None
        tail.settle(growth, now)
        total.changed |= growth.changed
        total.urgent |= growth.urgent
        total.news += [(tail.path, point) for point in growth.points]

    def _recognise_again(self, tail: Tail) -> bool:
        """Whether a file that was small when it was recognised turns out to be something else."""
        self._sizes.pop(tail.path, None)
        source = open_file(tail.path, options=self.options, given=False)
        reader = None if isinstance(source, Unreadable) else recognise(source)
        if reader is None or reader.NAME == tail.reader.NAME:
            return False
        self._drop(tail)
        self._next_scan = float("-inf")
        return True

    def _anew(self, tail: Tail, total: Growth) -> None:
        """The same name, another content: what was read is forgotten, and read from the start in the next turn."""
        self._drop(tail)
        total.changed = True
        self._next_scan = float("-inf")

    def _replaced(self, tail: Tail, total: Growth) -> None:
        """Another file has taken the name. The old one is read to its end under its new name, if it has one here."""
        total.changed = True
        folder = Path(tail.path).parent
        moved = None
        try:
            for entry in os.scandir(folder):
                if entry.inode() == tail.identity[1] and entry.is_file():
                    moved = entry.path
                    break
        except OSError:
            pass
        self.tails.pop(tail.path, None)
        if moved is None:
            self._by_identity.pop(tail.identity, None)
            return
        tail.path = moved
        self.tails[moved] = tail

    def _drop(self, tail: Tail) -> None:
        self.tails.pop(tail.path, None)
        self._by_identity.pop(tail.identity, None)
        self._folders.clear()

    # -- finding ---------------------------------------------------------------------------------------------------

    def _scan(self, now: float, total: Growth) -> None:
        for path in self.paths:
            if not os.path.lexists(path):
                for match in sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else ():  # noqa: PTH207
                    self._meet(match, total, given=True)
                continue
            if Path(path).is_dir():
                self._walk(path, total)
            else:
                self._meet(path, total, given=True)

    def _walk(self, root: str, total: Growth) -> None:
        waiting, seen = [root], set()
        while waiting:
            folder = waiting.pop()
            try:
                info = Path(folder).stat()
            except OSError:
                self._folders.pop(folder, None)
                continue
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            known = self._folders.get(folder)
            if known is None or known[0] != info.st_mtime_ns:
                known = self._list(folder, info)
            waiting += [str(Path(folder, name)) for name in known[1]]
            for name in known[2]:
                self._meet(str(Path(folder, name)), total, given=False)

    def _list(self, folder: str, info: os.stat_result) -> tuple[int, list[str], list[str]]:
        folders, files = [], []
        try:
            for entry in os.scandir(folder):
                if entry.is_dir():
                    if entry.name not in _NOT_WALKED:
                        folders.append(entry.name)
                elif entry.is_file():
                    files.append(entry.name)
        except OSError:
            return 0, [], []
        fresh = time.time() - info.st_mtime < TICK_SECONDS
        known = (0 if fresh else info.st_mtime_ns, sorted(folders), sorted(files))
        self._folders[folder] = known
        return known

    def _meet(self, path: str, total: Growth, *, given: bool) -> None:
        """Start to follow `path`, unless it is followed, under this or another name, or is nothing that is known."""
        if path in self.tails or len(self.tails) >= MAX_FILES:
            return
        try:
            info = Path(path).stat()
        except OSError:
            return
        if not stat.S_ISREG(info.st_mode) or not info.st_size:
            return
        other = self._by_identity.get((info.st_dev, info.st_ino))
        if other is not None:
            if other.missing_since is not None or not Path(other.path).exists():
                self.tails.pop(other.path, None)
                other.path, other.missing_since = path, None
                self.tails[path] = other
                total.changed = True
            return
        mark = (info.st_size if info.st_size < CERTAIN_BYTES else -1, info.st_ino)
        if self._unknown.get(path) == mark:
            return
        source = open_file(path, options=self.options, given=given)
        reader = None if isinstance(source, Unreadable) else recognise(source)
        if isinstance(source, Unreadable) or reader is None or reader.NAME in _NOT_READ or _copy_of_metrics(path):
            self._unknown[path] = mark
            if isinstance(source, Unreadable):
                self._unread[path] = source.problem or "cannot be read"
            elif given and reader is None:
                self._unread[path] = "is in no format that is known here"
            return
        self._unknown.pop(path, None)
        self._unread.pop(path, None)
        tail = tail_of(source, reader, info)
        self.tails[path] = self._by_identity[tail.identity] = tail
        self._sizes[path] = info.st_size
        total.changed = True

    # -- what there is ---------------------------------------------------------------------------------------------

    def artefacts(self) -> list[Artefact]:
        """What was read so far of every file, in the order of their names."""
        found = [self.tails[path].artefact() for path in sorted(self.tails)]
        return [item for item in found if item is not None]

    def unread(self) -> dict[str, str]:
        """Files of which nothing is known, and why."""
        empty = {path: "nothing in it can be read" for path, tail in self.tails.items() if tail.artefact() is None}
        return {path: problem for path, problem in (self._unread | empty).items() if os.path.lexists(path)}

    @property
    def behind(self) -> int:
        """Bytes that are there and not read yet."""
        return sum(tail.behind for tail in self.tails.values())

    @property
    def bytes(self) -> int:
        """Size of all files that are followed."""
        return sum(tail.size for tail in self.tails.values())

    @property
    def gone(self) -> bool:
        """Whether there were files and none is left."""
        return bool(self.tails) and all(tail.missing_since is not None for tail in self.tails.values())


def _copy_of_metrics(path: str) -> bool:
    """Whether this is the TensorBoard copy that our recorder writes beside metrics.jsonl."""
    folder = Path(path).parent
    return folder.name == "tensorboard" and (folder.parent / "metrics.jsonl").is_file()
