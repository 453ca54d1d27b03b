"""Saved output of `ibstat` and `ibstatus`: the ports of RDMA adapters.

Seen: ibstat of rdma-core 39 and 47, one of them ended by ibpanic; both InfiniBand and Ethernet (RoCE) link layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diag.artefacts import Artefact, Source, Unreadable
from diag.probes.host_facts import IbPort

NAME = "ibstat"
MAX_BYTES = 16 << 20

_CA = re.compile(r"^CA '([^']+)'")
_PORT = re.compile(r"^\s+Port ([0-9]{1,4}):")
_STATUS = re.compile(r"^Infiniband device '([^']+)' port ([0-9]{1,4}) status:", re.I)
_KEY = re.compile(r"^\s+(\w[\w ]*):\s*(.*)$")
#: What the kernel calls the states of a port.
_STATES = ("Active", "Down", "Initialize", "Initializing", "Init", "Armed", "Active defer", "Active_defer")
_SNIFF = re.compile(rb"^(?:CA '[^'\n]+'\s*\n\s+CA type:|Infiniband device '[^'\n]+' port \d+ status:)", re.M)


@dataclass(kw_only=True)
class Ibstat(Artefact):
    """Every port in order; `failures` are (line, text) of what the tool itself could not do."""

    ports: list[IbPort] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)


ARTEFACT = Ibstat


def sniff(head: bytes, name: str) -> float:
    """The first lines of an adapter."""
    return 0.95 if _SNIFF.search(head, 0, 4096) else 0.0


def read(source: Source) -> Ibstat | Unreadable:
    """Every port that is described."""
    with source.open() as stream:
        data = stream.read(MAX_BYTES)
    result = Ibstat(path=source.path, format=NAME, bytes=source.bytes)
    device, adapter, firmware, card = "", "", "", ""
    port: IbPort | None = None
    number = 0
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if found := _CA.match(line):
            device, adapter, firmware, card, port = found[1], "", "", "", None
        elif found := _STATUS.match(line):
            port = IbPort(device=found[1], port=int(found[2]), lines={"port": number})
            result.ports.append(port)
        elif (found := _PORT.match(line)) and device:
            port = IbPort(device=device, port=int(found[1]), adapter=adapter, firmware=firmware, card=card or device,
                          lines={"port": number})
            result.ports.append(port)
        elif line.startswith(("ibpanic", "ibwarn")) or "can't open" in line:
            result.failures.append((number, line.strip()[:300]))
        elif found := _KEY.match(line):
            key, value = found[1].strip().lower(), found[2].strip()
            if port is None:
                adapter = value if key == "ca type" else adapter
                firmware = value if key == "firmware version" else firmware
                card = value if key == "system image guid" else card
            else:
                _set(port, key, value, number)
    result.lines = number
    whole = data.endswith(b"\n")
    if result.ports and not whole and result.ports[-1].state not in _STATES:
        cut = result.ports.pop()  # the last word is half a word: no state to judge
        result.problem = f"ends within the description of {cut.device} port {cut.port}: cut off"
        result.problem_severity = "warning"
    if not result.ports and not result.failures:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem="describes no port")
    return result


def _set(port: IbPort, key: str, value: str, number: int) -> None:
    if key == "state":
        port.state = value.partition(": ")[2].capitalize() or value
        port.lines["state"] = number
    elif key in ("physical state", "phys state"):
        port.physical_state = value.partition(": ")[2] or value
    elif key == "rate":
        rate = re.match(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", value)
        port.rate = float(rate[0]) if rate else None
        port.lines["rate"] = number
    elif key in ("link layer", "link_layer"):
        port.link_layer = value
