"""Where text comes from: the standard library's sources, or the user's text and JSONL files, plain or compressed."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from diag.errors import ArtefactError, UsageError

TEXT = (".txt", ".text", ".md")
RECORDS = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zst")

#: Standard library: what is no library source text (tests repeat themselves, `config-*` is a build tree) …
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__")
#: … what was written by a program (code-page tables, the help topics), and how much is enough for a demonstration.
LARGEST_FILE = 200_000
LARGEST_CORPUS = 16_000_000


@dataclass(frozen=True, slots=True)
class Document:
    """One text, and where it stands: `files[file]`, line `record` (0: the whole file), byte `offset` of its text."""

    file: int
    record: int
    offset: int
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """Files in a fixed order. `names` are what the user sees, relative to the directory that was given."""

    paths: Sequence[Path]
    names: Sequence[str]
    text_key: str = "text"
    lenient: bool = False  #: leave out what is not UTF-8 instead of refusing it

    def documents(self) -> Iterator[Document]:
        """Every text that is not empty, file by file.

        Raises:
            ArtefactError: a file is damaged, not UTF-8, or a JSONL line is not a record with the text key.
        """
        for number, (path, name) in enumerate(zip(self.paths, self.names)):
            if kind(path) == "records":
                yield from self._records(number, path, name)
            elif text := self._text(path, name):
                yield Document(number, 0, 0, text)

    def _text(self, path: Path, name: str) -> str:
        content = b"".join(_blocks(path, name))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            if self.lenient:
                return ""
            raise ArtefactError(_not_utf8(name, error.start, content[error.start])) from None

    def _records(self, number: int, path: Path, name: str) -> Iterator[Document]:
        offset = 0
        for line_number, line in enumerate(_lines(path, name), start=1):
            here = f"{name}:{line_number}"
            body = line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line
            if body.strip():
                text = self._field(body, here)
                if text:
                    yield Document(number, line_number, offset, text)
            offset += len(line)

    def _field(self, line: bytes, here: str) -> str:
        try:
            record: Any = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ArtefactError(f"{here}: not a JSON record: {error}") from None
        if not isinstance(record, dict):
            raise ArtefactError(f"{here}: a JSON {type(record).__name__}, not an object with a text field")
        if self.text_key not in record:
            keys = ", ".join(sorted(map(str, record))[:8]) or "none"
            raise ArtefactError(f"{here}: no field {self.text_key!r}; set data.text_key to one of its fields: {keys}")
        text = record[self.text_key]
        if not isinstance(text, str):
            raise ArtefactError(f"{here}: field {self.text_key!r} is a {type(text).__name__}, not text")
        return text


def kind(path: Path) -> str:
    """`text`, `records` or `other`, by the name without its compression suffix."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    if name.endswith(RECORDS):
        return "records"
    return "text" if name.endswith(TEXT) else "other"


def standard_library() -> Source:
    """The machine's own Python sources: real text that is always there. About 10 MB, 600 documents.

    Raises:
        UsageError: this Python ships no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("config-"))
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    paths, total = [], 0
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        size = path.stat().st_size if path.is_file() else 0
        if 0 < size <= LARGEST_FILE and total + size <= LARGEST_CORPUS and not _generated(path):
            paths.append(path)
            total += size
    if not paths:
        raise UsageError(f"this Python has no library sources in {root}; set data.path to text of your own")
    return Source(paths, [path.relative_to(root).as_posix() for path in paths], lenient=True)


def _generated(path: Path) -> bool:
    with path.open("rb") as stream:
        return b"generated" in stream.read(300).lower()


def _blocks(path: Path, name: str, size: int = 1 << 20) -> Iterator[bytes]:
    """The (decompressed) content in blocks; damage becomes one line that names the file."""
    try:
        with _open(path) as stream:
            while block := stream.read(size):
                yield block
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ArtefactError(f"{name}: damaged gzip file: {error}") from None
    except OSError as error:
        raise ArtefactError(f"{name}: cannot be read: {error.strerror or error}") from None


def _lines(path: Path, name: str) -> Iterator[bytes]:
    """Lines with their ends; `\\n` alone ends a line, as JSON text may contain every other separator."""
    rest = b""
    for block in _blocks(path, name):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _open(path: Path) -> BinaryIO:
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(path))
    return path.open("rb")


class _Zstd(io.RawIOBase):
    """A zstd file as a stream that refuses to end inside a frame (the library's reader just stops there)."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._name = path
        self._error = zstandard.ZstdError
        self._stream = path.open("rb")
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._decoder = self._new()
        self._begun = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._decoder.unused_data if self._decoder.eof else b""
            block = block or self._stream.read(1 << 17)
            if self._decoder.eof:
                self._decoder, self._begun = self._new(), False
            if not block:
                if self._begun:
                    raise OSError("damaged zstd file: it ends inside a frame")
                return 0
            self._begun = True
            try:
                self._ready = self._decoder.decompress(block)
            except self._error as error:
                raise OSError(f"damaged zstd file: {error}") from None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _not_utf8(name: str, offset: int, byte: int) -> str:
    return f"{name}: not UTF-8 at byte {offset:,} (0x{byte:02x}); convert it first, for example with iconv"
