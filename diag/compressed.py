"""Streams of plain bytes from .gz and .zst files and from UTF-16 text, with a limit against decompression bombs.

Compression is recognised by its magic bytes, not by the name; UTF-16 (what Windows shells redirect) by its byte-order
mark before an ASCII character. Damage is raised as `ArtefactError` from `read`, after
everything before it has been delivered, so that a cut archive still tells what it holds.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from diag.errors import ArtefactError

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
#: Logs compress 5 to 50 times; beyond this, and beyond FREE_BYTES, a stream is a bomb (gzip can reach 1,032 times).
MAX_RATIO = 100
FREE_BYTES = 256 << 20


def compression_of(path: Path) -> str | None:
    """"gzip", "zstd", "utf-16" or None, from the first four bytes."""
    with path.open("rb") as stream:
        magic = stream.read(4)
    if len(magic) == 4 and (magic[:2] == b"\xff\xfe" and magic[3] == 0 < magic[2]
                            or magic[:2] == b"\xfe\xff" and magic[2] == 0 < magic[3]):
        return "utf-16"
    return next((name for prefix, name in MAGIC.items() if magic.startswith(prefix)), None)


def open_plain(path: Path, compression: str | None) -> BinaryIO:
    """The decompressed bytes of `path`, buffered. Reading raises `ArtefactError` on damage or absurd expansion."""
    if compression is None:
        return path.open("rb")
    limit = max(FREE_BYTES, MAX_RATIO * path.stat().st_size)
    raw: BinaryIO
    if compression == "gzip":
        raw = cast(BinaryIO, gzip.GzipFile(path, "rb"))
    elif compression == "utf-16":
        raw = cast(BinaryIO, _Recoded(path.open("rb")))
    else:
        import zstandard  # optional at run time: most runs leave no .zst behind

        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        raw = cast(BinaryIO, decompressor.stream_reader(path.open("rb"), closefd=True, read_across_frames=True))
    return cast(BinaryIO, io.BufferedReader(_Guarded(raw, limit), 1 << 18))


class _Recoded:
    """UTF-16 read as UTF-8."""

    def __init__(self, inner: BinaryIO) -> None:
        self.inner, self.decoder, self.ready = inner, codecs.getincrementaldecoder("utf-16")("replace"), b""

    def read(self, size: int) -> bytes:
        while not self.ready:
            block = self.inner.read(1 << 16)
            self.ready = self.decoder.decode(block, final=not block).encode("utf-8", "replace")
            if not block:
                break
        taken, self.ready = self.ready[:size], self.ready[size:]
        return taken

    def close(self) -> None:
        self.inner.close()


class _Guarded(io.RawIOBase):
    """Passes reads through, counts them, and turns every decoder's complaint into `ArtefactError`."""

    def __init__(self, inner: BinaryIO, limit: int) -> None:
        self.inner, self.limit, self.delivered = inner, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if self.delivered >= self.limit:
            raise ArtefactError(
                f"expands to more than {self.limit >> 20:,} MiB, over {MAX_RATIO} times its size; "
                "decompress it yourself if it is genuine"
            )
        try:
            block = self.inner.read(min(len(buffer), self.limit - self.delivered))
        except ArtefactError:
            raise
        except EOFError as error:
            raise ArtefactError(f"compressed data ends early, after {self.delivered:,} bytes of text") from error
        except (OSError, zlib.error, ValueError) as error:
            raise ArtefactError(f"compressed data is damaged after {self.delivered:,} bytes of text") from error
        except Exception as error:  # zstandard raises its own ZstdError
            raise ArtefactError(f"compressed data is damaged after {self.delivered:,} bytes of text") from error
        buffer[: len(block)] = block
        self.delivered += len(block)
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self.inner.close()
        super().close()
