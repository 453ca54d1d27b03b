"""This process's place in the job: device, rank, default process group, and an orderly end."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from diag.errors import UsageError
from pdtrain.restart import launcher_is_gone


@dataclass(frozen=True, slots=True)
class Place:
    """rank and world as torchrun gave them (0 of 1 without it), and this rank's device."""

    rank: int
    world: int
    device: torch.device

    @property
    def leader(self) -> bool:
        return self.rank == 0


@contextmanager
def joined_job(threads: int, timeout_seconds: float) -> Iterator[Place]:
    """Join the job that torchrun describes in the environment; NCCL on GPUs, Gloo on CPUs, nothing for one process.

    On a normal end everything that holds a group is collected before the group is destroyed: with FSDP on Gloo about
    one run in ten otherwise aborts at exit (torch 2.13).
    """
    torch.set_num_threads(threads)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"local rank {local_rank} has no GPU: this host shows {torch.cuda.device_count()}; start at most that "
                "many processes per host, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on CPUs"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    _quieten()
    if world > 1:
        timeout = timedelta(seconds=timeout_seconds)
        place: dict[str, Any] = {}
        if _started_again():
            place = {"store": _fresh_store(timeout), "rank": rank, "world_size": world}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout, **place)
    yield Place(rank, world, device)
    if world > 1:
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()


def _started_again() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def _fresh_store(timeout: timedelta) -> dist.Store:
    """The job's store without what an earlier attempt left in it.

    torchrun keeps its store over `--max-restarts`; without a prefix Gloo takes a dead rank's address (torch 2.13).
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _quieten() -> None:
    """Silence warnings that describe what we do on purpose, or what torch does to itself."""
    # Outputs of sharded modules are views of DTensors; nothing here updates activations in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # One process saves and loads by itself, without a process group.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # torch's own code still calls the name that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=r".*`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


class StopRequest:
    """Turns SIGTERM, SIGINT and the death of our launcher into a flag that the loop reads between steps; a second
    signal ends the process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)

    def __bool__(self) -> bool:
        return self.signal is not None or launcher_is_gone()

    @property
    def why(self) -> str:
        """Who asks."""
        if self.signal is not None:
            return self.signal.name
        return "the launcher was killed" if launcher_is_gone() else "a stop request of another rank"
