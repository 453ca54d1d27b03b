"""`pdtrain diag env` as its users run it: this machine with planted faults, saved outputs, hosts of a job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diag.probes.host_facts import encode
from diag.schema import SEVERITY_ORDER
from tests.diag.helpers import pdtrain
from tests.diag.probes.hosts import host

RUN = [sys.executable, "-c", "import sys; from pdtrain.cli import main; main(sys.argv[1:])", "diag", "env", "--json"]
#: What names a job or would be judged; the tests of this machine begin without.
CLEAN = {name: value for name, value in os.environ.items()
         if not name.startswith(("NCCL_", "TORCH_", "GLOO_", "PYTORCH_", "CUDA_", "MASTER_"))
         and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}


def run(*command: str, **environ: str) -> dict[str, object]:
    """The report of `command`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=CLEAN | environ)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def alarms(report: dict[str, object]) -> set[str]:
    findings = report["findings"]
    assert isinstance(findings, list)
    return {f["cause"] for f in findings if SEVERITY_ORDER[f["severity"]] >= 1}


def shell(script: str, *arguments: str) -> list[str]:
    """`script` in a mount name space of its own, then the command with `arguments` in it."""
    return ["unshare", "-m", "--propagation", "private", "sh", "-ec", f'{script}\nexec "$@"', "sh", *RUN, *arguments]


@pytest.fixture(scope="module")
def before() -> set[str]:
    """What this machine is already blamed for: planted faults must come on top."""
    return alarms(run(*RUN))


def test_a_variable_is_blamed_and_nothing_else(before: set[str]) -> None:
    report = run(*RUN, NCCL_SOCKET_IFNAM="eth0")
    assert alarms(report) - before == {"env_variable"}
    if not before:
        root = report["findings"][0]
        assert report["verdict"] == "degraded" and root["role"] == "root"
        assert root["playbook"] == "environment-variables" and "NCCL_SOCKET_IFNAME" in root["fix"][0]


