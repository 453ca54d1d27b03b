"""Trials as processes: they end in time, leave nobody behind, and a killed sweep goes on where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pdtrain.sweep.execute import end_leftovers, execute

#: Starts a child of a session of its own, as torchrun's agent does, and waits.
PARENT = ("import subprocess, sys, time; "
          "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', sys.argv[1]], "
          "start_new_session=True); print('started', flush=True); time.sleep(60)")  # fmt: skip


def alive(word: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if word in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_a_hung_trial_ends_with_all_it_started(tmp_path: Path):
    command = [sys.executable, "-c", PARENT, str(tmp_path / "mark")]
    ended = execute(command, tmp_path, timeout=1.5, tick=lambda seconds: None)
    assert ended.status is None and ended.said == "started"
    assert not alive(str(tmp_path / "mark"))


def test_an_interruption_ends_the_trial_first(tmp_path: Path):
    def interrupted(seconds: float) -> None:
        if b"started" in (tmp_path / "console.log").read_bytes():
            raise KeyboardInterrupt

    command = [sys.executable, "-c", PARENT, str(tmp_path / "mark")]
    with pytest.raises(KeyboardInterrupt):
        execute(command, tmp_path, timeout=30, tick=interrupted)
    assert not alive(str(tmp_path / "mark"))


def test_leftovers_of_a_killed_sweep_are_found_by_their_folder(tmp_path: Path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen([*sleep, "pdtrain.cli", "train", "--run-dir", str(tmp_path / "run")])
    other = subprocess.Popen([*sleep, "an editor of", str(tmp_path / "run")])
    try:
        time.sleep(0.3)  # until the command lines are there
        end_leftovers(tmp_path)
        assert ours.wait(10) is not None and other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


SMALL = ["model.layers=1", "model.dense_layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=2",
         "model.head_dim=16", "model.ffn_hidden=64", "train.sequence_length=32", "train.train_batch=4",
         "train.micro_batch=2", "modules.attention.tensor=1", "modules.experts.expert=1"]  # fmt: skip


@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_measures_nothing_twice(tmp_path: Path):
    """Real trials. One layout cannot be: it is a row with its reason."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "pdtrain.cli", "sweep", "--preset", "tiny", "--nproc", "1", "--steps", "5",
               "--grid", "train.micro_batch=2,4,8", "--out", str(tmp_path), "--json",
               *(word for text in SMALL for word in ("--set", text))]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    book = tmp_path / "trials.jsonl"

    def rows() -> list[dict[str, object]]:
        lines = book.read_bytes().split(b"\n")[:-1] if book.exists() else []
        return [row for row in map(json.loads, lines) if row["schema"] == "pdtrain.trial/1"]

    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while first.poll() is None and not rows():
            time.sleep(0.1)
    finally:
        first.kill()
        first.wait()
    before = rows()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, after = json.loads(done.stdout), rows()
    assert after[: len(before)] == before and len({row["trial"] for row in after}) == len(after) == 3
    assert [row["status"] for row in answer["not_measured"]] == ["refused"]
    assert len(answer["trials"]) == 2 and "causal model FLOP" in answer["mfu_convention"]
    assert all(row["loss"] == "ok" and row["peak_bytes_per_rank"] for row in answer["trials"])
    assert done.stderr == "" and not (tmp_path / "trials" / str(answer["trials"][0]["trial"])).exists()
