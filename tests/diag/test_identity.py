"""Which rank, host and GPU a line speaks of, put together from everything that a run left."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.diagnose import diagnose
from diag.identity import expand_tasks, normal_bus
from diag.schema import Finding

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
XID = ("Aug 12 08:13:55 node-9 kernel: NVRM: Xid (PCI:0000:89:00): 79, pid=70411, name=python, GPU has fallen off the "
       "bus.\n")
STEPS = "".join(f"step {n} | loss {3 - n / 100:.4f}\n" for n in range(10, 20))


def init(host: str, pid: int, rank: int, bus: str, world: int = 16) -> str:
    return (f"{host}:{pid}:{pid + 90} [{rank % 8}] NCCL INFO ncclCommInitRank comm 0x55d rank {rank} nranks {world} "
            f"cudaDev {rank % 8} nvmlDev {rank % 8} busId {bus} commId 0xabc - Init COMPLETE\n")


def root(folder: Path, **files: str) -> Finding:
    """The root finding of a folder with these files; "__" in a name stands for a dot, "___" for a slash."""
    for name, text in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    report = diagnose([folder])
    assert report.findings and report.findings[0].role == "root", report.headline
    return report.findings[0]


@pytest.mark.parametrize("line, ranks", [
    (f"[rank3]: {OOM}", [3]), (f"5: {OOM}", [5]), (f"[Rank 2] {OOM}", [2]), (OOM, [])])
def test_the_rank_stands_in_the_prefix(tmp_path: Path, line: str, ranks: list[int]) -> None:
    tasks = "".join(f"{n % 8}: step {n // 8 + 10} | loss {3 - n / 100:.4f}\n" for n in range(80))  # srun --label
    assert root(tmp_path, job__log=(tasks if line[0] == "5" else STEPS) + line + "\n").where.ranks == ranks


def test_the_rank_stands_in_the_name_of_the_file(tmp_path: Path) -> None:
    found = root(tmp_path, rank_0__log=STEPS, rank_6__log=STEPS + OOM + "\n", rank_7__log=STEPS)
    assert found.where.ranks == [6]


def test_torchrun_trees_and_tee_prefixes_give_local_ranks(tmp_path: Path) -> None:
    world = "[rank 0] joined a world_size=4 run\n"
    tree = root(tmp_path, console__log=world, logs___attempt_0___2___stderr__log=OOM + "\n",
                logs___attempt_0___0___stdout__log=world + STEPS)
    assert tree.where.ranks == [2]


def test_a_local_rank_of_several_hosts_is_no_global_rank(tmp_path: Path) -> None:
    two = init("node-1", 400, 0, "1b000") + init("node-2", 500, 8, "1b000")
    found = root(tmp_path, job__log=two + STEPS + f"[default2]:{OOM}\n")
    assert found.where.ranks == []


def test_a_block_of_torchrun_joins_process_host_and_rank(tmp_path: Path) -> None:
    text = STEPS + (
        "E0914 09:21:12.101000 14 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) "
        "local_rank: 2 (pid: 4711) of binary: /usr/bin/python\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2024-09-14_09:21:12\n  host      : node-2\n"
        "  rank      : 10 (local_rank: 2)\n  exitcode  : -9 (pid: 4711)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 4711\n")
    kernel = "[81230.1] Out of memory: Killed process 4711 (python) total-vm:99999999kB, anon-rss:88888888kB\n"
    found = root(tmp_path, job__log=text, dmesg__txt=kernel)
    assert (found.cause, found.where.ranks, found.where.hosts) == ("host_oom", [10], ["node-2"])


def test_a_gpu_of_the_kernel_log_is_joined_to_its_rank_by_bus_id(tmp_path: Path) -> None:
    comms = init("node-9", 70411, 11, "89000") + init("node-9", 70412, 12, "8a000") + init("node-8", 70411, 3, "89000")
    found = root(tmp_path, job__log=comms + STEPS, dmesg__log=XID)
    assert (found.cause, found.where.ranks, found.where.hosts) == ("gpu_fell_off_bus", [11], ["node-9"])


def test_without_a_table_a_gpu_has_no_rank(tmp_path: Path) -> None:
    found = root(tmp_path, job__log=STEPS, dmesg__log=XID)
    assert (found.where.ranks, found.where.hosts) == ([], ["node-9"])


def test_ranks_of_a_subgroup_are_not_taken_for_global_ones(tmp_path: Path) -> None:
    """NCCL numbers ranks within each communicator; only the largest one is the world."""
    comms = init("node-9", 70411, 11, "89000") + init("node-9", 70411, 1, "89000", world=2)
    assert root(tmp_path, job__log=comms + STEPS, dmesg__log=XID).where.ranks == [11]


@pytest.mark.parametrize("bus, normal", [
    ("0000:06:00.0", "6000"), ("06:00.0", "6000"), ("6000", "6000"), ("0000:89:00", "89000"), ("0x89000", "89000"),
    ("0008:01:00", "801000")])
def test_bus_ids_in_any_notation(bus: str, normal: str) -> None:
    assert normal_bus(bus) == normal


@pytest.mark.parametrize("text, tasks", [("3", [3]), ("3,8-10", [3, 8, 9, 10]), ("", []), ("x,2", [2])])
def test_task_lists(text: str, tasks: list[int]) -> None:
    assert expand_tasks(text) == tasks


def test_an_absurd_task_range_is_cut() -> None:
    assert len(expand_tasks("0-9999999")) < 100_000
