"""After a death: where all ranks go on, and what that cost.

The launcher starts every rank again. Each says which versions it kept whole; the newest that all have is taken, and the
compute ranks get its weights like those of a checkpoint. Where there is none, all go back to the last checkpoint.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor

from diag.errors import UsageError
from pdtrain.config.schema import Pools
from pdtrain.pools.keep import Keep, name_of
from pdtrain.pools.plan import Plan
from pdtrain.restart import Restart

#: Room for one number of a buffer as JSON.
NUMBER_BYTES = 26


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank brings to the start: the versions it kept whole, None where it keeps nothing; or why it cannot."""

    versions: tuple[int, ...] | None = None
    adopted: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Agreement:
    """`version`: where all go on; None: nowhere that was kept. `newest`: the newest that any rank of the update pool
    kept whole. `lacking`: ranks without their part of it. `begun`: an earlier start of this job has trained."""

    version: int | None
    newest: int
    lacking: tuple[int, ...]
    begun: bool


def choose(held: Sequence[Held], update: Sequence[int], begun: bool = False) -> Agreement:
    """The newest version that all ranks can go on with.

    What a compute rank kept is its own random numbers and rounding; without it the update pool's version is still good.
    """
    kept = {rank: set(each.versions) for rank, each in enumerate(held) if each.versions is not None}
    common = set.intersection(*(kept.get(rank, set()) for rank in update))
    everywhere = common.intersection(*kept.values())
    version = max(everywhere or common, default=None)
    newest = max((v for rank in update for v in kept.get(rank, ())), default=0)
    wanted = newest if version is None else version
    lacking = tuple(rank for rank, versions in kept.items() if wanted not in versions)
    return Agreement(version, newest, lacking, begun or any(each.adopted for each in held))


def open_keep(
    settings: Pools, run_dir: Path, rank: int, plan: Plan, like: Sequence[Tensor], numbers: int
) -> tuple[Keep | None, Held]:
    """This rank's file, and what it holds. `like`: what it will keep; `numbers`: how many beside, in JSON."""
    if settings.keep is None or not like:
        return None, Held()
    restart = Restart.from_environment()
    identity = hashlib.sha256(f"{restart.launch}\n{run_dir.absolute()}\n{plan!r}".encode()).hexdigest()
    try:
        keep = Keep(Path(settings.keep) / name_of(run_dir, rank), identity, like, NUMBER_BYTES * numbers,
                    adopt=restart.count > 0)  # fmt: skip
    except UsageError as error:
        return None, Held(error=str(error))
    return keep, Held(tuple(keep.versions()) if keep.adopted else (), keep.adopted)


def agree(mine: Held, plan: Plan, begun: bool) -> Agreement:
    """What all ranks kept; collective over the job.

    Raises UsageError on every rank: one of them cannot keep what it should.
    """
    held: list[Any] = [None] * (len(plan.compute) + len(plan.update))
    dist.all_gather_object(held, (mine.versions, mine.adopted, mine.error))
    everybody = [Held(*each) for each in held]
    for rank, each in enumerate(everybody):
        if each.error:
            raise UsageError(f"rank {rank}: {each.error}")
    return choose(everybody, plan.update, begun)


def has_begun(run_dir: Path) -> bool:
    """Whether an earlier start of this job has joined its pools: it is not the first that is to be started again."""
    restart = Restart.from_environment()
    if not restart.count:
        return False
    launch = msgspec.json.encode({"launch": restart.launch})[1:-1]  # as events are written
    try:
        with (run_dir / "events" / "rank_0.jsonl").open("rb") as stream:
            return any(row.startswith(b'{"event":"pool"') and launch in row for row in stream)
    except OSError:
        return False


def rejoined(agreement: Agreement, step: int, source: str, last_row: dict[str, Any], compute: int) -> Rejoined:
    """How this start goes on after `step`. `last_row`: of metrics.jsonl, before this start; `compute`: ranks."""
    when = last_row.get("time")
    return Rejoined(
        Restart.from_environment(), step, max(step, agreement.newest, last_row.get("step", 0)), source,
        agreement.lacking, compute, time.time() - when if isinstance(when, (int, float)) else None,
    )


@dataclass(frozen=True, slots=True)
class Rejoined:
    """How a start after a death went on: event `pool_restart`, and a line for people.

    source: "kept", "checkpoint" or "beginning". `reached`: the last step that was done before. `seconds`: from the last
    record of the start before to here.
    """

    restart: Restart
    step: int
    reached: int
    source: str
    lacking: tuple[int, ...]
    compute: int
    seconds: float | None

    @property
    def lost_steps(self) -> int:
        return max(0, self.reached - self.step)

    def fields(self) -> dict[str, Any]:
        return {
            "start": self.restart.start, "failures": self.restart.told(), "step": self.step, "reached": self.reached,
            "lost_steps": self.lost_steps, "source": self.source, "lacking": list(self.lacking),
            "seconds": None if self.seconds is None else round(self.seconds, 3),
        }

    def line(self) -> str:
        """What happened, where it goes on, and what it cost."""
        why = ""
        if self.restart.failures:
            last = self.restart.failures[-1]
            why = f", because {self._name(last.rank)} {last.how}"
        where = {
            "kept": f"all ranks go on after step {self.step}, which the update pool has kept",
            "checkpoint": f"all ranks go back to the checkpoint of step {self.step}",
            "beginning": "all ranks begin anew, no checkpoint was saved yet",
        }[self.source]
        if self.lacking:
            names = ", ".join(map(self._name, self.lacking[:4]))
            whole = f"a whole copy of step {self.reached}"
            part = "its own random numbers and rounding" if self.source == "kept" else whole
            where += f" ({names} did not keep {part})"
        first = self.step + 1
        lost = "nothing is lost" if not self.lost_steps else f"step {first} is lost and computed again" \
            if self.reached == first else f"steps {first} to {self.reached} are lost and computed again"
        return f"pools: start {self.restart.start}{why}: {where}; {lost}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({'compute' if rank < self.compute else 'update'})"
