"""A run directory that was started twice: only the end of the last start is judged."""

from __future__ import annotations

import json
from pathlib import Path

from diag.diagnose import diagnose
from diag.schema import Report

START = "INFO pdtrain.recorder.recorder: rank {rank} of 2 on node-1, process {pid}"
KILLED = """\
W1129 19:52:34.311000 16077 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 16106 closing signal SIGTERM
E1129 19:52:34.411000 16077 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 16107) of binary: /usr/bin/python3
"""  # noqa: E501


def run_directory(root: Path, *, second: bool = True, ranks_of_second: tuple[int, ...] = (0, 1)) -> Path:
    """Preempted at 19:49, resumed at 19:52 and then killed on rank 1."""
    for folder in ("logs", "events", "dumps"):
        (root / folder).mkdir(parents=True)
    launcher = "W1129 19:48:44.010000 11200 torch/distributed/elastic.py:83] pdtrain starts 2 ranks\n"
    for rank in (0, 1):
        log = [f"2026-11-29T19:48:49.280Z [rank{rank}] {START.format(rank=rank, pid=11290 + rank)}",
               f"2026-11-29T19:49:05.834Z [rank{rank}] WARNING pdtrain.recorder.crash: received SIGTERM"]
        events: list[dict[str, object]] = [
            {"event": "start", "time": 1795981729.2, "rank": rank, "world_size": 2, "host": "node-1", "pid": 11290},
            {"event": "signal", "time": 1795981745.8, "signal": "SIGTERM", "last_step": 8},
            {"event": "end", "time": 1795981747.8, "ok": True, "last_step": 10}]
        if second and rank in ranks_of_second:
            log.append(f"2026-11-29T19:52:18.700Z [rank{rank}] {START.format(rank=rank, pid=16106 + rank)}")
            events += [{"event": "start", "time": 1795983138.7, "rank": rank, "world_size": 2, "host": "node-1",
                        "pid": 16106}, {"event": "resume", "time": 1795983138.8, "step": 10}]
        (root / "logs" / f"rank_{rank}.log").write_text("\n".join(log) + "\n")
        (root / "events" / f"rank_{rank}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events).replace(
            '": ', '":').replace(', "', ',"'))
    if second:
        launcher += "W1129 19:52:10.010000 16077 torch/distributed/elastic.py:83] pdtrain starts 2 ranks\n" + KILLED
    (root / "logs" / "launcher.log").write_text(launcher)
    return root


def root_of(report: Report) -> tuple[str, list[int]]:
    root = next(f for f in report.findings if f.role == "root")
    return root.cause, root.where.ranks


def test_the_end_of_an_earlier_start_is_not_the_root_of_the_last(tmp_path: Path) -> None:
    report = diagnose([run_directory(tmp_path / "run")])
    assert root_of(report) == ("killed_unconfirmed", [1])
    assert not [f for f in report.findings if f.cause == "preempted"]
    assert any("only the last start is judged" in note for note in report.not_checked)


def test_a_run_started_once_is_judged_whole(tmp_path: Path) -> None:
    report = diagnose([run_directory(tmp_path / "run", second=False)])
    assert root_of(report)[0] == "preempted"
    assert not any("last start" in note for note in report.not_checked)


def test_what_earlier_launches_and_set_aside_dumps_say_is_left_out(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    old = run / "logs" / "torchrun" / "20261129T194844Z-0a1b_x" / "attempt_0" / "1"
    new = run / "logs" / "torchrun" / "20261129T195210Z-2c3d_y" / "attempt_0" / "1"
    for folder, text in ((old, "Traceback (most recent call last):\n  File \"a.py\", line 3, in f\n    g()\n"
                               "ValueError: of the first start\n"), (new, "nothing to say\n")):
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)
    aside = run / "dumps" / "earlier_1"
    aside.mkdir()
    (aside / "stacks_1.txt").write_text((old / "stderr.log").read_text())
    report = diagnose([run])
    assert root_of(report) == ("killed_unconfirmed", [1])
    assert "of the first start" not in str(report.findings)
