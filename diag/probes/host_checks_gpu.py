"""Judgement of GPUs, whether NVML or a saved nvidia-smi output described them. Pure functions of facts.

What is judged at warning or above is what NVIDIA's documents call a fault: uncorrectable errors since the driver was
loaded, a failed or pending row remapping, hardware slowdowns, a link narrower than it can be, a fabric that is not up.
Corrected errors, replays and lifetime counters are shown, not judged: nobody publishes a limit for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from diag.detectors import NotChecked
from diag.probes import hardware
from diag.probes.host_facts import Gpu
from diag.probes.host_words import GIB, Place, plural, size
from diag.schema import Finding, Severity

#: Another process that holds more than this share of a GPU, or this many bytes, will be missed.
OTHERS_SHARE = 0.02
OTHERS_BYTES = 1 * GIB
#: A GPU that works harder than this should run its PCIe link at full generation; an idle one saves power.
BUSY_PERCENT = 50
#: So many GPUs that show the same are one finding.
ALIKE = 3
#: CRC errors per second below this are normal for a link (DCGM: DCGM_LIMIT_MAX_NVLINK_CRC_ERROR).
CRC_RATE = 100.0
#: Slowdowns that the hardware forces. A software power cap is how a GPU at full load normally runs.
SLOWDOWNS = {"hw_thermal_slowdown": "is too hot and slowed down by its hardware",
             "hw_power_brake": "is slowed down by an external power brake",
             "sw_thermal_slowdown": "is near its temperature limit and slowed down by the driver",
             "hw_slowdown": "is slowed down by its hardware"}
#: Compute applications that do not count as somebody else's.
_SERVICES = ("nvidia-cuda-mps", "Xorg", "gnome-shell", "dcgm", "nv-hostengine", "nvidia-persistenced")


def check(place: Place) -> Iterator[Finding | NotChecked]:
    """Everything about the GPUs of one host."""
    facts = place.facts
    if not facts.gpus:
        why = facts.notes.get("gpus", "none described")
        if facts.gpus_on_bus:
            yield place.finding(
                "driver_mismatch", "error", f"{plural(facts.gpus_on_bus, 'NVIDIA GPU')} on the PCI bus and no working "
                f"driver ({why})", at="/sys/bus/pci/devices", text=f"{facts.gpus_on_bus} controllers of NVIDIA; {why}")
        else:
            yield NotChecked(f"no GPU on this host ({why})" if place.live else why)
        return
    if facts.gpus_on_bus is not None and facts.gpus_on_bus > len(facts.gpus):
        # Info only: a scheduler or container that hands out some of the GPUs looks exactly the same.
        yield place.finding(
            "gpu_fell_off_bus", "info", f"{facts.gpus_on_bus} GPUs on the PCI bus, {len(facts.gpus)} known to the "
            "driver: the others are lost, or not handed to this job", at="/sys/bus/pci/devices",
            text=f"NVML lists {len(facts.gpus)} of {facts.gpus_on_bus}", confidence=0.4)
    yield from _driver(place)
    checks = [memory_errors, slowed, links, state, *([others] if place.live else [])]
    yield from together([item for gpu in facts.gpus for one in checks for item in one(place, gpu)], len(facts.gpus))
    yield from alike(place)
    yield from link_errors(place)
    yield from peers(place)
    yield from redirected(place)


def together(found: list[Finding], total: int) -> Iterator[Finding]:
    """`found`, what three GPUs or more show alike as one: a power brake of a chassis is one fault, not eight."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for item in found:
        groups.setdefault((item.cause, item.severity, item.numbers.pop("check", None)), []).append(item)
    for first, *rest in groups.values():
        if len(rest) < ALIKE - 1:
            yield from (first, *rest)
            continue
        first.summary = f"{len(rest) + 1} of {total} GPUs alike: {first.summary}"
        first.where.gpus = [gpu for item in (first, *rest) for gpu in item.where.gpus]
        first.evidence += [proof for item in rest for proof in item.evidence][:7]
        first.numbers = {"standing": True, "alike": len(rest) + 1}
        yield first


def _driver(place: Place) -> Iterator[Finding]:
    facts = place.facts
    if facts.kernel_module and facts.driver and facts.kernel_module != facts.driver:
        yield place.finding("driver_mismatch", "error", f"the loaded kernel module is {facts.kernel_module}, the "
                            f"driver library {facts.driver}: a reboot or a reload is due",
                            at="/proc/driver/nvidia/version",
                            text=f"module {facts.kernel_module}, library {facts.driver}")


