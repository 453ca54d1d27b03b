"""This trainer's resolved configuration: config.toml of a run directory (docs/run-directory.md).

    [model.moe]
    experts = 8
    top_k = 2
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

from diag.artefacts import Artefact, Source, Unreadable

NAME = "run-config"
#: A configuration is a few kB; anything larger is not one.
MAX_BYTES = 4 << 20
_TABLE = re.compile(rb"(?m)^\[(?:model|modules|parallel|train|optimizer|precision|data|checkpoint|recorder|pools)[.\]]")


@dataclass(kw_only=True)
class RunConfig(Artefact):
    """The tables of config.toml as plain values. Keys of other versions are kept; none is required."""

    values: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value at a dotted key ("model.moe.top_k"), or None where the file does not say."""
        value: Any = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def number(self, key: str) -> float | None:
        """As `get`, for finite numbers of a sane size only: TOML knows nan and inf, and files are untrusted."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if abs(value) < 1e15 else None  # a nan compares false


ARTEFACT = RunConfig


def sniff(head: bytes, name: str) -> float:
    """TOML with at least two of the tables that every run configuration has."""
    tables = len(set(_TABLE.findall(head)))
    return (0.95 if name == "config.toml" else 0.7) if tables >= 2 else 0.0


def read(source: Source) -> RunConfig | Unreadable:
    """Parse the file whole. A damaged one is `Unreadable` with the parser's own line and column."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    problem = None
    if len(data) > MAX_BYTES:
        problem = f"larger than {MAX_BYTES >> 20} MiB: not a configuration"
    else:
        try:
            values = tomllib.loads(data.decode("utf-8"))
            return RunConfig(path=source.path, format=NAME, bytes=source.bytes, values=values)
        except (ValueError, RecursionError) as error:
            problem = f"is not valid TOML: {error}"
    return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=problem)
