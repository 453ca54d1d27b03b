"""How facts are gathered: NVML from recorded answers, sysfs and control groups from trees, storage that hangs."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from diag.probes import host_gpu, host_network, host_pci, host_software, host_storage, host_system
from diag.probes.host_facts import HostFacts, decode, encode
from diag.probes.host_gather import gather
from tests.diag.probes.hosts import GIB, NVMLError, Recorded, alarms, host, said


def gpus(recorded: Recorded) -> HostFacts:
    facts = HostFacts(host="n1", variables={})
    host_gpu.gather(facts, recorded)
    facts.gpus_on_bus, facts.kernel_module = None, ""
    return facts


def test_a_recorded_card_is_described_whole_and_is_silent() -> None:
    recorded = Recorded(count=2)
    facts = gpus(recorded)
    first = facts.gpus[0]
    assert (facts.driver, facts.driver_cuda, len(facts.gpus)) == ("550.90.07", "12.4", 2)
    assert (first.name, first.bus_id, first.memory_total) == ("NVIDIA H100 80GB HBM3", "00000000:19:00.0", 85520809984)
    assert (first.nvlinks_active, first.nvlinks_inactive, first.throttle, first.power_limit) == (18, 0, ["idle"], 700.0)
    assert (first.ecc_enabled, first.remap_pending, first.retired_pending) == (True, False, None)  # last: not supported
    assert (first.fabric_state, first.recovery_action, facts.p2p) == ("Completed", "None", {"0,1": "OK"})
    assert recorded.closed and alarms(facts) == []


@pytest.mark.parametrize("answers, cause", [
    ({"nvmlDeviceGetCurrentClocksEventReasons": 0x8 | 0x40}, "gpu_throttled"),
    ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, "gpu_ecc"),
    ({"nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 3 if (kind, counter) == (1, 0) else 0}, "gpu_ecc"),
    ({"nvmlDeviceGetCurrPcieLinkWidth": 8}, "pcie_degraded"),
    ({"nvmlDeviceGetNvLinkState": lambda handle, link: int(link < 17)}, "nvlink_error"),
    ({"fabric": (2, 0)}, "fabric_manager"), ({"fabric": (3, 50)}, "fabric_manager"),
    ({"nvmlDeviceGetHandleByIndex": NVMLError("GPU is lost")}, "gpu_fell_off_bus"),
    ({"nvmlDeviceGetComputeMode": 2}, "gpu_hw_fault"),
    ({"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1 << 22, usedGpuMemory=40 * GIB)]},
     "cuda_oom_shared_gpu"),
    ({"nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=1))]}, "gpu_hw_fault")])
def test_what_the_card_answers_is_judged(answers: dict[str, object], cause: str) -> None:
    assert {slug for slug, _ in alarms(gpus(Recorded(**answers)))} == {cause}


def test_a_driver_that_answers_almost_nothing() -> None:
    names = [name for name in Recorded().usual if name not in ("nvmlDeviceGetCount", "nvmlDeviceGetName")]
    facts = gpus(Recorded(**{name: NVMLError("Not Supported") for name in names}, fabric=(0, 0)))
    assert len(facts.gpus) == 2 and facts.gpus[0].ecc_enabled is None and alarms(facts) == []


def test_a_library_that_lacks_the_newer_functions() -> None:
    recorded = Recorded()
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetP2PStatus",
                 "nvmlDeviceGetNvLinkState", "nvmlDeviceGetMigMode"):
        del recorded.usual[name]
    recorded.usual["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x8
    facts = gpus(recorded)
    assert facts.gpus[0].throttle == ["hw_slowdown"] and facts.gpus[0].remap_pending is None and not facts.p2p
    assert {slug for slug, _ in alarms(facts)} == {"gpu_throttled"}


def test_link_errors_of_long_ago_and_of_now() -> None:
    """CRC errors count from 100 per second; a replay while one looks always does."""
    calls = {"n": 0}

    def counter(handle: int, link: int, kind: int) -> int:
        calls["n"] += 1
        return 7 + (calls["n"] if handle == 1 and kind == rising[0] else 0) if link == 0 else 0

    rising = [9]
    for rising[0], cause in ((9, set()), (0, {"nvlink_error"})):
        facts = gpus(Recorded(nvmlDeviceGetNvLinkErrorCounter=counter))
        assert {slug for slug, _ in alarms(facts)} == cause
        assert facts.gpus[0].nvlink_errors["replay"] == 7 and not facts.gpus[0].nvlink_error_rates
        assert bool(facts.gpus[1].nvlink_error_rates) == bool(cause)


def test_access_control_of_the_bridges_above_gpus(tmp_path: Path) -> None:
    def bridge(control: int) -> bytes:
        head, acs = (0x1 | 0x148 << 20).to_bytes(4, "little"), (0xD).to_bytes(4, "little")
        return bytes(256) + head + bytes(0x148 - 0x104) + acs + bytes(2) + control.to_bytes(2, "little") + bytes(64)

    root = tree(tmp_path, {f"sys/devices/pci0/0000:00:0{i}.0/{name}": text for i in (1, 2)
                           for name, text in (("class", "0x060400\n"), ("vendor", "0x8086\n"))})
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for i, control in ((1, 0x1D), (2, 0x01)):
        above = root / f"sys/devices/pci0/0000:00:0{i}.0"
        (above / "config").write_bytes(bridge(control))
        tree(above / f"0000:0{i}:00.0", {"class": "0x030200\n", "vendor": "0x10de\n"})
        (root / f"sys/bus/pci/devices/0000:0{i}:00.0").symlink_to(above / f"0000:0{i}:00.0")
    tree(root, {"proc/cpuinfo": "flags\t\t: fpu vme\n"})
    facts = host(gpus_on_bus=2)
    host_pci.gather(facts, root)
    assert facts.acs == {"0000:00:01.0": "ReqRedir CmpltRedir"} and facts.virtual is False
    assert alarms(facts) == [("p2p_acs_iommu", "warning")]
    assert alarms(host(acs=facts.acs, virtual=True)) == [], "in a virtual machine it has to be on"
    (root / "sys/devices/pci0/0000:00:01.0/config").write_bytes(bytes(64))
    hidden = host(gpus_on_bus=2)
    host_pci.gather(hidden, root)
    assert not hidden.acs and "root" in hidden.notes["acs"] and alarms(hidden) == []


def test_nccls_own_files_are_read_as_nccl_reads_them(tmp_path: Path) -> None:
    own = tmp_path / "mine.conf"
    own.write_text("# note\nNCCL_DEBUG=INFO\nNCCL_PROTO = Simple\nexport NCCL_ALGO=Ring\nNCCL_IB_HCAS=mlx5\n"
                   "no equals\nMY_TOKEN: s3cret\n")
    root = tree(tmp_path, {"etc/nccl.conf": "NCCL_DEBUG=TRACE\nNCCL_NET=Socket\nNCCL_IB_TIMEOUT=22\n"})
    environ = {"NCCL_CONF_FILE": str(own), "NCCL_NET": "IB"}
    facts = host()
    host_software.gather(facts, environ, root)
    assert facts.variables["NCCL_DEBUG"] == "INFO" and facts.variables["NCCL_NET"] == "IB"
    assert facts.variable_files == {"NCCL_DEBUG": str(own), "NCCL_IB_HCAS": str(own),
                                    "NCCL_IB_TIMEOUT": str(root / "etc/nccl.conf")}
    assert list(facts.overridden) == ["NCCL_NET"] and len(facts.conf_odd) == 3
    said_ = [f.summary for f in said(facts) if f.cause == "env_variable" and f.severity == "warning"]
    assert len(said_) == 4 and any("NCCL_IB_HCAS" in text and "did you mean NCCL_IB_HCA" in text and "mine.conf" in text
                                   for text in said_)
    gone = host()
    host_software.gather(gone, {"NCCL_CONF_FILE": str(tmp_path / "none")}, tmp_path / "nowhere")
    assert [f.severity for f in said(gone) if "does not exist" in f.summary] == ["warning"]


def test_no_driver_is_a_note() -> None:
    facts = gpus(Recorded(nvmlInit=NVMLError("Driver Not Loaded")))
    assert facts.gpus == [] and facts.notes["gpus"] == "NVML: Driver Not Loaded"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_adapters_and_interfaces_of_a_tree(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1/"
    root = tree(tmp_path, {
        port + "state": "1: DOWN\n", port + "phys_state": "2: Polling\n", port + "rate": "400 Gb/sec (4X NDR)\n",
        port + "link_layer": "InfiniBand\n", port + "counters/link_downed": "7\n",
        port + "hw_counters/out_of_sequence": "3\n", "sys/class/infiniband/mlx5_0/hca_type": "MT4129\n",
        "sys/class/net/eth0/operstate": "up\n", "sys/class/net/eth0/mtu": "9000\n", "sys/class/net/eth0/speed": "-1\n",
        "sys/class/net/eth0/statistics/rx_errors": "5\n", "sys/class/net/eth0/device/vendor": "0x15b3\n",
        "sys/class/net/bonding_masters": "\n"})
    (found,) = host_network.ib_ports(root)
    assert (found.state, found.physical_state, found.rate) == ("Down", "Polling", 400.0)
    assert found.counters == {"link_downed": 7, "out_of_sequence": 3} and found.adapter == "MT4129"
    (nic,) = host_network.interfaces(root, {"eth0": ["10.0.0.1"]})
    assert (nic.state, nic.mtu, nic.speed, nic.virtual, nic.counters) == ("up", 9000, None, False, {"rx_errors": 5})


def test_control_group_v2_takes_the_tightest_limit_above(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/pod/box\n", base + "cgroup.controllers": "cpu memory",
        base + "pod/memory.max": "1000\n", base + "pod/memory.current": "700\n",
        base + "pod/memory.stat": "anon 5\ninactive_file 300\n",
        base + "pod/box/memory.max": "max\n", base + "pod/box/memory.events": "oom 1\noom_kill 2\n",
        base + "pod/cpu.max": "200000 100000\n", base + "pod/box/cpu.max": "max 100000\n",
        base + "pod/box/pids.max": "512\n", base + "pod/box/pids.current": "9\n"})
    group = host_system.cgroup(root)
    assert group is not None and (group.version, group.memory_limit, group.memory_used, group.memory_cache) == \
        (2, 1000, 700, 300)
    assert (group.oom_kills, group.cpus, group.pids_limit, group.pids_used) == (2, 2.0, 512, 9)


def test_control_group_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n2:pids:/\n",
        base + "memory/box/memory.limit_in_bytes": "2147483648\n", base + "memory/box/memory.usage_in_bytes": "1000\n",
        base + "memory/memory.limit_in_bytes": "9223372036854771712\n",
        base + "memory/box/memory.oom_control": "oom_kill_disable 0\noom_kill 1\n", base + "pids/pids.max": "max\n",
        base + "cpu/box/cpu.cfs_quota_us": "150000\n", base + "cpu/box/cpu.cfs_period_us": "100000\n"})
    group = host_system.cgroup(root)
    assert group is not None and (group.version, group.memory_limit, group.oom_kills, group.cpus, group.pids_limit) == \
        (1, 2 * GIB, 1, 1.5, None)


def test_kernel_records_keep_what_matters_with_its_time() -> None:
    facts = HostFacts()
    ring = "6,1,100,-;usb 1-1: new device\n4,2,4838359381,-;NVRM: Xid (PCI:0000:1a:00): 48, DBE\n"
    host_system.kernel_log(facts, ring)
    assert [(line.text, line.time, line.line) for line in facts.kernel_log] == \
        [("NVRM: Xid (PCI:0000:1a:00): 48, DBE", "4838.359381", 2)]


_HANGS = """
import json, sys, time
task = json.loads(sys.argv[1])
for path in task.get("sizes", ()):
    print(json.dumps({"path": path, "stage": "statvfs"}), flush=True)
    if path == "/hangs":
        time.sleep(60)
    print(json.dumps({"path": path, "total": 100, "free": 50}), flush=True)
