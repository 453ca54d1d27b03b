"""The Xid catalogue: what each code of NVIDIA's kernel driver means and what to do, as data in xid.toml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from diag.schema import Severity

_XID = re.compile(r"Xid \(PCI:([\da-fA-F:.]+)\): (\d+)\b")
_SXID = re.compile(r"SXid \(PCI:([\da-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)", re.I)
_LOST = re.compile(r"GPU (?:at )?(?:PCI:)?([\da-fA-F:.]{7,16})?:? ?(?:GPU )?has fallen off the bus"
                   r"|(?:The NVIDIA GPU ([\da-fA-F:.]{7,16})\b.{0,200})?NVRM: fallen off the bus", re.S)
#: What the driver says without an Xid when it cannot start a GPU, or the GPU's firmware is silent.
_SILENT = re.compile(r"NVRM: GPU(?: ([\da-fA-F:.]{7,16}):| ?(\d{1,3})) (?:\w+: )?"
                     r"(RmInitAdapter failed|\*+ GSP Timeout)")


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """One Xid. `cause` is a slug; `severity` what one such line means for a machine that is about to be used."""

    code: int
    says: str
    cause: str
    severity: Severity
    action: str


@dataclass(slots=True)
class Entry:
    """All lines of one code on one GPU."""

    code: int
    cause: str
    severity: Severity
    summary: str
    text: str
    line: int | None
    time: str
    gpus: list[str]
    fix: list[str] = field(default_factory=list)
    count: int = 1


@cache
def catalogue() -> dict[int, Code]:
    """Code -> what it means."""
    import tomllib

    data: dict[str, Any] = tomllib.loads((resources.files("diag.probes") / "xid.toml").read_text("utf-8"))
    rows = [msgspec.convert(row, Code) for row in data["xid"]]
    return {row.code: row for row in rows}


def action_of(text: str) -> str | None:
    """What the catalogue says to do about the Xid in the line `text`."""
    found = _XID.search(text)
    code = catalogue().get(int(found[2])) if found else None
    return f"Xid {code.code}: {code.action}" if code else None


def lines_of(lines: Iterable[tuple[str, int | None, str]]) -> list[Entry]:
    """The Xid and SXid among `lines` (text, line number, time), one entry per code and GPU, first line kept."""
    found: dict[tuple[str, int, str], Entry] = {}
    for text, number, time in lines:
        kind, gpu, code, entry = _entry(text)
        if entry is None:
            continue
        known = found.setdefault((kind, code, gpu), entry)
        if known is not entry:
            known.count += 1
        else:
            entry.line, entry.time = number, time
    for entry in found.values():
        if entry.count > 1:
            entry.summary += f", {entry.count} times"
    return list(found.values())


def _entry(text: str) -> tuple[str, str, int, Entry | None]:
    if match := _SXID.search(text):
        fatal = match[3].lower() == "fatal"
        return "sxid", match[1], int(match[2]), Entry(
            int(match[2]), "nvlink_error", "error" if fatal else "info", f"NVSwitch {match[1]}: SXid {match[2]} "
            f"({match[3].lower()})", text, None, "", [match[1]],
            ["Drain the host and read the fabric manager's log for the port."] if fatal else [])
    if match := _XID.search(text):
        number = int(match[2])
        code = catalogue().get(number)
        if code is None:
            return "xid", match[1], number, Entry(number, "gpu_hw_fault", "info", f"GPU {match[1]}: Xid {number}, "
                                                  "which the catalogue does not hold", text, None, "", [match[1]])
        return "xid", match[1], number, Entry(number, code.cause, code.severity,
                                              f"GPU {match[1]}: Xid {number}, {code.says}", text, None, "", [match[1]],
                                              [f"Xid {number}: {code.action}"])
    if match := _LOST.search(text):
        gpu = match[1] or match[2] or ""
        return "lost", gpu, 79, Entry(79, "gpu_fell_off_bus", "error", f"GPU {gpu or '?'} has fallen off the bus", text,
                                      None, "", [gpu] if gpu else [], [f"Xid 79: {catalogue()[79].action}"])
    if match := _SILENT.search(text):
        gpu, what = match[1] or match[2], match[3].strip("* ")
        return "silent", gpu, 119, Entry(119, "gpu_hw_fault", "error", f"GPU {gpu}: {what}", text, None, "", [gpu],
                                         [f"Xid 119: {catalogue()[119].action}"])
    return "", "", 0, None
