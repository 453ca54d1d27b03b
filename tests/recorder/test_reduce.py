"""Scalars over ranks, on real Gloo processes."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist

from pdtrain.recorder import Recorder
from pdtrain.recorder.reduce import reduce_over_ranks
from tests.distributed import run_distributed


def several(rank):
    group = dist.new_group([0, 2])
    complaints: list[str] = []
    values = {
        "mean": (float(rank), "mean"), "max": (torch.tensor(rank, dtype=torch.int64), "max"),
        "min": (torch.tensor([float(rank)]), "min"), "sum": (2**53 if rank == 0 else 0, "sum"),
        "slowest": ([1.0, 9.0, 2.0][rank], "argmax"), "nan": (float("nan") if rank == 1 else 0.0, "mean"),
        "fine": (torch.tensor(0.1, dtype=torch.float64), "max"),
    }
    everyone = reduce_over_ranks(values, None, complaints.append)
    part = reduce_over_ranks({"sum": (float(rank), "sum")}, group, complaints.append) if rank != 1 else None
    differing = reduce_over_ranks({f"of_{rank}": (float(rank), "mean")}, None, complaints.append)
    return everyone, part, differing, complaints


def test_every_operation_over_all_ranks_and_over_a_group(tmp_path):
    answers = run_distributed(several, 3, tmp_path)
    for rank, (everyone, part, differing, complaints) in enumerate(answers):
        nan = everyone.pop("nan")
        assert nan != nan, "a NaN of one rank is not averaged away"
        assert everyone == {"mean": 1.0, "max": 2.0, "min": 0.0, "sum": 2.0**53, "slowest": 1.0, "fine": 0.1}
        assert part == (None if rank == 1 else {"sum": 2.0})
        assert differing == {f"of_{rank}": float(rank)}, "ranks that disagree keep their own"
        assert len(complaints) == 1 and f"of_{rank}" in complaints[0]


def test_one_process_keeps_its_values(tmp_path):
    with Recorder(tmp_path, tensorboard=False, guard=False) as recorder:
        got = recorder.reduce({"a": (torch.tensor(2.0), "sum"), "b": (3, "mean"), "which": (7.0, "argmax")})
    assert got == {"a": 2.0, "b": 3.0, "which": 0.0}


def test_an_unknown_operation_names_the_known_ones():
    with pytest.raises(ValueError, match="'median'; use one of mean, max, min, sum, argmax"):
        reduce_over_ranks({"a": (1.0, "median")}, None, print)  # type: ignore[dict-item]


def logged(rank, folder):
    """DTensors: a replicated one is read where it is, a sharded one would need the other ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    with redirect_stderr(io.StringIO()) as err, Recorder(folder, tensorboard=False, guard=False) as recorder:
        whole = distribute_tensor(torch.tensor(1.5), mesh, [Replicate()])
        parts = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        recorder.log(1, whole=whole, parts=parts)
    return recorder.rank, recorder.world, "full_tensor" in err.getvalue()


def test_a_sharded_tensor_is_never_waited_for(tmp_path):
    from tests.recorder.helpers import rows

    assert run_distributed(logged, 2, tmp_path / "store", tmp_path / "run") == [(0, 2, True), (1, 2, False)]
    (row,) = rows(tmp_path / "run" / "metrics.jsonl")
    assert row["whole"] == 1.5 and "parts" not in row
