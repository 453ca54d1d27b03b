"""A small data-parallel job that breaks on purpose: run by torchrun in the tests and by the sample-log script.

    torchrun --nproc-per-node 8 broken_job.py FAULT [--rank R] [--steps N] [--timeout SECONDS] [--folder DIR]

Every rank prints its steps, as trainers do; nothing in the output says what the fault is.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FAULTS = ("none", "exception", "kill", "stop", "sleep", "size", "dtype", "operation", "order", "early", "memory",
          "checkpoint", "segfault", "shape")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=12.0)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"[rank {rank}] joined a world_size={world} run", flush=True)
    model = torch.nn.Linear(64, 64)
    if options.fault == "checkpoint":
        resume(model, options.folder, rank)
    groups = [dist.new_group(list(range(world)), timeout=timedelta(seconds=options.timeout)) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guilty = rank == options.rank
    for step in range(1, options.steps + 1):
        loss = (model(torch.randn(16, 64)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        if step == options.at and "DUMPS" in os.environ:
            time.sleep(1)  # no rank may die before the others have a dump of the step before
        if step == options.at and guilty:
            misbehave(options.fault, options)
        if step == options.at and guilty and options.fault == "early":
            break
        reduce(model, options.fault if step == options.at and guilty else "none", groups)
        optimizer.step()
        print(f"[rank {rank}] step {step} loss {loss.item():.4f} lr 1.0e-03", flush=True)
    if rank == 0 and options.fault != "early":
        torch.save(model.state_dict(), options.folder / "final.pt")
        print(f"saved checkpoint to {options.folder / 'final.pt'}", flush=True)
    print(f"[rank {rank}] training finished after {step} steps", flush=True)
    dist.destroy_process_group()


def misbehave(fault: str, options: argparse.Namespace) -> None:
    """The faults that are not wrong collectives."""
    if fault == "exception":
        batch = {"input_ids": [1, 2, 3]}
        print(batch["labels"])
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "sleep":
        time.sleep(3 * options.timeout)
    elif fault == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        torch.ones(1 << 28)
    elif fault == "shape":
        torch.nn.Linear(64, 8)(torch.randn(4, 32))


def reduce(model: torch.nn.Module, fault: str, groups: list[dist.ProcessGroup]) -> None:
    """Average the gradients: two groups, one after the other; `fault` spoils this rank's part."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    if fault == "size":
        flat = torch.cat([flat, torch.zeros(1)])
    if fault == "dtype":
        flat = flat.double()
    first, second = groups if fault != "order" else reversed(groups)
    if fault == "operation":
        dist.broadcast(flat, 0, group=first)
    else:
        dist.all_reduce(flat, group=first)
    norm = flat.norm().to(torch.float32)
    dist.all_reduce(norm, group=second)


def resume(model: torch.nn.Module, folder: Path, rank: int) -> None:
    """Write a checkpoint, cut it, and load it again: what a killed save leaves."""
    path = folder / "step_100.pt"
    if rank == 0:
        torch.save(model.state_dict(), path)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
    dist.barrier()
    print(f"[rank {rank}] resuming from {path}", flush=True)
    model.load_state_dict(torch.load(path, weights_only=True))


def dump_for_ever(folder: Path) -> None:
    """Leave this rank's last collectives on disk a few times a second, so that even an aborted rank has a dump."""
    from torch._C._distributed_c10d import _dump_fr_trace

    path = folder / f"flight_recorder_{os.environ['RANK']}"
    while True:
        scratch = folder / f".{path.name}"
        scratch.write_bytes(_dump_fr_trace())
        scratch.replace(path)
        time.sleep(0.2)


if __name__ == "__main__":
    if "DUMPS" in os.environ:
        threading.Thread(target=dump_for_ever, args=(Path(os.environ["DUMPS"]),), daemon=True).start()
    main()
