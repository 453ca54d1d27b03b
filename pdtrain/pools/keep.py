"""What a rank keeps in a file that survives its process: the state after each of the last two steps.

    header   what run, launch and plan the file belongs to; a file of another one is replaced, never read
    slot 0   mark, then text (JSON) and tensors of one version
    slot 1   the same of the version before or after

Version v lies in slot v % 2. Its mark is wiped before the slot is written and set when it is whole, and it carries the
checksum of what it stands for: what a rank was writing when it died has no mark, and is never used. The memory of the
mapping belongs to the kernel, so a killed process loses nothing that it wrote; a host that goes down loses it all.

Nobody overwrites version v - 1 before every rank has version v whole (`compute.deliver`, `update.tell_kept`), so that
after a death there is always a version that all have.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from diag.errors import UsageError

PAGE = 4096
MAGIC = b"pdkeep 1"
#: version, length of the text, xxh3-64 of text and tensors; then a CRC of them
MARK = struct.Struct("<qQQ")
ALIGNMENT = 64


def name_of(run_dir: Path, rank: int | str) -> str:
    """The file of one rank of a run; `*` for those of all."""
    run = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]
    return f"pdtrain-keep-{run}-rank{rank}"


def remove_all(folder: Path, run_dir: Path) -> None:
    """Remove what the ranks of a run keep on this host: nothing will go on from it."""
    for path in folder.glob(name_of(run_dir, "*")):
        with suppress(OSError):
            path.unlink()


class Keep:
    """The file of one rank. `like`: tensors of the shapes and types that will be kept; `text_bytes`: room for JSON."""

    def __init__(self, path: Path, identity: str, like: Sequence[Tensor], text_bytes: int, *, adopt: bool) -> None:
        """Open the file of this identity, where `adopt` allows it and there is one; else make a new one, empty.

        Raises UsageError: the folder cannot be written, or has no room.
        """
        self.path = path
        self.interrupt: Callable[[int], None] = lambda version: None  # a fault in the middle of a slot
        sizes = [_aligned(tensor.numel() * tensor.element_size()) for tensor in like]
        self._text = _aligned(max(text_bytes, PAGE))
        self._slot = _whole_pages(PAGE + self._text + sum(sizes))
        described = json.dumps([identity, [[str(t.dtype), list(t.shape)] for t in like], self._text]).encode()
        self._header = MAGIC + hashlib.sha256(described).digest()
        self.adopted = adopt and self._is_ours()
        try:
            self._map = self._open()
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise UsageError(
                f"pools.keep = {str(path.parent)!r} cannot be used for 2 x {self._slot:,} bytes: {error.strerror}"
            ) from None

    def _is_ours(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as stream:
                same = stream.read(len(self._header)) == self._header
                return same and os.fstat(descriptor).st_size == PAGE + 2 * self._slot
        except OSError:
            return False

    def _open(self) -> mmap.mmap:
        size = PAGE + 2 * self._slot
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        if not self.adopted:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            flags |= os.O_CREAT | os.O_EXCL
        descriptor = os.open(self.path, flags, 0o600)
        try:
            if not self.adopted:  # take the room now: a full disk met through the mapping would be a SIGBUS
                os.posix_fallocate(descriptor, 0, size)
                os.pwrite(descriptor, self._header, 0)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def write(self, version: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Keep `tensors` and `facts` as `version`, in the place of the version before the last.

        Raises ValueError: `facts` need more room than was reserved.
        """
        text = json.dumps(facts).encode()
        if len(text) > self._text:
            raise ValueError(f"{len(text)} bytes of facts, {self._text} were reserved")
        start = self._start(version)
        self._map[start : start + PAGE] = bytes(PAGE)
        body = start + PAGE
        self._map[body : body + len(text)] = text
        places = self._places(version, tensors)
        for number, (place, tensor) in enumerate(places):
            place.copy_(tensor)
            if number == len(places) // 2:
                self.interrupt(version)
        mark = MARK.pack(version, len(text), self._checksum(version, len(text)))
        self._map[start : start + MARK.size + 4] = mark + struct.pack("<I", zlib.crc32(mark))

    def versions(self) -> list[int]:
        """The versions that are whole, newest first."""
        return sorted((v for slot in (0, 1) if (v := self._whole(slot)) is not None), reverse=True)

    def read(self, version: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Copy `version`, one of `versions()`, into `tensors`; its facts."""
        start = self._start(version)
        _, length, _ = MARK.unpack_from(self._map, start)
        for place, tensor in self._places(version, tensors):
            tensor.copy_(place)
        facts: dict[str, Any] = json.loads(self._map[start + PAGE : start + PAGE + length])
        return facts

    def forget_beyond(self, version: int) -> None:
        """Wipe what is newer than `version`: the run goes on from there."""
        for slot in (0, 1):
            mark = self._mark(slot)
            if mark is None or mark[0] > version:
                start = PAGE + slot * self._slot
                self._map[start : start + PAGE] = bytes(PAGE)

    def remove(self) -> None:
        """The run ended well: nothing will go on from here."""
        with suppress(OSError):
            self.path.unlink()

    def _start(self, version: int) -> int:
        return PAGE + version % 2 * self._slot

    def _places(self, version: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        offset = self._start(version) + PAGE + self._text
        found = []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size:
                flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                found.append((flat.view(tensor.shape), tensor))
            offset += _aligned(size)
        return found

    def _checksum(self, version: int, length: int) -> int:
        start = self._start(version) + PAGE
        whole = memoryview(self._map)
        digest = xxhash.xxh3_64(whole[start : start + length])
        digest.update(whole[start + self._text : start + self._slot - PAGE])
        return digest.intdigest()

    def _mark(self, slot: int) -> tuple[int, int, int] | None:
        """Version, length of the text and checksum, where the slot has a mark that makes sense."""
        start = PAGE + slot * self._slot
        packed = self._map[start : start + MARK.size]
        version, length, checksum = MARK.unpack(packed)
        (crc,) = struct.unpack_from("<I", self._map, start + MARK.size)
        if not checksum or crc != zlib.crc32(packed) or version % 2 != slot or length > self._text:
            return None
        return version, length, checksum

    def _whole(self, slot: int) -> int | None:
        mark = self._mark(slot)
        return mark[0] if mark is not None and self._checksum(*mark[:2]) == mark[2] else None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
