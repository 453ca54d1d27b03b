"""What dies with a compute rank and is nowhere else: its random numbers (router jitter), and what rounding took from
its gradients (error feedback). Weights it gets again from the update pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdtrain.pools.keep import Keep
from pdtrain.pools.message import Kind

if TYPE_CHECKING:
    from pdtrain.pools.compute import ComputeSide


class OwnState:
    """One compute rank's part in `pools.keep`: its own file, where it needs one, and the wait for the owners' files."""

    def __init__(self, side: ComputeSide) -> None:
        self.side = side
        self.keep: Keep | None = None
        run = side.resolved.run
        self.wanted = run.pools.keep is not None
        self.jitters = run.model.moe.jitter > 0
        self.consumed = 0  # sequences, with the step under way
        self._confirmed = -1  # the newest step that every owner of this rank's pieces has kept

    def begin(self, consumed: int) -> None:
        """A step begins after `consumed` sequences: keep what it starts from."""
        self.consumed = consumed + self.side.resolved.train_batch
        if self.keep is not None:
            self.keep.write(self.side.step, {}, self.tensors())

    def await_owners(self) -> None:
        """Nobody may commit a step, and overwrite what it kept before, until every owner has kept the last one.

        Raises PoolError: an update rank is gone or silent.
        """
        step = self.side.step
        if self.wanted and self._confirmed < step:
            with self.side.journal.waiting("pool_wait_weights"):
                for receiver in self.side.receivers.values():
                    receiver.take(Kind.KEPT, step)
            self._confirmed = step

    def tensors(self) -> list[Tensor]:
        """What the file holds of one version; the residuals are those that the next step adds to."""
        found = [torch.get_rng_state()] if self.jitters else []
        return found + self.side.feedback.residuals()

    def restore(self, version: int) -> None:
        """Take what this rank kept of `version`, where it did."""
        if self.keep is None or version not in self.keep.versions():
            return
        held = self.tensors()
        self.keep.read(version, held)
        self.keep.forget_beyond(version)
        if self.jitters:
            torch.set_rng_state(held[0])
