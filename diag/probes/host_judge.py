"""The judgement of one host: every check over its facts, and one line that says what was looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diag.detectors import NotChecked
from diag.probes import (
    host_checks_gpu,
    host_checks_network,
    host_checks_software,
    host_checks_system,
    host_variables,
)
from diag.probes.host_facts import HostFacts
from diag.probes.host_words import Place, plural, size
from diag.schema import Evidence, Finding, Where

Check = Callable[[Place], Iterator[Finding | NotChecked]]

CHECKS: tuple[Check, ...] = (host_checks_gpu.check, host_checks_network.check, host_checks_system.check,
                             host_checks_software.check, host_variables.check)


def judge(place: Place) -> Iterator[Finding | NotChecked]:
    """Everything that can be said of one host alone, and `healthy` as context where nothing is at warning."""
    said: list[Finding | NotChecked] = [item for check in CHECKS for item in check(place)]
    yield from said
    yield summary(place)


def summary(place: Place) -> Finding:
    """What the host is, in one line and a table; never a warning."""
    facts = place.facts
    return Finding(cause="host_checked", role="context", severity="info", confidence=1.0,
                   where=Where(hosts=[facts.host] if facts.host else []), summary=words_of(facts),
                   evidence=[Evidence(path=place.path or f"{facts.host}:live", text=words_of(facts))],
                   numbers={"host": facts.host, "standing": True, **numbers_of(facts)})


def words_of(facts: HostFacts) -> str:
    """ "vm: no GPU, 2 processors, 23.5 GiB, torch 2.13.0+cpu" """
    gpus = plural(len(facts.gpus), "GPU") if facts.gpus else "no GPU"
    names = sorted({gpu.name for gpu in facts.gpus if gpu.name})
    parts = [f"{gpus}{' ' + ', '.join(names) if names else ''}"]
    if facts.cpus:
        parts.append(plural(facts.cpus_usable or facts.cpus, "processor"))
    if facts.memory_total:
        parts.append(f"{size(facts.memory_total)} of memory")
    if facts.ib:
        active = sum(port.state == "Active" for port in facts.ib)
        parts.append(f"{active} of {plural(len(facts.ib), 'RDMA port')} active")
    if facts.driver:
        parts.append(f"driver {facts.driver}")
    if "torch" in facts.packages:
        parts.append(f"torch {facts.packages['torch']}")
    return f"{facts.host or 'the host'}: {', '.join(parts)}"


def numbers_of(facts: HostFacts) -> dict[str, object]:
    """The figures of a host that a reader looks for, absent ones left out."""
    rate = facts.storage.write_rate if facts.storage else None
    usual = {
        "gpus": len(facts.gpus), "driver": facts.driver, "cuda_driver": facts.driver_cuda,
        "torch": facts.packages.get("torch"), "torch_cuda": facts.torch_cuda,
        "nccl": next((v for n, v in facts.packages.items() if n.startswith("nvidia-nccl")), None),
        "memory_bytes": facts.memory_total, "shm_bytes": facts.shm_total,
        "open_files": facts.limits.get("nofile", (None, None))[0],
        "memory_limit_bytes": facts.cgroup.memory_limit if facts.cgroup else None,
        "write_bytes_per_second": round(rate) if rate else None,
        "seconds": round(facts.seconds, 3),
    }
    return {key: value for key, value in usual.items() if value not in (None, "")}
