"""Training with pools without the command line: `tests.small_run.train_steps` for a job of compute and update ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from pdtrain.config import resolve
from pdtrain.config.schema import Pools, Run
from tests.small_run import TRAIN_BATCH, NoSpans, NumberedSequences, Trained, small_run, whole


class Notes(NoSpans):
    """A recorder that keeps events: enough for the pools."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def span(self, name: str, step: int | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"event": name} | fields)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def pooled_run(mode: str, *, compute: int, update: int, tensor: int = 1, expert: int = 1, **changes: Any) -> Run:
    """`small_run` on `compute` ranks with an update pool; `pools={...}` changes its section."""
    pools = {"mode": mode, "update_ranks": update, "bucket_mb": 0.05, "timeout_seconds": 60.0}
    section = Pools(**(pools | changes.pop("pools", {})))
    return msgspec.structs.replace(small_run(ranks=compute, tensor=tensor, expert=expert, **changes), pools=section)


def pooled_steps(
    rank: int, run: Run, steps: int, folder: Path, resume: bool = False, save: bool = False, total: bool = False
) -> tuple[Trained | None, list[dict[str, Any]]]:
    """`steps` steps of `run` in this rank's role; losses and weights (rank 0), and what was recorded.

    `save`: a checkpoint of everything after the last step. `total`: `steps` counts from the beginning of the run.
    """
    import torch

    from pdtrain.optim import learning_rate
    from pdtrain.parallel.gradients import rows_of
    from pdtrain.parallel.layout import Layout
    from pdtrain.parallel.meshes import create_meshes
    from pdtrain.parallel.parallelize import build_parallel_model
    from pdtrain.pools.run import UpdateRank, join_compute
    from pdtrain.step import TrainStep

    torch.manual_seed(1234 + rank)
    resolved, layout, notes = resolve(run), Layout.from_run(run), Notes()
    meshes = create_meshes(layout, "cpu") if layout.ranks > 1 else None
    if rank >= layout.ranks:
        worker = UpdateRank(resolved, layout, rank, folder)
        worker.restore("latest" if resume else None)
        worker.attach(notes)  # type: ignore[arg-type]
        while worker.one_step():
            pass
        worker.close()
        return None, notes.events
    device = torch.device("cpu")
    model = build_parallel_model(run, meshes, device)
    rows = rows_of(model, meshes)
    side, checkpoints, joined = join_compute(
        resolved, layout, rank, model, rows, NumberedSequences.fingerprint, folder
    )
    side.attach(notes)  # type: ignore[arg-type]
    step_once = TrainStep(resolved, model, None, rows, NumberedSequences(), meshes, device, notes, None, side)  # type: ignore[arg-type]
    losses, norms, consumed = [], [], joined.consumed
    last = steps if total else joined.step + steps
    for step in range(joined.step, last):
        result = step_once(consumed, learning_rate(run.optimizer, step, run.train.steps), False)
        consumed += TRAIN_BATCH
        losses.append(result.loss.item())
        norms.append(dict(zip(rows, result.norms.tolist(), strict=True)))
        if step + 1 < last:
            checkpoints.go_on(step + 1)
    side.settle()
    if save:
        assert checkpoints.save(last, consumed)
    else:
        side.after(last, end=True)
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    side.close()
    return Trained(losses, None, norms, weights if rank == 0 else None, joined.restored()), notes.events
