"""The update rank's run, from its restore to its last step: `train` of the other pool."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pdtrain.config import Resolved
from pdtrain.parallel.layout import Layout
from pdtrain.pools.run import UpdateRank
from pdtrain.process import Place
from pdtrain.recorder import Recorder


def update(
    resolved: Resolved, layout: Layout, run_dir: Path, resume: Path | Literal["latest"] | None, place: Place
) -> None:
    """Serve the compute pool until it says that the run ends. Collective at the start; see `pdtrain.pools.run`.

    Raises:
        UsageError: nothing to resume from, or a checkpoint that does not fit.
        PoolError: a compute rank is gone, silent, or sends what cannot be used.
    """
    run = resolved.run
    rank = UpdateRank(resolved, layout, place.rank, run_dir)
    joined = rank.restore(resume)
    with Recorder(
        run_dir, log_every=run.train.log_every, tensorboard=False, spans=run.recorder.spans,
        stall_seconds=run.train.timeout_seconds / 2,
    ) as recorder:
        rank.attach(recorder)
        if joined.source is not None or joined.kept:
            recorder.resume(joined.step)
        going = joined.step < run.train.steps
        while going:
            going = rank.one_step()
            recorder.log(rank.side.step)
        rank.close()
        recorder.event("regrouping" if rank.regroups else "finished", step=rank.side.step)
