"""GPUs through NVML. The module is an argument, so that recorded answers can stand in for a card.

Every call may be unsupported on a given card, driver or container: what is not answered stays absent.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diag.probes.host_facts import Gpu, GpuProcess, HostFacts

#: NVML's bits of clock event reasons (nvml.h, nvmlClocksEventReasons), under our names.
REASONS = {0x1: "idle", 0x2: "application_clocks", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost",
           0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake", 0x100: "display_clock"}
_COMPUTE_MODES = {0: "Default", 1: "Exclusive Thread", 2: "Prohibited", 3: "Exclusive Process"}
_FABRIC_STATES = {0: "Not Supported", 1: "Not Started", 2: "In Progress", 3: "Completed"}
_RECOVERY = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}
_P2P = {0: "OK", 1: "chipset not supported", 2: "GPU not supported", 3: "IOH topology not supported",
        4: "disabled by registry key", 5: "not supported", 6: "unknown"}
#: NVML offers up to 18 links, and the field ids of the error counters are per link in old drivers.
MAX_NVLINKS = 18


def gather(facts: HostFacts, nvml: Any = None, root: Path = Path("/")) -> None:
    """Fill what `facts` says of GPUs and their driver; `facts.notes["gpus"]` when there is nothing to ask."""
    begun = time.monotonic()
    facts.gpus_on_bus = on_bus(root)
    facts.kernel_module = kernel_module(root)
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            facts.notes["gpus"] = "nvidia-ml-py is not installed"
            return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        facts.notes["gpus"] = f"NVML: {error}"
        return
    try:
        facts.driver = _text(_ask(nvml, nvml.nvmlSystemGetDriverVersion))
        version = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        if isinstance(version, int):
            facts.driver_cuda = f"{version // 1000}.{version % 1000 // 10}"
        count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
        handles = []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                facts.gpus.append(Gpu(index=index, error=str(error)))
                continue
            handles.append((index, handle))
            facts.gpus.append(gpu(nvml, index, handle))
        _peers(facts, nvml, handles)
        _rising(facts, nvml, dict(handles), time.monotonic() - begun)
        facts.gpus.sort(key=lambda item: item.index)
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    """One GPU, as far as NVML answers."""
    found = Gpu(index=index)
    ask = functools.partial(_by_name, nvml, handle)
    found.name, found.uuid = _text(ask("nvmlDeviceGetName")), _text(ask("nvmlDeviceGetUUID"))
    pci = ask("nvmlDeviceGetPciInfo")
    found.bus_id = _text(getattr(pci, "busId", ""))
    memory = ask("nvmlDeviceGetMemoryInfo")
    if memory is not None:
        found.memory_total, found.memory_used = int(memory.total), int(memory.used)
    mode = ask("nvmlDeviceGetMigMode")
    found.mig = bool(mode[0]) if isinstance(mode, (list, tuple)) else None
    found.persistence = _flag(ask("nvmlDeviceGetPersistenceMode"))
    found.compute_mode = _COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode"), "")
    state = ask("nvmlDeviceGetPerformanceState")
    found.performance_state = f"P{state}" if isinstance(state, int) and 0 <= state < 16 else ""
    rates = ask("nvmlDeviceGetUtilizationRates")
    found.utilisation = int(rates.gpu) if rates is not None else None
    found.temperature = ask("nvmlDeviceGetTemperature", 0)
    found.power = _watts(ask("nvmlDeviceGetPowerUsage"))
    found.power_limit = _watts(ask("nvmlDeviceGetEnforcedPowerLimit"))
    found.power_default = _watts(ask("nvmlDeviceGetPowerManagementDefaultLimit"))
    found.clock_sm = ask("nvmlDeviceGetClockInfo", 1)
    found.clock_sm_max = ask("nvmlDeviceGetMaxClockInfo", 1)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    found.throttle = [name for bit, name in REASONS.items() if isinstance(reasons, int) and reasons & bit]
    _memory_errors(found, ask)
    found.pcie_generation = ask("nvmlDeviceGetCurrPcieLinkGeneration")
    found.pcie_generation_max = ask("nvmlDeviceGetMaxPcieLinkGeneration")
    found.pcie_width = ask("nvmlDeviceGetCurrPcieLinkWidth")
    found.pcie_width_max = ask("nvmlDeviceGetMaxPcieLinkWidth")
    found.pcie_replays = ask("nvmlDeviceGetPcieReplayCounter")
    _links(found, ask)
    _fabric(found, nvml, handle)
    found.processes = _processes(nvml, ask)
    return found


def _memory_errors(found: Gpu, ask: Callable[..., Any]) -> None:
    mode = ask("nvmlDeviceGetEccMode")
    found.ecc_enabled = bool(mode[0]) if isinstance(mode, (list, tuple)) else None
    found.ecc_volatile_corrected = ask("nvmlDeviceGetTotalEccErrors", 0, 0)
    found.ecc_volatile_uncorrected = ask("nvmlDeviceGetTotalEccErrors", 1, 0)
    found.ecc_aggregate_uncorrected = ask("nvmlDeviceGetTotalEccErrors", 1, 1)
    rows = ask("nvmlDeviceGetRemappedRows")
    if isinstance(rows, (list, tuple)) and len(rows) == 4:
        found.remapped_correctable, found.remapped_uncorrectable = int(rows[0]), int(rows[1])
        found.remap_pending, found.remap_failure = bool(rows[2]), bool(rows[3])
    found.retired_pending = _flag(ask("nvmlDeviceGetRetiredPagesPendingStatus"))


def _links(found: Gpu, ask: Callable[..., Any]) -> None:
    states = []
    for link in range(MAX_NVLINKS):
        state = ask("nvmlDeviceGetNvLinkState", link)
        if state is None:
            break
        states.append(bool(state))
    if not states:
        return
    found.nvlinks_active, found.nvlinks_inactive = sum(states), len(states) - sum(states)
    found.nvlink_errors = _link_errors(ask, len(states))


def _link_errors(ask: Callable[..., Any], links: int) -> dict[str, int]:
    """Counts over all links by kind; kinds that the card does not count are absent."""
    found = {}
    for code, kind in ((0, "replay"), (1, "recovery"), (2, "crc flit"), (3, "crc data")):
        counts = [ask("nvmlDeviceGetNvLinkErrorCounter", link, code) for link in range(links)]
        known = [int(count) for count in counts if isinstance(count, int)]
        if known:
            found[kind] = sum(known)
    return found


def _rising(facts: HostFacts, nvml: Any, handles: dict[int, Any], seconds: float) -> None:
    """A second look at the GPUs with link errors: are they of long ago, or happening now?"""
    for item in facts.gpus:
        if not any(item.nvlink_errors.values()) or item.index not in handles:
            continue
        ask = functools.partial(_by_name, nvml, handles[item.index])
        after = _link_errors(ask, (item.nvlinks_active or 0) + (item.nvlinks_inactive or 0))
        item.nvlink_error_rates = {kind: (count - item.nvlink_errors[kind]) / max(seconds, 1e-3)
                                   for kind, count in after.items() if count > item.nvlink_errors.get(kind, count)}


def _fabric(found: Gpu, nvml: Any, handle: Any) -> None:
    """State of the NVSwitch fabric and the recovery action, by calls that only newer libraries have."""
    try:
        info = nvml.c_nvmlGpuFabricInfo_t()
        nvml.nvmlDeviceGetGpuFabricInfo(handle, info)
        found.fabric_state = _FABRIC_STATES.get(int(info.state), "")
        found.fabric_status = "Success" if int(info.status) == 0 else f"error {int(info.status)}"
    except (AttributeError, TypeError, nvml.NVMLError):
        pass
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return
    values = _ask(nvml, nvml.nvmlDeviceGetFieldValues, handle, [field])
    if values and getattr(values[0], "nvmlReturn", 1) == 0:
        found.recovery_action = _RECOVERY.get(int(values[0].value.uiVal), "")


def _processes(nvml: Any, ask: Callable[..., Any]) -> list[GpuProcess]:
    found = []
    for item in ask("nvmlDeviceGetComputeRunningProcesses") or ():
        name = _text(_ask(nvml, nvml.nvmlSystemGetProcessName, item.pid)) if \
            hasattr(nvml, "nvmlSystemGetProcessName") else ""
        used = item.usedGpuMemory
        found.append(GpuProcess(pid=int(item.pid), name=os.path.basename(name),  # noqa: PTH119
                                memory=int(used) if used else None, user=_owner(int(item.pid))))
    return found


def _owner(pid: int) -> str:
    try:
        import psutil

        return psutil.Process(pid).username()
    except Exception:  # gone, or in another pid namespace
        return ""


def _peers(facts: HostFacts, nvml: Any, handles: list[tuple[int, Any]]) -> None:
    """Whether each GPU may read each other's memory (NVML_P2P_CAPS_INDEX_READ)."""
    function = getattr(nvml, "nvmlDeviceGetP2PStatus", None)
    if function is None:
        return
    for row, first in handles:
        for column, second in handles:
            if row < column:
                status = _ask(nvml, function, first, second, 0)
                if isinstance(status, int):
                    facts.p2p[f"{row},{column}"] = _P2P.get(status, "unknown")


