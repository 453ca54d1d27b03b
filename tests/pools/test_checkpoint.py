"""The update pool saves alone; with and without pools, a run resumes what the other has saved, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diag.errors import UsageError
from tests.distributed import run_distributed
from tests.pools.pooled import pooled_run, pooled_steps
from tests.small_run import small_run, train_steps


@pytest.mark.slow
def test_saved_with_pools_resumed_without_and_with_others(tmp_path: Path) -> None:
    """5 + 5 steps equal 10, whichever half ran with pools, and with another number of update ranks."""
    straight = run_distributed(train_steps, 2, tmp_path, small_run(ranks=2), 10)[0]
    pooled = pooled_run("stream", compute=2, update=1)
    first = run_distributed(pooled_steps, 3, tmp_path, pooled, 5, tmp_path / "run", False, True)[0][0]
    assert first.losses == straight.losses[:5]
    folder = tmp_path / "run" / "checkpoints" / "step_00000005"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["world"] == 3 and len(manifest["rows"]) == 7
    assert list(folder.glob("*.distcp")), "nothing was saved"
    assert not list(folder.glob("__1_*")), "a rank that is not of the update pool has saved"

    without = run_distributed(train_steps, 2, tmp_path, small_run(ranks=2), 5, folder.parent, True)[0]
    assert without.losses == straight.losses[5:]
    for name, weight in straight.weights.items():
        assert (without.weights[name] == weight).all(), name

    two = pooled_run("sync", compute=2, update=2)
    again = run_distributed(pooled_steps, 4, tmp_path, two, 5, tmp_path / "run", True)[0][0]
    assert again.restored.step == 5
    assert again.losses == straight.losses[5:]
    for name, weight in straight.weights.items():
        assert (again.weights[name] == weight).all(), name


@pytest.mark.slow
def test_saved_without_pools_resumed_with(tmp_path: Path) -> None:
    run = small_run(ranks=4, tensor=2, expert=2)
    straight = run_distributed(train_steps, 4, tmp_path, run, 10)[0]
    run_distributed(train_steps, 4, tmp_path, run, 5, tmp_path / "run" / "checkpoints", False, True)
    pooled = pooled_run("stream", compute=4, update=2, tensor=2, expert=2)
    resumed = run_distributed(pooled_steps, 6, tmp_path, pooled, 5, tmp_path / "run", True)[0][0]
    assert resumed.losses == straight.losses[5:]
    for name, weight in straight.weights.items():
        assert (resumed.weights[name] == weight).all(), name


@pytest.mark.slow
def test_balancing_biases_are_saved_and_restored(tmp_path: Path) -> None:
    """A buffer that lives on the compute ranks is in the update pool's checkpoint."""
    from pdtrain.config.schema import Moe

    moe = Moe(experts=8, top_k=2, expert_hidden=32, aux_loss=0.0, bias_update_speed=0.01)
    straight = run_distributed(train_steps, 2, tmp_path, small_run(ranks=2, model={"moe": moe}), 10)[0]
    pooled = pooled_run("stream", compute=2, update=1, model={"moe": moe})
    run_distributed(pooled_steps, 3, tmp_path, pooled, 5, tmp_path / "run", False, True)
    resumed = run_distributed(pooled_steps, 3, tmp_path, pooled, 5, tmp_path / "run", True)[0][0]
    assert resumed.losses == straight.losses[5:]


def _refused(rank: int, run, folder: Path) -> str:
    try:
        pooled_steps(rank, run, 1, folder, resume=True)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_nothing_to_resume_from_is_the_same_line_on_every_rank(tmp_path: Path) -> None:
    said = run_distributed(_refused, 3, tmp_path, pooled_run("sync", compute=2, update=1), tmp_path / "run")
    assert len(set(said)) == 1 and "nothing to resume from" in said[0]
