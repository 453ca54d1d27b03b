"""`pools.rebalance`, on the compute ranks: every so many steps both pools say how busy they were, and rank 0 applies
the rule of `diag.pools.rebalance`.

The update ranks are asked with what follows the step before the boundary and answer with their report, so that nobody
waits. For a change of the split everything is saved, every rank ends in good order, and the launcher starts them again
(`pdtrain.pools.regroup`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from diag.pools.balance import verdict
from diag.pools.gather import COMPUTE, UPDATE
from diag.pools.legal import command
from diag.pools.ratio import split_words
from diag.pools.rebalance import Change, Measured, Proposal, propose
from pdtrain.config.resolved import LEAST_WINDOW
from pdtrain.pools.compute import ComputeSide
from pdtrain.pools.regroup import (
    VARIABLE,
    Move,
    limits_of,
    read_book,
    regrouped,
    split_of,
    write_book,
)
from pdtrain.pools.state import RemoteCheckpointer
from pdtrain.restart import Restart

if TYPE_CHECKING:
    from pdtrain.instruments import Instruments

#: Until a change was made, it is taken to cost this many times what the start of this process took: the end of the
#: ranks and the checkpoint are of the same kind as their start and its loading.
STARTS_PER_CHANGE = 2.0


class Rebalance:
    """Looks at the pools at coarse boundaries. Collective over the compute pool where it says so."""

    def __init__(
        self, pools: ComputeSide, checkpoints: RemoteCheckpointer, instruments: Instruments, run_dir: Path, start: int
    ) -> None:
        """Training goes on after step `start`. Says and records what the change before this start has cost."""
        self.pools = pools
        self.checkpoints = checkpoints
        self.instruments = instruments
        self.run = pools.resolved.run
        self.run_dir = run_dir
        self.start = start
        self.every = pools.rebalance_every
        self.auto = self.run.pools.rebalance == "auto"
        self.leader = pools.rank == 0
        self._said: tuple[str, str] | None = None
        if not self.leader:
            return
        self.book = read_book(run_dir, self.run)
        started = os.environ.get(VARIABLE)
        self.cost = STARTS_PER_CHANGE * (time.time() - psutil.Process().create_time())
        if started in ("regrouped", "went back") and self.book.done and not Restart.from_environment().count:
            self._tell_cost(self.book.done[-1])
        if self.auto and started is None:
            self.auto = False
            instruments.note('pools.rebalance = "auto" only advises: another launcher has started this job, which '
                             "pdtrain cannot start again (with pdtrain train --nproc it can)")
        if self.book.wanted is not None:  # of a start that died before it was granted
            self._wish(None)

    def _tell_cost(self, move: Move) -> None:
        seconds = time.time() - move.began
        self.cost = seconds
        before, after = split_words(move.before), split_words(move.after)
        self.instruments.recorder.event(
            "pool_regrouped", step=move.step, before=list(move.before), after=list(move.after), why=move.why,
            seconds=round(seconds, 3), failed=move.failed,
        )
        if move.failed:
            said = f"{after} did not start; back at {before} (compute + update)"
        else:
            said = f"regrouped {before} -> {after} (compute + update)"
        self.instruments.note(f"pools: {said} after step {move.step}, {seconds:.1f} s without training")

    def wants(self, step: int) -> bool:
        """Whether the run is to be saved after `step` and started again with another split. Collective.

        False at every step that is no boundary, and where too few steps were measured since the start.
        """
        if step % self.every:
            return False
        steps, seconds, busy, own = self.pools.journal.take_window()
        if step - self.start < LEAST_WINDOW:
            return False
        mine = Measured(self.pools.rank, COMPUTE, steps, seconds, busy, own)
        everybody: list[Any] = [None] * dist.get_world_size(self.pools.group)
        dist.all_gather_object(everybody, mine, group=self.pools.group)
        decision = [self._decide(step, everybody) if self.leader else False]
        dist.broadcast_object_list(decision, src=0, group=self.pools.group)
        return bool(decision[0])

    def _decide(self, step: int, compute: list[Measured]) -> bool:
        """Rank 0: apply the rule, record and say what follows."""
        update = [Measured(rank, UPDATE, steps, seconds, busy, None, state)
                  for rank, steps, seconds, busy, state in self.pools.pool_report(step - 1)]
        left = self.run.train.steps - step
        past = [Change(move.before, move.after, move.step_seconds) for move in self.book.done]
        found = propose(
            [*compute, *update], lambda c, u: regrouped(self.run, c, u, self.book.micro_batch) is not None,
            steps_left=left, cost_seconds=self.cost, past=past,
        )
        action = "stay" if not found.change else "regroup" if self.auto else "advise"
        problem = ""
        if action == "regroup":
            problem = self._wish(self._move(step, found))
            action = "stay" if problem else action
        self.instruments.recorder.event("pool_rebalance", step=step, action=action, **_fields(found, problem))
        line = self._line(step, found, action, problem)
        about = (action, found.choice.best.text) if found.choice is not None else None
        if line and about != self._said:  # once, not at every boundary
            self.instruments.note(line)
        self._said = about
        return action == "regroup"

    def _move(self, step: int, found: Proposal) -> Move:
        assert found.choice is not None and found.split is not None
        best = found.choice.best
        return Move(step=step, before=split_of(self.run), after=(best.compute, best.update), why=found.why,
                    began=time.time(), step_seconds=found.split.step_seconds)

    def _line(self, step: int, found: Proposal, action: str, problem: str) -> str:
        """One line for people; empty where the pools are balanced or could not be measured."""
        split, choice = found.split, found.choice
        if split is None or choice is None:
            return ""
        busy = (f"step {step}: pools: compute ranks are busy {split.compute_busy:.0%} of a step, update ranks "
                f"{split.update_busy:.0%}")
        if problem:
            return f"{busy}; {problem}"
        if action == "regroup":
            return f"{busy}: saving, and going on with {choice.best.text} instead of {split.text}; {found.why}"
        if action == "advise":
            best, limits = choice.best, limits_of(self.run, self.book.micro_batch)
            typed = command(limits, str(self.run_dir), best.compute, best.update)
            return f"{busy}. {verdict(choice)} Stop the run, which saves it, and: {typed}"
        return f"{busy}; the split stays: {found.why}"

    def _wish(self, move: Move | None) -> str:
        """Hand `move` to the launcher, or take it back; why that failed."""
        self.book.wanted = move
        try:
            write_book(self.run_dir, self.book)
        except OSError as error:
            self.book.wanted = None
            return f"the split stays: {self.run_dir} cannot be written: {error.strerror}"
        return ""

    def save(self, step: int, consumed: int) -> bool:
        """Save everything; the update ranks end when it is complete, and go on where it could not be written."""
        saved = self.checkpoints.save(step, consumed, None, end="saved")
        if not saved and self.leader:
            self._wish(None)
            self.instruments.note(f"step {step}: pools: not saved, so the split stays: {self.checkpoints.problem}")
        return saved


def _fields(found: Proposal, problem: str) -> dict[str, Any]:
    """`pool_rebalance` in events/ (docs/run-directory.md)."""
    fields: dict[str, Any] = {"why": problem or found.why}
    if found.split is not None:
        split = found.split
        fields |= {"split": [split.compute, split.update], "compute_busy": round(split.compute_busy, 4),
                   "update_busy": round(split.update_busy, 4), "step_seconds": round(split.step_seconds, 6)}
    if found.slow:
        fields["slow"] = found.slow
    if found.choice is not None:
        best = found.choice.best
        fields |= {"proposed": [best.compute, best.update], "predicted_seconds": round(best.step_seconds, 6)}
    for name, value in (("saved_seconds", found.saved_seconds), ("cost_seconds", found.cost_seconds)):
        if value is not None:
            fields[name] = round(value, 3)
    return fields
