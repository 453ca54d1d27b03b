"""Whose line was it? Ranks for lines that carry no mark, found by elimination or from their neighbours."""

from __future__ import annotations

import re

from diag.logs.view import Item, Place, View

#: Evidence that other ranks wait for, or complain about, a peer.
WAITING = ("watchdog-timeout", "watchdog-down", "gloo-timeout", "gloo-peer-gone", "nccl-remote-gone", "still-waiting",
           "store-broken", "unique-id-timeout", "desync-report", "monitored-barrier", "monitored-barrier-peer",
           "agent-lost-store", "hccl-wait", "hccl-peer-absent")
#: What to do about a rank that is guilty by its silence: nobody knows yet whether it stood still or ran elsewhere.
SILENT_FIX = (
    "Look at that rank first: is its process alive (ps -o pid,stat,wchan; T is stopped, D waits for a disk or a "
    "driver), and where is it (py-spy dump --pid PID)?",
    "Dead or stuck: its own log, its host's kernel log (dmesg -T: OOM, Xid) and the flight-recorder dumps "
    "(pdtrain diag hang DUMPS) say why.",
    "Alive in other code: a branch that only it takes; make the branch the same on all ranks, or decide it by an "
    "all-reduced flag.",
)
#: What to do about a process that ended and whose own words are not among the inputs.
UNSEEN_FIX = (
    "Read what that process printed itself: the launcher's folder (torchrun --log-dir, --redirects 3), the file that "
    "srun --output or the container wrote for it, or its host's journal; then run this command on that file too.",
    "Nothing there: the kernel's log of its host (dmesg -T: OOM, Xid, segfault) and the scheduler's record "
    "(sacct -j JOBID) of that time.",
    "So that the next one is not lost: one log file per rank, and main wrapped with torch.distributed.elastic's record "
    "decorator, so that the launcher prints the traceback.",
)
#: A line without a mark may continue what a marked line this little above it began.
NEIGHBOUR_LINES = 3


def neighbour(view: View, item: Item) -> Item | None:
    """The nearest line just above that names a rank which is not merely waiting."""
    waiting = {i.rank for i in view.of(*WAITING)}
    for other in reversed(view.items):
        if other.place.log == item.place.log and 0 < item.line - other.line <= NEIGHBOUR_LINES and \
                other.rank is not None and other.rank not in waiting and other.rule.role in ("fact", "initiating"):
            return other
    return None


def culprit_by_elimination(view: View, place: Place) -> set[int]:
    """The rank of an exception printed without a mark: the launcher's block, the pid's place among its siblings,
    the device that is behind, or the only rank that does not complain."""
    codes = {block.rank for index, block in view.blocks if block.code in (1, 2) and index == place.log}
    if len(codes) == 1:
        return codes
    failed = {(i.groups["local"], i.groups["code"]) for i in view.of("agent-failed") if i.groups["code"] == "1"}
    if len(failed) == 1:
        rank = view.identity.rank_from_local(int(failed.pop()[0]), None)
        if rank is not None:
            return {rank}
    task = first_task(view)
    if task is not None and len(view.of("srun-task")) > 1 and task.groups["tasks"].isdigit() and not view.blocks and \
            not view.of("agent-failed"):
        return {int(task.groups["tasks"])}  # srun starts the ranks itself, and this one ended first
    behind = device_behind(view)
    if behind is not None and view.identity.one_host():
        return {behind}
    waiting = {i.rank for i in view.of(*WAITING) if i.rank is not None}
    if view.world and len(waiting) == view.world - 1:
        return set(range(view.world)) - waiting
    return set()


def first_task(view: View) -> Item | None:
    """The line on the task that srun saw end by itself before any other; srun ends the others then."""
    items = view.of("srun-task")
    return items[0] if items and items[0].groups["what"].startswith("Exited with exit code") else None


def crashed_ranks(view: View) -> list[Item]:
    """What a launcher says of the ranks that ended by themselves; it ends the others, and may list them too."""
    items = view.of("rank-exit")
    crashed = [i for i in items if i.groups["how"] == "crashed"]
    return crashed or [i for i in items if i.groups["code"] not in ("0", "-15", "143")]


def stuck(view: View) -> set[int]:
    """Ranks whose processes did not react when the launcher ended the job: stopped, or stuck in a call.

    The launcher then kills them; their exit code -9 is its doing and not the out-of-memory killer's.
    """
    pids = {int(i.groups["pid"]) for i in view.of("forced-exit")}
    ranks = {block.rank for _, block in view.blocks if block.pid in pids}
    return ranks | {rank for (_, pid), rank in view.identity.rank_of_process.items() if pid in pids}


def killed_by_launcher(view: View) -> bool:
    """Whether every reported SIGKILL was the launcher's own."""
    pids = {int(i.groups["pid"]) for i in view.of("forced-exit")}
    killed = {block.pid for _, block in view.blocks if block.code in (-9, 137)}
    killed |= {int(i.groups["pid"]) for i in view.of("agent-failed") if i.groups["code"] in ("-9", "137")}
    first = crashed_ranks(view)[:1]
    if first and not killed and first[0].groups["code"] not in ("-9", "137") and not view.of("slurm-oom", "kernel-oom"):
        return True  # the one that left by itself comes first
    if first_task(view) is not None and not killed and not view.of("slurm-oom", "kernel-oom"):
        return True  # srun ends the other tasks of a step when one has failed
    return bool(pids) and killed <= pids


def device_behind(view: View) -> int | None:
    """The one CUDA device whose progress lines stop a step before all the others'."""
    last: dict[int, int] = {}
    for _, item in view.progress:
        found = re.search(r"cuda:(\d+)", item.text)
        if found:
            last[int(found[1])] = item.step
    if len(last) < 3:
        return None
    top = max(last.values())
    behind = [device for device, step in last.items() if step < top]
    return behind[0] if len(behind) == 1 else None
