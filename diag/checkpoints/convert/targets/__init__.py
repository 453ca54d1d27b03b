"""One writer per target format: each turns entries into a `Plan`, to the byte, and touches nothing.

A writer module has `NAME`, and `plan(contents, entries, family, options) -> Plan`.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from diag.checkpoints.convert.contents import RECORD, RECORD_FORMAT, Contents
from diag.checkpoints.convert.plan import Plan

#: what --to takes -> module here
TARGETS = {
    "dcp": "dcp", "hf": "hf", "universal": "universal", "zero1": "zero", "zero2": "zero", "megatron": "megatron",
    "megatron-legacy": "megatron_legacy",
}


@dataclass(slots=True, kw_only=True)
class Options:
    """The layout asked for. ranks: files of a DCP; shard: bytes of a safetensors file at most."""

    to: str
    ranks: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    shard: int = 5_000_000_000
    destination_name: str = ""


def writer(to: str) -> ModuleType:
    """The module that writes the format `to`."""
    return importlib.import_module(f"{__name__}.{TARGETS[to]}")


def record(plan: Plan, contents: Contents, options: Options, names: str) -> None:
    """Write beside the result what it came from and what its format could not hold; the way back needs it."""
    value: dict[str, Any] = {
        "format": RECORD_FORMAT, "source": contents.format, "source_names": contents.family, "names": names,
        "to": options.to, "step": contents.step, "consumed": contents.consumed, "facts": contents.facts,
        "not_carried": contents.dropped + plan.dropped, "manifest": contents.manifest,
    }
    text = json.dumps({k: v for k, v in value.items() if v not in (None, {}, [])}, indent=2)
    plan.file(RECORD).raw(text.encode() + b"\n")