def label(gpu: Gpu) -> str:
    """ "GPU 3 (0000:1A:00.0)"."""
    return f"GPU {gpu.index}" + (f" ({short_bus(gpu.bus_id)})" if gpu.bus_id else "")


def short_bus(bus_id: str) -> str:
    """The PCI address as the kernel log writes it, without NVML's four extra zeros."""
    return bus_id[4:].lower() if bus_id.startswith("0000") and bus_id.count(":") == 2 and len(bus_id) > 12 else \
        bus_id.lower()


def _say(place: Place, gpu: Gpu, cause: str, severity: str, words: str, key: str, text: str, *,
         confidence: float = 0.9, **numbers: Any) -> Finding:
    return place.finding(cause, severity, f"{label(gpu)} {words}", at="NVML", text=text,  # type: ignore[arg-type]
                         line=gpu.lines.get(key), gpus=[short_bus(gpu.bus_id) or str(gpu.index)],
                         confidence=confidence, gpu=gpu.index, check=numbers.get("reason", key), **numbers)


def memory_errors(place: Place, gpu: Gpu) -> Iterator[Finding]:
    """ECC and row remapping. Source: NVIDIA GPU Memory Error Management, row remapping and its states."""
    if gpu.remap_failure:
        yield _say(place, gpu, "gpu_ecc", "error", "could not remap a faulty memory row: replace it", "remap_failure",
                   "Remapping Failure Occurred: Yes")
    if gpu.unrepairable:
        yield _say(place, gpu, "gpu_ecc", "error", "has unrepairable memory: replace it", "unrepairable",
                   "Unrepairable Memory: Yes")
    if gpu.ecc_volatile_uncorrected:
        yield _say(place, gpu, "gpu_ecc", "error", f"had {plural(gpu.ecc_volatile_uncorrected, 'uncorrectable error')} "
                   "of memory since the driver was loaded", "ecc_volatile_uncorrected",
                   f"volatile uncorrectable ECC errors: {gpu.ecc_volatile_uncorrected}",
                   uncorrected=gpu.ecc_volatile_uncorrected)
    if gpu.remap_pending or gpu.retired_pending:
        what = "Remapped Rows, Pending: Yes" if gpu.remap_pending else "Pending Page Blacklist: Yes"
        yield _say(place, gpu, "gpu_ecc", "warning", "waits for a reset to take a faulty memory row out of use",
                   "remap_pending" if gpu.remap_pending else "retired_pending", what)
    if gpu.ecc_aggregate_uncorrected and not gpu.ecc_volatile_uncorrected:
        yield _say(place, gpu, "gpu_ecc", "info", f"had {gpu.ecc_aggregate_uncorrected} uncorrectable errors in its "
                   "life, none since the driver was loaded", "ecc_aggregate_uncorrected",
                   f"aggregate uncorrectable ECC errors: {gpu.ecc_aggregate_uncorrected}")


def slowed(place: Place, gpu: Gpu) -> Iterator[Finding]:
    """Clocks that something holds down now."""
    for reason, words in SLOWDOWNS.items():
        if reason not in gpu.throttle or (reason == "hw_slowdown" and len(set(SLOWDOWNS) & set(gpu.throttle)) > 1):
            continue
        clocks = f", {gpu.clock_sm} of {gpu.clock_sm_max} MHz" if gpu.clock_sm and gpu.clock_sm_max else ""
        heat = f", {gpu.temperature} °C" if gpu.temperature is not None else ""
        yield _say(place, gpu, "gpu_throttled", "warning", f"{words}{clocks}{heat}", reason,
                   f"clock event reason active: {reason.replace('_', ' ')}", reason=reason)
    if gpu.power_limit and gpu.power_default and gpu.power_limit < 0.95 * gpu.power_default:
        yield _say(place, gpu, "gpu_throttled", "info", f"has its power limited to {gpu.power_limit:.0f} W, "
                   f"{gpu.power_default:.0f} W by default", "power_limit", f"power limit {gpu.power_limit:.0f} W")


