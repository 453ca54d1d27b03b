"""Drive the localiser on hosts made of namespaces: `LinkJob` keeps one process per host alive over many trials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from diag.probes.localise import Outcome
from tests.netns.hosts import Network

ROOT = Path(__file__).parents[2]


class LinkJob:
    """The processes of a network's hosts, as a context manager. Every call ends within `patience` seconds."""

    def __init__(self, network: Network, *, timeout: float = 10.0, patience: float = 120.0) -> None:
        self.network, self._timeout, self._patience = network, timeout, patience
        self.pids: list[int] = []
        self.seconds = 0.0

    def __enter__(self) -> LinkJob:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL",
                       "PYTHONPATH": str(ROOT)}
        names = [self.network.name(host) for host in range(self.network.count)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.netns.link_worker", str(self._timeout), self.network.address(0), *names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        self.pids = self._read("pids")["pids"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it (PR_SET_PDEATHSIG)
            self._process.wait()
        self._process.stdout.close()

    def locate(self, mode: str = "quick", passes: int = 1, during: Callable[[str], None] | None = None) -> Outcome:
        """One localisation; `during` hears of each round before it begins."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"mode": mode, "passes": passes}) + "\n")
        self._process.stdin.flush()
        answer = self._read("outcome", during)
        self.seconds = answer["seconds"]
        return msgspec.convert(answer["outcome"], Outcome, str_keys=True)

    def _read(self, key: str, during: Callable[[str], None] | None = None) -> dict[str, Any]:
        guard = threading.Timer(self._patience, self._process.kill)
        guard.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                answer = json.loads(line)
                if key in answer:
                    return dict(answer)
                if during is not None and "progress" in answer:
                    during(answer["progress"])
        finally:
            guard.cancel()
        raise AssertionError(f"the job ended, or did not answer within {self._patience:.0f} s")
