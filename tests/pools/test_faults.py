"""Faults between the pools, with real processes: nothing wrong is applied; the run recovers, or ends in one line."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pdtrain.pools.faults import VARIABLE
from tests.commands.test_train_job import OUTSIDE, PDTRAIN, SMALL, steps
from tests.distributed import run_distributed
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


def random_faults(seed: int) -> list[dict[str, Any]]:
    """Four faults that a run survives, anywhere."""
    rng = random.Random(seed)
    kinds = ("corrupt", "delay", "duplicate", "reorder", "version")
    return [
        {"kind": rng.choice(kinds), "step": rng.randint(1, 8), "bucket": rng.choice((0, 1, None)), "version": -3,
         "seconds": rng.random() / 2} | rng.choice(({"rank": 0, "direction": "up"}, UP, DOWN))
        for _ in range(4)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_faults_leave_the_curve_as_it_is(seed: int, tmp_path: Path, fault_free: Trained) -> None:
    ours, _ = with_faults(random_faults(seed), tmp_path, ("sync", "stream")[seed % 2])
    same_curve(ours, fault_free)


# -- whole jobs ---------------------------------------------------------------------------------------------------


def job(folder: Path, *more: str, faults: list[dict[str, Any]] | None = None) -> Any:
    """`pdtrain train` of the small configuration on 2 + 1 ranks, with these faults."""
    (folder / "small.toml").write_text(SMALL + '[pools]\nmode = "stream"\nupdate_ranks = 1\ntimeout_seconds = 5\n')
    environment = OUTSIDE | ({VARIABLE: json.dumps(faults)} if faults else {})
    return subprocess.run([*PDTRAIN, "train", *more], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=240)


def losses(run_dir: Path) -> dict[int, float]:
    """The curve, the last word on each step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
@pytest.mark.parametrize("rank, direction", [(1, "up"), (2, "down")])
def test_a_killed_rank_ends_the_run_in_one_line_and_resume_goes_on(rank: int, direction: str, tmp_path: Path) -> None:
    """Step 4 is saved, the rank dies in step 5: the run says who, what is lost, and ends as the undisturbed one."""
    every = ("--set", "checkpoint.every=2")
    whole = job(tmp_path, "small.toml", "--run-dir", "whole", *every)
    assert whole.returncode == 0, whole.stderr
    kill = [{"kind": "kill", "rank": rank, "direction": direction, "step": 6}]
    died = job(tmp_path, "small.toml", "--run-dir", "run", *every, faults=kill)
    assert died.returncode == 137, died.stderr
    assert f"rank {rank} failed first: it was killed by SIGKILL" in died.stderr
    assert "Traceback" not in died.stderr
    again = job(tmp_path, "--run-dir", "run", "--resume")
    assert again.returncode == 0, again.stderr
    assert "at step 4" in again.stderr + again.stdout
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    events = [json.loads(line) for line in (tmp_path / "run" / "events" / "rank_0.jsonl").read_text().splitlines()]
    assert [event["incarnation"] for event in events if event.get("event") == "pool"] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind, words", [
    ("corrupt", "refused gradients of step 3, bucket 0 from rank 1 (compute): checksum wrong 4 times in a row"),
    ("delay", "got no answer from rank"),
])  # fmt: skip
def test_what_cannot_be_recovered_is_one_line_that_names_both_ranks(kind: str, words: str, tmp_path: Path) -> None:
    fault = {"kind": kind, "step": 3, "bucket": 0, "times": 99, "every_try": True, "seconds": 15.0, **UP}
    ended = job(tmp_path, "small.toml", "--run-dir", "run", faults=[fault])
    assert ended.returncode not in (0, 2), ended.stderr
    said = ended.stderr + "".join(
        path.read_text() for path in (tmp_path / "run" / "logs" / "torchrun").rglob("stderr.log")
    )
    assert words in said, said
    assert 3 not in steps(tmp_path / "run"), "a step that never ended is recorded"
