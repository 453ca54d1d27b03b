"""The zip archives that torch.save writes, inside a byte range of a file: every header compared with its double.

An archive says everything twice: the local header and the data descriptor beside a member, and the central directory
at the end. torch reads some of it from either place, so both must agree; what lies between is accounted for byte by
byte. The data themselves are proven by `Member.crc`, which torch.load does not look at.

Layout: APPNOTE.TXT 6.3.10, and what torch 1.6 to 2.13 write (stored, never deflated; UTF-8 flag; descriptors; an "FB"
extra field that pads data to 64 bytes; zip64 records always or when needed).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from diag.errors import ArtefactError

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_STORED = 0
_ENCRYPTED, _DESCRIPTOR = 0x1, 0x8
_DIRECTORY = 0x10  # DOS attribute
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
#: Members of one archive; a .pt of a large rank has some ten thousand.
MAX_MEMBERS = 4_000_000


class ZipDamage(ArtefactError):
    """An archive whose structure is damaged; `at` is the byte in the file where it shows, `member` whose it is."""

    def __init__(self, text: str, at: int, member: str = "") -> None:
        super().__init__(f"{text} (byte {at:,})")
        self.at = at
        self.member = member
        self.text = text

    def within(self, file: str) -> ZipDamage:
        """The same complaint with the file's name in front."""
        return ZipDamage(f"{file}: {self.text}", self.at, self.member)


@dataclass(frozen=True, slots=True)
class Member:
    """One file of the archive: bytes `[begin, begin + size)` of the containing file, their CRC32; where its local
    header and its entry in the directory are."""

    name: str
    begin: int
    size: int
    crc: int
    header: int
    entry: int = 0


def members(data: memoryview, offset: int = 0, length: int | None = None) -> list[Member]:
    """Members of the archive at `data[offset : offset + length]`, by position. Raises `ZipDamage`.

    `begin` and `header` count from the start of `data`. Checks structure only; the CRCs are the caller's to compare.
    """
    length = len(data) - offset if length is None else length
    stop = offset + length
    if length < _END.size or stop > len(data):
        raise ZipDamage("is cut: it is too short for an archive", min(stop, len(data)))
    if bytes(data[offset : offset + 4]) not in (b"PK\x03\x04", b"PK\x05\x06"):
        raise ZipDamage("does not begin like an archive", offset)
    count, size, start, end_at = _directory(data, offset, stop)
    if start + size != end_at - offset:
        raise ZipDamage("its directory does not end where the end record begins", end_at)
    if count > MAX_MEMBERS or count * _CENTRAL.size > size:
        raise ZipDamage(f"its end record counts {count:,} members in {size:,} bytes of directory", end_at)
    found: list[Member] = []
    at = offset + start
    names: set[str] = set()
    previous = offset
    for _ in range(count):
        member, at, previous = _member(data, offset, at, end_at, previous, offset + start)
        if member.name in names:
            raise ZipDamage(f"has two members named {member.name!r}", member.header, member.name)
        names.add(member.name)
        found.append(member)
    if at != end_at:
        raise ZipDamage("its directory holds more than its members", at)
    if previous != offset + start:
        raise ZipDamage("bytes between the last member and the directory belong to nothing", previous)
    return found


def root_name(head: bytes) -> str:
    """The folder that the first member lies in, from the first bytes of an archive; "" when they do not tell.

    torch.save to a path names it after the file, without the suffix; to a stream, "archive".
    """
    if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
        return ""
    length = _LOCAL.unpack_from(head)[-2]
    folder, slash, _ = head[_LOCAL.size : _LOCAL.size + length].decode("utf-8", "backslashreplace").partition("/")
    return folder if slash else ""


def _directory(data: memoryview, offset: int, stop: int) -> tuple[int, int, int, int]:
    """(members, bytes of the directory, its place in the archive, where the end records begin in `data`)."""
    at = stop - _END.size
    mark, disk, directory_disk, here, count, size, start, comment = _END.unpack_from(data, at)
    if mark != b"PK\x05\x06" or comment:
        raise ZipDamage("has no end record where it should end: it is cut, or its end was overwritten", at)
    if disk or directory_disk or here != count:
        raise ZipDamage("its end record is damaged", at)
    locator_at = at - _LOCATOR.size
    if locator_at < offset or bytes(data[locator_at : locator_at + 4]) != b"PK\x06\x07":
        if count == _FULL16 or size == _FULL32 or start == _FULL32:
            raise ZipDamage("has no zip64 end record", locator_at)
        return count, size, start, at
    _, _, place, _ = _LOCATOR.unpack_from(data, locator_at)
    at64 = offset + place
    if at64 + _END64.size != locator_at:
        raise ZipDamage("its zip64 locator points elsewhere", locator_at)
    mark, record, _, _, _, _, here64, count64, size64, start64 = _END64.unpack_from(data, at64)
    if mark != b"PK\x06\x06" or record != _END64.size - 12 or here64 != count64:
        raise ZipDamage("its zip64 end record is damaged", at64)
    agree = all(short in (full, limit) for short, full, limit in
                ((count, count64, _FULL16), (size, size64, _FULL32), (start, start64, _FULL32)))
    if not agree:
        raise ZipDamage("its two end records contradict each other", at64)
    return count64, size64, start64, at64


