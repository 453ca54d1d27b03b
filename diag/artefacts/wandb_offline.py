"""Weights & Biases offline files (`run-<id>.wandb`): the history of a run, without the wandb package.

A LevelDB log (32 KiB blocks; CRC32, length, type before each piece) of protobuf `Record`s; of these only `history` (2)
is read: items (1) of key (1) or nested key (2) and a JSON value (16), and the step (2). Layout from
wandb/proto/wandb_internal.proto. A torn tail is what a killed run leaves.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from diag.artefacts import Source, Unreadable
from diag.artefacts.metric_table import MetricTable
from diag.artefacts.wire import BYTES, VARINT, WireError, fields, signed
from diag.errors import ArtefactError

NAME = "wandb"
ARTEFACT = MetricTable

_HEADER = b":W&B"
_BLOCK = 32_768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
MAX_RECORD = 256 << 20
MAX_KEYS = 100_000


def sniff(head: bytes, name: str) -> float:
    """The magic of the file."""
    return 1.0 if head.startswith(_HEADER) else 0.0


def read(source: Source) -> MetricTable | Unreadable:
    """Every number of the history by key; nested keys are joined with "/"."""
    table = MetricTable(path=source.path, format=NAME, bytes=source.bytes, lines_known=False, style="wandb")
    problems: list[str] = []
    number = rows = 0
    try:
        with source.open() as stream:
            for number, record in enumerate(_records(stream, problems), 1):
                try:
                    rows += _take(table, record, number, rows)
                except (WireError, ValueError, RecursionError):
                    problems.append(f"record {number:,} is damaged")
    except ArtefactError as error:
        problems.append(str(error))
    if not table.series:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes,
                          problem="holds no history" + (f"; {problems[0]}" if problems else ""))
    if problems:
        table.problem = problems[0]
        table.problem_severity = "info" if "cut off" in problems[0] else "warning"
    return table


def _records(stream: BinaryIO, problems: list[str]) -> Iterator[bytes]:
    """Whole records; damaged pieces are stated in `problems` and end the reading of their record."""
    parts: list[bytes] = []
    offset = len(stream.read(7))
    while True:
        left = _BLOCK - offset % _BLOCK
        if left < 7:
            stream.read(left)
            offset += left
        head = stream.read(7)
        if not head:
            return
        if len(head) < 7:
            problems.append("the last record is cut off")
            return
        crc, length, kind = struct.unpack("<IHB", head)
        data = stream.read(length)
        offset += 7 + length
        if len(data) < length:
            problems.append("the last record is cut off")
            return
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            problems.append(f"a checksum is wrong at byte {offset - length - 7:,}")
            parts = []
            continue
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(data)
        if sum(map(len, parts)) > MAX_RECORD:
            parts = []
        if kind in (_FULL, _LAST) and parts:
            yield b"".join(parts)
            parts = []


def _take(table: MetricTable, record: bytes, number: int, rows: int) -> int:
    """Add the history of `record`; 1 when there was one."""
    history = next((v for f, k, v in fields(record) if f == 2 and k == BYTES), None)
    if history is None:
        return 0
    step: int | None = None
    values: dict[str, float] = {}
    for field, kind, value in fields(history):  # type: ignore[arg-type]
        if field == 2 and kind == BYTES:
            step = next((signed(v) for f, k, v in fields(value)  # type: ignore[arg-type,misc]
                         if f == 1 and k == VARINT), 0)
        elif field == 1 and kind == BYTES:
            _item(value, values)  # type: ignore[arg-type]
    own = values.pop("_step", None)
    if step is None:
        step = int(own) if own is not None and own == own else rows
    for key, scalar in values.items():
        if key in table.series or len(table.series) < MAX_KEYS:
            table.column(key).add(step, number, scalar)
    return 1


def _item(data: bytes, values: dict[str, float]) -> None:
    key, nested, text = "", [], b""
    for field, kind, value in fields(data):
        if kind != BYTES:
            continue
        if field == 1:
            key = value.decode("utf-8", "replace")  # type: ignore[union-attr]
        elif field == 2:
            nested.append(value.decode("utf-8", "replace"))  # type: ignore[union-attr]
        elif field == 16:
            text = value  # type: ignore[assignment]
    _flatten(key or "/".join(nested), json.loads(text) if text else None, values)


def _flatten(key: str, value: Any, values: dict[str, float], depth: int = 0) -> None:
    if isinstance(value, dict) and depth < 4 and "_type" not in value:
        for name, inner in value.items():
            _flatten(f"{key}/{name}", inner, values, depth + 1)
        return
    if isinstance(value, str):
        value = float(value) if value.lower().lstrip("-") in ("nan", "infinity", "inf") else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        values[key] = float(value)
