"""Which start of a job this is: the launcher starts all ranks again after one has died (`pools.restarts`, or torchrun's
own `--max-restarts`), and each rank learns here that it is not the first to be started.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

#: Set by our own launcher, which knows more than torchrun tells: who died, and how.
VARIABLE = "PDTRAIN_RESTART"
#: Our own launcher's process, for its ranks.
LAUNCHER = "PDTRAIN_LAUNCHER_PID"
#: Who had started this process; torchrun or a wrapper where that is not our launcher.
_PARENT = os.getppid()


def launcher_is_gone() -> bool:
    """Whether our launcher, which had started this rank, was killed: nobody else would stop the rank.

    (The kernel's own notice, PR_SET_PDEATHSIG, comes once for every thread that the launcher had.)
    """
    return os.environ.get(LAUNCHER) == str(_PARENT) and os.getppid() != _PARENT


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended start number `start` of the job: the rank that failed first, and how (`was killed by SIGKILL`)."""

    start: int
    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Restart:
    """`launch` names the job over all its starts; `count` is how often it was started again before this start."""

    launch: str = ""
    count: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def start(self) -> int:
        """The number of this start, from 1."""
        return self.count + 1

    def after(self, rank: int, how: str) -> Restart:
        """The start that follows the failure of `rank`."""
        failures = (*self.failures, Failure(self.start, rank, how))
        return replace(self, count=self.count + 1, failures=failures)

    def told(self) -> list[dict[str, Any]]:
        """The failures for events and files."""
        return [asdict(failure) for failure in self.failures]

    def to_environment(self) -> str:
        """The value of `VARIABLE`."""
        return json.dumps({"launch": self.launch, "count": self.count, "failures": self.told()})

    @classmethod
    def from_environment(cls) -> Restart:
        """What the launcher says, ours or torchrun's; the first start where neither says anything."""
        try:
            said = json.loads(os.environ.get(VARIABLE, ""))
            failures = tuple(Failure(int(f["start"]), int(f["rank"]), str(f["how"])) for f in said["failures"])
            return cls(str(said["launch"]), int(said["count"]), failures)
        except (ValueError, KeyError, TypeError):
            count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
            return cls(os.environ.get("TORCHELASTIC_RUN_ID", ""), int(count) if count.isdigit() else 0)