def links(place: Place, gpu: Gpu) -> Iterator[Finding]:
    """PCIe and NVLink."""
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        yield _say(place, gpu, "pcie_degraded", "warning", f"has a PCIe link of {gpu.pcie_width} lanes where "
                   f"{gpu.pcie_width_max} are possible", "pcie_width",
                   f"link width {gpu.pcie_width}x of {gpu.pcie_width_max}x", lanes=gpu.pcie_width)
    busy = (gpu.utilisation or 0) >= BUSY_PERCENT
    if busy and gpu.pcie_generation and gpu.pcie_generation_max and gpu.pcie_generation < gpu.pcie_generation_max:
        yield _say(place, gpu, "pcie_degraded", "warning", f"works and its PCIe link runs at generation "
                   f"{gpu.pcie_generation} of {gpu.pcie_generation_max}", "pcie_generation",
                   f"PCIe generation {gpu.pcie_generation} of {gpu.pcie_generation_max}, busy {gpu.utilisation} %")
    if gpu.nvlinks_active and not gpu.mig:
        known = hardware.gpu_of(gpu.name)
        expected = known.nvlinks if known is not None and known.nvlinks else None
        total = expected or gpu.nvlinks_active + (gpu.nvlinks_inactive or 0)
        if gpu.nvlinks_active < total and (expected or gpu.nvlinks_inactive):
            certain = expected is not None
            yield _say(place, gpu, "nvlink_error", "warning" if certain else "info", f"has {gpu.nvlinks_active} of "
                       f"{total} NVLinks up", "nvlinks", f"{gpu.nvlinks_active} links active, {total} "
                       + (f"by design of {known.name}" if certain and known else "in all"), confidence=0.8,
                       active=gpu.nvlinks_active)


def state(place: Place, gpu: Gpu) -> Iterator[Finding]:
    """What the driver itself says of the GPU: unreadable, to be reset, fabric not up, compute prohibited."""
    if gpu.error:
        lost = any(word in gpu.error.lower() for word in ("lost", "fallen", "requires reset"))
        yield _say(place, gpu, "gpu_fell_off_bus" if lost else "gpu_hw_fault", "error" if lost else "warning",
                   f"does not answer: {gpu.error}", "error", gpu.error, confidence=0.85 if lost else 0.5)
    action = gpu.recovery_action or ("Reset" if gpu.reset_required else "")
    if action and action not in ("None", "N/A"):
        yield _say(place, gpu, "gpu_hw_fault", "error", f"needs recovery: {action}", "recovery_action",
                   f"GPU Recovery Action: {action}")
    if gpu.fabric_state in ("In Progress", "Not Started"):
        yield _say(place, gpu, "fabric_manager", "warning", f"is not part of the NVSwitch fabric ({gpu.fabric_state}): "
                   "is the fabric manager running?", "fabric_state", f"Fabric State: {gpu.fabric_state}")
    elif gpu.fabric_state == "Completed" and gpu.fabric_status not in ("", "Success", "N/A"):
        yield _say(place, gpu, "fabric_manager", "error", f"could not join the NVSwitch fabric ({gpu.fabric_status})",
                   "fabric_status", f"Fabric Status: {gpu.fabric_status}")
    if gpu.compute_mode == "Prohibited":
        yield _say(place, gpu, "gpu_hw_fault", "error", "is set to refuse all computation (compute mode Prohibited)",
                   "compute_mode", "Compute Mode: Prohibited")


def others(place: Place, gpu: Gpu) -> Iterator[Finding]:
    """Processes on the GPU before the job begins: they are somebody else's, or left over."""
    total = gpu.memory_total or 0
    for process in gpu.processes:
        if process.name.startswith(_SERVICES) or process.memory is None:
            continue
        if process.memory < min(OTHERS_BYTES, OTHERS_SHARE * total if total else OTHERS_BYTES):
            continue
        owner = f" of {process.user}" if process.user else ""
        yield _say(place, gpu, "cuda_oom_shared_gpu", "warning", f"is in use: process {process.pid} "
                   f"({process.name or 'name unknown'}{owner}) holds {size(process.memory)}", "processes",
                   f"pid {process.pid} {process.name} {size(process.memory)}", confidence=0.8, pid=process.pid,
                   bytes=process.memory)


