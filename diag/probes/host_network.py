"""Network of one host: interfaces and InfiniBand ports from sysfs, names and the rendezvous port from the resolver.

`root` replaces / so that a recorded tree can be read. Questions to the resolver may hang: they run in threads that are
given up after a time limit.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diag.probes.host_facts import HostFacts, IbPort, Nic, Port, Resolution

#: A resolver that needs longer makes every start of every rank slow; glibc's own time limit is 5 s per server.
NAME_SECONDS = 1.0
CONNECT_SECONDS = 1.0
#: torch.distributed's default (torch/distributed/constants.py and torchrun's static rendezvous).
DEFAULT_PORT = 29500
#: Counters of a port that speak of a bad link (IBTA PortCounters) and of retransmission (mlx5 hw_counters).
IB_COUNTERS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "port_xmit_discards",
               "local_link_integrity_errors", "excessive_buffer_overrun_errors")
IB_HARDWARE_COUNTERS = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence", "rnr_nak_retry_err")
NIC_COUNTERS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_dropped", "tx_dropped", "carrier_changes")


def interfaces(root: Path = Path("/"), addresses: Mapping[str, list[str]] | None = None) -> list[Nic]:
    """Every network interface, loopback included. `addresses` replaces what the system says of their addresses."""
    found = []
    known = _addresses() if addresses is None else addresses
    for folder in _entries(root / "sys/class/net"):
        if not (folder / "operstate").exists():
            continue
        counters = {}
        for name in NIC_COUNTERS:
            place = folder / name if name == "carrier_changes" else folder / "statistics" / name
            value = _integer(place)
            if value is not None:
                counters[name] = value
        speed = _integer(folder / "speed")
        carrier = _integer(folder / "carrier")
        found.append(Nic(name=folder.name, state=_text(folder / "operstate"), mtu=_integer(folder / "mtu"),
                         carrier=None if carrier is None else bool(carrier),
                         speed=speed if speed is not None and speed > 0 else None,
                         virtual=not (folder / "device").exists(), addresses=known.get(folder.name, []),
                         counters=counters))
    return found


def ib_ports(root: Path = Path("/")) -> list[IbPort]:
    """Every port of every RDMA adapter."""
    found = []
    for device in _entries(root / "sys/class/infiniband"):
        for port in _entries(device / "ports"):
            counters = {}
            for folder, names in (("counters", IB_COUNTERS), ("hw_counters", IB_HARDWARE_COUNTERS)):
                for name in names:
                    value = _integer(port / folder / name)
                    if value is not None:
                        counters[name] = value
            rate = _text(port / "rate").split(" ")[0]
            found.append(IbPort(device=device.name, port=int(port.name) if port.name.isdigit() else 1,
                                state=_after_colon(_text(port / "state")).capitalize(),
                                physical_state=_after_colon(_text(port / "phys_state")),
                                rate=_float(rate), link_layer=_text(port / "link_layer"),
                                adapter=_text(device / "hca_type"), firmware=_text(device / "fw_ver"),
                                card=_text(device / "sys_image_guid") or device.name, counters=counters))
    return found


def resolve(name: str, why: str, *, limit: float = NAME_SECONDS,
            ask: Callable[..., Any] = socket.getaddrinfo) -> Resolution:
    """The addresses of `name`; `problem` when there are none, or no answer in time."""
    found = Resolution(name=name, why=why)
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(sorted({item[4][0] for item in ask(name, None)}))
        except OSError as error:
            answer.append(error.strerror or str(error))

    begun = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)  # a daemon: an unanswered question must not hold up the exit
    thread.start()
    thread.join(limit)
    found.seconds = time.monotonic() - begun
    if not answer:
        found.problem = f"no answer within {limit:g} s"
    elif isinstance(answer[0], str):
        found.problem = answer[0]
    else:
        found.addresses = answer[0]
    return found


def names(facts: HostFacts, environ: Mapping[str, str]) -> None:
    """Resolve this host's own name and the rendezvous host's."""
    if facts.host:
        facts.names.append(resolve(facts.host, "this host's own name"))
    master = environ.get("MASTER_ADDR", "")
    if master and not _is_address(master):
        facts.names.append(resolve(master, "MASTER_ADDR"))


def rendezvous(facts: HostFacts, environ: Mapping[str, str]) -> Port | None:
    """The rendezvous port: is it free where it will be opened, can it be reached from elsewhere?

    Under torchrun the launcher has opened it already: then only reaching it counts.
    """
    address, text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if text and not (text.isdigit() and 0 < int(text) < 65_536):
        return Port(address=address, port=0, state="invalid", problem=f"MASTER_PORT is {text!r}")
    port = Port(address=address or "this host", port=int(text or DEFAULT_PORT), given=bool(text))
    running = "TORCHELASTIC_RUN_ID" in environ or environ.get("RANK", "").isdigit()
    here = not address or _is_here(address, facts)
    if here and not running:
        port.state, port.problem = _bind(port.port)
    elif address and (running or not here):
        port.state, port.problem = _connect(address, port.port)
    return port if port.state else None


def _bind(number: int) -> tuple[str, str]:
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104 - as a TCPStore binds
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, number))
                return "free", ""
        except OSError as error:
            problem = error.strerror or str(error)
            if family == socket.AF_INET:
                return "in use", problem
    return "", ""


def _connect(address: str, number: int) -> tuple[str, str]:
    answer: list[tuple[str, str]] = []

    def run() -> None:
        try:
            with socket.create_connection((address, number), timeout=CONNECT_SECONDS):
                answer.append(("accepts", ""))
        except ConnectionRefusedError:
            answer.append(("refused", "nobody listens there (yet)"))
        except OSError as error:
            answer.append(("unreachable", error.strerror or str(error)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS + NAME_SECONDS)
    return answer[0] if answer else ("unreachable", f"no answer within {CONNECT_SECONDS:g} s")


def _is_here(address: str, facts: HostFacts) -> bool:
    own = {facts.host, "localhost", "127.0.0.1", "::1", "0.0.0.0"}  # noqa: S104
    return address in own or any(address in nic.addresses for nic in facts.nics)


def _is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
            return True
        except OSError:
            continue
    return False


def _addresses() -> dict[str, list[str]]:
    try:
        import psutil

        return {name: [item.address.split("%")[0] for item in items if item.family in (socket.AF_INET, socket.AF_INET6)]
                for name, items in psutil.net_if_addrs().items()}
    except (ImportError, OSError):
        return {}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:  # an interface that is down answers some files with EINVAL
        return ""


def _integer(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _after_colon(text: str) -> str:
    """ "4: ACTIVE" -> "ACTIVE"."""
    return text.partition(":")[2].strip() or text
