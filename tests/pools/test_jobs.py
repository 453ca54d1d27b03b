"""Whole jobs with faults between the pools: how they end, what they lost, and what the doctor says of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from pdtrain.pools.faults import VARIABLE
from tests.commands.test_train_job import OUTSIDE, PDTRAIN, SMALL, steps
from tests.diag.helpers import pdtrain

UP, DOWN = {"rank": 1, "direction": "up"}, {"rank": 2, "direction": "down"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]


def job(
    folder: Path, *more: str, faults: list[dict[str, Any]] | None = None, update: int = 1, start: tuple[str, ...] = ()
) -> Any:
    """`pdtrain train` of the small configuration on 2 + `update` ranks, with these faults."""
    pools = f'[pools]\nmode = "stream"\nupdate_ranks = {update}\ntimeout_seconds = 5\n'
    (folder / "small.toml").write_text(SMALL + pools)
    environment = OUTSIDE | ({VARIABLE: json.dumps(faults)} if faults else {})
    done = subprocess.run([*start, *PDTRAIN, "train", *more], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=240)  # fmt: skip
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)], "processes are left behind"
    return done


def losses(run_dir: Path) -> dict[int, float]:
    """The curve, the last word on each step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def found_by(command: str, run_dir: Path) -> dict[str, Any]:
    """Cause -> finding, of one of the doctor's commands; "verdict" is its verdict."""
    report = pdtrain("diag", command, run_dir, "--json").json()
    return {"verdict": report["verdict"]} | {found["cause"]: found for found in reversed(report["findings"])}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve without faults."""
    folder = tmp_path_factory.mktemp("whole")
    done = job(folder, "small.toml", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("rank, direction", [(1, "up"), (2, "down")])
def test_a_killed_rank_ends_the_run_in_one_line_and_resume_goes_on(
    rank: int, direction: str, tmp_path: Path, whole: dict[int, float]
) -> None:
    """Step 4 is saved, the rank dies in step 6: the run says who, what is lost, and ends as the undisturbed one."""
    kill = [{"kind": "kill", "rank": rank, "direction": direction, "step": 6}]
    died = job(tmp_path, "small.toml", "--run-dir", "run", "--set", "checkpoint.every=2", faults=kill)
    assert died.returncode == 137, died.stderr
    assert f"rank {rank} failed first: it was killed by SIGKILL" in died.stderr
    assert "Traceback" not in died.stderr
    for command in ("pools", "postmortem"):
        found = found_by(command, tmp_path / "run")
        assert found["verdict"] == "failed" and found["pool_member_lost"]["where"]["ranks"] == [rank], command
    again = job(tmp_path, "--run-dir", "run", "--resume")
    assert again.returncode == 0, again.stderr
    assert "at step 4" in again.stderr + again.stdout
    assert losses(tmp_path / "run") == whole
    events = [json.loads(line) for line in (tmp_path / "run" / "events" / "rank_0.jsonl").read_text().splitlines()]
    assert [event["incarnation"] for event in events if event.get("event") == "pool"] == [1, 2]
    assert found_by("postmortem", tmp_path / "run")["verdict"] == "healthy", "the end of an earlier start is judged"


@pytest.mark.slow
@pytest.mark.parametrize("kind, words, cause", [
    ("corrupt", "refused gradients of step 3, bucket 0 from rank 1 (compute): checksum wrong 4 times in a row",
     "pool_payload_corrupt"),
    ("delay", "for rank 1 (compute), which answers but has not sent gradients of step 3, bucket 0", "pool_member_lost"),
])  # fmt: skip
def test_what_cannot_be_recovered_is_one_line_that_names_both_ranks(
    kind: str, words: str, cause: str, tmp_path: Path
) -> None:
    fault = {"kind": kind, "step": 3, "bucket": 0, "times": 99, "every_try": True, "seconds": 15.0, **UP}
    ended = job(tmp_path, "small.toml", "--run-dir", "run", faults=[fault])
    assert ended.returncode not in (0, 2), ended.stderr
    said = ended.stderr + "".join(
        path.read_text() for path in (tmp_path / "run" / "logs" / "torchrun").rglob("stderr.log")
    )
    assert words in said and "Fatal Python error" not in said, said
    assert 3 not in steps(tmp_path / "run"), "a step that never ended is recorded"
    for command in ("pools", "postmortem"):
        assert found_by(command, tmp_path / "run")[cause]["where"]["ranks"] == [1], command


@pytest.mark.slow
def test_what_was_recovered_is_named_with_its_rank(tmp_path: Path, whole: dict[int, float]) -> None:
    """One job, and the doctor names damage of rank 0, old versions of rank 1, odd delivery of rank 2."""
    faults = [
        {"kind": "corrupt", "rank": 0, "direction": "up", "step": 2, "bucket": 0},
        {"kind": "version", "step": 3, "bucket": 0, "version": 1, **UP},
        {"kind": "version", "step": 4, "bucket": 0, "incarnation": 7, **UP},
        {"kind": "duplicate", "step": 4, "bucket": 0, **DOWN}, {"kind": "reorder", "step": 5, "bucket": 0, **DOWN},
        {"kind": "delay", "step": 5, "bucket": 1, "seconds": 1.5, **DOWN},
    ]  # fmt: skip
    done = job(tmp_path, "small.toml", "--run-dir", "run", "--set", "pools.bucket_mb=0.01", faults=faults)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == whole
    for command in ("pools", "postmortem"):
        found = found_by(command, tmp_path / "run")
        ranks = {cause: found[cause]["where"]["ranks"] for cause in ("pool_payload_corrupt", "pool_version_mismatch",
                                                                     "pool_delivery")}  # fmt: skip
        assert ranks == {"pool_payload_corrupt": [0], "pool_version_mismatch": [1], "pool_delivery": [2]}, command
        assert all(word in found["pool_delivery"]["summary"] for word in ("twice", "after a later one", "late"))
        assert found["verdict"] == "degraded"


@pytest.mark.slow
def test_an_update_rank_that_is_five_times_slower_is_named(tmp_path: Path) -> None:
    slow = [{"kind": "slow", "at": "optimizer", "rank": 2, "seconds": 0.1},
            {"kind": "slow", "at": "optimizer", "rank": 3, "seconds": 0.5}]  # fmt: skip
    done = job(tmp_path, "small.toml", "--run-dir", "run", "--set", "train.steps=14", faults=slow, update=2)
    assert done.returncode == 0, done.stderr
    for command in ("pools", "postmortem"):
        late = found_by(command, tmp_path / "run")["pool_weights_late"]
        assert late["where"]["ranks"] == [3] and "rank 3" in late["summary"], command


@pytest.mark.slow
def test_the_launcher_starts_dead_ranks_again_and_nothing_is_lost(tmp_path: Path, whole: dict[int, float]) -> None:
    """An update rank dies while it writes its file, then a compute rank, of a run that saves nothing in between."""
    kills = [{"kind": "kill", "at": "keep", "rank": 3, "step": 3}, {"kind": "kill", "step": 5, "start": 2, **UP}]
    keep = tmp_path / "keep"
    done = job(tmp_path, "small.toml", "--run-dir", "run", "--set", "pools.restarts=2", "--set", f"pools.keep={keep}",
               faults=kills, update=2)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 3 failed first: it was killed by SIGKILL; all ranks start again (1 of 2)" in done.stderr
    said = done.stderr + done.stdout
    assert "rank 3 (update) was killed by SIGKILL: all ranks go on after step 2, which the update pool has kept" in said
    # whether step 4 was kept is a race of the rank's death with what it had just sent
    assert re.search(r"rank 1 \(compute\) was killed by SIGKILL: all ranks go on after step [34]", said), said
    assert "Traceback" not in said
    assert losses(tmp_path / "run") == whole and not list(keep.iterdir())
    for command in ("pools", "postmortem"):
        found = found_by(command, tmp_path / "run")
        again = found["pool_restarted"]
        assert found["verdict"] == "degraded" and again["where"]["ranks"] == [1], command
        assert [row["rank"] for row in again["numbers"]["failures"]] == [3, 1]


@pytest.mark.slow
def test_the_next_start_is_told_why_a_rank_gave_up(tmp_path: Path, whole: dict[int, float]) -> None:
    fault = {"kind": "corrupt", "step": 3, "bucket": 0, "times": 99, "every_try": True, **UP}
    done = job(tmp_path, "small.toml", "--run-dir", "run", "--set", "pools.restarts=1", faults=[fault])
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == whole
    again = found_by("pools", tmp_path / "run")["pool_restarted"]["summary"]
    assert 'ended with exit status 1, saying "pools: rank ' in again, again
    assert "SIGABRT" not in again + done.stderr and "Fatal Python error" not in done.stderr


@pytest.mark.slow
def test_without_a_kept_state_a_start_goes_back_to_the_checkpoint(tmp_path: Path, whole: dict[int, float]) -> None:
    kill = [{"kind": "kill", "rank": 2, "step": 6}]
    sets = ("--set", "pools.restarts=1", "--set", "checkpoint.every=2")
    done = job(tmp_path, "small.toml", "--run-dir", "run", *sets, faults=kill)
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    assert "back to the checkpoint of step 4; step 5 is lost and computed again" in said, said
    assert losses(tmp_path / "run") == whole
    assert found_by("pools", tmp_path / "run")["pool_restarted"]["numbers"]["lost_steps"] == 1


@pytest.mark.slow
def test_torchrun_starts_dead_ranks_again_too(tmp_path: Path, whole: dict[int, float]) -> None:
    start = (*TORCHRUN, "--nproc-per-node", "3", "--max-restarts", "1", "--")
    done = job(tmp_path, "small.toml", "--run-dir", "run", "--set", f"pools.keep={tmp_path / 'keep'}",
               faults=[{"kind": "kill", "rank": 2, "step": 4}], start=start)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == whole and not list((tmp_path / "keep").iterdir())
    # whether the step in which it died was kept is a race, as above: one step at most is computed again
    assert found_by("pools", tmp_path / "run")["pool_restarted"]["numbers"]["lost_steps"] in (0, 1)

