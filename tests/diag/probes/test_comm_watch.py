"""A rank that is stopped for good is ended by its own watcher; a host that is cut off writes over nobody's files."""

from __future__ import annotations

import os
import signal
import time

import pytest

from diag.commands.output import Output
from diag.probes.comm.control import process_state
from diag.probes.comm.rank import Shown
from diag.probes.comm.watch import watched
from tests.diag.probes.comm_job import wait_for


def _child(seconds: float) -> int:
    child = os.fork()
    if not child:
        try:
            with watched(1.0):
                time.sleep(seconds)
        finally:
            os._exit(0)
    return child


def test_a_stopped_process_is_ended_and_a_running_one_is_not() -> None:
    child = _child(60.0)
    time.sleep(0.2)
    os.kill(child, signal.SIGSTOP)
    assert wait_for(lambda: process_state(child) in ("Z", ""), 20.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    sound = _child(2.0)
    assert os.waitstatus_to_exitcode(os.waitpid(sound, 0)[1]) == 0


def test_a_host_that_knows_a_part_writes_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(Output(json=True, html="page.html", file="-", force=True), save="probe.json", png=None)
    assert shown.printed() == Shown(Output(json=True))
    assert "--save, --html not written" in capsys.readouterr().err
