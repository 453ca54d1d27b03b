"""TensorBoard event files: scalars by tag, read without TensorFlow or the tensorboard package.

Framing is TFRecord: length (8 bytes), its masked CRC32C, the record, its masked CRC32C. A record is an `Event`: wall
time (1), step (2), summary (5) of values with a tag (1) and a float (2), or a tensor (8) of one element. Field numbers
from tensorboard/compat/proto/{event,summary,tensor}.proto. A run that was killed leaves a record cut in the middle:
stated, not held against it. A record whose checksum is wrong is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from diag.artefacts import Source, Unreadable
from diag.artefacts.metric_table import MetricTable
from diag.artefacts.wire import BYTES, FIXED32, FIXED64, VARINT, Damage, WireError, fields, masked_crcs, signed
from diag.errors import ArtefactError

NAME = "tensorboard"
ARTEFACT = MetricTable

#: Records with images or graphs are longer than any scalar; they are skipped by their length.
MAX_SCALAR_RECORD = 1 << 16
MAX_RECORD = 1 << 31
BATCH = 20_000
MAX_TAGS = 100_000
_FLOAT, _DOUBLE, _INT32, _INT64, _HALF, _BFLOAT16 = 1, 2, 3, 9, 19, 14


def sniff(head: bytes, name: str) -> float:
    """A first record whose length and checksum agree, or the usual name with a plausible length."""
    if len(head) < 12:
        return 0.0
    length = struct.unpack_from("<Q", head)[0]
    if not 0 < length < MAX_RECORD:
        return 0.0
    if head[20:21] == b"\x1a" and b"brain.Event:" in head[:64]:
        return 1.0
    return 0.9 if "tfevents" in name and masked_crcs([head[:8]])[0] == struct.unpack_from("<I", head, 8)[0] else 0.0


def read(source: Source) -> MetricTable | Unreadable:
    """All scalars of one event file."""
    table = MetricTable(path=source.path, format=NAME, bytes=source.bytes, lines_known=False,
                        joins=f"{NAME}:{source.directory}", style="tensorboard")
    times: dict[int, float] = {}
    damage: list[Damage] = []
    bad_sums = 0
    batch: list[tuple[int, bytes, int]] = []
    count = 0

    def flush() -> int:
        wrong = 0
        for (number, record, expected), crc in zip(batch, masked_crcs([b[1] for b in batch]), strict=True):
            if crc != expected:
                wrong += 1
                continue
            try:
                _event(table, record, number, times)
            except (WireError, struct.error):
                wrong += 1
        batch.clear()
        return wrong

    try:
        with source.open() as stream:
            for number, record, crc in _records(stream, damage):
                count = number
                if record is not None:
                    batch.append((number, record, crc))
                    if len(batch) >= BATCH:
                        bad_sums += flush()
            bad_sums += flush()
    except ArtefactError as error:
        bad_sums += flush()
        damage.append(Damage(count, 0, str(error)))
    if times:
        column = table.column("time")
        for number, (step, time) in enumerate(sorted(times.items()), 1):
            column.add(step, number, time)
    if not any(key != "time" for key in table.series):
        what = f"; {damage[0].what}" if damage else ""
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes,
                          problem=f"holds no scalar{what}" if not bad_sums else f"no record has a right checksum{what}")
    if bad_sums:
        table.problem = f"{bad_sums:,} of {count:,} records are damaged and were left out"
        table.problem_severity = "warning"
    elif damage:
        table.problem = f"record {damage[0].record:,} {damage[0].what}"
        table.problem_severity = "info" if "cut off" in damage[0].what else "warning"
    return table


def _records(stream: BinaryIO, damage: list[Damage]) -> Iterator[tuple[int, bytes | None, int]]:
    """(number, record, checksum); None for what is too long to be a scalar. `damage` gets where it stopped."""
    number = 0
    while head := stream.read(12):
        number += 1
        if len(head) < 12:
            damage.append(Damage(number, 0, "is cut off"))
            return
        length, length_crc = struct.unpack("<QI", head)
        if length > MAX_RECORD or (number == 1 or length > MAX_SCALAR_RECORD) and \
                masked_crcs([head[:8]])[0] != length_crc:
            damage.append(Damage(number, 0, "has an impossible length; what follows was not read"))
            return
        body = stream.read(length + 4)
        if len(body) < length + 4:
            damage.append(Damage(number, 0, "is cut off"))
            return
        if length <= MAX_SCALAR_RECORD:
            yield number, body[:-4], int.from_bytes(body[-4:], "little")
        else:
            yield number, None, 0


def _event(table: MetricTable, record: bytes, number: int, times: dict[int, float]) -> None:
    step, wall, summary = 0, None, None
    for field, kind, value in fields(record):
        if field == 1 and kind == FIXED64:
            wall = struct.unpack("<d", value)[0]  # type: ignore[arg-type]
        elif field == 2 and kind == VARINT:
            step = signed(value)  # type: ignore[arg-type]
        elif field == 5 and kind == BYTES:
            summary = value
    if table.created is None and wall is not None:
        table.created = wall
    if summary is None or abs(step) > 2**53:
        return
    found = False
    for field, kind, value in fields(summary):  # type: ignore[arg-type]
        if field == 1 and kind == BYTES and (scalar := _scalar(value)) is not None:  # type: ignore[arg-type]
            if len(table.series) >= MAX_TAGS and scalar[0] not in table.series:
                continue
            table.column(scalar[0]).add(step, number, scalar[1])
            found = found or " vs " not in scalar[0]  # Megatron's copies over samples count other things than steps
    if found and wall is not None and wall == wall:
        times.setdefault(step, wall)


def _scalar(data: bytes) -> tuple[str, float] | None:
    tag, number = None, None
    for field, kind, value in fields(data):
        if field == 1 and kind == BYTES:
            tag = value.decode("utf-8", "replace")  # type: ignore[union-attr]
        elif field == 2 and kind == FIXED32:
            number = struct.unpack("<f", value)[0]  # type: ignore[arg-type]
        elif field == 8 and kind == BYTES:
            number = _tensor(value)  # type: ignore[arg-type]
    return (tag, number) if tag is not None and number is not None else None


def _tensor(data: bytes) -> float | None:
    """The number in a tensor of one element, stored as bytes or in the typed list."""
    dtype = 0
    for field, kind, value in fields(data):
        if field == 1 and kind == VARINT:
            dtype = value  # type: ignore[assignment]
        elif field == 4 and kind == BYTES:
            layout = {_FLOAT: "<f", _DOUBLE: "<d", _INT32: "<i", _INT64: "<q", _HALF: "<e"}.get(dtype)
            if layout and len(value) == struct.calcsize(layout):  # type: ignore[arg-type]
                return float(struct.unpack(layout, value)[0])  # type: ignore[arg-type]
            if dtype == _BFLOAT16 and len(value) == 2:  # type: ignore[arg-type]
                return float(struct.unpack("<f", b"\0\0" + value)[0])  # type: ignore[operator]
        elif field == 5 and (kind == FIXED32 or kind == BYTES and len(value) == 4):  # type: ignore[arg-type]
            return float(struct.unpack("<f", value)[0])  # type: ignore[arg-type]
        elif field == 6 and (kind == FIXED64 or kind == BYTES and len(value) == 8):  # type: ignore[arg-type]
            return float(struct.unpack("<d", value)[0])  # type: ignore[arg-type]
    return None
