"""Run scripts that use the recorder as real processes, and read back what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start(script: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    """`script` in a process of its own; `sys.argv[1:]` are `arguments`. Waits for nothing."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=kept | {"OMP_NUM_THREADS": "1"} | environ,
    )


def run(script: str, *arguments: object, timeout: float = 60.0, **environ: str) -> subprocess.CompletedProcess[str]:
    """`script` to its end; its output and exit status."""
    process = start(script, *arguments, **environ)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true value of `condition`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {condition}")


def rows(path: Path) -> list[dict[str, Any]]:
    """Every line as JSON; fails on a line that is not whole."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def events(run_dir: Path, rank: int = 0) -> dict[str, dict[str, Any]]:
    """The events of a rank by name, the last of each."""
    path = run_dir / "events" / f"rank_{rank}.jsonl"
    return {row["event"]: row for row in rows(path) if "event" in row} if path.exists() else {}
