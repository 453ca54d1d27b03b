"""A process that nobody runs cannot end itself: a child of each rank ends it when it has been stopped for too long.

Without it the launcher of a host whose only rank was stopped (SIGSTOP, a debugger) waits for it for ever, long after
the other hosts have named it and gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from diag.probes.comm.control import process_state

_PR_SET_PDEATHSIG = 1
#: Seconds between two looks.
LOOK = 0.5


@contextmanager
def watched(timeout: float) -> Iterator[None]:
    """Fork the watcher of this process, before it has threads or a GPU; it ends with this process."""
    child = 0
    with suppress(OSError):  # no process is to be had: the probe does without
        child = _fork(timeout)
    try:
        yield
    finally:
        if child:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _fork(timeout: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        _look(parent, timeout)
    finally:
        os._exit(0)


def _look(parent: int, timeout: float) -> None:
    """Until `parent` is gone, or has been stopped for `timeout` seconds and is ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    stopped = 0.0
    while os.getppid() == parent:
        time.sleep(LOOK)
        stopped = stopped + LOOK if process_state(parent) in ("T", "t") else 0.0
        if stopped >= timeout:
            os.kill(parent, signal.SIGKILL)
            return
