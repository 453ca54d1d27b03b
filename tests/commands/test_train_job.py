"""`pdtrain train` with real jobs: started here, under torchrun, stopped, resumed on another layout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
SMALL = """
[model]
hidden = 32
layers = 2
heads = 4
kv_heads = 2
head_dim = 8
ffn_hidden = 64
moe = {experts = 4, expert_hidden = 32}
[parallel]
ranks = 2
[modules]
attention = {tensor = 2}
experts = {expert = 2}
[train]
steps = 6
sequence_length = 32
micro_batch = 2
train_batch = 4
val_sequences = 4
[optimizer]
warmup_steps = 1
[recorder]
tensorboard = false
"""
PDTRAIN = [sys.executable, "-m", "pdtrain.cli"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=OUTSIDE, capture_output=True, text=True, timeout=240)


def steps(run_dir: Path) -> list[int]:
    """Steps with a training loss, in the order in which they were logged."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_job_runs_and_resumes_on_another_layout(folder: Path):
    done = run([*PDTRAIN, "train", "small.toml", "--run-dir", "run", "--set", "train.steps=3"], folder)
    assert done.returncode == 0, done.stderr
    assert steps(folder / "run") == [1, 2, 3]
    # the run directory knows its configuration; one rank does the work of two
    again = run(
        [
            *PDTRAIN, "train", "--run-dir", "run", "--resume", "--nproc", "1", "--set", "train.steps=6",
            "--set", "modules.attention.tensor=1", "--set", "modules.experts.expert=1",
            "--set", "train.accumulation=none",
        ],
        folder,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert steps(folder / "run") == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_torchrun_starts_the_same_command(folder: Path):
    done = run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", "--",
            *PDTRAIN, "train", "small.toml", "--run-dir", "run",
        ],
        folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert steps(folder / "run") == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_stopped_job_has_saved_what_it_did(folder: Path):
    job = subprocess.Popen(
        [*PDTRAIN, "train", "small.toml", "--run-dir", "run", "--set", "train.steps=100000"],
        cwd=folder, env=OUTSIDE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(steps(folder / "run")) > 2):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=120)
    assert job.returncode == 0, said
    reached = steps(folder / "run")[-1]
    done = run(
        [*PDTRAIN, "train", "--run-dir", "run", "--resume", "--set", f"train.steps={reached + 2}"], folder
    )
    assert done.returncode == 0, done.stderr
    assert steps(folder / "run") == list(range(1, reached + 3))


@pytest.mark.slow
def test_ranks_end_saved_when_their_launcher_is_killed(folder: Path):
    """Nobody else would stop them, and a resumed run would find them still writing to its directory."""
    command = [*PDTRAIN, "train", "small.toml", "--run-dir", "run", "--set", "train.steps=100000"]
    job = subprocess.Popen(command, cwd=folder, env=OUTSIDE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ranks = []
    try:
        metrics = folder / "run" / "metrics.jsonl"
        until = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert job.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        ranks = psutil.Process(job.pid).children()
        assert len(ranks) == 2
        job.kill()
        job.wait()
        _, alive = psutil.wait_procs(ranks, timeout=120)
        assert not alive, "the ranks train on without a launcher"
        (saved,) = (path for path in (folder / "run" / "checkpoints").iterdir() if path.is_dir())
        assert saved.name == f"step_{steps(folder / 'run')[-1]:08d}"
    finally:
        job.kill()
        for rank in ranks:
            if rank.is_running():
                rank.kill()
