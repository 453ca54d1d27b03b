"""What `train.on_spike` does to real runs: one process and two Gloo ranks, a batch of noise, a NaN on one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.spike_run import BATCH, STEPS

ROOT = Path(__file__).parents[1]
OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
BAD = 45


def run(folder: Path, *arguments: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "tests.spike_run", str(folder), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=OUTSIDE, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path, name: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = (folder / "events" / f"rank_{rank}.jsonl").read_text().splitlines()
    return [found for line in lines if (found := json.loads(line)).get("event") == name]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder) if "loss" in row]


def test_warn_records_a_spike_and_skip_changes_nothing_before_it(tmp_path: Path):
    run(tmp_path / "warn", "warn", "data", BAD)
    run(tmp_path / "skip", "skip", "data", BAD)
    (warned,), (skipped,) = events(tmp_path / "warn", "spike"), events(tmp_path / "skip", "spike")
    assert (warned["step"], warned["kind"], warned["action"]) == (BAD, "loss", "warn")
    assert (skipped["step"], skipped["kind"], skipped["action"]) == (BAD, "loss", "skip")
    assert skipped["sequences"] == [(BAD - 1) * BATCH, BAD * BATCH - 1]
    assert not any(row["skipped"] for row in rows(tmp_path / "warn"))
    assert [row["step"] for row in rows(tmp_path / "skip") if row["skipped"]] == [BAD]
    assert [row["step"] for row in rows(tmp_path / "skip") if row["spike"]] == [BAD]
    # watching costs no bit: until the update that is dropped, both runs are the same
    assert losses(tmp_path / "warn")[:BAD] == losses(tmp_path / "skip")[:BAD]
    assert losses(tmp_path / "warn")[BAD] != losses(tmp_path / "skip")[BAD]


@pytest.mark.slow
def test_two_ranks_rewind_to_the_checkpoint_and_leave_the_bad_data_behind(tmp_path: Path):
    run(tmp_path, "rewind", "data", BAD, 10, 20, ranks=2)
    (went,) = events(tmp_path, "rewound")
    assert (went["step"], went["to_step"], went["consumed"]) == (BAD, 40, BAD * BATCH)
    steps = [row["step"] for row in rows(tmp_path) if "loss" in row]
    assert steps == [*range(1, BAD + 1), *range(41, STEPS + 1)]
    (resume,) = [row for row in rows(tmp_path) if row.get("event") == "resume"]
    assert resume["step"] == 40
    assert [row["step"] for row in rows(tmp_path) if row.get("spike")] == [BAD], "the noise is not read again"
    saved = json.loads((tmp_path / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())
    assert saved["consumed"] == (STEPS + BAD - 40) * BATCH
    assert events(tmp_path, "spike", rank=1) == []


@pytest.mark.slow
def test_a_nan_on_one_rank_is_dropped_by_all(tmp_path: Path):
    run(tmp_path, "skip", "nan", BAD, ranks=2)
    (found,) = events(tmp_path, "spike")
    assert (found["step"], found["kind"], found["action"]) == (BAD, "nan", "skip")
    kept = [row for row in rows(tmp_path) if row["step"] != BAD]
    assert len(kept) == STEPS - 1
    assert all(isinstance(row["loss"], float) for row in kept), "the weights stayed finite"


@pytest.mark.slow
def test_beyond_the_cap_a_spike_is_only_recorded(tmp_path: Path):
    run(tmp_path, "rewind", "data", BAD, 0)
    assert [found["action"] for found in events(tmp_path, "spike")] == ["warn"]
    assert events(tmp_path, "rewound") == []
    assert not any(row["skipped"] for row in rows(tmp_path))


@pytest.mark.slow
def test_before_the_first_checkpoint_a_rewind_is_a_skip(tmp_path: Path):
    done = run(tmp_path, "rewind", "data", BAD, 10, 50)
    assert "no checkpoint yet" in done.stderr
    assert [row["step"] for row in rows(tmp_path) if row["skipped"]] == [BAD]
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))
