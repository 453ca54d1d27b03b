"""Saved outputs of nvidia-smi, ibstat, nccl-tests and NCCL RAS: read whole, cut, and told from a run's log."""

from __future__ import annotations

import json
import re

import pytest

from diag.artefacts import Artefact, Artefacts, Unreadable, ibstat, memory_source, nccl_tests, nvidia_smi, recognise
from diag.artefacts.ibstat import Ibstat
from diag.artefacts.log_facts import Log
from diag.artefacts.nccl_ras import NcclRas
from diag.artefacts.nccl_tests import NcclTests
from diag.artefacts.nvidia_smi import NvidiaSmi
from diag.detectors import NotChecked
from diag.detectors.env_outputs import env_ibstat, env_nccl_tests, env_nvidia_smi
from diag.detectors.env_ras import env_nccl_ras
from diag.schema import SEVERITY_ORDER, Finding

DETECTORS = {NvidiaSmi: env_nvidia_smi, Ibstat: env_ibstat, NcclTests: env_nccl_tests, NcclRas: env_nccl_ras}


def read(text: str, name: str = "out.txt") -> Artefact:
    source = memory_source(text.encode(), name)
    reader = recognise(source)
    assert reader is not None
    return reader.read(source)


def alarms(item: Artefact) -> list[Finding]:
    found = DETECTORS[type(item)](Artefacts([item]))
    return [f for f in found if not isinstance(f, NotChecked) and SEVERITY_ORDER[f.severity] >= 1]


def query(count: int = 2, attached: int | None = None, **changes: str) -> str:
    """`nvidia-smi -q` as driver 550 writes it, shortened; `changes` replace values of the last GPU."""
    head = f"\n==============NVSMI LOG==============\n\nTimestamp   : Tue Jul 14 08:12:38 2026\n" \
           f"Driver Version    : 550.90.07\nCUDA Version    : 12.4\n\nAttached GPUs      : {attached or count}\n"
    usual = {"gen": "5", "width": "16x", "brake": "Not Active", "slowdown": "Not Active", "volatile": "0",
             "aggregate": "0", "pending": "No", "failure": "No", "fabric": "Completed", "mode": "None"}
    blocks = []
    for i in range(count):
        v = usual | (changes if i == count - 1 else {})
        blocks.append(f"""GPU 00000000:{0x19 + i:02X}:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : Enabled
    Addressing Mode                       : {v['mode']}
    MIG Mode
        Current                           : Disabled
    GPU UUID                              : GPU-{i:032x}
    PCI
        Bus Id                            : 00000000:{0x19 + i:02X}:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 5
                Current                   : {v['gen']}
            Link Width
                Max                       : 16x
                Current                   : {v['width']}
        Replays Since Reset               : 67
    Clocks Event Reasons
        Idle                              : Active
        SW Power Cap                      : Not Active
        HW Slowdown                       : {v['slowdown']}
            HW Thermal Slowdown           : Not Active
            HW Power Brake Slowdown       : {v['brake']}
    FB Memory Usage
        Total                             : 81559 MiB
        Used                              : 0 MiB
    ECC Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 0
            DRAM Uncorrectable            : {v['volatile']}
        Aggregate
            DRAM Uncorrectable            : {v['aggregate']}
    Remapped Rows
        Uncorrectable Error               : 0
        Pending                           : {v['pending']}
        Remapping Failure Occurred        : {v['failure']}
    Clocks
        SM                                : 345 MHz
    Max Clocks
        SM                                : 1980 MHz
    Fabric
        State                             : {v['fabric']}
        Status                            : Success
    Processes                             : None
""")
    return head + "".join(blocks)


def test_a_sound_query_is_read_and_silent() -> None:
    item = read(query(8))
    assert isinstance(item, NvidiaSmi) and item.problem is None and alarms(item) == []
    assert (item.driver, item.cuda, len(item.gpus), item.gpus[7].bus_id) == ("550.90.07", "12.4", 8, "00000000:20:00.0")
    first = item.gpus[0]
    assert (first.memory_total, first.pcie_width, first.clock_sm_max, first.ecc_volatile_uncorrected) == \
        (81559 << 20, 16, 1980, 0)


