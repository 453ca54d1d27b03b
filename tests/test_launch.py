"""Starting a job on this machine: who failed first, what is kept, how it stops. The ranks here are small scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
from pdtrain.launch import launch  # noqa: E402

REPORT = "import os, sys; print(*map(os.environ.get, ['RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS']), sys.argv[1:])"


def streams(run_dir: Path, rank: int, name: str) -> str:
    """What a rank wrote, over all attempts."""
    return "".join(file.read_text() for file in run_dir.glob(f"logs/torchrun/*/attempt_0/{rank}/{name}.log"))


def test_ranks_get_their_place_and_options_are_not_swallowed(tmp_path: Path, capfd):
    before = dict(os.environ)
    options = ["--nproc", "7", "--run-dir", "x", "--start"]
    assert launch(["-c", REPORT, *options], processes=2, run_dir=tmp_path, threads=3) == 0
    assert capfd.readouterr().out == f"0 2 3 {options}\n"
    assert streams(tmp_path, 1, "stdout") == f"1 2 3 {options}\n"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("raise ValueError('bad \\x1b[31m shard')", 1, "exit status 1; its last line: ValueError: bad \\x1b[31m shard"),
        ("sys.exit(5)", 5, "rank 1 failed first: it ended with exit status 5"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 failed first: it was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_first_failure_decides_status_and_words(end: str, status: int, words: str, tmp_path: Path, capfd):
    code = f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)"
    began = time.monotonic()
    assert launch(["-c", code], processes=2, run_dir=tmp_path) == status
    assert time.monotonic() - began < 45, "the other rank was not stopped"
    printed = capfd.readouterr().err
    assert words in printed
    assert f"pdtrain diag postmortem {tmp_path}" in printed
    assert "Root Cause (first observed failure)" in (tmp_path / "logs" / "launcher.log").read_text()


def test_a_job_is_started_again_for_as_long_as_it_is_asked(tmp_path: Path, capfd):
    """Pools that regroup: the next arguments follow from the status; each start has a log folder of its own."""
    following, seen = iter([["-c", "import sys; sys.exit(3)"], None]), []

    def again(status: int) -> list[str] | None:
        seen.append(status)
        return next(following)

    assert launch(["-c", "print('first')"], processes=1, run_dir=tmp_path, again=again) == 3
    assert seen == [0, 3] and capfd.readouterr().out == "first\n"
    assert len(list((tmp_path / "logs" / "torchrun").iterdir())) == 2


def test_usage_error_of_rank_0_is_said_once(tmp_path: Path, capfd):
    code = "import os, sys; print('pdtrain: one line', file=sys.stderr); sys.exit(2)"
    assert launch(["-c", code], processes=1, run_dir=tmp_path) == 2
    assert capfd.readouterr().err == "pdtrain: one line\n"


def test_a_usage_error_of_all_ranks_is_said_once(tmp_path: Path, capfd):
    """Whoever of them ends first: rank 0 says it on this terminal, a little later here."""
    code = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \
           "time.sleep(os.environ['RANK'] == '0'); print('pdtrain: one line', file=sys.stderr); sys.exit(2)"
    assert launch(["-c", code], processes=3, run_dir=tmp_path) == 2
    assert capfd.readouterr().err == "pdtrain: one line\n"


POLITE = """
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(f"ready-{os.environ['RANK']}", "w").close()
time.sleep(60)
"""
PARENT = """
import pathlib, sys
from pdtrain.launch import launch
sys.exit(launch(["-c", sys.argv[1]], processes=2, run_dir=pathlib.Path("run")))
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    """A launching process whose two ranks are running."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, code], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
        assert parent.poll() is None, parent.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return parent


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stop_signal_lets_every_rank_save(number: int, status: int, tmp_path: Path):
    parent = start(POLITE, tmp_path)
    parent.send_signal(number)
    out, err = parent.communicate(timeout=30)
    assert (parent.returncode, out) == (status, "saved\n")
    assert streams(tmp_path / "run", 1, "stdout") == "saved\n"
    assert "the ranks save and exit" in err


def test_a_second_signal_kills_what_does_not_stop(tmp_path: Path):
    parent = start(POLITE.replace("sys.exit(0)", "return"), tmp_path)
    parent.send_signal(signal.SIGINT)
    time.sleep(0.5)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=30)
    assert parent.returncode == 137


def test_a_directory_that_cannot_be_made_is_a_usage_error(tmp_path: Path):
    from diag.errors import UsageError

    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        launch(["-c", ""], processes=1, run_dir=tmp_path / "file")


DYING = """
import os, sys, time
from pdtrain.restart import Restart
restart = Restart.from_environment()
if os.environ["RANK"] == "0":
    print(restart.start, [(f.start, f.rank, f.how) for f in restart.failures], flush=True)
elif restart.count < int(sys.argv[1]):
    os.kill(os.getpid(), 9) if sys.argv[2] == "kill" else sys.exit(int(sys.argv[2]))
time.sleep(60 if restart.count < int(sys.argv[1]) else 0)
"""


def test_dead_ranks_are_started_again_and_know_it(tmp_path: Path, capfd):
    assert launch(["-c", DYING, "1", "kill"], processes=2, run_dir=tmp_path, restarts=2) == 0
    printed = capfd.readouterr()
    assert printed.out == "1 []\n2 [(1, 1, 'was killed by SIGKILL')]\n"
    assert printed.err == "pdtrain: rank 1 failed first: it was killed by SIGKILL; all ranks start again (1 of 2)\n"


@pytest.mark.parametrize(("how", "status", "starts"), [("2", 2, 1), ("5", 5, 2)])
def test_a_wrong_command_is_not_started_again(how: str, status: int, starts: int, tmp_path: Path, capfd):
    assert launch(["-c", DYING, "9", how], processes=2, run_dir=tmp_path, restarts=1) == status
    assert len(capfd.readouterr().out.splitlines()) == starts
