"""Faults on purpose, between the pools: what a test or a drill asks for through the environment.

    PDTRAIN_POOL_FAULTS='[{"kind": "corrupt", "rank": 0, "direction": "up", "step": 3, "bucket": 0, "times": 1}]'

kind: corrupt (a byte of the payload changes after its checksum was taken), delay (`seconds`), duplicate, reorder (the
message leaves after the next one), version (the header claims the weight version `version`), slow (every message waits
`seconds`), kill (the rank dies by SIGKILL before it sends the message). rank: who sends. `direction`, `step`, `bucket`
may be absent: any. `times`: how often it strikes (default 1); `every_try`: also what is sent again.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from diag.errors import UsageError
from pdtrain.pools.message import Header

VARIABLE = "PDTRAIN_POOL_FAULTS"
KINDS = ("corrupt", "delay", "duplicate", "reorder", "version", "slow", "kill")


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

    def meets(self, direction: str, header: Header, tries: int) -> bool:
        """Whether it strikes this message, which was sent `tries` times before; counts."""
        if tries and not self.every_try:
            return False
        wanted = ((self.direction, direction), (self.step, header.step), (self.bucket, header.bucket))
        if self.times <= 0 or any(want is not None and want != have for want, have in wanted):
            return False
        if self.kind != "slow":
            self.times -= 1
        return True


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
    return [fault for fault in faults if fault.rank == rank]
