"""Start the broken job under torchrun and wait until every process of it is gone: for tests and the sample logs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("broken_job.py")
WORLD = 8
#: Seconds until a collective gives up; everything else is torch's import on few cores.
PATIENCE = 12
DEADLINE = 240


def launch(folder: Path, *arguments: str, torchrun: tuple[str, ...] = ("--standalone",), world: int = WORLD,
           job: Path = JOB, console: str = "console.log", **variables: str) -> None:
    """Run `job` on `world` ranks under torchrun, its console in `folder`; every process is gone afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--nproc-per-node", str(world), str(job),
               *arguments, "--folder", str(folder), "--timeout", str(PATIENCE)]
    run_to_the_end(command, folder / console, **variables)


def run_to_the_end(command: list[str], console: Path, **variables: str) -> None:
    """Run `command` in the console's folder for at most `DEADLINE` seconds, then kill its whole session."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with console.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment,
                                   start_new_session=True, cwd=console.parent)
        try:
            process.wait(DEADLINE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
