"""Run a function on several Gloo processes, for tests.

No ports (a FileStore in the test's own folder), a deadline that kills every child, each rank's traceback on failure.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel"])


def run_distributed(
    function: Callable[..., Any], world: int, folder: Path, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """`function(rank, *args)` on `world` Gloo ranks; what each returned, in rank order. `function` must be importable.

    Raises AssertionError with every failing rank's traceback, or naming the ranks that were still running.
    """
    with _one_job_at_a_time():
        return _run(function, world, folder, args, timeout)


@contextmanager
def _one_job_at_a_time() -> Iterator[None]:
    """Gloo's ranks poll: two jobs at once on few cores are many times slower than one after the other."""
    with (Path(tempfile.gettempdir()) / f"pdtrain-tests-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(function: Callable[..., Any], world: int, folder: Path, args: tuple[Any, ...], timeout: float) -> list[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    results = _CONTEXT.SimpleQueue()
    store = folder / f"store_{time.time_ns()}"
    children = [
        _CONTEXT.Process(target=_child, args=(function, rank, world, str(store), timeout, results, args), daemon=True)
        for rank in range(world)
    ]
    for child in children:
        child.start()
    deadline = time.monotonic() + timeout
    answers: dict[int, tuple[bool, Any]] = {}
    try:
        while len(answers) < world and time.monotonic() < deadline:
            if not results.empty():
                rank, ok, value = results.get()
                answers[rank] = (ok, value)
                continue
            dead = [r for r, c in enumerate(children) if c.exitcode not in (None, 0) and r not in answers]
            if dead and results.empty():
                raise AssertionError(f"ranks {dead} died: exit codes {[children[r].exitcode for r in dead]}")
            if any(not ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 5)  # the others may only be waiting for the failed one
            time.sleep(0.01)
    finally:
        for child in children:
            child.join(timeout=5 if len(answers) == world else 0)
            if child.is_alive():
                child.kill()
                child.join()
    failed = {rank: value for rank, (ok, value) in answers.items() if not ok}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failed.items()))
    assert len(answers) == world, f"no answer within {timeout} s from ranks {sorted(set(range(world)) - set(answers))}"
    return [pickle.loads(answers[rank][1]) for rank in range(world)]  # noqa: S301 - our own children wrote it


def _child(function, rank, world, store, timeout, results, args) -> None:  # type: ignore[no-untyped-def]
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        value = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, True, pickle.dumps(value)))  # bytes: shared-memory tensors would die with the process
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    # FSDP on Gloo sometimes aborts in static destructors; a test's answer is already in the queue
    os._exit(0)