def alike(place: Place) -> Iterator[Finding]:
    """GPUs of one host that should be alike and are not: model, memory, ECC, MIG, PCIe generation and width."""
    gpus = place.facts.gpus
    if len(gpus) < 3:
        return  # of two that differ, nobody can say which is the odd one
    for key, word in (("name", "model"), ("memory_total", "memory"), ("ecc_enabled", "ECC mode"), ("mig", "MIG mode"),
                      ("pcie_width_max", "PCIe width"), ("pcie_generation_max", "PCIe generation"),
                      ("nvlinks_active", "active NVLinks")):
        if key == "nvlinks_active" and any((m := hardware.gpu_of(gpu.name)) and m.nvlinks for gpu in gpus):
            continue  # each was held to its own number of links
        values = [getattr(gpu, key) for gpu in gpus]
        (usual, count), *rest = Counter(values).most_common()
        if not rest or usual in (None, "") or count <= len(gpus) // 2:
            continue
        odd = [gpu for gpu in gpus if getattr(gpu, key) not in (usual, None, "")]
        if odd:
            names = ", ".join(f"{label(gpu)}: {getattr(gpu, key)}" for gpu in odd)
            yield place.finding("hosts_differ", "warning", f"{word} of {names}; the other {count} GPUs: {usual}",
                                at="NVML", text=f"{word}: {names}; usual {usual}", line=odd[0].lines.get(key),
                                gpus=[short_bus(gpu.bus_id) or str(gpu.index) for gpu in odd], confidence=0.8)


def link_errors(place: Place) -> Iterator[Finding]:
    """NVLink errors that are counted right now; then those since the driver was loaded, against the host's other GPUs.

    The limits are those of NVIDIA's DCGM (dcgm_gpu_hardware_limits.h): any replay or recovery, CRC errors from 100 per
    second. Counts of long ago are a warning only where most GPUs of the host have none.
    """
    gpus = [gpu for gpu in place.facts.gpus if gpu.nvlink_errors]
    clean = sum(not _retried(gpu) for gpu in gpus)
    for gpu in gpus:
        now = {kind: rate for kind, rate in gpu.nvlink_error_rates.items()
               if rate >= CRC_RATE or (rate > 0 and not kind.startswith("crc"))}
        counts = ", ".join(f"{kind} {count:,}" for kind, count in gpu.nvlink_errors.items() if count)
        if now:
            words = ", ".join(f"{kind} {rate:,.0f} per second" for kind, rate in now.items())
            yield _say(place, gpu, "nvlink_error", "warning", f"counts NVLink errors now: {words}", "nvlink_errors",
                       counts, rates=now)
        elif _retried(gpu):
            odd = len(gpus) >= ALIKE and clean > len(gpus) // 2
            others = f", {clean} of its {len(gpus) - 1} peers none" if odd else ""
            yield _say(place, gpu, "nvlink_error", "warning" if odd else "info", f"had NVLink errors since the driver "
                       f"was loaded ({counts}){others}", "nvlink_errors", counts, confidence=0.6)


def _retried(gpu: Gpu) -> int:
    return gpu.nvlink_errors.get("replay", 0) + gpu.nvlink_errors.get("recovery", 0)


def redirected(place: Place) -> Iterator[Finding | NotChecked]:
    """PCIe access control services: NCCL's troubleshooting guide wants them off on bare metal."""
    facts = place.facts
    if (facts.gpus_on_bus or 0) < 2:
        return
    if "acs" in facts.notes:
        yield NotChecked(f"PCIe ACS: {facts.notes['acs']}")
    if facts.acs:
        bridges = list(facts.acs)
        severity: Severity = "info" if facts.virtual else "warning"
        yield place.finding("p2p_acs_iommu", severity, f"PCIe ACS sends transfers between devices through the "
                            f"processor at {plural(len(bridges), 'bridge')} above GPUs "
                            f"({', '.join(bridges[:4])}): slow, or hanging, GPU to GPU and GPU to adapter",
                            at="/sys/bus/pci/devices", confidence=0.7, bridges=len(bridges),
                            text="; ".join(f"{bridge}: {what}" for bridge, what in list(facts.acs.items())[:4]))


def peers(place: Place) -> Iterator[Finding]:
    """Pairs of GPUs that may not read each other's memory, where others of the host may."""
    table = place.facts.p2p
    bad = {pair: why for pair, why in table.items() if why != "OK"}
    if not bad:
        return
    words = "; ".join(f"{pair}: {why}" for pair, why in list(bad.items())[:4])
    mixed = len(bad) < len(table)
    nvlink = any(gpu.nvlinks_active for gpu in place.facts.gpus)
    yield place.finding("p2p_acs_iommu", "warning" if mixed or nvlink else "info",
                        f"{len(bad)} of {plural(len(table), 'pair')} of GPUs have no peer access", at="NVML",
                        text=words, confidence=0.7, pairs=list(bad))
