"""A probe's ranks as processes of a test: forked from a server that has torch, the store held by the test itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from diag.commands.output import Output
from diag.probes.comm.ask import Ask
from diag.probes.comm.rank import Shown, run_rank

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "diag.probes.comm.report"])
#: What every test asks for unless it says otherwise: small and quick, on a machine that others use too.
SMALL: dict[str, Any] = {"max_bytes": 16 << 10, "budget": 2.0, "iterations": 3, "timeout": 8.0, "extras": False}


class Job:
    """`world` ranks of a probe. `answer()` is the JSON that one of them printed and the exit statuses of all."""

    def __init__(self, world: int, folder: Path, **ask: Any) -> None:
        import torch.distributed as dist

        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                   timeout=timedelta(seconds=30))
        self.begun = time.monotonic()
        self.ranks: list[BaseProcess] = []
        for rank in range(world):
            process = _CONTEXT.Process(target=_rank, daemon=True, args=(
                rank, world, self.store.port, Ask(**(SMALL | ask)), str(folder)))
            process.start()
            self.ranks.append(process)

    def reached(self, label: str, rank: int = 0, patience: float = 60.0) -> None:
        """Wait until `rank` says that it does something whose name holds `label`."""
        key = f"pdtrain-comm/beat/{rank}"
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if self.store.check([key]) and label in self.store.get(key).decode():
                return
            time.sleep(0.05)
        raise AssertionError(f"rank {rank} never came to {label}")

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid or 0, number)

    def answer(self, patience: float = 60.0, but: tuple[int, ...] = ()) -> tuple[dict[str, Any], list[int | None]]:
        """Waits for all ranks except `but`, then ends those; AssertionError when another is still there."""
        end = time.monotonic() + patience
        try:
            for rank, process in enumerate(self.ranks):
                if rank not in but:
                    process.join(max(0.0, end - time.monotonic()))
            late = [rank for rank, process in enumerate(self.ranks) if rank not in but and process.is_alive()]
        finally:
            for process in self.ranks:
                process.kill()
                process.join()
        said = sorted(self.folder.glob("answer.*"))
        assert not late, f"ranks {late} are still there"
        assert len(said) == 1, f"printed by {[path.name for path in said]}"
        return msgspec.json.decode(said[0].read_bytes()), [process.exitcode for process in self.ranks]


def _rank(rank: int, world: int, port: int, ask: Ask, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    status = run_rank(ask, Shown(Output(json=True, file=f"{folder}/answer.{rank}", force=True),
                                 save=f"{folder}/probe.json"))
    sys.stdout.flush()
    os._exit(status or 0)


def roots(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The findings that lead."""
    return [finding for finding in report["findings"] if finding["role"] == "root"]


def wait_for(condition: Callable[[], bool], patience: float) -> bool:
    """Whether `condition` came true in time."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