@pytest.mark.parametrize("changes, cause", [
    ({"volatile": "3"}, "gpu_ecc"), ({"pending": "Yes"}, "gpu_ecc"), ({"failure": "Yes"}, "gpu_ecc"),
    ({"slowdown": "Active", "brake": "Active"}, "gpu_throttled"), ({"width": "8x"}, "pcie_degraded"),
    ({"fabric": "In Progress"}, "fabric_manager"), ({"gen": "Unknown Error"}, "gpu_hw_fault"),
    ({"mode": "GPU is lost"}, "gpu_fell_off_bus")])
def test_each_fault_of_a_query_stands_at_its_line(changes: dict[str, str], cause: str) -> None:
    text = query(3, **changes)
    (found,) = alarms(read(text))
    assert found.cause == cause and found.where.gpus == ["0000:1b:00.0"]
    line = found.evidence[0].line
    assert line is not None and text.splitlines()[line - 1].split(":")[-1].strip() in changes.values()


@pytest.mark.parametrize("changes", [{"aggregate": "4"}, {"gen": "1"}, {"mode": "Unknown Error"}])
def test_what_is_normal_for_an_idle_or_aged_card(changes: dict[str, str]) -> None:
    assert alarms(read(query(3, **changes))) == []


def test_a_cut_query_says_so_and_judges_what_is_there() -> None:
    item = read(query(1, attached=8, pending="Yes"))
    assert item.problem is not None and "8 GPUs are attached and describes 1" in item.problem
    assert [f.cause for f in alarms(item)] == ["gpu_ecc"]


TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.90.07              Driver Version: 550.90.07      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:19:00.0 Off |                    {ecc} |
| N/A   27C    P0             72W /  700W |       1MiB /  81559MiB |      0%      Default |
+-----------------------------------------+------------------------+----------------------+
"""


def test_the_default_table() -> None:
    item = read(TABLE.format(ecc=0))
    assert isinstance(item, NvidiaSmi) and item.gpus[0].memory_total == 81559 << 20 and alarms(item) == []
    assert [f.cause for f in alarms(read(TABLE.format(ecc=2)))] == ["gpu_ecc"]


def test_csv_with_units() -> None:
    item = read("index, name, driver_version, pci.bus_id, memory.total [MiB], pcie.link.width.current, "
                "pcie.link.width.max, clocks_event_reasons.hw_thermal_slowdown\n"
                "0, NVIDIA A100-SXM4-80GB, 535.1, 00000000:07:00.0, 81920 MiB, 16, 16, Not Active\n"
                "1, NVIDIA A100-SXM4-80GB, 535.1, 00000000:0B:00.0, 81920 MiB, 16, 16, Active\n", "gpus.csv")
    assert isinstance(item, NvidiaSmi) and item.gpus[1].memory_total == 81920 << 20
    assert [(f.cause, f.evidence[0].line) for f in alarms(item)] == [("gpu_throttled", 3)]


def topo(size: int, **odd: str) -> str:
    rows = ["\t\x1b[4m" + "\t".join(f"GPU{i}" for i in range(size)) + "\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    for i in range(size):
        cells = [" X " if i == j else odd.get(f"p{min(i, j)}{max(i, j)}", "NV18") for j in range(size)]
        rows.append(f"GPU{i}\t" + "\t".join(cells) + "\t0-51\t0")
    return "\n".join([*rows, "", "Legend:", "  X    = Self", "  NV#  = Connection of # NVLinks", ""])


def test_topology_with_escapes_and_an_odd_pair() -> None:
    item = read(topo(8))
    assert isinstance(item, NvidiaSmi) and item.topologies[0].gpus == 8 and alarms(item) == []
    (found,) = alarms(read(topo(8, **{f"p{i}7": "SYS" for i in range(7)})))
    assert found.cause == "nvlink_error" and "GPU 7" in found.summary and found.evidence[0].line == 2
    assert alarms(read(topo(2, p01="PHB"))) == []  # without NVLink anywhere, nothing is odd


def test_nvlink_errors_and_peer_access() -> None:
    def errors(replays: int) -> str:
        return "".join(f"GPU {k}: NVIDIA H100 80GB HBM3 (UUID: GPU-{k:08x})\n" + "".join(
            f"\t Link {i}: Replay Errors: {replays if (k, i) == (2, 3) else 0}\n\t Link {i}: Recovery Errors: 0\n"
            f"\t Link {i}: CRC Errors: 0\n\n" for i in range(18)) for k in range(4))

    sound = read(errors(0))
    assert isinstance(sound, NvidiaSmi) and alarms(sound) == []
    assert sound.gpus[0].nvlinks_active is None, "lines of errors are no links"
    (bad,) = alarms(read(errors(4210)))
    assert bad.cause == "nvlink_error" and "GPU 2" in bad.summary and "replay 4,210" in bad.summary
    assert bad.evidence[0].line is not None
    matrix = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tOK\n GPU2\tCNS\tOK\tX\n"
    (pair,) = alarms(read(matrix))
    assert pair.cause == "p2p_acs_iommu" and "0,2: chipset not supported" in pair.evidence[0].text
    assert alarms(read(matrix.replace("CNS", "OK"))) == [] == alarms(read(matrix.replace("OK", "CNS")))


def test_names_that_the_table_cuts_short_are_shown() -> None:
    item = read(TABLE.format(ecc=0).replace("NVIDIA H100 80GB HBM3", "NVIDIA A100-PCI...   "))
    (seen,) = (f for f in env_nvidia_smi(Artefacts([item])) if isinstance(f, Finding) and f.cause == "host_checked")
    assert "NVIDIA A100-PCI..." in seen.summary and isinstance(item, NvidiaSmi) and item.gpus[0].name == ""


def test_links_left_out_by_hand_are_not_down() -> None:
    whole = "".join(f"GPU {k}: NVIDIA GB200 (UUID: GPU-{k:08x})\n" + "".join(
        f"\t Link {i}: 53.125 GB/s\n" for i in range(18)) for k in range(2))
    assert alarms(read(whole)) == []
    kept = whole[:whole.rindex("\t Link 2:")]
    (down,) = alarms(read(kept))
    assert down.cause == "nvlink_error" and alarms(read(kept + "...\n")) == []


def test_peer_access_alone_says_what_was_read() -> None:
    item = read(" \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n")
    (seen,) = (f for f in env_nvidia_smi(Artefacts([item])) if isinstance(f, Finding) and f.cause == "host_checked")
    assert seen.summary.endswith("peer access of 1 pair of GPUs") and alarms(item) == []


def test_a_runs_log_that_begins_with_the_table_stays_a_log() -> None:
    text = TABLE.format(ecc=0) + "[2026-01-01 10:00:00] starting\nn1:12:34 [0] NCCL INFO Bootstrap : Using eth0\n"
    reader = recognise(memory_source(text.encode(), "job.out"))
    assert reader is not None and reader.NAME == "log"


def test_nvidia_smi_that_failed() -> None:
    item = read(query(1) + "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n")
    assert [f.cause for f in alarms(item)] == ["gpu_fell_off_bus"]


def port(device: str, state: str = "Active", physical: str = "LinkUp", rate: int = 400, adapter: str = "MT4129") -> str:
    return f"CA '{device}'\n\tCA type: {adapter}\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: {state}\n" \
           f"\t\tPhysical state: {physical}\n\t\tRate: {rate}\n\t\tLink layer: InfiniBand\n"


def test_ibstat() -> None:
    whole = "".join(port(f"mlx5_{i}") for i in range(4))
    item = read(whole)
    assert isinstance(item, Ibstat) and len(item.ports) == 4 and alarms(item) == []
    (down,) = alarms(read(whole + port("mlx5_4", "Down", "Polling", 40)))
    assert down.cause == "ib_link_error" and "mlx5_4" in down.summary and down.evidence[0].line == 4 * 8 + 5
    (slow,) = alarms(read(whole + port("mlx5_4", rate=200)))
    assert "200 Gb/s" in slow.summary
    assert alarms(read(whole + port("mlx5_4", "Down", "Disabled", 40, "MT4125"))) == []  # another kind, switched off
    card = "\tSystem image GUID: 0xab\n\tPort 1:"
    pair = [text.replace("\tPort 1:", card) for text in (port("mlx5_5"), port("mlx5_6", "Down", "Disabled", 40))]
    assert alarms(read(whole + "".join(pair))) == []  # the second port of a card, not cabled
    (waits,) = alarms(read(port("mlx5_0", "Initializing")))
    assert waits.severity == "error" and "subnet manager" in waits.summary
    (panic,) = alarms(read(whole + "ibpanic: [7] main: stat of IB device 'mlx5_8' failed: No such file or directory\n"))
    assert panic.cause == "ib_hca_failure"


def test_a_port_whose_state_is_cut_is_not_judged() -> None:
    down = port("mlx5_0", "Down", "Disabled", 40, "MT4125")
    whole = down + port("mlx5_1")
    item = read(whole[:whole.rindex("Active") + 4])
    assert isinstance(item, Ibstat) and len(item.ports) == 1 and item.problem is not None and "mlx5_1" in item.problem
    assert alarms(item) == [], "other ports may be active"
    assert isinstance(read(whole.rstrip()), Ibstat) and read(whole.rstrip()).problem is None


def test_ibstatus() -> None:
    item = read("Infiniband device 'mlx5_0' port 1 status:\n\tdefault gid:\t fe80::1\n\tstate:\t\t 4: ACTIVE\n"
                "\tphys state:\t 5: LinkUp\n\trate:\t\t 200 Gb/sec (4X HDR)\n\tlink_layer:\t InfiniBand\n")
    assert isinstance(item, Ibstat)
    assert [(p.state, p.physical_state, p.rate) for p in item.ports] == [("Active", "LinkUp", 200.0)]


def table(bus: float, wrong: int = 0, model: str = "NVIDIA H100 80GB HBM3", ranks: int = 8) -> str:
    devices = "".join(f"#  Rank {i:2} Group  0 Pid   {70 + i} on   gpu-7 device  {i} [0x1{i}] {model}\n"
                      for i in range(ranks))
    alg = bus * ranks / (2 * max(ranks - 1, 1))
    row = f"  17179869184    4294967296     float     sum      -1    65000   {alg:.2f}   {bus:.2f}      {wrong}    " \
          f"65010   {alg:.2f}   {bus:.2f}      0\n"
    return f"# nThread 1 nGpus {ranks} minBytes 17179869184 maxBytes 17179869184\n# Using devices\n{devices}#\n" \
           "#       size         count      type   redop    root     time   algbw   busbw #wrong\n" \
           f"{row}# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}\n# Avg bus bandwidth    : {bus}\n"


def test_nccl_tests_table() -> None:
    item = read(table(480.0))
    assert isinstance(item, NcclTests) and alarms(item) == []
    (run,) = item.runs
    assert run.operation == "all_reduce" and len(run.rows) == 2
    (low,) = alarms(read(table(210.0)))
    assert low.cause == "bandwidth_low" and low.numbers["floor"] == 460.0 and low.evidence[0].line == 13
    (bad,) = alarms(read(table(480.0, wrong=5)))
    assert bad.cause == "collective_wrong_result" and bad.severity == "error"


@pytest.mark.parametrize("above", [1, 1500], ids=["within the head", "below the head"])
def test_a_table_that_the_scheduler_cut_short_is_a_log(above: int) -> None:
    """Such a file once passed for a healthy measurement: the words that ended it stand below the table."""
    row = "  17179869184    4294967296     float     sum      -1    65000   264.31   462.54      0\n"
    item = read(f"{table(480.0)}{row * above}"
                "slurmstepd: error: *** JOB 4711 ON gpu-7 CANCELLED AT 2026-02-11T02:26:09 DUE TO TIME LIMIT ***\n")
    assert isinstance(item, Log) and any(event.rule == "slurm-time-limit" for event in item.events)


def test_hardware_without_a_floor_is_not_judged() -> None:
    said = list(env_nccl_tests(Artefacts([read(table(3.0, model="Some Card 9000"))])))
    assert any(isinstance(item, NotChecked) and "floor unknown" in item.reason for item in said)
    assert alarms(read(table(3.0, ranks=4))) == []


def test_a_test_on_one_gpu_has_measured_nothing() -> None:
    text = table(0.0, ranks=1)
    (note,) = (item for item in env_nccl_tests(Artefacts([read(text)])) if isinstance(item, NotChecked))
    assert "ran on one GPU" in note.reason and "MPI=1" in note.reason
    twice = text.replace("# Using devices\n", "# Using devices\n#  Rank  0 Group  0 Pid 9 on n2 device  0 [0x07] X\n")
    (note,) = (item for item in env_nccl_tests(Artefacts([read(twice)])) if isinstance(item, NotChecked))
    assert "2 times as rank 0" in note.reason


OLD = """Running: LD_PRELOAD=/opt/nccl/lib/libnccl.so.2 ./build/all_gather_perf -b 4G -e 4G -g 4
# nThread 1 nGpus 4 minBytes 4294967296 maxBytes 4294967296 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid  8185 on      n1 device  0 [0x0c] Tesla V100-SXM2-32GB
#
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
  4294967296     134217728   float    29122  129.05  129.05  1e+00    29169  128.84  128.84  1e+00
