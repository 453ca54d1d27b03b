"""A run that changes the split of its pools: what the launcher does, and that the curve is the one of a run by hand."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from diag.errors import UsageError
from pdtrain.config import Run, read_run, resolve
from pdtrain.pools.regroup import FILE, VARIABLE, Book, Move, Relaunch, read_book, regrouped, splits, write_book
from tests.commands.test_train_job import OUTSIDE, PDTRAIN, SMALL
from tests.diag.helpers import pdtrain
from tests.planting import plant_modules

#: What the pools are said to measure, by split: seconds of a step, busy seconds of a rank of each pool. Nothing else is
#: made up: the rule, the checkpoint, the end and the start are real.
PLANT = """
import os
from dataclasses import replace
MEASURED = {(2, 2): (940.0, 900.0, 375.0), (3, 1): (690.0, 640.0, 675.0)}

def rebalance(module):
    rule = module.propose
    def propose(measured, *rest, **more):
        size = sum(m.role == "compute" for m in measured)
        step, *busy = MEASURED[size, len(measured) - size]
        return rule([replace(m, step=step, busy=busy[m.role == "update"], own=None) for m in measured], *rest, **more)
    module.propose = propose

def manifest(module):
    commit = module.commit
    def refuse(*rest):
        module.commit = commit
        raise OSError(28, "No space left on device")
    module.commit = refuse

def step(module):
    raise SystemExit("planted: does not start")

PLANTS = {"pdtrain.pools.rebalance": rebalance}
if os.environ.get("PLANT_FULL_DISK"):
    PLANTS["pdtrain.checkpoint.manifest"] = manifest
if os.environ.get("PLANT_NO_START") and os.environ.get("PDTRAIN_POOL_LAUNCHER") == "regrouped":
    PLANTS["pdtrain.step"] = step
