"""What is said of a host, by its facts: a sound one is silent, each fault is named, its near-miss is not."""

from __future__ import annotations

from typing import Any

import pytest

from diag.probes.host_facts import (
    Cgroup,
    Clock,
    GpuProcess,
    IbPort,
    KernelLine,
    Mount,
    Nic,
    Port,
    Resolution,
    Storage,
)
from tests.diag.probes.hosts import GIB, alarms, gpu, host, said


def test_a_sound_host_is_silent() -> None:
    assert alarms(host()) == []
    assert alarms(host(gpus=[], gpus_on_bus=0, ib=[], notes={"gpus": "NVML: not found"})) == []


def _gpus(index: int = 3, **changes: Any) -> dict[str, Any]:
    return {"gpus": [gpu(i, **(changes if i == index else {})) for i in range(8)]}


def _port(**changes: Any) -> dict[str, Any]:
    ports = host().ib
    for key, value in changes.items():
        setattr(ports[2], key, value)
    return {"ib": ports}


MIB = 1 << 20
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    (_gpus(ecc_volatile_uncorrected=2), "gpu_ecc", "error"),
    (_gpus(remap_failure=True), "gpu_ecc", "error"),
    (_gpus(remap_pending=True), "gpu_ecc", "warning"),
    (_gpus(throttle=["hw_slowdown", "hw_thermal_slowdown"], temperature=91), "gpu_throttled", "warning"),
    (_gpus(throttle=["hw_slowdown", "hw_power_brake"]), "gpu_throttled", "warning"),
    (_gpus(pcie_width=8), "pcie_degraded", "warning"),
    (_gpus(pcie_generation=1, utilisation=98), "pcie_degraded", "warning"),
    (_gpus(nvlinks_active=17, nvlinks_inactive=1), "nvlink_error", "warning"),
    (_gpus(error="GPU is lost"), "gpu_fell_off_bus", "error"),
    (_gpus(recovery_action="Reset"), "gpu_hw_fault", "error"),
    (_gpus(fabric_state="In Progress"), "fabric_manager", "warning"),
    (_gpus(name="NVIDIA A100-SXM4-80GB"), "hosts_differ", "warning"),
    (_gpus(processes=[GpuProcess(pid=77, name="python3", memory=9 * GIB, user="alice")]), "cuda_oom_shared_gpu",
     "warning"),
    ({"p2p": {"0,1": "OK", "0,2": "chipset not supported"}}, "p2p_acs_iommu", "warning"),
    ({"gpus": [], "gpus_on_bus": 8, "notes": {"gpus": "NVML: driver not loaded"}}, "driver_mismatch", "error"),
    ({"kernel_module": "550.54.15"}, "driver_mismatch", "error"),
    ({"torch_cuda": "13.0"}, "driver_mismatch", "error"),
    ({"torch_cuda": None}, "driver_mismatch", "error"),
    ({"torch_cuda": "11.7"}, "no_kernel_image", "error"),
    ({"pins": {"torch: nvidia-nccl-cu12": "2.26.2"}}, "nccl_version_mismatch", "warning"),
    ({"pins": {"torch: triton": "3.3.0"}}, "library_mismatch", "warning"),
    ({"variables": {"LD_LIBRARY_PATH": "/opt/nccl/lib"}, "nccl_libraries": {"/opt/nccl/lib/libnccl.so.2": "2.18.3"}},
     "nccl_version_mismatch", "warning"),
    (_port(state="Down", physical_state="Polling"), "ib_link_error", "warning"),
    (_port(rate=200.0), "ib_link_error", "warning"),
    (_port(counters={"symbol_error": 90_000}), "ib_link_error", "warning"),
    ({"ib": [IbPort(device="mlx5_0", state="Down")]}, "ib_link_error", "error"),
    ({"shm_total": 64 * MIB, "shm_free": 64 * MIB}, "shm_too_small", "warning"),
    ({"shm_free": 10 * MIB}, "shm_too_small", "warning"),
    ({"limits": {"nofile": (256, 4096)}}, "too_many_open_files", "warning"),
    ({"limits": {"memlock": (65536, 65536)}}, "host_limits", "warning"),
    ({"cgroup": Cgroup(version=2, memory_limit=16 * GIB, memory_used=0)}, "memory_limit_low", "warning"),
    ({"cgroup": Cgroup(version=2, memory_limit=100 * GIB, memory_used=99 * GIB + 600 * MIB, memory_cache=0)},
     "memory_limit_low", "warning"),
    ({"cgroup": Cgroup(version=2, oom_kills=1)}, "host_oom", "warning"),
    ({"cgroup": Cgroup(version=2, cpus=4.0)}, "host_limits", "warning"),
    ({"mounts": [Mount(path="/ckpt", why="checkpoints", total=10**13, free=10 * MIB)]}, "disk_full", "error"),
    ({"mounts": [Mount(path="/tmp", why="temporary files", total=10**11, free=MIB)]}, "disk_full", "warning"),
    ({"mounts": [Mount(path="/ckpt", why="checkpoints", hung=True)]}, "stale_file_handle", "error"),
    ({"mounts": [Mount(path="/ckpt", why="checkpoints", total=10**13, free=10**12, read_only=True)]},
     "storage_unusable", "error"),
    ({"storage": Storage(path="/ckpt", hung=True, stage="fsync", seconds=5.0)}, "stale_file_handle", "error"),
    ({"storage": Storage(path="/ckpt", bytes=32 * MIB, write_rate=3e6, fsync_seconds=0.1)}, "slow_storage", "warning"),
    ({"clock": Clock(offset=-40.0, error=0.001)}, "clock_skew", "warning"),
    ({"names": [Resolution(name="n1", why="this host's own name", problem="Name or service not known")]},
     "hostname_resolution", "warning"),
    ({"names": [Resolution(name="n1", why="this host's own name", addresses=["127.0.1.1"])]}, "hostname_resolution",
     "warning"),
    ({"port": Port(address="this host", port=29400, state="in use", problem="Address already in use")}, "port_in_use",
     "error"),
    ({"port": Port(address="10.0.0.9", port=29500, state="unreachable", problem="timed out")}, "rendezvous_timeout",
     "error"),
    ({"variables": {"NCCL_SOCKET_IFNAME": "ens5"}}, "wrong_nic", "error"),
    ({"variables": {"GLOO_SOCKET_IFNAME": "^lo"}}, "wrong_nic", "error"),
    ({"variables": {"NCCL_IB_HCA": "=mlx5_9"}}, "wrong_nic", "error"),
    ({"kernel_log": [KernelLine(text="NVRM: Xid (PCI:0000:1a:00): 79, pid=1, GPU has fallen off the bus.")]},
     "gpu_fell_off_bus", "error"),
    ({"kernel_log": [KernelLine(text="NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this "
                                     "system has\nNVRM: fallen off the bus and is not responding to commands.")]},
     "gpu_fell_off_bus", "error"),
    ({"kernel_log": [KernelLine(text="NVRM: GPU 0000:81:00.0: RmInitAdapter failed! (0x25:0x40:1470)")]},
     "gpu_hw_fault", "error"),
]


