"""One process per namespace, which measure links again and again as the driver says. Run by `tests.netns.links`.

python -m tests.netns.link_worker TIMEOUT MASTER_ADDRESS NAMESPACE...
Lines of JSON on stdin ({"mode": "quick", "passes": 1}), one outcome per line on stdout. torch is imported once; the
children fork and enter their namespaces (setns), where they also get the namespace's name as host name.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from datetime import timedelta

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
PORT = 29555


def enter(namespace: str) -> None:
    """Move this single-threaded process into a network namespace, under its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as handle:  # noqa: PTH123
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    if libc.unshare(CLONE_NEWUTS) or libc.sethostname(namespace.encode(), len(namespace)):
        raise OSError(ctypes.get_errno(), f"sethostname {namespace}")
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def work(rank: int, timeout: float, master: str, names: list[str]) -> None:
    """One host: rank 0 conducts what the driver asks for, the others serve."""
    import msgspec
    import torch.distributed as dist

    from diag.errors import UsageError
    from diag.probes.comm_pairs import Conductor, PairGroups, serve
    from diag.probes.localise import Place, localise

    store = dist.TCPStore(master, PORT, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=30))
    pairs = PairGroups(dist.PrefixStore("links", store), rank, "gloo", timeout)
    if rank:
        number = 0
        while True:
            try:
                number = serve(dist.PrefixStore("links", store), pairs, timeout, first=number)
            except UsageError as error:
                print(error, file=sys.stderr, flush=True)
                return
    conductor = Conductor(dist.PrefixStore("links", store), pairs, len(names), timeout)
    places = [Place(index, name) for index, name in enumerate(names)]
    for line in sys.stdin:
        asked = json.loads(line)
        conductor.restart()
        before = os.times()
        outcome = localise(conductor.measure, places, mode=asked.get("mode", "quick"), passes=asked.get("passes", 1),
                           progress=lambda words: print(json.dumps({"progress": words}), flush=True))
        conductor.end()
        print(json.dumps({"outcome": msgspec.to_builtins(outcome), "seconds": os.times().elapsed - before.elapsed}),
              flush=True)


def main() -> None:
    """Fork one child per namespace; when the first ends, end them all."""
    timeout, master, names = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    import torch

    import diag.probes.comm_pairs  # noqa: F401

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    children = []
    for rank, name in enumerate(names):
        child = os.fork()
        if child == 0:
            try:
                enter(name)
                work(rank, timeout, master, names)
            finally:
                os._exit(0)
        children.append(child)
    print(json.dumps({"pids": children}), flush=True)
    try:
        os.waitpid(children[0], 0)
    finally:
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


if __name__ == "__main__":
    main()
