"""What known hardware should show: data with source and date in hardware.toml. Unknown hardware has no floor."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU model. `name` is a regular expression on the name that the driver prints."""

    name: str
    match: str
    nvlinks: int = 0
    #: the oldest CUDA whose compiler and libraries know the architecture
    cuda: str = ""
    capability: str = ""


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The least bandwidth (GB/s) that a measurement on sound hardware shows, and who says so."""

    model: str
    operation: str
    gpus: int
    at_least_bytes: int
    bus_bandwidth: float
    source: str
    date: str


@cache
def _data() -> dict[str, Any]:
    import tomllib

    return tomllib.loads((resources.files("diag.probes") / "hardware.toml").read_text("utf-8"))


@cache
def models() -> tuple[Model, ...]:
    """Every known model, the most particular names first."""
    return tuple(msgspec.convert(row, Model) for row in _data()["models"])


@cache
def floors() -> tuple[Floor, ...]:
    """Every known floor."""
    return tuple(msgspec.convert(row, Floor) for row in _data()["floors"])


def gpu_of(name: str) -> Model | None:
    """The model that `name` is, or None: then nothing is expected of it."""
    return next((model for model in models() if name and re.search(model.match, name)), None)


def floor_of(name: str, operation: str, gpus: int, size: int) -> Floor | None:
    """The floor of bus bandwidth for `operation` of `size` bytes among `gpus` of one host, or None: unknown."""
    model = gpu_of(name)
    rows = [f for f in floors() if model is not None and f.model == model.name and f.operation == operation
            and f.gpus == gpus and size >= f.at_least_bytes]
    return max(rows, key=lambda f: f.at_least_bytes, default=None)
