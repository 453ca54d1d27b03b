"""The facts of all hosts of a job, gathered over torch.distributed's Gloo back end, and the clocks compared.

One rank per host speaks for it; the ranks of a host are listed in its facts. The only module here that needs torch.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from diag.errors import MissingExtra, UsageError
from diag.probes.host_facts import Clock, HostFacts, decode, encode

#: A host that is not there by then is named as missing by the store's own error.
TIMEOUT = timedelta(seconds=60)
#: Exchanges of time stamps with each host; the quickest one bounds the error.
ROUNDS = 8


def all_hosts(facts: HostFacts, job: tuple[int, int], *, now: Callable[[], float] = time.time) -> list[HostFacts]:
    """On rank 0 the facts of every host, in rank order; an empty list on all other ranks.

    Raises `UsageError` when the ranks do not find each other, `MissingExtra` without torch.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the store's own words of each second try; one line says it
    try:
        import torch.distributed as dist
    except ImportError:
        raise MissingExtra("pdtrain diag env` under a launcher; `--save` and PATHs do without", "train", "torch") \
            from None
    rank, world = job
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"rank {rank}: the {world} ranks of the job did not find each other within "
                         f"{TIMEOUT.total_seconds():.0f} s: {str(error).splitlines()[0]}") from None
    try:
        identity = [None] * world
        dist.all_gather_object(identity, _identity(facts.host))
        members: dict[Any, list[int]] = {}
        for other, key in enumerate(identity):
            members.setdefault(key, []).append(other)
        leaders = [ranks[0] for ranks in members.values()]
        facts.ranks = members[identity[rank]]
        facts.local_ranks = len(facts.ranks)
        offset = _clocks(dist, rank, leaders, now)
        if offset is not None:
            synchronised = facts.clock.synchronised if facts.clock else None
            facts.clock = Clock(offset=offset[0], error=offset[1], synchronised=synchronised)
        gathered: list[bytes | None] = [None] * world
        dist.all_gather_object(gathered, encode(facts) if rank in leaders else None)
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return []
    return [decode(data) for data in gathered if data is not None]


def _identity(host: str) -> tuple[str, str, str]:
    """What two ranks of one host share: its name, the boot, and the network name space (hosts made of name spaces)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        boot = ""
    try:
        space = str(Path("/proc/self/ns/net").readlink()) + str(Path("/proc/self/ns/uts").readlink())
    except OSError:
        space = ""
    return host or socket.gethostname(), boot, space


def _clocks(dist: Any, rank: int, leaders: list[int], now: Callable[[], float]) -> tuple[float, float] | None:
    """(offset, error) of this host's clock against rank 0's, by the quickest of some exchanges; None on other ranks.

    As NTP: rank 0 notes when it asked and when the answer came; the other's time lies between.
    """
    import torch

    stamp = torch.zeros(2, dtype=torch.float64)
    mine: tuple[float, float] | None = (0.0, 0.0) if rank == 0 else None
    for other in leaders:
        if other == 0 or rank not in (0, other):
            continue
        best: tuple[float, float] | None = None
        for _ in range(ROUNDS):
            if rank == 0:
                asked = now()
                dist.send(stamp, other)
                dist.recv(stamp, other)
                answered = now()
                measured = (float(stamp[0]) - (asked + answered) / 2, (answered - asked) / 2)
                best = measured if best is None or measured[1] < best[1] else best
            else:
                dist.recv(stamp, 0)
                stamp[0] = now()
                dist.send(stamp, 0)
        if rank == 0 and best is not None:
            dist.send(torch.tensor(best, dtype=torch.float64), other)
        else:
            dist.recv(stamp, 0)
            mine = (float(stamp[0]), float(stamp[1]))
    return mine
