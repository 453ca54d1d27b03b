"""Laying out an archive as torch.save writes it, inside a file that is being planned.

Members are stored, aligned to 64 bytes, with their CRC32 in the local header and in the directory (APPNOTE.TXT 6.3.10);
zip64 fields where a size or a place needs them. Read by torch.load with weights_only, memory-mapped or not.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

from diag.checkpoints.convert.pickles import dumps
from diag.checkpoints.convert.plan import OutFile

_FULL = 0xFFFFFFFF
_UTF8 = 0x0800
_ALIGN = 64


@dataclass(slots=True)
class _Entry:
    name: bytes
    header: int  # from the start of the archive
    size: int
    crc: int = 0
    payload: int = -1


def add_archive(file: OutFile, value: Any, prefix: str = "archive") -> tuple[int, int]:
    """Append what `torch.save(value)` would write; (offset, length) in the file.

    The payload of each `Stored` tensor in `value` is the list of segments that make its bytes.
    """
    start = file.size
    pickled, stored = dumps(value)
    entries: list[_Entry] = []
    _literal(file, start, entries, f"{prefix}/data.pkl", pickled)
    _literal(file, start, entries, f"{prefix}/.format_version", b"1")
    _literal(file, start, entries, f"{prefix}/.storage_alignment", b"64")
    _literal(file, start, entries, f"{prefix}/byteorder", b"little")
    for number, tensor in enumerate(stored):
        name = f"{prefix}/data/{number}".encode()
        entry = _Entry(name, file.size - start, tensor.nbytes, payload=len(file.payloads))
        extra = _local_extra(entry, start)
        file.late(30 + len(name) + len(extra), _later(entry, extra))
        file.add(tensor.payload, label=tensor.label or name.decode())
        if file.payloads[-1].nbytes != tensor.nbytes:
            raise AssertionError(f"{file.name}: {name!r} has {file.payloads[-1].nbytes} of {tensor.nbytes} bytes")
        entries.append(entry)
    _literal(file, start, entries, f"{prefix}/version", b"3\n")
    directory = file.size - start
    length = sum(46 + len(e.name) + len(_directory_extra(e)) for e in entries)
    tail = _end(len(entries), length, directory)
    file.late(length, lambda crcs: b"".join(_directory(e, e.crc if e.payload < 0 else crcs[e.payload])
                                            for e in entries))
    file.raw(tail)
    return start, file.size - start


def _literal(file: OutFile, start: int, entries: list[_Entry], name: str, data: bytes) -> None:
    entry = _Entry(name.encode(), file.size - start, len(data), zlib.crc32(data))
    extra = _local_extra(entry, start)
    file.raw(_local(entry, extra, entry.crc) + data)
    entries.append(entry)


def _later(entry: _Entry, extra: bytes) -> Any:
    return lambda crcs: _local(entry, extra, crcs[entry.payload])


def _local(entry: _Entry, extra: bytes, crc: int) -> bytes:
    size = _FULL if entry.size >= _FULL else entry.size
    return struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 45 if size == _FULL else 0, _UTF8, 0, 0, 0x21, crc, size, size,
                       len(entry.name), len(extra)) + entry.name + extra


def _local_extra(entry: _Entry, start: int) -> bytes:
    """The zip64 sizes where needed, and padding that brings the data to a multiple of 64 in the archive."""
    wide = struct.pack("<HHQQ", 1, 16, entry.size, entry.size) if entry.size >= _FULL else b""
    at = entry.header + 30 + len(entry.name) + len(wide) + 4
    padding = -at % _ALIGN
    return wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding


def _directory_extra(entry: _Entry) -> bytes:
    fields = [entry.size, entry.size] if entry.size >= _FULL else []
    if entry.header >= _FULL:
        fields.append(entry.header)
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""


def _directory(entry: _Entry, crc: int) -> bytes:
    extra = _directory_extra(entry)
    size, header = min(entry.size, _FULL), min(entry.header, _FULL)
    version = 45 if extra else 0
    return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", version, version, _UTF8, 0, 0, 0x21, crc, size, size,
                       len(entry.name), len(extra), 0, 0, 0, 0, header) + entry.name + extra


def _end(count: int, length: int, directory: int) -> bytes:
    tail = b""
    if count >= 0xFFFF or length >= _FULL or directory >= _FULL:
        tail = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, directory)
        tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, directory + length, 1)
    return tail + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF),
                              min(length, _FULL), min(directory, _FULL), 0)
