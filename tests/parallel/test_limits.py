"""A collective of any group of the trainer is as bounded as the configuration says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pdtrain.config import resolve
from tests.distributed import run_distributed
from tests.pools.pooled import pooled_run
from tests.small_run import small_run


def _wait_for_nobody(rank: int) -> float | None:
    import torch
    import torch.distributed as dist

    from pdtrain.parallel.layout import Layout
    from pdtrain.parallel.meshes import create_meshes

    meshes = create_meshes(Layout.from_run(pooled_run("sync", compute=2, update=1)), "cpu", 3.0)
    dist.barrier()
    if rank > 0:
        time.sleep(12)
        return None
    began = time.monotonic()
    try:
        dist.all_reduce(torch.zeros(1), group=meshes.dp.get_group())
    except RuntimeError:
        return time.monotonic() - began
    return None


@pytest.mark.slow
def test_a_group_of_the_layout_has_the_limit_of_the_run_not_torchs(tmp_path: Path) -> None:
    waited, *_ = run_distributed(_wait_for_nobody, 3, tmp_path)
    assert waited is not None and waited < 10


def test_with_pools_a_collective_outlasts_the_wait_for_the_other_pool() -> None:
    """Else whoever waits for a rank that waits for the other pool would be the first to give up, and name nobody."""
    alone, pooled = resolve(small_run(ranks=2)), resolve(pooled_run("stream", compute=2, update=1))
    assert alone.collective_seconds == alone.run.train.timeout_seconds
    assert pooled.collective_seconds > pooled.run.train.timeout_seconds + pooled.run.pools.timeout_seconds