"""
CONFIG = (SMALL.replace("{tensor = 2}", "{tensor = 1}").replace("{expert = 2}", "{expert = 1}")
          .replace("train_batch = 4", "train_batch = 6").replace("micro_batch = 2", "micro_batch = 1")
          .replace("val_sequences = 4", "val_sequences = 0").replace("steps = 6", "steps = 26")
          .replace("warmup_steps = 1", 'warmup_steps = 1\nschedule = "constant"')
          + '[pools]\nmode = "stream"\nupdate_ranks = 2\ntimeout_seconds = 60\nrebalance_every = 12\n')  # fmt: skip


def words(folder: Path, *more: str) -> list[str]:
    (folder / "run.toml").write_text(CONFIG)
    plant_modules(folder, PLANT)
    return ["train", "run.toml", "--nproc", "4", *more]


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return OUTSIDE | {"PYTHONPATH": path} | more


def job(folder: Path, *more: str, plant: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PDTRAIN, *words(folder, *more)], cwd=folder, env=environment(folder, **(plant or {})),
                          capture_output=True, text=True, timeout=240)


def curve(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Step -> loss and gradient norm; each step once, whatever starts there were."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found: dict[int, tuple[float, float]] = {}
    for row in rows:
        if row.get("event") == "resume":
            found = {step: values for step, values in found.items() if step <= row["step"]}
        elif "loss" in row:
            found[row["step"]] = row["loss"], row["grad_norm"]
    return found


def events(run_dir: Path, name: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = (run_dir / "events" / f"rank_{rank}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event.get("event") == name]


AUTO = ("--set", "pools.rebalance=auto")


@pytest.mark.slow
def test_a_run_that_regroups_has_the_curve_of_one_that_was_stopped_and_resumed_by_hand(tmp_path: Path) -> None:
    done = job(tmp_path, "--run-dir", "auto", *AUTO)
    assert done.returncode == 0, done.stderr
    assert "regrouping the pools: 2 + 2 -> 3 + 1" in done.stderr
    first = job(tmp_path, "--run-dir", "hand", "--set", "train.steps=12")
    assert first.returncode == 0, first.stderr
    hand = job(tmp_path, "--run-dir", "hand", "--resume", "--set", "parallel.ranks=3", "--set", "pools.update_ranks=1")
    assert hand.returncode == 0, hand.stderr
    assert curve(tmp_path / "auto") == curve(tmp_path / "hand") and len(curve(tmp_path / "auto")) == 26

    looked = events(tmp_path / "auto", "pool_rebalance")
    assert [(event["step"], event["action"]) for event in looked] == [(12, "regroup"), (24, "stay")]
    assert looked[0]["split"] == [2, 2] and looked[0]["proposed"] == [3, 1]
    (made,) = events(tmp_path / "auto", "pool_regrouped")
    assert (made["step"], made["before"], made["after"], made["failed"]) == (12, [2, 2], [3, 1], False)
    assert made["seconds"] > 0 and not events(tmp_path / "auto", "pool_restored")
    report = pdtrain("diag", "pools", tmp_path / "auto", "--json").json()
    measured = next(f for f in report["findings"] if f["cause"] == "pool_measured")
    assert "after step 12 it went from 2 + 2 to 3 + 1 ranks" in measured["summary"]
    assert measured["numbers"]["regroupings"][0]["seconds"] == made["seconds"]
    whole = pdtrain("diag", "postmortem", tmp_path / "auto", "--json").json()
    assert whole["verdict"] != "failed", whole["headline"]
    assert not any("earlier starts" in note for note in whole["not_checked"]), "a change of the split is no crash"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_while_it_regroups_it_can_be_resumed(seed: int, tmp_path: Path) -> None:
    """SIGKILL for launcher and ranks at some moment after the wish: the checkpoint is there before anything ends."""
    process = subprocess.Popen([*PDTRAIN, *words(tmp_path, "--run-dir", "run", *AUTO, "--set", "checkpoint.every=5")],
                               cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    ranks: list[psutil.Process] = []
    try:
        wish, until = tmp_path / "run" / FILE, time.monotonic() + 120
        while not wish.exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random.Random(seed).random() * (0.3, 3.0, 9.0)[seed % 3])
        ranks = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    finally:
        process.kill()
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        process.wait()
    assert wish.exists(), "it never came to regroup"
    ended = bool(events(tmp_path / "run", "regrouping"))
    again = subprocess.run(
        [*PDTRAIN, "train", "--run-dir", "run", "--resume"], cwd=tmp_path, env=environment(tmp_path),
        capture_output=True, text=True, timeout=240)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert sorted(curve(tmp_path / "run")) == list(range(1, 27))
    resumed = [event["step"] for event in events(tmp_path / "run", "resume")]
    assert min(resumed) >= (12 if ended else 10), "a step that was saved is computed again"


@pytest.mark.slow
def test_a_split_that_does_not_start_is_given_up(tmp_path: Path) -> None:
    done = job(tmp_path, "--run-dir", "run", *AUTO, plant={"PLANT_NO_START": "1"})
    assert done.returncode == 0, done.stderr
    assert "3 + 1 ranks did not come as far as their first step; going back to 2 + 2" in done.stderr
    assert sorted(curve(tmp_path / "run")) == list(range(1, 27))
    (made,) = events(tmp_path / "run", "pool_regrouped")
    assert made["failed"]
    assert "made before" in events(tmp_path / "run", "pool_rebalance")[-1]["why"], "once is enough"


@pytest.mark.slow
def test_without_a_checkpoint_there_is_no_change(tmp_path: Path) -> None:
    done = job(tmp_path, "--run-dir", "run", *AUTO, "--set", "train.steps=20", plant={"PLANT_FULL_DISK": "1"})
    assert done.returncode == 0, done.stderr
    assert sorted(curve(tmp_path / "run")) == list(range(1, 21))
    assert len(events(tmp_path / "run", "checkpoint_failed")) == 1 and not events(tmp_path / "run", "regrouping")
    assert read_book(tmp_path / "run", config()).wanted is None


@pytest.mark.slow
def test_a_job_of_another_launcher_is_only_advised(tmp_path: Path) -> None:
    """torchrun started the ranks: nobody could start them again."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python"]
    line = [*torchrun, *PDTRAIN, "train", "run.toml", "--run-dir", "run", *AUTO, "--set", "train.steps=14"]
    words(tmp_path)
    done = subprocess.run(line, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=240)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert 'rebalance = "auto" only advises' in said
    assert "3 + 1 (compute + update) would balance" in said
    assert "--set parallel.ranks=3 --set pools.update_ranks=1" in said
    assert [event["action"] for event in events(tmp_path / "run", "pool_rebalance")] == ["advise"]
    assert not (tmp_path / "run" / FILE).exists()


# -- the launcher's side ------------------------------------------------------------------------------------------


def config(*more: str) -> Run:
    pools = ("pools.mode=stream", "pools.update_ranks=2", "pools.rebalance=auto")
    one = ("modules.attention.tensor=1", "modules.experts.expert=1", "train.micro_batch=2", "train.train_batch=12")
    return read_run(None, preset="tiny", overrides=(*pools, *one, "parallel.ranks=2", *more)).run


def move(after: tuple[int, int] = (3, 1), step: int = 11) -> Move:
    return Move(step=step, before=(2, 2), after=after, why="", began=0.0, step_seconds=1.0)


