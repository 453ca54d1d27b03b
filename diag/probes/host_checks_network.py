"""Judgement of interfaces, InfiniBand ports, names and the rendezvous port."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from diag.detectors import NotChecked
from diag.probes.host_facts import IbPort
from diag.probes.host_words import Place, plural
from diag.schema import Finding, Severity

#: A name server that needs this long is felt by every rank's start.
SLOW_NAME = 0.5
#: A counter this many times its peers' median, and at least so large, is an odd one out.
ODD_RATIO = 10
ODD_LEAST = 100


def check(place: Place) -> Iterator[Finding | NotChecked]:
    """Everything about the network of one host."""
    facts = place.facts
    if facts.ib:
        yield from ports(place, facts.ib)
    elif place.live:
        yield NotChecked("InfiniBand: no adapter on this host")
    yield from interfaces(place)
    yield from names(place)
    yield from rendezvous(place)


def ports(place: Place, found: list[IbPort]) -> Iterator[Finding]:
    """State and rate of InfiniBand and RoCE ports, each against its peers.

    A port that is Down and was disabled on purpose looks like a broken one; where other ports of the same adapter
    model and link layer are up, it is reported. The second port of a card whose first is up often has no cable.
    """
    active = [port for port in found if port.state == "Active"]
    if not active:
        states = ", ".join(f"{port.device}/{port.port} {port.state or 'unknown'}" for port in found[:4])
        yield place.finding("ib_link_error", "error", f"no port of {plural(len(found), 'adapter port')} is active "
                            f"({states}){_why(found[0])}", at="/sys/class/infiniband", text=states,
                            line=_line(found[0], "state"))
        return
    for port in found:
        if port.state == "Active":
            continue
        alike = [other for other in active if other.adapter == port.adapter and
                 (not port.link_layer or other.link_layer in ("", port.link_layer))]
        sibling = next((other for other in alike if port.card and other.card == port.card), None)
        where = f"{port.device} port {port.port}"
        physical = f", physical state {port.physical_state}" if port.physical_state else ""
        severity: Severity = "warning"
        peers = f"{plural(len(alike), 'port')} like it {'is' if len(alike) == 1 else 'are'} active"
        if sibling is not None:
            severity, peers = "info", f"the other port of its card ({sibling.device}/{sibling.port}) is active: not " \
                                      "cabled, or broken"
        elif port.physical_state == "Disabled" and not alike:
            severity = "info"  # an adapter of another kind (management, storage) that nobody uses
        yield place.finding("ib_link_error", severity, f"{where} is {port.state or 'not active'}{physical}"
                            f"{_why(port)}; {peers}", at=f"/sys/class/infiniband/{port.device}",
                            text=f"state {port.state}{physical}", line=_line(port, "state"), device=port.device)
    groups: dict[tuple[str, str], list[IbPort]] = {}
    for port in active:
        groups.setdefault((port.adapter, port.link_layer), []).append(port)
    for members in groups.values():
        rates = Counter(port.rate for port in members if port.rate)
        top, count = max(rates.items(), default=(0, 0))
        if len(rates) < 2 or 3 * count < 2 * sum(rates.values()):
            continue  # ports of one adapter model on two fabrics by design cannot be told from a fault
        for port in members:
            if port.rate and port.rate < top:
                yield place.finding("ib_link_error", "warning", f"{port.device} port {port.port} runs at "
                                    f"{port.rate:g} Gb/s, {count} ports like it at {top:g}",
                                    at=f"/sys/class/infiniband/{port.device}", text=f"rate {port.rate:g}",
                                    line=_line(port, "rate"), device=port.device, rate=port.rate)
    yield from counters(place, active)


def _why(port: IbPort) -> str:
    """What the state of a port that is not active says of the reason."""
    if port.physical_state == "Polling":
        return " (no link partner: cable, transceiver or switch port)"
    if port.state.lower().startswith(("init", "armed")):
        return " (the link is up and no subnet manager has brought it into use)"
    return ""


def counters(place: Place, active: list[IbPort]) -> Iterator[Finding]:
    """Error counters since the port was reset: no public limit, so only a port far above its peers is named."""
    for name in sorted({name for port in active for name in port.counters}):
        values = sorted(port.counters.get(name, 0) for port in active)
        usual = values[len(values) // 2]
        for port in active:
            value = port.counters.get(name, 0)
            if len(active) >= 3 and value >= ODD_LEAST and value > ODD_RATIO * max(usual, 1):
                yield place.finding("ib_link_error", "warning", f"{port.device} port {port.port} has {name} {value:,}, "
                                    f"its peers {usual:,}", at=f"/sys/class/infiniband/{port.device}",
                                    text=f"{name} {value}", confidence=0.6, device=port.device, counter=name,
                                    value=value)


def _line(port: IbPort, key: str) -> int | None:
    return port.lines.get(key)


def interfaces(place: Place) -> Iterator[Finding]:
    """Network interfaces: none with an address, or a variable that names one that is not usable."""
    facts = place.facts
    usable = [nic for nic in facts.nics if nic.name != "lo" and nic.state != "down" and nic.addresses]
    if facts.nics and not usable and place.many:
        yield place.finding("wrong_nic", "error", "no network interface is up and has an address", at="/sys/class/net",
                            text=", ".join(f"{nic.name} {nic.state}" for nic in facts.nics[:6]))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"):
        value = facts.variables.get(name, "").strip()
        if value and facts.nics:
            yield from named(place, name, value)
    value = facts.variables.get("NCCL_IB_HCA", "").strip()
    if value and place.facts.ib and not value.startswith("^"):
        devices = {port.device for port in facts.ib}
        exact = value.startswith("=")
        for part in value.lstrip("=").split(","):
            device = part.split(":")[0].strip()
            if device and not any(known == device if exact else known.startswith(device) for known in devices):
                yield place.finding("wrong_nic", "error", f"NCCL_IB_HCA names {device}, which this host does not have "
                                    f"({', '.join(sorted(devices)[:8])})", at="NCCL_IB_HCA", text=value,
                                    variable="NCCL_IB_HCA")


def named(place: Place, variable: str, value: str) -> Iterator[Finding]:
    """Whether the interfaces that `variable` selects exist and can carry traffic.

    NCCL reads prefixes, `=` exact names and `^` exclusions; Gloo and TensorPipe exact names only.
    """
    nics = place.facts.nics
    ncclish = variable.startswith("NCCL_")
    if ncclish and value.startswith("^"):
        return
    exact = not ncclish or value.startswith("=")
    for wanted in (part.strip().split(":")[0] for part in value.lstrip("=").split(",")):
        found = [nic for nic in nics if (nic.name == wanted if exact else nic.name.startswith(wanted))]
        names = ", ".join(nic.name for nic in nics)
        if not wanted:
            continue
        if not ncclish and wanted.startswith(("^", "=")):
            yield place.finding("wrong_nic", "error", f"{variable}={value}: only NCCL understands ^ and =; Gloo looks "
                                "for an interface of that very name", at=variable, text=value, variable=variable)
        elif not found:
            yield place.finding("wrong_nic", "error", f"{variable}={value}: this host has no interface {wanted} (it "
                                f"has {names})", at=variable, text=value, variable=variable)
        elif all(nic.state == "down" for nic in found):
            yield place.finding("wrong_nic", "error", f"{variable}={value}: {found[0].name} is down", at=variable,
                                text=value, variable=variable)
        elif place.many and all(nic.name == "lo" for nic in found):
            yield place.finding("wrong_nic", "error", f"{variable}={value}: loopback does not reach another host",
                                at=variable, text=value, variable=variable)
        elif place.many and not any(nic.addresses for nic in found):
            yield place.finding("wrong_nic", "warning", f"{variable}={value}: {found[0].name} has no address",
                                at=variable, text=value, variable=variable)


def names(place: Place) -> Iterator[Finding]:
    """Name resolution of this host and of the rendezvous host."""
    for name in place.facts.names:
        own = name.why != "MASTER_ADDR"
        loopback = name.addresses and all(re.match(r"127\.|::1$", address) for address in name.addresses)
        if name.problem:
            severity = "warning" if own else "error"
            yield place.finding("hostname_resolution", severity, f"{name.name} ({name.why}) does not resolve: "  # type: ignore[arg-type]
                                f"{name.problem}", at="resolver", text=f"{name.name}: {name.problem}", name=name.name)
        elif loopback and place.many:
            rank = place.facts.ranks or [0]
            if own or 0 not in rank:
                yield place.finding("hostname_resolution", "warning", f"{name.name} ({name.why}) resolves to "
                                    f"{name.addresses[0]}: Gloo listens there, and no other host reaches it",
                                    at="/etc/hosts", text=f"{name.name} {' '.join(name.addresses)}", name=name.name)
        elif (name.seconds or 0) > SLOW_NAME:
            yield place.finding("hostname_resolution", "warning", f"resolving {name.name} ({name.why}) takes "
                                f"{name.seconds:.1f} s", at="resolver", text=f"{name.seconds:.2f} s", name=name.name,
                                confidence=0.6)


def rendezvous(place: Place) -> Iterator[Finding]:
    """MASTER_ADDR and MASTER_PORT."""
    port = place.facts.port
    if port is None:
        return
    at = "MASTER_PORT" if port.given else "default port"
    if port.state == "invalid":
        yield place.finding("port_in_use", "error", f"{port.problem}: not a port", at=at, text=port.problem)
    elif port.state == "in use":
        yield place.finding("port_in_use", "error" if port.given else "info", f"port {port.port}, where the rendezvous "
                            f"would listen, is in use ({port.problem})", at=at, text=f"bind: {port.problem}",
                            port=port.port)
    elif port.state == "unreachable":
        yield place.finding("rendezvous_timeout", "error", f"{port.address}:{port.port} cannot be reached from here: "
                            f"{port.problem}", at=at, text=port.problem, port=port.port)