@pytest.mark.parametrize("changes, cause, severity", FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_fault_is_named(changes: dict[str, Any], cause: str, severity: str) -> None:
    assert set(alarms(host(**changes))) == {(cause, severity)}


NEAR = [
    _gpus(ecc_aggregate_uncorrected=3), _gpus(throttle=["sw_power_cap"], utilisation=100),
    _gpus(pcie_generation=1), _gpus(processes=[GpuProcess(pid=5, name="Xorg", memory=100 * MIB)]),
    _gpus(power_limit=500.0, power_default=700.0), {"gpus_on_bus": 16}, {"driver_cuda": "12.9"},
    {"torch_cuda": "12.8"},  # minor versions of one major are compatible
    {"nccl_libraries": {"/usr/lib/x86_64-linux-gnu/libnccl.so.2": "2.18.3"}},  # the system's, not in the way
    _port(counters={"symbol_error": 12}),
    {"shm_total": 2 * GIB, "shm_free": GIB}, {"limits": {"nofile": (1024, 524288)}},
    {"limits": {"memlock": (65536, 65536)}, "ib": []},
    {"cgroup": Cgroup(version=2, memory_limit=64 * GIB, memory_used=63 * GIB, memory_cache=60 * GIB)},
    {"mounts": [Mount(path="/ckpt", why="checkpoints", total=10**13, free=5 * GIB)]},
    {"clock": Clock(offset=2.0, error=1.0)}, {"clock": Clock(synchronised=False)},
    {"port": Port(address="this host", port=29500, state="in use", problem="Address in use", given=False)},
    {"port": Port(address="10.0.0.9", port=29500, state="refused")},
    {"names": [Resolution(name="n1", why="this host's own name", addresses=["127.0.1.1"])], "world_size": 8},
    {"variables": {"NCCL_SOCKET_IFNAME": "eth"}}, {"variables": {"NCCL_SOCKET_IFNAME": "^docker,lo"}},
    {"kernel_log": [KernelLine(text="NVRM: Xid (PCI:0000:1a:00): 43, pid=1, Ch 00000008")]},
    {"kernel_log": [KernelLine(text="Out of memory: Killed process 7 (python)")]},
]


@pytest.mark.parametrize("changes", NEAR, ids=range(len(NEAR)))
def test_its_near_miss_is_not(changes: dict[str, Any]) -> None:
    assert alarms(host(**changes)) == []


def test_the_guilty_gpu_is_named_by_bus_and_place() -> None:
    found = next(f for f in said(host(**_gpus(5, remap_failure=True))) if f.cause == "gpu_ecc")
    assert found.where.gpus == ["0000:1d:00.0"] and found.where.hosts == ["n1"] and "GPU 5" in found.summary
    assert found.numbers["gpu"] == 5 and found.evidence[0].path == "n1:NVML"


def test_a_gpu_alone_without_nvlink_is_no_fault() -> None:
    alone = gpu(0, name="NVIDIA Unknown 9000", nvlinks_active=2, nvlinks_inactive=2)
    assert alarms(host(gpus=[alone], gpus_on_bus=1)) == []  # unknown hardware: nothing is expected of it


def test_an_xid_names_its_action() -> None:
    lines = [KernelLine(text=f"NVRM: Xid (PCI:0000:1a:00): 48, pid={i}, DBE") for i in range(3)]
    found = next(f for f in said(host(kernel_log=lines)) if f.cause == "gpu_ecc")
    assert found.numbers["count"] == 3 and "3 times" in found.summary and "Drain the host" in found.fix[0]


def test_interface_down() -> None:
    nics = [Nic(name="eth0", state="down"), Nic(name="eth1", state="up", addresses=["10.0.0.1"])]
    found = said(host(nics=nics, variables={"NCCL_SOCKET_IFNAME": "eth0"}))
    assert any(f.cause == "wrong_nic" and "eth0 is down" in f.summary for f in found)


def test_a_fault_of_all_gpus_is_one_finding() -> None:
    braked = host(gpus=[gpu(i, throttle=["hw_slowdown", "hw_power_brake"]) for i in range(8)])
    (found,) = [f for f in said(braked) if f.cause == "gpu_throttled"]
    assert found.summary.startswith("8 of 8 GPUs alike") and len(found.where.gpus) == 8
