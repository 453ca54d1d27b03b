"""Whether a launcher started this process as a rank of a job, by the variables that torchrun and its like set."""

from __future__ import annotations

import os

from diag.errors import UsageError


def job() -> tuple[int, int] | None:
    """(rank, world size) when a launcher started this process, or None.

    Raises:
        UsageError: half a job, or one that cannot be: its ranks would wait for a minute for nobody.
    """
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and world.isdecimal()):
        return None
    if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        raise UsageError("RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not; start it with torchrun, "
                         "or unset RANK")
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UsageError(f"MASTER_PORT={port[:40]} is no port; start it with torchrun, or unset RANK")
    if int(rank) >= int(world):
        raise UsageError(f"RANK={rank} and WORLD_SIZE={world}: ranks count from 0; start it with torchrun, or unset "
                         "RANK")
    return int(rank), int(world)