def test_another_split_keeps_the_batch() -> None:
    run = config()
    assert splits(run) == [(3, 1), (2, 2), (1, 3)]
    for split, micro, accumulation in (((3, 1), 2, 2), ((1, 3), 2, 6)):
        other = regrouped(run, *split)
        assert other is not None
        train = other.train
        assert (train.micro_batch, train.accumulation, resolve(other).train_batch) == (micro, accumulation, 12)
    assert regrouped(config("parallel.ranks=6"), 5, 3) is None, "5 ranks cannot share 12 sequences"
    wider = regrouped(config("parallel.ranks=3", "train.micro_batch=4"), 4, 1)
    assert wider is not None and wider.train.micro_batch == 3
    back = regrouped(wider, 3, 2, micro_batch=4)
    assert back is not None and back.train.micro_batch == 4, "the micro-batch does not shrink for ever"
    assert regrouped(config("parallel.ranks=4", "modules.attention.tensor=2", "modules.experts.expert=2"), 3, 3) is None


def launcher(folder: Path, run: Run) -> Relaunch:
    return Relaunch(run, folder, lambda config, resume: [str(config), str(resume)])


def test_the_launcher_grants_a_wish_once(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "first")
    relaunch = launcher(tmp_path, config())
    assert relaunch.again(0) is None, "nobody has asked"
    write_book(tmp_path, Book(micro_batch=4, wanted=move()))
    assert relaunch.again(1) is None and read_book(tmp_path, config()).wanted is None, "the job has failed"
    write_book(tmp_path, Book(micro_batch=4, wanted=move()))
    assert relaunch.again(0) == [str(tmp_path / "config.toml"), "latest"]
    assert os.environ[VARIABLE] == "regrouped"
    run = read_run(tmp_path / "config.toml").run
    assert (run.parallel.ranks, run.pools.update_ranks, resolve(run).train_batch) == (3, 1, 12)
    book = read_book(tmp_path, run)
    assert book.wanted is None and book.done == [move()]
    assert "2 + 2 -> 3 + 1" in capsys.readouterr().err
    assert relaunch.again(0) is None, "the run has ended"


def test_it_goes_back_only_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "first")
    relaunch = launcher(tmp_path, config())
    assert relaunch.again(1) is None, "the first split has no other to go back to"
    write_book(tmp_path, Book(micro_batch=4, wanted=move()))
    relaunch.again(0)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank_1.jsonl").write_text('{"event":"pool_step","step":12}\n{"span":"for')
    assert relaunch.again(1) is None, "it did train: its death has another cause"
    (tmp_path / "events" / "rank_1.jsonl").write_text('{"event":"pool_step","step":11}\n')
    assert relaunch.again(1) is not None
    assert read_run(tmp_path / "config.toml").run.parallel.ranks == 2
    assert read_book(tmp_path, config()).done[-1].failed
    assert relaunch.again(1) is None, "once"


def test_what_a_dead_launcher_left_is_settled(tmp_path: Path) -> None:
    write_book(tmp_path, Book(micro_batch=4, wanted=move()))
    launcher(tmp_path, config())
    assert read_book(tmp_path, config()) == Book(micro_batch=4), "config.toml has the old split: nothing was changed"
    write_book(tmp_path, Book(micro_batch=4, wanted=move()))
    launcher(tmp_path, config("parallel.ranks=3", "pools.update_ranks=1"))
    assert read_book(tmp_path, config()).done == [move()]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"micro_batch":"x"}', b'{"micro_batch":4,"done":[{"step":1}]}'])
def test_a_damaged_file_is_no_history(text: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(text)
    assert read_book(tmp_path, config()) == Book(micro_batch=2)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    relaunch = launcher(tmp_path / "gone", config())
    (tmp_path / "gone").mkdir()
    write_book(tmp_path / "gone", Book(micro_batch=4, wanted=move()))
    (tmp_path / "gone" / "config.toml").mkdir()
    (tmp_path / "gone" / "config.toml" / "x").touch()
    with pytest.raises(UsageError, match="the run is saved: go on with"):
        relaunch.again(0)


def test_a_wish_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    relaunch = launcher(tmp_path, config())
    (tmp_path / FILE).write_bytes(msgspec.json.encode(Book(micro_batch=4, wanted=move((4, 0)))))
    with pytest.raises(UsageError, match=r"4 \+ 0 ranks, which do not fit"):
        relaunch.again(0)


def test_a_dry_run_says_when_and_what(tmp_path: Path) -> None:
    shown = pdtrain("train", "--preset", "tiny", "--dry-run", "--json", "--set", "pools.mode=sync", "--set",
                    "pools.update_ranks=2", "--set", "parallel.ranks=4", "--set", "pools.rebalance=advise", "--set",
                    "train.train_batch=48", "--set", "train.steps=100", "--set", "pools.rebalance_every=40").json()
    assert shown["pools"]["rebalance"] == {"mode": "advise", "after_steps": [40, 80], "splits": [[4, 2], [2, 4]]}
