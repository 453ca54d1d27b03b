"""What was measured, as a file: JSON of schema pdtrain.probe/1. docs/comm.md documents every key for users."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from diag.schema import Finding

SCHEMA = "pdtrain.probe/1"

_Amount = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Rank = Annotated[int, Meta(ge=0, le=1 << 24)]

#: nccl-tests' doc/PERFORMANCE.md: what turns an algorithm's bandwidth into the load of the busiest link, for n ranks.
_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_to_all_skewed": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


def bus_factor(operation: str, ranks: int) -> float:
    """busbw / algbw of `operation` among `ranks`."""
    return float(_FACTORS[operation](ranks))


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One operation at one size in one group. Bandwidths in 10⁹ B/s; `bytes` as nccl-tests counts them; times are over
    repetitions, each the mean of the ranks. `wrong` is how many elements of the result were wrong."""

    operation: str
    bytes: _Count
    count: _Count
    iterations: _Count
    min_seconds: _Amount
    median_seconds: _Amount
    p99_seconds: _Amount
    algbw: _Amount
    busbw: _Amount
    wrong: _Count = 0
    dtype: str = "float"
    group: str = "world"
    ranks: list[_Rank] = []
    concurrent: bool = False
    note: str = ""


class Extra(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A measurement that is no sweep: `kind` is "hierarchy", "overlap", "payload" or "dispatch"."""

    kind: str
    name: str
    numbers: dict[str, float | int | str] = {}


class Lost(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A rank that stopped answering: `how` is "gone" (no such process), "stopped" (SIGSTOP), "silent" or "absent"."""

    rank: _Rank
    how: str
    host: str = ""
    at: str = ""
    seconds: _Amount = 0.0


class Link(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One direction between two ranks."""

    src: _Rank
    dst: _Rank
    bytes_per_second: _Amount
    src_host: str = ""
    dst_host: str = ""


class Probe(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything of one probe. `hosts` and `devices` by rank; `stopped` says why it ended early, empty if it did not.

    `link_findings` is what localisation concluded, `rates` what `pdtrain plan --probe` takes in the absence of links.
    """

    schema: Annotated[str, Meta(pattern="^pdtrain.probe/1$")] = SCHEMA
    created: str = ""
    backend: str = ""
    torch: str = ""
    world: _Count = 0
    hosts: list[str] = []
    devices: list[str] = []
    ranks_per_node: _Count = 0
    seconds: _Amount = 0.0
    timeout: _Amount = 0.0
    rows: list[Row] = []
    extras: list[Extra] = []
    links: list[Link] = []
    rounds: _Count = 0
    mode: str = ""
    link_findings: list[Finding] = []
    rates: dict[str, float] = {}
    lost: list[Lost] = []
    stopped: str = ""
    position: list[str] = []
    notes: list[str] = []


def encode(probe: Probe) -> bytes:
    """`probe` as indented JSON, the schema first."""
    plain = {"schema": SCHEMA, **msgspec.to_builtins(probe)}
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def decode(data: bytes) -> Probe:
    """The inverse. Raises ValueError when `data` is no probe."""
    try:
        return msgspec.json.decode(data, type=Probe)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


def rates_of(rows: list[Row], hosts: list[str]) -> dict[str, float]:
    """One direction of one device inside a node or between nodes, from the ring of send_recv: its slowest link decides.

    B/s; the key is the one that `pdtrain plan --probe` reads. Empty where it was not measured.
    """
    best = max((row.busbw for row in rows if row.operation == "send_recv" and row.group == "world"), default=0.0)
    if not best:
        return {}
    return {"network_bandwidth" if len(set(hosts)) > 1 else "node_bandwidth": best * 1e9}


def restore(records: list[tuple[str, Any]]) -> tuple[list[Row], list[Extra]]:
    """Rows and extras that ranks left in the store, as (kind, value)."""
    rows = [msgspec.convert(value, Row) for kind, value in records if kind == "row"]
    return rows, [msgspec.convert(value, Extra) for kind, value in records if kind == "extra"]
