"""Faults on purpose, between the pools: what a test or a drill asks for through the environment.

    PDTRAIN_POOL_FAULTS='[{"kind": "corrupt", "rank": 0, "direction": "up", "step": 3, "bucket": 0, "times": 1}]'

kind: corrupt (a byte of the payload changes after its checksum was taken), delay (`seconds`), duplicate, reorder (the
message leaves after the next one), version (the header claims the weight version `version`, or the `incarnation`), slow
(every message waits `seconds`), kill (the rank dies by SIGKILL before it sends the message). rank: who sends.
`direction`, `step`, `bucket` may be absent: any. `times`: how often it strikes (default 1); `every_try`: also what is
sent again; `start`: the start of the job in which it strikes (default 1, the first).

`at`: slow and kill may strike elsewhere than before a message: "join" (the links are made), and on update ranks
"optimizer" (the first buckets of the step are applied), "keep" (a slot of its file is half written), "checkpoint".
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diag.errors import UsageError
from pdtrain.pools.message import Header
from pdtrain.restart import Restart

VARIABLE = "PDTRAIN_POOL_FAULTS"
KINDS = ("corrupt", "delay", "duplicate", "reorder", "version", "slow", "kill")
PLACES = ("send", "join", "optimizer", "keep", "checkpoint")


@dataclass(slots=True)
class Fault:
    """One fault, and how often it may still strike."""

    kind: str
    rank: int
    direction: str | None = None
    step: int | None = None
    bucket: int | None = None
    seconds: float = 0.0
    version: int = -1
    times: int = 1
    every_try: bool = False
    incarnation: int | None = None
    start: int = 1
    at: str = "send"

    def meets(self, direction: str, header: Header, tries: int) -> bool:
        """Whether it strikes this message, which was sent `tries` times before; counts."""
        if self.at != "send" or (tries and not self.every_try):
            return False
        wanted = ((self.direction, direction), (self.step, header.step), (self.bucket, header.bucket))
        if self.times <= 0 or any(want is not None and want != have for want, have in wanted):
            return False
        if self.kind != "slow":
            self.times -= 1
        return True

    def strike(self, at: str, step: int) -> None:
        """Be slow, or die, where the rank is now."""
        if self.at != at or self.step not in (None, step) or self.times <= 0:
            return
        if self.kind == "slow":
            time.sleep(self.seconds)
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def strike(faults: Iterable[Fault], at: str, step: int) -> None:
    """Whatever is to happen at this place."""
    for fault in faults:
        fault.strike(at, step)


def faults_of(rank: int) -> list[Fault]:
    """What the environment asks of this rank's sending.

    Raises UsageError: the variable is not what this module documents.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return []
    try:
        asked: list[dict[str, Any]] = json.loads(text)
        faults = [Fault(**fields) for fields in asked]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{VARIABLE} in the environment is no list of faults: {error}") from None
    if wrong := [fault.kind for fault in faults if fault.kind not in KINDS]:
        raise UsageError(f"{VARIABLE}: no fault {wrong[0]!r}; use one of {', '.join(KINDS)}")
    if wrong := [fault.at for fault in faults if fault.at not in PLACES]:
        raise UsageError(f"{VARIABLE}: no place {wrong[0]!r}; use one of {', '.join(PLACES)}")
    start = Restart.from_environment().start
    return [fault for fault in faults if fault.rank == rank and fault.start == start]
