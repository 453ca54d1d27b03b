"""Recorded hosts for tests: a sound GPU host as facts, and a stand-in for NVML that replays a card's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from diag.detectors import NotChecked
from diag.probes.host_facts import Cgroup, Clock, Gpu, HostFacts, IbPort, Mount, Nic, Resolution
from diag.probes.host_judge import judge
from diag.probes.host_words import Place
from diag.schema import SEVERITY_ORDER, Finding

GIB = 1 << 30


def gpu(index: int, **changes: Any) -> Gpu:
    """An H100 of an idle, sound HGX host."""
    facts: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3", "bus_id": f"00000000:{0x18 + index:02X}:00.0", "uuid": f"GPU-{index:032x}",
        "memory_total": 81559 << 20, "memory_used": 1 << 20, "mig": False, "persistence": True, "utilisation": 0,
        "compute_mode": "Default", "clock_sm": 345, "clock_sm_max": 1980, "throttle": ["idle"], "ecc_enabled": True,
        "ecc_volatile_uncorrected": 0, "ecc_aggregate_uncorrected": 0, "remap_pending": False, "remap_failure": False,
        "pcie_generation": 5, "pcie_generation_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_replays": 67,
        "nvlinks_active": 18, "nvlinks_inactive": 0, "fabric_state": "Completed", "fabric_status": "Success",
        "recovery_action": "None"}
    return Gpu(index=index, **(facts | changes))


def host(name: str = "n1", **changes: Any) -> HostFacts:
    """Eight sound GPUs, eight active ports, roomy limits: nothing to say at warning."""
    ports = [IbPort(device=f"mlx5_{i}", state="Active", physical_state="LinkUp", rate=400.0, link_layer="InfiniBand",
                    adapter="MT4129", counters={"symbol_error": 0, "link_downed": 1}) for i in range(8)]
    facts: dict[str, Any] = {
        "gpus": [gpu(i) for i in range(8)], "gpus_on_bus": 8, "driver": "550.90.07", "driver_cuda": "12.4",
        "kernel_module": "550.90.07", "kernel": "5.15.0", "cpus": 192, "cpus_usable": 192, "memory_total": 2048 * GIB,
        "packages": {"torch": "2.6.0", "numpy": "2.1.0", "triton": "3.2.0", "nvidia-nccl-cu12": "2.21.5"},
        "pins": {"torch: triton": "3.2.0", "torch: nvidia-nccl-cu12": "2.21.5"}, "torch_cuda": "12.4",
        "shm_total": 1024 * GIB, "shm_free": 1023 * GIB,
        "limits": {"nofile": (1048576, 1048576), "nproc": (-1, -1), "memlock": (-1, -1), "as": (-1, -1)},
        "cgroup": Cgroup(version=2, memory_used=10 * GIB, oom_kills=0),
        "mounts": [Mount(path="/ckpt", why="checkpoints", kind="lustre", device="mgs:/fs", total=10**15, free=10**14,
                         inodes=10**9, inodes_free=10**8)],
        "nics": [Nic(name="eth0", state="up", mtu=9000, addresses=["10.0.0.1"]), Nic(name="lo", state="unknown",
                 addresses=["127.0.0.1"], virtual=True)],
        "ib": ports, "names": [Resolution(name=name, why="this host's own name", addresses=["10.0.0.1"], seconds=0.01)],
        "clock": Clock(offset=0.0004, error=0.0001), "variables": {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"},
        "local_ranks": 8, "world_size": 64}
    return HostFacts(host=name, **(facts | changes))


def said(facts: HostFacts, **place: Any) -> list[Finding]:
    """Findings about `facts` alone."""
    return [item for item in judge(Place(facts, **place)) if not isinstance(item, NotChecked)]


def alarms(facts: HostFacts, **place: Any) -> list[tuple[str, str]]:
    """(cause, severity) of what is at warning or above."""
    return [(f.cause, f.severity) for f in said(facts, **place) if SEVERITY_ORDER[f.severity] >= 1]


class NVMLError(Exception):
    """As pynvml's."""


class Recorded:
    """NVML as one H100 host (driver 550) answers it; `answers` replaces single calls, an exception is raised."""

    NVMLError = NVMLError
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

    def __init__(self, count: int = 2, **answers: Any) -> None:
        pci = [SimpleNamespace(busId=f"00000000:{0x19 + 0x22 * i:02X}:00.0".encode()) for i in range(count)]
        self.count, self.answers = count, answers
        self.closed = False
        self.usual: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "550.90.07", "nvmlSystemGetCudaDriverVersion": 12040,
            "nvmlDeviceGetCount": count, "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetPciInfo": lambda handle: pci[handle],
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle:032x}",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=85520809984, used=1048576, free=85519761408),
            "nvmlDeviceGetMigMode": [0, 0], "nvmlDeviceGetPersistenceMode": 1, "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetPerformanceState": 0, "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0),
            "nvmlDeviceGetTemperature": 27, "nvmlDeviceGetPowerUsage": 69850, "nvmlDeviceGetEnforcedPowerLimit": 700000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700000, "nvmlDeviceGetClockInfo": 345,
            "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
            "nvmlDeviceGetEccMode": [1, 1], "nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetRetiredPagesPendingStatus": NVMLError("Not Supported"),
            "nvmlDeviceGetCurrPcieLinkGeneration": 5, "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16, "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetPcieReplayCounter": 67, "nvmlDeviceGetNvLinkState": 1, "nvmlDeviceGetNvLinkErrorCounter": 0,
            "nvmlDeviceGetComputeRunningProcesses": [], "nvmlSystemGetProcessName": b"/usr/bin/python3",
            "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))],
            "nvmlDeviceGetP2PStatus": 0}

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        self._answer(self.answers.get("nvmlInit"), ())

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.closed = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        answer = self.answers.get("nvmlDeviceGetHandleByIndex")
        return self._answer(answer, (index,)) if answer is not None else index

    def c_nvmlGpuFabricInfo_t(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(state=0, status=0)

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, info: SimpleNamespace) -> None:  # noqa: N802
        info.state, info.status = self.answers.get("fabric", (3, 0))

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("usual", {}):
            raise AttributeError(name)
        return lambda *arguments: self._answer(self.answers.get(name, self.usual[name]), arguments)

    @staticmethod
    def _answer(answer: Any, arguments: tuple[Any, ...]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer(*arguments) if callable(answer) else answer
