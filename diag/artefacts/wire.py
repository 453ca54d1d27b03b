"""The little of protocol buffers that event files need: fields of a message, one level at a time, and CRC32C."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
#: TFRecord stores its checksums rotated and shifted by this constant (tensorflow/core/lib/hash/crc32c.h).
MASK = 0xA282EAD8


class WireError(ValueError):
    """Bytes that are no message."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at offset `at` and the offset behind it. Raises `WireError`."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise WireError("a varint without end")


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(number, wire type, value) of each field; fixed-size values as their raw bytes. Raises `WireError`."""
    at, size = 0, len(data)
    while at < size:
        tag, at = varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            length, at = varint(data, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"wire type {kind}")
        if at + length > size:
            raise WireError("a field runs over the end")
        yield number, kind, data[at : at + length]
        at += length


def signed(value: int) -> int:
    """A varint as int64."""
    return value - (1 << 64) if value >= 1 << 63 else value


@cache
def _table() -> npt.NDArray[np.uint32]:
    import numpy as np

    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


def masked_crcs(records: Sequence[bytes]) -> list[int]:
    """The masked CRC32C of each record; records of one length are computed together."""
    import numpy as np

    table = _table()
    groups: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        groups.setdefault(len(record), []).append(index)
    result = [0] * len(records)
    for length, members in groups.items():
        matrix = np.frombuffer(b"".join(records[i] for i in members), dtype=np.uint8).reshape(len(members), length)
        crc = np.full(len(members), 0xFFFFFFFF, dtype=np.uint32)
        for column in matrix.T:
            crc = table[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
        crc = ~crc
        crc = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(MASK)
        for i, value in zip(members, crc.tolist(), strict=True):
            result[i] = value
    return result


class Damage(msgspec.Struct):
    """Where a stream of records stopped making sense."""

    record: int
    offset: int
    what: str
