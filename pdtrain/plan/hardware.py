"""What a device can do: the catalogue (hardware.toml), and measured links that replace its numbers."""

from __future__ import annotations

import functools
import importlib.resources
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diag.errors import UsageError

DEFAULT = "h100-sxm"
#: Largest probe file that is read.
PROBE_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device. Rates in FLOP/s and byte/s, one direction; `measured` names what a probe replaced."""

    key: str
    name: str
    flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    devices_per_node: int
    gemm_efficiency: float
    attention_efficiency: float
    source: str
    date: str
    match: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Dense peak of a compute dtype."""
        return self.flops[dtype]


@functools.cache
def catalogue() -> dict[str, Hardware]:
    """Every device of hardware.toml, by key."""
    text = (importlib.resources.files("pdtrain.plan") / "hardware.toml").read_text(encoding="utf-8")
    found = {}
    for key, table in tomllib.loads(text).items():
        found[key] = Hardware(key=key, **{**table, "match": tuple(table["match"])})
    return found


def named(name: str | None) -> Hardware:
    """The device called `name` (a key, or a part of a marketing name); absent: the default.

    Raises:
        UsageError: the catalogue has no such device.
    """
    known = catalogue()
    if name is None:
        return known[DEFAULT]
    wanted = name.lower()
    if wanted in known:
        return known[wanted]
    for device in known.values():
        if any(fragment.lower() in wanted for fragment in device.match):
            return device
    raise UsageError(f"--hardware {name!r} is not in the catalogue; use {', '.join(known)}")


def with_probe(hardware: Hardware, path: Path) -> Hardware:
    """`hardware` with the link rates that `pdtrain diag comm --json` measured, or that a file states itself.

    The file is a JSON object. `links`: [{src, dst, bytes_per_second}], ranks 8 to a node (or `ranks_per_node`); the
    median inside and across nodes is taken. `rates` may state {node_bandwidth, network_bandwidth, memory_bandwidth,
    flops: {bf16}} directly.

    Raises:
        UsageError: no such file, or nothing in it that could be used.
    """
    try:
        if path.stat().st_size > PROBE_LIMIT_BYTES:
            raise UsageError(f"--probe {path}: larger than {PROBE_LIMIT_BYTES:,} bytes; is it a probe's JSON?")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--probe {path}: no such file; `pdtrain diag comm --json > {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--probe {path}: cannot be read: {error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--probe {path}: not JSON; `pdtrain diag comm --json > {path}` writes it") from None
    rates = _rates(data if isinstance(data, dict) else {}, hardware.devices_per_node)
    if not rates:
        raise UsageError(f"--probe {path}: holds neither `links` nor `rates`; use the JSON of `pdtrain diag comm`")
    return replace(hardware, measured=tuple(sorted(rates)), **rates)


def _rates(data: dict[str, Any], per_node: int) -> dict[str, Any]:
    import statistics

    found: dict[str, Any] = {}
    per_node = int(_positive(data.get("ranks_per_node"))) or per_node
    inside: list[float] = []
    across: list[float] = []
    links = data.get("links")
    for link in links if isinstance(links, list) else []:
        if not isinstance(link, dict):
            continue
        rate, source, target = _positive(link.get("bytes_per_second")), link.get("src"), link.get("dst")
        if rate and isinstance(source, int) and isinstance(target, int) and source != target:
            (inside if source // per_node == target // per_node else across).append(rate)
    if inside:
        found["node_bandwidth"] = statistics.median(inside)
    if across:
        found["network_bandwidth"] = statistics.median(across)
    stated = data.get("rates")
    if not isinstance(stated, dict):
        return found
    for key in ("node_bandwidth", "network_bandwidth", "memory_bandwidth"):
        if rate := _positive(stated.get(key)):
            found[key] = rate
    if isinstance(stated.get("flops"), dict):
        flops = {k: _positive(v) for k, v in stated["flops"].items() if k in ("bf16", "fp32")}
        if flops and all(flops.values()):
            found["flops"] = {"bf16": 0.0, "fp32": 0.0} | flops
    return found


def _positive(value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    return float(value) if good else 0.0


def parse_bytes(text: str) -> float:
    """`80GB` (decimal), `80GiB`, `80` (GB) in bytes.

    Raises:
        UsageError: not a size.
    """
    import re

    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise UsageError(f"--memory {text!r} is no size; write 80GB or 80GiB")
    power = {"": 3, "k": 1, "m": 2, "g": 3, "t": 4}[found[2].lower()]
    return float(found[1]) * (1024 if found[3] else 1000) ** power


def parse_count(text: str, option: str) -> float:
    """`14.8T`, `5e12`, `300B` as a number.

    Raises:
        UsageError: not a positive number.
    """
    import re

    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([KMBGTP]?)\s*", text)
    scale = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
    if not found or not 0 < float(found[1]) * scale[found[2]] < 1e30:
        raise UsageError(f"{option} {text!r} is no positive number; write 5T or 5e12")
    return float(found[1]) * scale[found[2]]