# Out of bounds values : 2 FAILED
# Avg bus bandwidth    : 128.942
Running: LD_PRELOAD=/opt/nccl/lib/libnccl.so.2 ./build/all_reduce_perf -b 32M -e 32M -g 4
# nThread 1 nGpus 4 minBytes 33554432 maxBytes 33554432 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#   Rank  0 Pid  8186 on      n1 device  0 [0x0c] Tesla V100-SXM2-32GB
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
n1:195:195 [0] NCCL INFO Launch mode Parallel
    33554432       8388608   float     sum    19902    1.69    2.53  2e-07    19898    1.69    2.53  2e-07
# Out of bounds values : 0 OK
Running: ./build/broadcast_perf
# nThread 1 nGpus 4 minBytes 8 maxBytes 8
#       size         count    type    root     time   algbw   busbw  error     time   algbw   busbw  error
[1,0]<stdout>:           8             2   float       0    59.75    0.00    0.00    N/A    59.96    0.00    0.00  N/A
"""


def test_tables_of_old_versions_and_several_in_one_file() -> None:
    item = read(OLD)
    assert isinstance(item, NcclTests)
    assert [(run.operation, len(run.rows), len(run.devices)) for run in item.runs] == \
        [("all_gather", 2, 1), ("all_reduce", 2, 1), ("broadcast", 2, 0)]
    assert [row.bus for row in item.runs[1].rows] == [2.53, 2.53] and item.runs[1].rows[0].wrong is None
    (bad,) = alarms(item)
    assert bad.cause == "collective_wrong_result" and "all_gather" in bad.summary, "of three runs the one that failed"


def test_nccl_tests_json() -> None:
    half = {"alg_bw": 100.0, "bus_bw": 175.0, "nwrong": 0}
    document = {"version": 3, "args": ["./all_reduce_perf", "-b", "16G"], "results": [
        {"size": 1 << 34, "count": 1 << 32, "type": "float", "out_of_place": half, "in_place": half | {"nwrong": 9}}],
        "devices": [{"rank": i, "hostname": "n1", "device_info": "NVIDIA H100 80GB HBM3"} for i in range(8)],
        "out_of_bounds": {"count": 9, "okay": False}, "average_bus_bandwidth": {"bandwidth": 175.0, "okay": True}}
    causes = {f.cause for f in alarms(read(json.dumps(document), "r.json"))}
    assert causes == {"collective_wrong_result", "bandwidth_low"}
    broken = read(json.dumps(document | {"results": [{"size": "x", "in_place": half}]}), "r.json")
    assert isinstance(broken, Unreadable)


def ras(**status: object) -> dict[str, object]:
    member = {"host": "n1", "pid": 70, "cuda_dev": 0, "nvml_dev": 0}
    ranks = [member | {"rank": i, "status": {"init_state": 0, "async_error": 0}, "collective_counts": {"AllReduce": 9}}
             for i in range(3)]
    gone = [member | {"rank": 3, "host": "n2", "status": status}] if status else []
    return {"nccl_version": "2.28.7", "timestamp": "now", "communicators_count": 1, "communicators": [
        {"hash": "0xab", "size": 4 if gone else 3, "ranks_count": 3, "ranks": ranks, "missing_ranks": gone}]}


def test_ras_reports() -> None:
    item = read(json.dumps(ras()), "ras.json")
    assert isinstance(item, NcclRas) and alarms(item) == []
    (dead,) = alarms(read(json.dumps(ras(unresponsive=True, considered_dead=True)), "ras.json"))
    assert (dead.cause, dead.severity, dead.where.ranks, dead.where.hosts) == \
        ("collective_missing_rank", "error", [3], ["n2"])
    (quiet,) = alarms(read(json.dumps(ras(unresponsive=True)), "ras.json"))
    assert quiet.severity == "warning" and quiet.confidence < 0.7


def test_the_invalid_json_of_a_ras_report_with_missing_ranks() -> None:
    """NCCL 2.28.9 writes no comma between nvml_dev and status of a missing rank."""
    document = ras(unresponsive=True)
    (gone,) = document["communicators"][0]["missing_ranks"]  # type: ignore[index]
    order = ("rank", "host", "pid", "cuda_dev", "nvml_dev", "status")
    document["communicators"][0]["missing_ranks"] = [{key: gone[key] for key in order}]  # type: ignore[index]
    text = json.dumps(document, indent=2)
    damaged = re.sub(r'("nvml_dev": 0),(\s*"status": \{\s*"unresponsive")', r"\1\2", text)
    assert damaged != text
    with pytest.raises(ValueError):
        json.loads(damaged)
    (quiet,) = alarms(read(damaged, "ras.json"))
    assert quiet.where.hosts == ["n2"]


@pytest.mark.parametrize("text, name", [(query(4, volatile="1"), "q.txt"), (topo(4), "t.txt"), (table(3.0), "n.txt"),
                                        (port("mlx5_0"), "ib.txt"), (json.dumps(ras(unresponsive=True)), "r.json")])
def test_any_cut_is_a_value(text: str, name: str) -> None:
    for end in range(1, len(text), max(len(text) // 60, 1)):
        source = memory_source(text[:end].encode(), name)
        reader = recognise(source)
        if reader is not None and reader.NAME != "log":
            item = reader.read(source)
            if type(item) in DETECTORS:
                alarms(item)


@pytest.mark.parametrize("value", ["²", "٣" * 3, "9" * 5000, "-1", "1e999"])
def test_numbers_that_are_none(value: str) -> None:
    for text in (query(2, volatile=value, gen=value), TABLE.format(ecc=value), port("mlx5_0", rate=value),  # type: ignore[arg-type]
                 table(3.0).replace("17179869184 ", f"{value} "), query(1, attached=value)):  # type: ignore[arg-type]
        source = memory_source(text.encode(), "x.txt")
        reader = recognise(source)
        assert reader is not None
        item = reader.read(source)
        if type(item) in DETECTORS:
            alarms(item)


@pytest.mark.parametrize("line", [" " * 50_000, "a" + " " * 50_000 + "!", "a " * 25_000, "1 " * 25_000,
                                  "a : " * 12_000],
                         ids=["spaces", "gap", "words", "numbers", "keys"])
@pytest.mark.parametrize("head", ["busbw algbw\n", "==NVSMI LOG==\nGPU 00000000:19:00.0\n", "CA 'x'\n\tCA type: y\n"],
                         ids=["nccl-tests", "nvidia-smi", "ibstat"])
def test_a_line_of_any_length_ends(head: str, line: str) -> None:
    """Each of these once took minutes: patterns whose parts may take each other's spaces."""
    source = memory_source(f"{head}{line}\n".encode(), "x.txt")
    for reader in (nccl_tests, nvidia_smi, ibstat):
        reader.sniff(source.head, source.name)
        assert isinstance(reader.read(source), Artefact | Unreadable)
