"""Results of nccl-tests and rccl-tests: the table of any `*_perf`, the JSON of `-J`/`--output_file` (version 3).

Seen: tables of versions 2.0 to 2.20. Before 2.13 the last column of each half is the largest deviation (`error`), not
a count of wrong elements, and the root is absent, sometimes the reduction too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diag.artefacts import Artefact, Source, Unreadable, log

NAME = "nccl-tests"
MAX_BYTES = 64 << 20

#: Characters of a line that may be a row.
LONGEST = 1000
#: What a launcher puts before each line: Open MPI's `[1,0]<stdout>:`, srun's `0: `, a host's name.
_PREFIX = re.compile(r"^\s*(?:\[\d{1,9},\d{1,9}\]<std\w+>:|[\w.-]+: )?\s*")
_FLOAT = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?(?:e[+-][0-9]{1,3})?")
_WRONG = re.compile(r"[0-9]{1,18}")
_DTYPE = re.compile(r"u?int\d+|float\w*|f8\w*|fp8\w*|half|double|bf(?:loat)?16|[iu]?char")
_SNIFF_ROW = re.compile(rb"^(?:[ \t]*(?:\[\d{1,9},\d{1,9}\]<std\w+>:|[\w.-]+: ))?[ \t]*\d+[ \t]+\d+[ \t]+"
                        rb"(?:u?int\d+|float\w*|f8\w*|fp8\w*|half|double|bf(?:loat)?16|[iu]?char)"
                        rb"(?:[ \t]+\w+)?(?:[ \t]+-?\d+)?(?:[ \t]+[\d.e+-]+){3}", re.M)
_DEVICE = re.compile(r"#\s+Rank\s+([0-9]{1,9}).*?Pid\s+([0-9]{1,9}) on\s+(\S+) device\s+([0-9]{1,4}) "
                     r"\[[^\]]*\](.*)$")
_TEST = re.compile(r"Collective test starting: (\w+?)_perf|\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast"
                   r"|sendrecv|reduce|gather|scatter|hypercube)_perf\b")
_BEGINS = re.compile(r"# nThread |Collective test starting|(?<!concluded: )\b[a-z_]{4,20}_perf\b")
#: Of the library, of a program, of the scheduler, of mpirun: such a file is the log of a failure.
_COMPLAINTS = re.compile(rb"NCCL WARN|Traceback \(most|Test NCCL failure|^(?:srun|slurmstepd): error"
                         rb"|^mpirun noticed that|exited on signal \d|^Segmentation fault|\(core dumped\)", re.M)
_BOUNDS = re.compile(r"Out of bounds values : ([0-9]{1,18}) (OK|FAILED)")
_AVERAGE = re.compile(rf"Avg bus bandwidth\s*:\s*{_FLOAT}")


@dataclass(slots=True)
class Row:
    """One size. Bandwidths in GB/s; `wrong` is None where results were not checked."""

    bytes: int
    algorithm: float
    bus: float
    wrong: int | None
    line: int | None = None


@dataclass(kw_only=True)
class Run:
    """One run of one test. `operation` is empty where neither the output nor the name says it."""

    operation: str = ""
    devices: list[tuple[int, str, str]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    out_of_bounds: int | None = None
    failed: bool = False
    average: float | None = None


@dataclass(kw_only=True)
class NcclTests(Artefact):
    """Every run of a file that has results, in order: scripts write one test below the other."""

    runs: list[Run] = field(default_factory=list)


ARTEFACT = NcclTests


def sniff(head: bytes, name: str) -> float:
    """A table row under its heading, or the JSON keys. What also holds complaints is a log of a failure."""
    if head.lstrip().startswith(b"{"):
        return 0.95 if b'"results"' in head and (b'"bus_bw"' in head or b'"average_bus_bandwidth"' in head) else 0.0
    if _COMPLAINTS.search(head):
        return 0.0
    return 0.9 if b"busbw" in head and b"algbw" in head and _SNIFF_ROW.search(head) else 0.0


def read(source: Source) -> Artefact:
    """Every row of both halves of each table; a log, where complaints stand below what was sniffed at."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES)
    if _COMPLAINTS.search(data):
        return log.read(source)
    result = NcclTests(path=source.path, format=NAME, bytes=source.bytes)
    if data.lstrip().startswith(b"{"):
        try:
            result.runs.append(_json(msgspec.json.decode(data), _named(source.name)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return Unreadable(path=source.path, format=NAME, bytes=source.bytes,
                              problem=f"is no result of nccl-tests: {type(error).__name__}: {error}")
    else:
        _text(result, data.decode("utf-8", "replace"))
    result.runs = [run for run in result.runs if run.rows]
    if not result.runs:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="holds no result")
    for run in result.runs:
        run.operation = run.operation or (_named(source.name) if len(result.runs) == 1 else "") or _by_factor(run)
    return result


def _text(result: NcclTests, text: str) -> None:
    number = 0
    run = Run()
    for number, line in enumerate(text.splitlines(), 1):
        if rows := row_of(line, number):
            run.rows += rows
        elif found := _DEVICE.search(line):
            run.devices.append((int(found[1]), found[3], found[5].strip()))
        elif found := _BOUNDS.search(line):
            run.out_of_bounds, run.failed = int(found[1]), found[2] == "FAILED"
        elif found := _AVERAGE.search(line):
            run.average = float(found[1])
        elif run.rows and _BEGINS.search(line):
            result.runs.append(run)
            run = Run()
        if not run.rows and (found := _TEST.search(line)):
            run.operation = found[1] or found[2]
    result.runs.append(run)
    result.lines = number


def row_of(line: str, number: int) -> list[Row]:
    """Both halves of one line of the table; empty for any other line.

    Size, count, type, reduction and root where the version has them; then time, algbw, busbw and #wrong (or error,
    which does not say how many), twice or once.
    """
    if len(line) > LONGEST:
        return []
    words = _PREFIX.sub("", line, count=1).split()
    if len(words) < 7 or not (_WRONG.fullmatch(words[0]) and _WRONG.fullmatch(words[1]) and _DTYPE.fullmatch(words[2])):
        return []
    rest = words[3:]
    if not _NUMBER.fullmatch(rest[0]) and rest[0] != "-1":
        rest = rest[1:]  # the reduction
    while rest and (":" in rest[-1] or rest[-1].count("-") == 2):
        rest = rest[:-1]  # --report_timestamps
    if len(rest) in (5, 9):
        rest = rest[1:]  # the root
    if len(rest) not in (4, 8):
        return []
    rows = []
    for time, algorithm, bus, wrong in zip(*(iter(rest),) * 4, strict=True):
        counted = _WRONG.fullmatch(wrong) is not None
        if not (counted or wrong == "N/A" or _NUMBER.fullmatch(wrong)) or \
                not all(_NUMBER.fullmatch(word) for word in (time, algorithm, bus)):
            return []
        rows.append(Row(int(words[0]), float(algorithm), float(bus), int(wrong) if counted else None, number))
    return rows


def _json(document: dict[str, Any], name: str) -> Run:
    arguments = document.get("args")
    words = " ".join(map(str, arguments)) if isinstance(arguments, list) else str(arguments or "")
    run = Run(operation=name or _named(words))
    for device in document.get("devices") or []:
        run.devices.append((int(device.get("rank", 0)), str(device.get("hostname", "")),
                            str(device.get("device_info", ""))))
    for row in document["results"]:
        for half in ("out_of_place", "in_place"):
            measured = row.get(half)
            if isinstance(measured, dict) and "bus_bw" in measured:
                wrong = measured.get("nwrong")
                run.rows.append(Row(int(row["size"]), float(measured.get("alg_bw", 0.0)), float(measured["bus_bw"]),
                                    wrong if isinstance(wrong, int) else None))
    bounds = document.get("out_of_bounds") or {}
    if isinstance(bounds, dict) and "count" in bounds:
        run.out_of_bounds, run.failed = int(bounds["count"]), bounds.get("okay") is False
    average = document.get("average_bus_bandwidth") or {}
    if isinstance(average, dict) and "bandwidth" in average:
        run.average = float(average["bandwidth"])
    return run


def _named(text: str) -> str:
    plain = re.compile(r"()(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)")
    found = _TEST.search(text) or plain.search(text)
    return (found[1] or found[2]) if found else ""


def _by_factor(run: Run) -> str:
    """all_reduce is the only operation whose bus bandwidth is 2(n-1)/n of its algorithm bandwidth."""
    ranks = len(run.devices)
    large = max(run.rows, key=lambda row: row.bytes)
    if ranks > 2 and large.algorithm > 0 and abs(large.bus / large.algorithm - 2 * (ranks - 1) / ranks) < 0.02:
        return "all_reduce"
    return ""
