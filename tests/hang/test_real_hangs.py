"""Hangs that really happen here: Gloo processes that stop, and the dumps torch writes of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from diag.diagnose import diagnose
from diag.schema import Finding

pytest.importorskip("torch")

#: Ranks dump when none of them has issued a call for so long, unless they failed before.
QUIET_SECONDS = 2.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed"])


def missing_rank(rank: int) -> None:
    """Rank 2 does something else, for ever."""
    import torch
    import torch.distributed as dist

    for step in range(6):
        if rank == 2 and step == 4:
            time.sleep(300)
        dist.all_reduce(torch.ones(8))


def missing_in_subgroup(rank: int) -> None:
    """Rank 1 is missing in its pair; the others come to a collective of all and wait there for rank 0."""
    import torch
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(4):
        if rank == 1 and step == 3:
            time.sleep(300)
        dist.all_reduce(torch.ones(8), group=pairs[rank // 2])
        dist.barrier()


def wrong_operation(rank: int) -> None:
    """Rank 0 broadcasts where the others reduce."""
    import torch
    import torch.distributed as dist

    for step in range(6):
        if rank == 0 and step == 3:
            dist.broadcast(torch.ones(8), src=0)
        dist.all_reduce(torch.ones(8))


def wrong_size(rank: int) -> None:
    """Rank 3 passes a tensor that is one element too long. Gloo aborts a rank that receives it: no dump of that one."""
    import torch
    import torch.distributed as dist

    for step in range(6):
        dist.all_reduce(torch.ones(8 + (rank == 3 and step == 4)))


def wrong_dtype(rank: int) -> None:
    """Rank 1 passes doubles."""
    import torch
    import torch.distributed as dist

    for step in range(6):
        dist.all_reduce(torch.ones(8, dtype=torch.float64 if rank == 1 and step == 2 else torch.float32))


def other_order(rank: int) -> None:
    """Rank 3 enters the two groups the other way round."""
    import torch
    import torch.distributed as dist

    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for step in range(5):
        groups = [half, dist.group.WORLD]
        for group in reversed(groups) if rank == 3 and step == 4 else groups:
            dist.all_reduce(torch.ones(8), group=group)


def leaves_early(rank: int) -> None:
    """Rank 1 has one batch less."""
    import torch
    import torch.distributed as dist

    for _ in range(5 - (rank == 1)):
        dist.all_reduce(torch.ones(8))


def killed(rank: int) -> None:
    """Rank 2 is gone, without a dump."""
    import torch
    import torch.distributed as dist

    for step in range(6):
        if rank == 2 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(8))


def stopped(rank: int) -> None:
    """Rank 0 is stopped, and cannot dump."""
    import torch
    import torch.distributed as dist

    for step in range(6):
        if rank == 0 and step == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(8))


def healthy(rank: int) -> None:
    """Everybody comes to the end."""
    import torch
    import torch.distributed as dist

    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for _ in range(5):
        dist.all_reduce(torch.ones(8), group=half)
        dist.all_gather([torch.ones(2) for _ in range(4)], torch.ones(2))
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(torch.ones(3), 1 - rank)
    dist.barrier()


def _rank(job: Callable[[int], None], rank: int, world: int, folder: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    os.environ["TORCH_FR_CPP_STACK"] = "0"
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    torch.set_num_threads(1)
    done = threading.Lock()

    def dump() -> None:
        with done:
            Path(folder, f"fr_rank_{rank}").write_bytes(_dump_fr_trace())
            os._exit(0)

    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    threading.Thread(target=_when_quiet, args=(rank, world, Path(folder), dump), daemon=True).start()
    try:
        job(rank)
        time.sleep(300)
    except RuntimeError:  # a peer is gone, or the sizes differ
        dump()


def _when_quiet(rank: int, world: int, folder: Path, dump: Callable[[], None]) -> None:
    """Call `dump` when no rank's count of calls, kept in a file each, has changed for a while."""
    from torch._C._distributed_c10d import _dump_fr_trace

    last, since = b"", time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        (folder / f"count_{rank}").write_bytes(b"%d" % len(_dump_fr_trace()))
        counts = [(folder / f"count_{other}") for other in range(world)]
        now = b" ".join(path.read_bytes() if path.exists() else b"none" for path in counts)
        if now != last or b"none" in now:
            last, since = now, time.monotonic()
        time.sleep(0.1)
    dump()


def hang(job: Callable[[int], None], folder: Path, world: int = 4) -> list[Finding]:
    """Run `job` on `world` ranks until it hangs, and what the dumps say; worst first."""
    children = [_CONTEXT.Process(target=_rank, args=(job, rank, world, str(folder)), daemon=True)
                for rank in range(world)]
    for child in children:
        child.start()
    deadline = time.monotonic() + 180
    try:
        while time.monotonic() < deadline and any(child.is_alive() for child in children):
            left = [child for child in children if child.is_alive()]
            if len(left) < world and all(_is_stopped(child.pid) for child in left):
                break
            time.sleep(0.05)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    report = diagnose(sorted(folder.glob("fr_rank_*")), only="hang")
    found = [f for f in report.findings if f.role != "victim"]
    expected = {"healthy": {"healthy"}, "killed": {"failed", "unknown"}}.get(job.__name__, {"failed"})
    assert report.verdict in expected, report.headline
    return found


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:  # it ended meanwhile
        return False


def slow(*values: object) -> object:
    """A case for `make acceptance`, and now and then for `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "job, cause, guilty",
    [
        (missing_rank, "collective_missing_rank", [2]),
        slow(missing_in_subgroup, "collective_missing_rank", [1]),
        slow(wrong_operation, "collective_mismatch", [0]),
        (wrong_size, "collective_mismatch", [3]),
        slow(wrong_dtype, "collective_mismatch", [1]),
        (other_order, "group_order_deadlock", [3]),
        slow(leaves_early, "collective_missing_rank", [1]),
        slow(killed, "rank_dump_missing", [2]),
        slow(stopped, "rank_dump_missing", [0]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_gloo_hang(job: Callable[[int], None], cause: str, guilty: list[int], tmp_path: Path) -> None:
    found = hang(job, tmp_path)
    if [f.cause for f in found] == ["hang_undetermined"] and job is killed:
        guilty = []  # all calls of the survivors had failed by the time of the dump, which Gloo shows as completion
        cause = "hang_undetermined"
    assert [(f.cause, f.where.ranks) for f in found] == [(cause, guilty)]
    if job not in (killed, stopped):  # a dump exists: the line of the program that made the guilty call, or the last
        assert found[0].where.file == __file__


def test_a_healthy_gloo_run_raises_nothing(tmp_path: Path) -> None:
    assert hang(healthy, tmp_path) == []