if "write" in task:
    print(json.dumps({"stage": "open"}), flush=True)
    print(json.dumps({"stage": "fsync", "bytes": 5}), flush=True)
    time.sleep(60)
"""


def test_a_mount_that_hangs_is_named_and_the_others_answer() -> None:
    found = host_storage.sizes([("/a", ""), ("/hangs", ""), ("/b", "")], limit=0.3, program=_HANGS)
    assert [(m.path, m.hung, m.free) for m in found] == [("/a", False, 50), ("/hangs", True, None), ("/b", False, 50)]


def test_a_write_that_hangs_is_given_up_and_the_call_named() -> None:
    begun = time.monotonic()
    probe = host_storage.write("/x", limit=0.3, program=_HANGS)
    assert (probe.hung, probe.stage) == (True, "fsync") and time.monotonic() - begun < 30


def test_a_real_write_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    probe = host_storage.write(str(tmp_path), amount=1 << 20)
    assert probe.write_rate is not None and probe.write_rate > 0 and not probe.problem and not probe.hung
    assert list(tmp_path.iterdir()) == []
    assert "o such file" in host_storage.write(str(tmp_path / "absent")).problem


def test_a_resolver_that_does_not_answer_is_given_up() -> None:
    found = host_network.resolve("n1", "own", limit=0.1, ask=lambda *_: time.sleep(30) or [])
    assert found.problem == "no answer within 0.1 s"


def test_secrets_stay_out_of_the_facts() -> None:
    kept = host_software.variables({"NCCL_DEBUG": "INFO", "TORCH_API_KEY": "x", "AWS_SECRET": "y", "PATH": "/bin"})
    assert kept == {"NCCL_DEBUG": "INFO"}


def test_this_machine_is_described_and_survives_its_file() -> None:
    facts = gather(environ={"NCCL_DEBUG": "INFO"}, nvml=Recorded(count=1))
    assert facts.gpus and facts.cpus and facts.memory_total and facts.limits["nofile"] and facts.nics
    assert decode(encode(facts)) == facts and decode(encode(host())) == host()


@pytest.mark.parametrize("data", [b"{}x", b'{"schema": "pdtrain.host/9"}', b'{"schema": 5}', b"[]"])
def test_what_is_no_facts_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)
