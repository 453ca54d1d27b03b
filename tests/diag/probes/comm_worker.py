"""`pdtrain diag comm` as one process per network namespace, forked from one that has imported torch.

python -m tests.diag.probes.comm_worker FOLDER MASTER_ADDRESS NAMESPACE... -- OPTION...
What rank N prints is in FOLDER/out.N and FOLDER/err.N; the exit statuses are printed when all have ended.
"""

from __future__ import annotations

import json
import os
import sys

from tests.netns.link_worker import PORT, enter


def rank_of(rank: int, world: int, folder: str, master: str, options: list[str]) -> None:
    """Become a rank in this process's namespace. Does not return."""
    from pdtrain.cli import main

    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                   "MASTER_ADDR": master, "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0"}
    status = 70
    try:
        main(["diag", "comm", *options])
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run() -> None:
    """Fork, wait for every child, print their statuses."""
    folder, master, *rest = sys.argv[1:]
    names, options = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    import torch.distributed  # noqa: F401 - once for all

    import diag.probes.comm.report  # noqa: F401

    children = []
    for rank, name in enumerate(names):
        child = os.fork()
        if child == 0:
            enter(name)
            rank_of(rank, len(names), folder, master, options)
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


if __name__ == "__main__":
    run()
