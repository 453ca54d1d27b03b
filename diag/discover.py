"""A path -> the files in it, opened safely and recognised by content later.

Files, directories (walked in sorted order, symlink loops cut), quoted globs, `-` for standard input, `.gz` and `.zst`
(recognised by their magic bytes). A path that does not exist is the user's mistake (`UsageError`); a file that exists
and cannot be opened is a value (`Unreadable`), because the other 255 may still tell the story.
"""

from __future__ import annotations

import glob
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from diag.artefacts import ReadOptions, Source, Unreadable
from diag.compressed import compression_of, open_plain
from diag.errors import ArtefactError, UsageError

HEAD_BYTES = 65_536
#: A folder with more files than this is not a run's leftovers but somebody's home directory.
MAX_FILES = 200_000
STDIN_NAME = "<stdin>"
#: Never worth walking into; a checkpoint's shards are found by the checkpoint commands.
SKIPPED_DIRECTORIES = {".git", "__pycache__", ".venv", "node_modules"}


def discover(
    paths: Iterable[str | Path], *, options: ReadOptions | None = None, stdin: BinaryIO | None = None
) -> list[Source | Unreadable]:
    """All files under `paths` in the order given, each once. Raises `UsageError` for a path that does not exist."""
    options = options or ReadOptions()
    seen: set[tuple[int, int]] = set()
    found: list[Source | Unreadable] = []
    for path in paths:
        for item in _expand(str(path), options, stdin):
            key = _identity(item)
            if key is None or key not in seen:
                found.append(item)
            if key is not None:
                seen.add(key)
            if len(found) > MAX_FILES:
                raise UsageError(f"{path}: more than {MAX_FILES:,} files; name the run's own folder")
    return found


def _expand(path: str, options: ReadOptions, stdin: BinaryIO | None) -> Iterator[Source | Unreadable]:
    if path == "-":
        if stdin is None and sys.stdin is None:
            raise UsageError("-: standard input is closed")
        yield _spooled(stdin or sys.stdin.buffer, STDIN_NAME, options)
        return
    if "\0" in path:
        raise UsageError(f"{path!r}: not a path")
    if not os.path.lexists(path):
        matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []  # noqa: PTH207
        if not matches:
            what = "matches no file" if glob.has_magic(path) else "no such file or directory"
            raise UsageError(f"{path}: {what}")
        for match in matches:
            yield from _expand(match, options, stdin)
        return
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        yield Unreadable(path=path, format="unknown", problem=_words(error))
        return
    if stat.S_ISDIR(mode):
        yield from _walk(path, options)
    elif stat.S_ISFIFO(mode) and path.startswith(("/dev/fd/", "/proc/self/fd/")):  # bash: <(zcat …)
        with Path(path).open("rb") as pipe:
            yield _spooled(pipe, path, options)
    else:
        yield open_file(path, options=options, given=True)


def _walk(root: str, options: ReadOptions) -> Iterator[Source | Unreadable]:
    """Regular files below `root`, sorted; each directory once, so that symlink loops end. A directory that may not
    be listed is an `Unreadable`: its files are not absent."""
    visited: set[tuple[int, int]] = set()
    closed: list[OSError] = []
    for folder, names, files in os.walk(root, onerror=closed.append, followlinks=True):
        yield from _closed(closed)
        try:
            info = Path(folder).stat()
        except OSError:  # gone since the listing
            continue
        if (info.st_dev, info.st_ino) in visited:
            names[:] = []
            continue
        visited.add((info.st_dev, info.st_ino))
        names[:] = sorted(name for name in names if name not in SKIPPED_DIRECTORIES)
        for name in sorted(files):
            path = str(Path(folder, name))
            try:
                if not stat.S_ISREG(Path(path).stat().st_mode):
                    continue  # devices, sockets and pipes inside a folder are not artefacts
            except OSError:
                continue  # a dangling link, or gone since the listing
            yield open_file(path, options=options, given=False)
    yield from _closed(closed)


def _closed(errors: list[OSError]) -> Iterator[Unreadable]:
    while errors:
        error = errors.pop(0)
        if not isinstance(error, FileNotFoundError):  # a folder that went away has nothing to tell
            yield Unreadable(path=str(error.filename), format="unknown", problem=_words(error))


def open_file(path: str, *, options: ReadOptions | None = None, given: bool = True) -> Source | Unreadable:
    """`path` as a `Source` with its head read, or `Unreadable` saying why not."""
    real = Path(path)
    size = 0
    try:
        info = real.stat()
        size = info.st_size
        if not stat.S_ISREG(info.st_mode):
            return Unreadable(path=path, format="unknown", problem=f"is {_kind(info.st_mode)}, not a file")
        compression = compression_of(real)
        opener = partial(open_plain, real, compression)
        head, problem = _head(opener)
    except OSError as error:
        return Unreadable(path=path, format="unknown", bytes=size, problem=_words(error))
    if problem and not head:
        return Unreadable(path=path, format=compression or "unknown", bytes=size, problem=problem)
    name = real.name
    for suffix in (".gz", ".zst"):
        name = name.removesuffix(suffix)
    return Source(path=path, name=name, bytes=size, head=head, open=opener, real=real, compression=compression,
                  given=given, options=options or ReadOptions())


def _head(opener: partial[BinaryIO]) -> tuple[bytes, str | None]:
    """The first 64 KiB, as much of them as can be decompressed, and what went wrong."""
    parts: list[bytes] = []
    with opener() as stream:
        try:
            while sum(map(len, parts)) < HEAD_BYTES and (part := stream.read(8192)):
                parts.append(part)
        except ArtefactError as error:
            return b"".join(parts), str(error)
    return b"".join(parts)[:HEAD_BYTES], None


def _spooled(stream: BinaryIO, name: str, options: ReadOptions) -> Source | Unreadable:
    """A pipe, copied to an unlinked temporary file so that it can be read more than once."""
    try:
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the source; the system removes it
        while block := stream.read(1 << 20):
            spool.write(block)
        spool.flush()
    except OSError as error:
        raise UsageError(f"{name}: cannot be copied to a temporary file ({error.strerror or error}); give a file, "
                         "or set TMPDIR to a folder with room") from error
    real = Path(f"/proc/self/fd/{spool.fileno()}")
    size = os.fstat(spool.fileno()).st_size
    compression = compression_of(real)

    def opener(keep: object = spool) -> BinaryIO:  # holds the file open until the source is dropped
        return open_plain(real, compression)

    try:
        with opener() as opened:
            head = opened.read(HEAD_BYTES)
    except ArtefactError as error:
        return Unreadable(path=name, format=compression or "unknown", bytes=size, problem=str(error))
    return Source(path=name, name=name, bytes=size, head=head, open=opener, real=real, compression=compression,
                  given=True, options=options)


def _identity(item: Source | Unreadable) -> tuple[int, int] | None:
    try:
        info = Path(item.path).stat()
    except (OSError, ValueError):
        return None
    return info.st_dev, info.st_ino


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"),
             (stat.S_ISBLK, "a device"))
    return next((words for test, words in kinds if test(mode)), "something else")


def _words(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is a symbolic link to nothing"
    return f"cannot be opened: {error.strerror or error}"
