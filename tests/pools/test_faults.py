"""Faults between the pools, with real processes: nothing wrong is applied; the run recovers, or ends in one line."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pdtrain.pools.faults import VARIABLE
from tests.distributed import run_distributed
from tests.pools.dying import MODES, STEPS, random_faults, survive
from tests.pools.pooled import pooled_run, pooled_steps
from tests.small_run import Trained, small_run, train_steps

UP, DOWN = {"rank": 1, "direction": "up"}, {"rank": 2, "direction": "down"}


def faulty(rank: int, faults: list[dict[str, Any]], *arguments: Any) -> Any:
    os.environ[VARIABLE] = json.dumps(faults)
    return pooled_steps(rank, *arguments)


def with_faults(faults: list[dict[str, Any]], folder: Path, mode: str = "stream", **pools: Any) -> tuple[Trained, Any]:
    run = pooled_run(mode, compute=2, update=1, pools=pools)
    results = run_distributed(faulty, 3, folder, faults, run, 8, folder / "run")
    return results[0][0], [events for _, events in results]


def named(events: list[list[dict[str, Any]]], rank: int, name: str) -> list[dict[str, Any]]:
    return [event for event in events[rank] if event["event"] == name]


@pytest.fixture(scope="session")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run_distributed(train_steps, 2, tmp_path_factory.mktemp("fault_free"), small_run(ranks=2), 8)[0]


def same_curve(ours: Trained, theirs: Trained) -> None:
    assert ours.losses == theirs.losses and ours.weights is not None and theirs.weights is not None
    assert all((ours.weights[name] == weight).all() for name, weight in theirs.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_damage_delay_duplicates_and_another_order_leave_the_curve_as_it_is(
    mode: str, tmp_path: Path, fault_free: Trained
) -> None:
    faults = [
        {"kind": "corrupt", "step": 2, "bucket": 0, **UP}, {"kind": "corrupt", "step": 3, "bucket": 1, **DOWN},
        {"kind": "duplicate", "step": 4, **UP}, {"kind": "duplicate", "step": 4, **DOWN},
        {"kind": "reorder", "step": 5, "bucket": 1, **UP}, {"kind": "reorder", "step": 5, "bucket": 0, **DOWN},
        {"kind": "delay", "step": 6, "seconds": 0.5, **UP}, {"kind": "delay", "step": 7, "seconds": 0.5, **DOWN},
    ]  # fmt: skip
    ours, events = with_faults(faults, tmp_path, mode)
    same_curve(ours, fault_free)
    (damaged,) = named(events, 2, "pool_checksum_error")
    assert (damaged["peer"], damaged["step"], damaged["direction"]) == (1, 2, "up")
    (resent,) = named(events, 2, "pool_resend")
    assert (resent["step"], resent["direction"], resent["reason"]) == (3, "down", "checksum")
    assert len(named(events, 2, "pool_duplicate")) == 1
    assert len(named(events, 0, "pool_duplicate")) + len(named(events, 1, "pool_duplicate")) == 1


@pytest.mark.slow
def test_gradients_of_another_version_are_computed_again(tmp_path: Path, fault_free: Trained) -> None:
    faults = [{"kind": "version", "step": 4, "bucket": 1, "version": 1, **UP},
              {"kind": "version", "step": 6, "bucket": 0, "version": 2, **DOWN}]  # fmt: skip
    ours, events = with_faults(faults, tmp_path)
    same_curve(ours, fault_free)
    (seen,) = named(events, 2, "pool_version_mismatch")
    assert (seen["peer"], seen["step"], seen["version"], seen["expected"]) == (1, 4, 1, 3)
    assert seen["action"] == "recompute"
    assert named(events, 2, "pool_resend")[0]["reason"] == "version", "weights of another version are sent again"


@pytest.mark.slow
def test_drop_leaves_the_update_out_on_all_ranks(tmp_path: Path, fault_free: Trained) -> None:
    faults = [{"kind": "version", "step": 4, "bucket": 1, "version": 1, **UP}]
    ours, events = with_faults(faults, tmp_path, on_mismatch="drop")
    assert ours.losses[:4] == fault_free.losses[:4] and ours.losses[5:] != fault_free.losses[5:]
    (skipped,) = named(events, 2, "pool_skipped")
    assert (skipped["step"], skipped["reason"]) == (4, "version")


# -- at random ----------------------------------------------------------------------------------------------------


@cache
def undisturbed(mode: str, update: int, first: int = 0) -> Trained:
    """The curve without faults; `first`: of a run that was saved after that step and resumed."""
    pools = MODES[mode]
    run = pooled_run(mode if mode in ("sync", "async") else "stream", compute=2, update=update, pools=pools)
    with TemporaryDirectory() as name:
        folder = Path(name)
        if first:
            run_distributed(pooled_steps, 2 + update, folder, run, first, folder / "run", False, True)
        resume = (folder / "run", bool(first), False, True)
        return run_distributed(pooled_steps, 2 + update, folder, run, STEPS, *resume)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_faults_leave_the_curve_as_it_is(seed: int, tmp_path: Path) -> None:
    """Several faults and up to two deaths in one run, all ranks started again after each: the same bits in the end.

    Where weights are stale, those of a start are fresh: the curve is that of a run which was resumed at that step.
    """
    mode, update = list(MODES)[seed % len(MODES)], 1 + seed // len(MODES) % 2
    pools = MODES[mode] | {"keep": str(tmp_path / "keep"), "timeout_seconds": 20.0}
    run = pooled_run(mode if mode in ("sync", "async") else "stream", compute=2, update=update, pools=pools)
    faults = random_faults(seed, update)
    ours, _, deaths = survive(tmp_path, run, faults)
    assert deaths == sum(fault["kind"] == "kill" for fault in faults)
    first = ours.restored.step
    theirs = undisturbed(mode, update, first if mode == "async" else 0)
    assert ours.losses == theirs.losses[len(theirs.losses) - len(ours.losses) :] and len(ours.losses) == STEPS - first
    assert ours.weights is not None and theirs.weights is not None
    assert all((ours.weights[name] == weight).all() for name, weight in theirs.weights.items())
    assert not list((tmp_path / "keep").iterdir()), "what was kept is left behind after a good end"
