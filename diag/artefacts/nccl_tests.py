"""Results of nccl-tests: the console table of any `*_perf`, and the JSON file of `-J`/`--output_file` (version 3)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diag.artefacts import Artefact, Source, Unreadable

NAME = "nccl-tests"
MAX_BYTES = 64 << 20

_FLOAT = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_WRONG = r"([0-9]{1,18}|N/A)"
_ROW = re.compile(r"^\s*(?:\S+: )?\s*([0-9]{1,18})\s+([0-9]{1,18})\s+(\w+)\s+(\w+)\s+(-?[0-9]{1,9})"
                  rf"\s+{_FLOAT}\s+{_FLOAT}\s+{_FLOAT}\s+{_WRONG}"
                  rf"(?:\s+{_FLOAT}\s+{_FLOAT}\s+{_FLOAT}\s+{_WRONG})?\s*$")
_SNIFF_ROW = re.compile(rb"^[ \t]*\d+[ \t]+\d+[ \t]+(?:u?int\d+|float8?\w*|half|double|bfloat16|[iu]?char)[ \t]+"
                        rb"\w+[ \t]+-?\d+[ \t]+[\d.]+[ \t]+[\d.]+[ \t]+[\d.]+", re.M)
_DEVICE = re.compile(r"#\s+Rank\s+([0-9]{1,9}).*?Pid\s+([0-9]{1,9}) on\s+(\S+) device\s+([0-9]{1,4}) "
                     r"\[[^\]]*\] (.+?)\s*$")
_TEST = re.compile(r"Collective test starting: (\w+?)_perf|\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast"
                   r"|sendrecv|reduce|gather|scatter|hypercube)_perf\b")
_BOUNDS = re.compile(r"# Out of bounds values : ([0-9]{1,18}) (OK|FAILED)")
_AVERAGE = re.compile(rf"# Avg bus bandwidth\s*:\s*{_FLOAT}")


@dataclass(slots=True)
class Row:
    """One size. Bandwidths in GB/s; `wrong` is None where results were not checked."""

    bytes: int
    algorithm: float
    bus: float
    wrong: int | None
    line: int | None = None


@dataclass(kw_only=True)
class NcclTests(Artefact):
    """One run. `operation` is empty where neither the output nor the name says it."""

    operation: str = ""
    devices: list[tuple[int, str, str]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    out_of_bounds: int | None = None
    failed: bool = False
    average: float | None = None


ARTEFACT = NcclTests


def sniff(head: bytes, name: str) -> float:
    """A table row under its heading, or the JSON keys. What also holds complaints is a log of a failure."""
    if head.lstrip().startswith(b"{"):
        return 0.95 if b'"results"' in head and (b'"bus_bw"' in head or b'"average_bus_bandwidth"' in head) else 0.0
    if b"NCCL WARN" in head or b"Traceback (most" in head or b"Test NCCL failure" in head:
        return 0.0
    return 0.9 if b"busbw" in head and b"algbw" in head and _SNIFF_ROW.search(head) else 0.0


def read(source: Source) -> NcclTests | Unreadable:
    """Every row of both halves of the table."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES)
    result = NcclTests(path=source.path, format=NAME, bytes=source.bytes, operation=_named(source.name))
    if data.lstrip().startswith(b"{"):
        try:
            _json(result, msgspec.json.decode(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return Unreadable(path=source.path, format=NAME, bytes=source.bytes,
                              problem=f"is no result of nccl-tests: {type(error).__name__}: {error}")
    else:
        _text(result, data.decode("utf-8", "replace"))
    if not result.rows:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="holds no result")
    if not result.operation:
        result.operation = _by_factor(result)
    return result


def _text(result: NcclTests, text: str) -> None:
    number = 0
    for number, line in enumerate(text.splitlines(), 1):
        if found := _ROW.match(line):
            size = int(found[1])
            for algorithm, bus, wrong in ((found[7], found[8], found[9]), (found[11], found[12], found[13])):
                if bus is not None:
                    result.rows.append(Row(size, float(algorithm), float(bus),
                                           int(wrong) if wrong != "N/A" else None, number))
        elif found := _DEVICE.search(line):
            result.devices.append((int(found[1]), found[3], found[5]))
        elif found := _BOUNDS.search(line):
            result.out_of_bounds, result.failed = int(found[1]), found[2] == "FAILED"
        elif found := _AVERAGE.search(line):
            result.average = float(found[1])
        elif found := _TEST.search(line):
            result.operation = found[1] or found[2]
    result.lines = number


def _json(result: NcclTests, document: dict[str, Any]) -> None:
    arguments = document.get("args")
    words = " ".join(map(str, arguments)) if isinstance(arguments, list) else str(arguments or "")
    result.operation = result.operation or _named(words)
    for device in document.get("devices") or []:
        result.devices.append((int(device.get("rank", 0)), str(device.get("hostname", "")),
                               str(device.get("device_info", ""))))
    for row in document["results"]:
        for half in ("out_of_place", "in_place"):
            measured = row.get(half)
            if isinstance(measured, dict) and "bus_bw" in measured:
                wrong = measured.get("nwrong")
                result.rows.append(Row(int(row["size"]), float(measured.get("alg_bw", 0.0)), float(measured["bus_bw"]),
                                       wrong if isinstance(wrong, int) else None))
    bounds = document.get("out_of_bounds") or {}
    if isinstance(bounds, dict) and "count" in bounds:
        result.out_of_bounds, result.failed = int(bounds["count"]), bounds.get("okay") is False
    average = document.get("average_bus_bandwidth") or {}
    if isinstance(average, dict) and "bandwidth" in average:
        result.average = float(average["bandwidth"])


def _named(text: str) -> str:
    plain = re.compile(r"()(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)")
    found = _TEST.search(text) or plain.search(text)
    return (found[1] or found[2]) if found else ""


def _by_factor(result: NcclTests) -> str:
    """all_reduce is the only operation whose bus bandwidth is 2(n-1)/n of its algorithm bandwidth."""
    ranks = len(result.devices)
    large = max(result.rows, key=lambda row: row.bytes)
    if ranks > 2 and large.algorithm > 0 and abs(large.bus / large.algorithm - 2 * (ranks - 1) / ranks) < 0.02:
        return "all_reduce"
    return ""
