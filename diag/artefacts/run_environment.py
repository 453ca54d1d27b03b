"""Versions, host, command line and process groups of a run of this trainer: environment.json of a run directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from diag.artefacts import Artefact, Source, Unreadable

NAME = "run-environment"
MAX_BYTES = 64 << 20


@dataclass(kw_only=True)
class RunEnvironment(Artefact):
    """The document as plain values; every key is optional."""

    values: dict[str, Any] = field(default_factory=dict)


ARTEFACT = RunEnvironment


def sniff(head: bytes, name: str) -> float:
    """A JSON object with versions and the host, under its own name."""
    known = b'"versions"' in head and b'"host"' in head and head.lstrip().startswith(b"{")
    return (0.95 if name == "environment.json" else 0.6) if known else 0.0


def read(source: Source) -> RunEnvironment | Unreadable:
    """Parse the document whole."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES + 1)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        values = msgspec.json.decode(data)
        if not isinstance(values, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=f"is not valid JSON: {error}")
    return RunEnvironment(path=source.path, format=NAME, bytes=source.bytes, values=values)
