"""Runs the scripts under peers/ in a Python that has the real libraries, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile


def run_peer(python: str, *arguments: object, seconds: float = 240, **environment: str) -> None:
    """Run `python *arguments`; fails with the end of what it printed.

    Output goes to a file and the session is ended as a whole: megatron-core starts a writer process that outlives its
    parent and would hold a pipe open for ever.
    """
    with tempfile.TemporaryFile() as output:
        job = subprocess.Popen([python, *map(str, arguments)], stdout=output, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL, env=os.environ | environment, start_new_session=True)
        try:
            status: int | str = job.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"not ended after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        output.seek(0)
        assert status == 0, f"{status}: {output.read()[-3000:].decode('utf-8', 'backslashreplace')}"
