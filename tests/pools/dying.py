"""Runs whose ranks die and are started again, as the launcher does it, with `tests.distributed` instead of processes
that import everything anew.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

from pdtrain.config.schema import Run
from pdtrain.pools.faults import VARIABLE
from pdtrain.restart import VARIABLE as RESTART
from pdtrain.restart import Restart
from tests.distributed import run_distributed
from tests.pools.pooled import pooled_steps
from tests.small_run import Trained

STEPS = 8
#: What a survivor may say of a death.
GONE = "[Cc]onnection closed|reset by peer"
#: Kinds of run.
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "stream": {},
    "bf16": {"payload": "bf16", "error_feedback": True},
    "async": {"staleness": 1},
    "micro_batch": {"granularity": "micro_batch"},
}


def faulty(rank: int, faults: list[dict[str, Any]], restart: str, *arguments: Any) -> Any:
    """One rank of a start, with these faults."""
    os.environ |= {VARIABLE: json.dumps(faults), RESTART: restart}
    return pooled_steps(rank, *arguments)


def survive(folder: Path, run: Run, faults: list[dict[str, Any]]) -> tuple[Trained, list[Any], int]:
    """Start `run` again after each death; the last start's training and events, and how often it died.

    Raises AssertionError: a start ended although nobody was to be killed in it.
    """
    restart = Restart(str(folder))
    world = run.parallel.ranks + run.pools.update_ranks
    while True:
        try:
            results = run_distributed(
                faulty, world, folder, faults, restart.to_environment(), run, STEPS, folder / "run", False, False, True
            )
        except AssertionError as error:
            killed = [fault["rank"] for fault in faults if fault["kind"] == "kill" and fault["start"] == restart.start]
            if not killed or not re.search(rf"ranks \[{killed[0]}\] died|{GONE}", str(error)):
                raise
            restart = restart.after(killed[0], "was killed by SIGKILL")
            continue
        return results[0][0], [events for _, events in results], restart.count


def random_faults(seed: int, update: int) -> list[dict[str, Any]]:
    """Two to five faults that leave the ranks alive, and up to two deaths, anywhere in a run of 2 + `update` ranks."""
    rng = random.Random(seed)
    ranks = [{"rank": 0, "direction": "up"}, {"rank": 1, "direction": "up"}]
    ranks += [{"rank": 2 + owner, "direction": "down"} for owner in range(update)]
    faults: list[dict[str, Any]] = []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choice(("corrupt", "delay", "duplicate", "reorder", "version", "incarnation"))
        fault = {"kind": kind, "step": rng.randint(1, STEPS), "bucket": rng.choice((0, 1, None)),
                 "start": rng.choice((1, 1, 2)), "seconds": rng.random() / 2, "version": -3}
        if kind == "incarnation":
            fault |= {"kind": "version", "incarnation": rng.choice((0, 1, 7))}
        faults.append(fault | rng.choice(ranks))
    deaths = rng.choice((0, 1, 1, 2)) if seed % len(MODES) != 3 else rng.choice((0, 1))
    for start in range(1, deaths + 1):
        at = rng.choice(("send", "send", "join", "optimizer", "keep"))
        victim = rng.choice(ranks) if at == "send" else rng.choice(ranks[2:])
        # a start goes on where the one before was: what comes later strikes for certain
        step = None if at == "join" else rng.randint(1, 4) + 3 * (start - 1)
        faults.append({"kind": "kill", "at": at, "step": step, "start": start, "rank": victim["rank"]})
    return faults