def gpu_folders(root: Path = Path("/")) -> list[Path]:
    """The sysfs folders of NVIDIA GPUs (display or 3D controllers), which the kernel knows without any driver."""
    try:
        devices = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return []
    return [d for d in devices if _read(d / "vendor") == "0x10de" and _read(d / "class")[:4] == "0x03"]


def on_bus(root: Path = Path("/")) -> int | None:
    """How many NVIDIA GPUs are on the PCI bus; None where there is none to look at."""
    return len(gpu_folders(root)) if (root / "sys/bus/pci/devices").is_dir() else None


def kernel_module(root: Path = Path("/")) -> str:
    """Version of the loaded NVIDIA kernel module."""
    for line in _read(root / "proc/driver/nvidia/version").splitlines():
        for word in line.split():
            if line.startswith("NVRM") and word.count(".") in (1, 2) and word.replace(".", "").isdigit():
                return word
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def _by_name(nvml: Any, handle: Any, name: str, *arguments: Any) -> Any:
    """The answer of the function `name`, which this library may not have."""
    function = getattr(nvml, name, None)
    return None if function is None else _ask(nvml, function, handle, *arguments)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _flag(value: Any) -> bool | None:
    return bool(value) if isinstance(value, int) else None


def _watts(value: Any) -> float | None:
    return value / 1000 if isinstance(value, int) else None