def test_few_open_files(before: set[str]) -> None:
    assert alarms(run("sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *RUN)) - before == {"too_many_open_files"}


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert "storage_unusable" in alarms(run(*RUN, "--path", str(tmp_path / "absent")))


@pytest.mark.root
def test_tiny_shared_memory(before: set[str]) -> None:
    report = run(*shell("mount -t tmpfs -o size=64m none /dev/shm"))
    assert alarms(report) - before == {"shm_too_small"}
    assert next(f for f in report["findings"] if f["cause"] == "shm_too_small")["numbers"]["total_bytes"] == 64 << 20


@pytest.mark.root
def test_a_full_file_system(before: set[str], tmp_path: Path) -> None:
    fill = f"mount -t tmpfs -o size=16m none {tmp_path}\nhead -c 17m /dev/zero > {tmp_path}/full 2>/dev/null || true"
    report = run(*shell(fill, "--path", str(tmp_path)))
    assert alarms(report) - before == {"disk_full"} and report["verdict"] == "failed"


@pytest.mark.root
def test_a_memory_limit_of_the_control_group(before: set[str]) -> None:
    places = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
    for base, limit in places:
        group = base / f"pdtrain-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / limit).write_text(str(1 << 30))
            except OSError:
                continue
            join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
            report = run("sh", "-ec", join, "sh", *RUN)
            assert alarms(report) - before == {"memory_limit_low"}
            assert report["findings"] and any(f["numbers"].get("limit_bytes") == 1 << 30 for f in report["findings"])
            return
        finally:
            group.rmdir()
    pytest.skip("no memory control group can be made here")


def test_saved_hosts_are_compared(tmp_path: Path) -> None:
    for i in range(3):
        changes = {"shm_total": 512 << 30, "shm_free": 512 << 30} if i == 1 else {}
        (tmp_path / f"host{i}.json").write_bytes(encode(host(f"n{i}", **changes)))
    done = pdtrain("diag", "env", str(tmp_path / "host*.json"), "--json")
    report = done.json()
    assert done.status == 1 and alarms(report) == {"hosts_differ"} and report["verdict"] == "degraded"
    assert report["findings"][0]["where"]["hosts"] == ["n1"]
    text = pdtrain("diag", "env", str(tmp_path / "host*.json")).out
    assert "512 GiB ←" in text
    alone = pdtrain("diag", "env", str(tmp_path / "host0.json"))
    assert alone.status == 0 and "Nothing wrong was found" in alone.out


def test_facts_are_saved_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    target = tmp_path / "facts.json"
    assert pdtrain("diag", "env", "--save", target, "--json").status in (0, 1)
    again = pdtrain("diag", "env", target, "--json")
    assert again.json()["inputs"][0]["format"] == "host-facts"
    refused = pdtrain("diag", "env", "--save", target)
    assert refused.status == 2 and "exists" in refused.err


def test_states_of_a_machine_stand_beside_what_a_run_says(tmp_path: Path) -> None:
    (tmp_path / "host.json").write_bytes(encode(host("n1", limits={"nofile": (256, 256)})))
    log = tmp_path / "rank_0.log"
    log.write_text("[rank0]: Traceback (most recent call last):\n[rank0]:   File \"train.py\", line 3, in <module>\n"
                   "[rank0]:     step()\n[rank0]: ZeroDivisionError: division by zero\n")
    report = pdtrain("diag", "postmortem", tmp_path, "--json").json()
    assert report["findings"][0]["cause"] not in ("too_many_open_files", "hosts_differ")
    assert "too_many_open_files" in alarms(report)


def test_texts_of_no_known_kind_are_not_called_healthy(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a shopping list\nmilk\n")
    assert pdtrain("diag", "env", tmp_path / "notes.txt", "--json").json()["verdict"] == "unknown"
    log = tmp_path / "dmesg.txt"
    log.write_text("[    1.000000] Linux version 5.15\n[    2.000000] usb 1-1: new device\n")
    assert pdtrain("diag", "env", log, "--json").json()["verdict"] == "healthy"
    log.write_text("[   10.123456] NVRM: Xid (PCI:0000:1a:00): 79, pid=1, name=python, GPU has fallen off the bus.\n")
    found = pdtrain("diag", "env", log, "--json").json()["findings"][0]
    assert found["cause"] == "gpu_fell_off_bus" and found["fix"][0].startswith("Xid 79: Drain the host")


KERNEL = {
    "fell off, in three lines": ("""\
[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0
               NVRM: (PCI ID: 10de:26b5) installed in this system has
               NVRM: fallen off the bus and is not responding to commands.
""", "failed", "gpu_fell_off_bus", "GPU 0000:b3:00.0 has fallen off"),
    "panic, and a port that never had a cable": ("""\
<6>[    2.962781] mlx5_core 0000:41:00.1: Port module event: module 1, Cable unplugged
<0>[ 3098.275469] Kernel panic - not syncing: Fatal exception in interrupt
""", "failed", "node_failure", "kernel panicked (Fatal exception in interrupt)"),
    "oops": ("""\
<1>[  201.654822] BUG: unable to handle kernel NULL pointer dereference at           (null)
<4>[  201.670809] Oops: 0002 [#1] SMP
""", "failed", "node_failure", "kernel crashed"),
    "consequences only": ("""\
kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=python3, Ch 00000001 caused by previous Xid 149
kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=python3, Ch 00000002 caused by previous Xid 149
""", "failed", "nvlink_error", "GPU 0000:dc:00 because of an NVLink fault (Xid 149)"),
    "corrected memory errors": ("""\
May  7 06:45:12 n7 kernel: [21584690.529862] mce: [Hardware Error]: Machine check events logged
May  7 06:45:12 n7 kernel: [21584690.529877] EDAC MC0: 4 CE error on CPU#0Channel#2_DIMM#0 (channel:2 slot:0 page:0x0)
""", "healthy", "", ""),
    "a switch's start": ("""\
[   38.174242] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.195.03  Sat Sep 20 00:47:16 UTC 2025
[   38.175561] nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Data {0x0000002b, 0x0000002b, 0x00000000}
[   38.178720] nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ interrupt
""", "healthy", "", ""),
    "corrected PCIe errors, times relative": ("""\
[  +0.000316] pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0
[  +0.000004] pcieport 0000:00:03.0:    [12] Timeout
""", "healthy", "", ""),
}


@pytest.mark.parametrize("text, verdict, cause, words", KERNEL.values(), ids=KERNEL)
def test_kernel_logs(text: str, verdict: str, cause: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "dmesg.txt").write_text(text)
    report = pdtrain("diag", "env", tmp_path / "dmesg.txt", "--json").json()
    alarms = [f for f in report["findings"] if f["severity"] != "info"]
    assert report["verdict"] == verdict and (not cause or alarms[0]["cause"] == cause) and words in report["headline"]
    assert bool(alarms) == bool(cause) and not any("time" in f["where"] for f in alarms), "no line says when"


@pytest.mark.parametrize("arguments, words", [
    (("absent.json",), "no such file"), (("--nproc", "0"), "0"), ((__file__, "--path", "/tmp"), "live machine")])
def test_wrong_usage(arguments: tuple[str, ...], words: str) -> None:
    done = pdtrain("diag", "env", *arguments)
    assert done.status == 2 and words in done.err and "Traceback" not in done.err


_RANK = """
import sys, time
from diag.probes import host_job
late, name = float(sys.argv[1]), sys.argv[2]
host_job.all_hosts.__kwdefaults__["now"] = lambda: time.time() + late
import socket
socket.gethostname = lambda: name
from pdtrain.cli import main
main(["diag", "env", "--json"])
"""


@pytest.mark.slow
def test_hosts_of_a_job_are_gathered_and_the_skewed_one_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    ranks = []
    for rank, (late, name) in enumerate(((0.0, "localhost"), (-40.0, "vm-late"), (0.0, "localhost"))):
        environ = CLEAN | {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(number),
                           "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "3"}
        ranks.append(subprocess.Popen([sys.executable, "-c", _RANK, str(late), name], env=environ, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks][1:] == [0, 0] and outputs[1][0] == outputs[2][0] == "", outputs
    report = json.loads(outputs[0][0])
    assert [item["ranks"] for item in report["inputs"]] == [[0, 2], [1]]
    skew = next(f for f in report["findings"] if f["cause"] == "clock_skew")
    assert skew["where"]["hosts"] == ["vm-late"] and abs(skew["numbers"]["offset_seconds"] + 40) < 1
