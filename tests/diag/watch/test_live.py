"""What a watch says while the test writes the run, step by step, on a stopped clock."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.diag.watch.helpers import START, Watched, append, events, megatron, metrics


def test_a_nan_is_an_alarm_with_the_very_point_and_over_when_losses_are_numbers_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics(range(1, 60)))
    watched = Watched(tmp_path)
    assert watched.ticks(3) == []
    append(path, metrics(range(60, 61), loss="NaN"))
    assert watched.tick() == ["raised loss_nan"]
    alarm = watched.watch.alarms.active[0]
    assert alarm.finding.where.step == 60
    assert alarm.finding.playbook == "loss-nan" and alarm.finding.fix
    for step in range(61, 240):
        append(path, metrics(range(step, step + 1)))
        watched.tick()
    assert watched.active == []
    assert [c.event for c in watched.changes if c.alarm.finding.cause == "loss_nan"] == ["raised", "cleared"]


def test_a_healthy_run_is_silent_to_its_end_and_the_watch_ends(tmp_path: Path) -> None:
    for rank in range(2):
        append(tmp_path / f"events/rank_{rank}.jsonl", events(rank, range(0), start=True))
    watched = Watched(tmp_path)
    for step in range(1, 80):
        append(tmp_path / "metrics.jsonl", metrics(range(step, step + 1)))
        for rank in range(2):
            append(tmp_path / f"events/rank_{rank}.jsonl", events(rank, range(step, step + 1)))
        watched.tick()
    assert watched.watch.ended is None
    for rank in range(2):
        append(tmp_path / f"events/rank_{rank}.jsonl", json.dumps({"event": "end", "time": START, "ok": True}) + "\n")
    watched.ticks(4)
    assert watched.watch.ended == "finished"
    assert watched.changes == [] and watched.watch.exit_status() == 0
    assert watched.ticks(5, 1000.0) == [], "what has finished may be silent"


def test_a_rank_that_becomes_slow_is_named_and_cleared_when_it_is_not(tmp_path: Path) -> None:
    def run(steps: range, slow: float = 0.1) -> None:
        for rank in range(4):
            append(tmp_path / f"events/rank_{rank}.jsonl",
                   events(rank, steps, attention=slow if rank == 2 else 0.1, start=steps.start == 1))
        append(tmp_path / "metrics.jsonl", metrics(steps))

    run(range(1, 21))
    watched = Watched(tmp_path)
    watched.ticks(2)
    for step in range(21, 40):
        run(range(step, step + 1))
        watched.tick()
    assert watched.changes == []
    said = []
    for step in range(40, 44):
        run(range(step, step + 1), slow=0.25)
        said += watched.tick()
    assert said == ["raised straggler"]
    assert watched.watch.alarms.active[0].finding.where.ranks == [2]
    for step in range(44, 120):
        run(range(step, step + 1))
        watched.tick()
    assert [c.event for c in watched.changes] == ["raised", "cleared"]


@pytest.mark.parametrize("slow_steps, raised_at", [(2, []), (3, [32])])
def test_three_measured_steps_tell_a_rank_that_is_slower_by_far_and_two_do_not(
        tmp_path: Path, slow_steps: int, raised_at: list[int]) -> None:
    watched = Watched(tmp_path)
    at = []
    append(tmp_path / "metrics.jsonl", metrics(range(1, 2)))
    for step in range(1, 40):
        for rank in range(4):
            slow = 0.3 if rank == 2 and 30 <= step < 30 + slow_steps else 0.1
            append(tmp_path / f"events/rank_{rank}.jsonl",
                   events(rank, range(step, step + 1), attention=slow, start=step == 1))
        append(tmp_path / "metrics.jsonl", metrics(range(step + 1, step + 2)))
        at += [step for said in watched.tick() if said == "raised straggler"]
    assert at == raised_at


def test_the_one_that_was_fast_is_not_slow_when_the_other_recovers(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    append(tmp_path / "metrics.jsonl", metrics(range(1, 2)))
    for step in range(1, 160):
        for rank in range(2):
            slow = 0.25 if rank == 1 and 40 <= step < 100 else 0.1
            append(tmp_path / f"events/rank_{rank}.jsonl",
                   events(rank, range(step, step + 1), attention=slow, start=step == 1))
        append(tmp_path / "metrics.jsonl", metrics(range(step + 1, step + 2)))
        watched.tick()
    said = [(c.event, c.alarm.finding.where.ranks) for c in watched.changes if c.alarm.finding.cause == "straggler"]
    assert said == [("raised", [1]), ("cleared", [1])]


def test_silence_is_an_alarm_after_the_usual_interval_and_over_with_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics(range(1, 30), seconds=20.0))
    os.utime(path, (START, START))
    watched = Watched(path)
    watched.ticks(2)
    append(path, metrics(range(30, 31), seconds=20.0))
    watched.tick()
    assert watched.tick(150) == []
    assert watched.tick(60) == ["raised hang_silent"]
    summary = watched.watch.alarms.active[0].finding.summary
    assert "No progress since" in summary and "usually every 20 s" in summary and "the last step is 30" in summary
    append(path, metrics(range(31, 32), seconds=20.0))
    assert watched.tick() == ["cleared hang_silent"]


def test_a_slow_start_is_no_silence(tmp_path: Path) -> None:
    append(tmp_path / "run.log", "loading model\n")
    watched = Watched(tmp_path)
    assert watched.ticks(100, 10.0) == []
    assert watched.ticks(100, 10.0) == ["raised hang_silent"]


def test_a_console_log_of_another_trainer(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    append(path, "using world size: 8\n" + megatron(range(1, 80)))
    watched = Watched(path)
    assert watched.ticks(2) == []
    assert watched.watch.run is not None and len(watched.watch.run.columns["loss"]) == 79
    append(path, 'Traceback (most recent call last):\n  File "train.py", line 10, in <module>\n    main()\n')
    assert watched.tick() == [], "the traceback is not whole yet"
    append(path, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity "
                 "of 79.15 GiB of which 10.00 MiB is free.\n")
    assert "raised cuda_oom" in watched.ticks(4)


def test_a_progress_bar_is_progress_before_its_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    append(path, "start\n")
    watched = Watched(path)
    for step in range(1, 200):
        append(path, f"\rEpoch 1:  {step / 10:.0f}%|##   | {step}/1000 [00:{step % 60:02}<10:00, 1.0it/s, loss=2.5]")
        watched.tick()
    assert watched.watch.pulse.step is not None and watched.watch.pulse.step > 150
    assert watched.changes == []


def test_an_old_spike_is_history_and_a_new_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bump = dict.fromkeys(range(150, 158), 7.0)
    append(path, metrics(range(1, 600), loss={s: bump.get(s, 2.0 + 0.01 * (s % 7)) for s in range(1, 600)}))
    watched = Watched(path)
    assert watched.ticks(3) == []
    for step in range(600, 800):
        high = 640 <= step < 648
        append(path, metrics(range(step, step + 1), loss=7.0 if high else 2.0 + 0.01 * (step % 7)))
        watched.tick()
    kinds = [(c.event, c.alarm.finding.cause) for c in watched.changes]
    assert ("raised", "loss_spike") in kinds or ("raised", "loss_divergence") in kinds
    assert watched.active == [], "it came back"


def test_a_restart_that_does_steps_again_is_one_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics(range(1, 100)))
    watched = Watched(path)
    watched.ticks(2)
    append(path, json.dumps({"event": "resume", "time": START, "step": 50}) + "\n" + metrics(range(51, 120)))
    assert watched.ticks(3) == []
    run = watched.watch.run
    assert run is not None
    assert run.columns["loss"].steps.tolist() == list(range(1, 120))
    assert [resume.step for resume in run.resumes] == [50]


@pytest.mark.parametrize("broken", ["", "\n\n\n", "{", "\0\0\0\0", "[1, 2]\n", '{"step": 1}\n',
                                    "\xff\xfe garbage \x1b[2J\n"])
def test_odd_files_are_no_trouble(tmp_path: Path, broken: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(broken.encode("latin-1"))
    (tmp_path / "x.log").write_bytes(broken.encode("latin-1"))
    watched = Watched(tmp_path)
    assert watched.ticks(3) == []
    append(tmp_path / "metrics.jsonl", "\n" + metrics(range(1, 50)))
    assert watched.ticks(5) == []
    assert watched.watch.problem is None
