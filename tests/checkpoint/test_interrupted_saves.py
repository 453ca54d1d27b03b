"""kill -9 of the whole job at random moments while it saves: what is chosen afterwards always loads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdtrain.checkpoint import manifest as files

#: Saves without pause; each step's weights say which step it was, so that a mixture would show.
SAVER = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from pdtrain.checkpoint import Checkpointer
from pdtrain.optim import build_optimizer
from pdtrain.parallel.gradients import rows_of
from pdtrain.parallel.layout import Layout
from pdtrain.parallel.meshes import create_meshes
from pdtrain.parallel.parallelize import build_parallel_model
from tests.small_run import small_run
root, rank, store = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60))
run = small_run(ranks=2, expert=2, checkpoint={"keep": 2})
model = build_parallel_model(run, create_meshes(Layout.from_run(run), "cpu"), torch.device("cpu"))
rows = rows_of(model, None)
checkpointer = Checkpointer(root, run, model, build_optimizer(run, rows), rows, "numbered")
start = checkpointer.restore("latest" if checkpointer.has_any() else None)
for parameter in model.parameters():
    local = parameter.to_local()
    assert start.step == 0 or bool((local == start.step).all()), f"step {start.step} holds other weights"
checkpointer.tidy(start.step)
for step in range(start.step + 1, start.step + 10_000):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    assert checkpointer.save(step, step)
    if rank == 0:
        print(step, flush=True)
"""

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_the_newest_complete_checkpoint_always_loads(kills: int, tmp_path: Path) -> None:
    moments = random.Random(kills)
    root = tmp_path / "checkpoints"
    reached = 0
    for attempt in range(kills):
        newest = _save_until_killed(root, tmp_path / f"store{attempt}", moments.uniform(0.0, 0.5))
        complete = files.complete_checkpoints(root)
        assert complete, "no complete checkpoint left"
        folder, manifest = complete[-1]
        # A save that was reported is never lost; one that was under way may or may not have made it.
        assert newest <= manifest.step <= newest + 1
        assert manifest.step > reached
        reached = manifest.step
        pointer = root / (root / "latest").read_text().strip()
        assert (pointer / "manifest.json").is_file(), "`latest` points at something incomplete"


def _save_until_killed(root: Path, store: Path, delay: float) -> int:
    """Start two ranks, wait for a first save, kill -9 both after `delay` more seconds; the last step reported."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", SAVER, str(root)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store), ROOT],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        first = ranks[0].stdout.readline()
        assert first.strip(), "".join(rank.stderr.read() for rank in ranks if rank.poll() is not None and rank.stderr)
        time.sleep(delay)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    rest, _ = ranks[0].communicate()
    ranks[1].communicate()
    return int(([first, *rest.splitlines()])[-1])
