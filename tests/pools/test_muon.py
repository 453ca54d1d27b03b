"""With Muon, an owner has whole matrices; with and without pools, every bit is the same, and so are checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.errors import UsageError
from pdtrain.pools.plan import make_plan
from tests.distributed import run_distributed
from tests.pools.pooled import pooled_run, pooled_steps
from tests.pools.test_equality import LAYOUTS, same
from tests.pools.test_plan import shards
from tests.small_run import changed, small_run, train_steps

STEPS = 50


def muon_run(ranks: int, tensor: int, expert: int):
    return changed(small_run(ranks=ranks, tensor=tensor, expert=expert), "optimizer", name="muon")


def pooled(mode: str, compute: int, update: int, tensor: int = 1, expert: int = 1):
    run = pooled_run(mode, compute=compute, update=update, tensor=tensor, expert=expert)
    return changed(run, "optimizer", name="muon")


def test_a_matrix_has_one_owner_and_the_rest_is_still_spread():
    """`head` counts as a matrix of Muon's here, `embed` as AdamW's."""
    plan = make_plan(shards(4), 3, 256, 4, lambda piece: piece.name in ("head", "blocks.0.attention.wq"))
    owners: dict[str, set[int]] = {}
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            owners.setdefault(piece.name, set()).add(bucket.owner)
    assert len(owners["head"]) == len(owners["blocks.0.attention.wq"]) == 1 < len(owners["embed"])
    assert set.union(*owners.values()) == set(plan.update)


def test_fewer_matrices_than_update_ranks_is_one_line():
    with pytest.raises(UsageError, match=r"it has 4 whole matrices, for Muon, and shards; use at most"):
        make_plan(shards(4), 4, 256, 4, lambda piece: True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_steps_of_muon_are_the_same_in_every_bit(mode: str, layout: str, tmp_path: Path):
    compute, update, tensor, expert = LAYOUTS[layout]
    theirs = run_distributed(train_steps, compute, tmp_path, muon_run(compute, tensor, expert), STEPS, timeout=300)[0]
    run = pooled(mode, compute, update, tensor, expert)
    results = run_distributed(pooled_steps, compute + update, tmp_path, run, STEPS, tmp_path / "run", timeout=300)
    same(results[0][0], theirs)


@pytest.mark.slow
def test_saved_with_pools_resumed_without_and_the_other_way_round(tmp_path: Path):
    """5 + 5 steps equal 10; another number of update ranks, and other layouts, read the same file."""
    straight = run_distributed(train_steps, 2, tmp_path, muon_run(2, 1, 1), 10)[0]
    one, two = pooled("stream", 2, 1), pooled("sync", 2, 2)
    run_distributed(pooled_steps, 3, tmp_path, one, 5, tmp_path / "run", False, True)
    root = tmp_path / "run" / "checkpoints"
    without = run_distributed(train_steps, 2, tmp_path, muon_run(2, 1, 1), 5, root, True)[0]
    again = run_distributed(pooled_steps, 4, tmp_path, two, 5, tmp_path / "run", True)[0][0]
    for resumed in (without, again):
        assert resumed.restored.step == 5 and resumed.losses == straight.losses[5:]
        for name, weight in straight.weights.items():
            assert (resumed.weights[name] == weight).all(), name
    alone = run_distributed(train_steps, 1, tmp_path, muon_run(1, 1, 1), 5, root, True)[0]
    assert alone.losses == pytest.approx(straight.losses[5:], rel=1e-5)
