"""What a device can do: the catalogue (hardware.toml), a file of the same form (`pdtrain sweep --calibrate` writes it),
and measured links that replace its numbers."""

from __future__ import annotations

import functools
import importlib.resources
import json
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from diag.errors import UsageError
from pdtrain.plan.files import read_regular

Device = Literal["gpu", "cpu"]
DEFAULT = "h100-sxm"
#: Largest probe file that is read.
PROBE_LIMIT_BYTES = 64 << 20
#: The same of a hardware file.
HARDWARE_LIMIT_BYTES = 1 << 20
#: What a hardware file may state as 0.
MAY_BE_ZERO = ("latency", "block_overhead", "step_overhead", "runtime_bytes")
#: An all_reduce of so few bytes takes as long as one of none.
SMALL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device. Rates in FLOP/s and byte/s, one direction; `measured` names what a probe replaced.

    latency: seconds that starting one collective costs. block_overhead: seconds of the host per block and micro-batch,
    forward and backward, that no device work hides; step_overhead: the same per optimizer step. The catalogue takes the
    latter two as 0: a GPU that is busy hides them. runtime_bytes: what the context, NCCL's buffers and the allocator
    take beside tensors, 2 to 4 GB on NVIDIA GPUs (field value); nothing on CPUs. kind: modules keep other tensors on a
    CPU, which has fewer fused kernels.
    """

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
    latency: float = 25e-6
    block_overhead: float = 0.0
    step_overhead: float = 0.0
    runtime_bytes: float = 3e9
    kind: Device = "gpu"

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
    """The device called `name` (a key, or a part of a marketing name), or described by the TOML file of that name;
    absent: the default.

    Raises:
        UsageError: the catalogue has no such device, or the file does not describe one.
    """
    known = catalogue()
    if name is None:
        return known[DEFAULT]
    if name.endswith(".toml") or "/" in name:
        return read_hardware(Path(name))
    wanted = name.lower()
    if wanted in known:
        return known[wanted]
    for device in known.values():
        if any(fragment.lower() in wanted for fragment in device.match):
            return device
    raise UsageError(f"--hardware {name!r} is not in the catalogue; use {', '.join(known)}, or a .toml file that "
                     "`pdtrain sweep --calibrate` wrote")


def read_hardware(path: Path) -> Hardware:
    """The first table of a TOML file in the catalogue's form.

    Raises:
        UsageError: no such file, or a number that is missing, unknown or not positive.
    """
    where = f"--hardware {path}"
    try:
        tables = tomllib.loads(read_regular(path, HARDWARE_LIMIT_BYTES, where).decode())
    except FileNotFoundError:
        raise UsageError(f"{where}: no such file; `pdtrain sweep --calibrate {path}` writes one") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid TOML: {error}") from None
    key, table = next(iter(tables.items()), ("", None))
    if not isinstance(table, dict):
        raise UsageError(f"{where}: holds no table of a device; `pdtrain sweep --calibrate FILE` writes one")
    rows = {field.name: field for field in fields(Hardware) if field.name not in ("key", "measured", "match")}
    if unknown := sorted(set(table) - set(rows) - {"match"}):
        raise UsageError(f"{where}: [{key}] has an unknown key {unknown[0]!r}; its keys are {', '.join(rows)}")
    values: dict[str, Any] = {}
    for name, row in rows.items():
        value = table.get(name)
        if value is None and row.default is not MISSING:
            continue
        if name in ("name", "source", "date"):
            values[name] = str(value or "")
        elif name == "kind":
            if value not in get_args(Device):
                raise UsageError(f"{where}: kind = {value!r} is neither {' nor '.join(get_args(Device))}")
            values[name] = value
        elif name == "flops":
            found = {k: _positive(v) for k, v in value.items()} if isinstance(value, dict) else {}
            if set(found) != {"bf16", "fp32"} or not all(found.values()):
                raise UsageError(f"{where}: flops must be {{ bf16 = FLOP/s, fp32 = FLOP/s }}")
            values[name] = found
        elif not _positive(value) and not (value == 0 and name in MAY_BE_ZERO):
            raise UsageError(f"{where}: {name} = {value!r} is no positive number")
        else:
            values[name] = int(_positive(value)) if name == "devices_per_node" else _positive(value)
    return Hardware(key=str(key), **values)


def write_hardware(hardware: Hardware, path: Path) -> None:
    """`hardware` as a file for `--hardware`, replaced as one step.

    Raises:
        UsageError: it cannot be written.
    """
    import os

    import tomli_w

    table = {name: value for name, value in asdict(hardware).items() if name not in ("key", "match", "measured")}
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(tomli_w.dumps({hardware.key: table}), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def with_probe(hardware: Hardware, path: Path) -> Hardware:
    """`hardware` with the link rates that `pdtrain diag comm --save FILE` measured, or that a file states itself.

    The file is a JSON object (docs/comm.md). `links`: [{src, dst, bytes_per_second}], ranks 8 to a node (or
    `ranks_per_node`); the median inside and across nodes is taken. `rows`: the smallest all_reduce is the start of a
    collective. `rates` may state {node_bandwidth, network_bandwidth, memory_bandwidth,
    flops: {bf16}} directly.

    Raises:
        UsageError: no such file, or nothing in it that could be used.
    """
    try:
        data = json.loads(read_regular(path, PROBE_LIMIT_BYTES, f"--probe {path}").decode())
    except FileNotFoundError:
        raise UsageError(f"--probe {path}: no such file; `pdtrain diag comm --save {path}` writes one") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--probe {path}: not JSON; `pdtrain diag comm --save {path}` writes it") from None
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
    if latency := min(_starts(data), default=0.0):
        found["latency"] = latency
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


def _starts(data: dict[str, Any]) -> Iterator[float]:
    """Seconds of the probe's all_reduces of next to nothing: what one collective costs to start."""
    rows = data.get("rows")
    for row in rows if isinstance(rows, list) else []:
        small = isinstance(row, dict) and 0 < _positive(row.get("bytes")) <= SMALL_BYTES
        if small and row.get("operation") == "all_reduce" and (seconds := _positive(row.get("median_seconds"))):
            yield seconds


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