def _member(
    data: memoryview, offset: int, at: int, end_at: int, previous: int, directory: int
) -> tuple[Member, int, int]:
    """The member of the directory entry at `at`; where the next entry is; where the member's bytes end."""
    if at + _CENTRAL.size > end_at:
        raise ZipDamage("its directory is cut", at)
    (mark, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, comment_size, disk, _, attributes,
     header) = _CENTRAL.unpack_from(data, at)
    after = at + _CENTRAL.size + name_size + extra_size + comment_size
    if mark != b"PK\x01\x02" or after > end_at or disk or comment_size or attributes & _DIRECTORY:
        raise ZipDamage("an entry of its directory is damaged", at)
    raw = bytes(data[at + _CENTRAL.size : at + _CENTRAL.size + name_size])
    name = raw.decode("utf-8", "backslashreplace")
    size, packed, header = _zip64(data, at + _CENTRAL.size + name_size, extra_size, size, packed, header)
    if method != _STORED or flags & _ENCRYPTED or packed != size:
        raise ZipDamage(f"{name!r} is compressed or encrypted, which torch never writes", at, name)
    local = offset + header
    if local != previous:
        raise ZipDamage(f"{name!r} begins at byte {local:,}, the member before it ends at {previous:,}", at, name)
    if local + _LOCAL.size > directory:
        raise ZipDamage(f"the header of {name!r} lies outside of the archive", at, name)
    mark, _, local_flags, local_method, _, _, local_crc, local_packed, local_size, local_name, local_extra = (
        _LOCAL.unpack_from(data, local))
    begin = local + _LOCAL.size + local_name + local_extra
    if mark != b"PK\x03\x04" or local_method != method or local_flags != flags:
        raise ZipDamage(f"the header of {name!r} is damaged", local, name)
    if bytes(data[local + _LOCAL.size : local + _LOCAL.size + local_name]) != raw:
        raise ZipDamage(f"the header of {name!r} gives another name than the directory", local, name)
    finish = begin + size
    if finish > directory:
        raise ZipDamage(f"{name!r} reaches into the directory", local, name)
    if flags & _DESCRIPTOR:
        finish = _descriptor(data, finish, crc, size, name)
    else:
        known = local_crc == crc and local_size in (size, _FULL32) and local_packed in (size, _FULL32)
        if not known:
            raise ZipDamage(f"the header of {name!r} gives another size or CRC than the directory", local, name)
    return Member(name, begin, size, crc, local, at), after, finish


def _descriptor(data: memoryview, at: int, crc: int, size: int, name: str) -> int:
    """Where the data descriptor at `at` ends, once it agrees with the directory."""
    start = bytes(data[at : at + 24])
    short = struct.pack("<4sIII", b"PK\x07\x08", crc, size & _FULL32, size & _FULL32)
    long = struct.pack("<4sIQQ", b"PK\x07\x08", crc, size, size)
    if start.startswith(long):
        return at + len(long)
    if size <= _FULL32 and start.startswith(short):
        return at + len(short)
    raise ZipDamage(f"the size and CRC after {name!r} differ from those in the directory", at, name)


def _zip64(data: memoryview, at: int, extra: int, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """size, packed size and header offset with the zip64 extra field applied."""
    stop = at + extra
    while at + 4 <= stop:
        kind, length = struct.unpack_from("<HH", data, at)
        at += 4
        if kind == 1 and at + length <= stop:
            wide = list(struct.unpack_from(f"<{length // 8}Q", data, at))
            try:
                if size == _FULL32:
                    size = wide.pop(0)
                if packed == _FULL32:
                    packed = wide.pop(0)
                if header == _FULL32:
                    header = wide.pop(0)
            except IndexError:
                raise ZipDamage("a zip64 field of its directory is cut", at) from None
        at += length
    return size, packed, header
