"""What the trainer does about a loss spike: `train.on_spike`.

warn: rank 0 looks at what is recorded anyway, at the end of each logging interval. Nothing is read, reduced or decided
in the step: no bit of training changes.

skip, rewind: every step waits for its loss and gradient norm before the weights move. Each rank judges the same reduced
numbers, and one more all-reduce makes the judgement of any rank that of all: a decision that differed between ranks
would be a hang. A suspect update is dropped, as if the batch had not been; under rewind the last checkpoint is restored
besides, and training goes on with the data behind the suspect batch (PaLM, arXiv 2204.02311, 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from diag.watch.online import OnlineDetector, Verdict
from pdtrain.parallel.meshes import Meshes

Action = Literal["warn", "skip", "rewind"]


@dataclass(frozen=True, slots=True)
class Spike:
    """A step that was judged suspect, and what is done about it."""

    verdict: Verdict
    action: Action

    def fields(self) -> dict[str, Any]:
        """What the event `spike` says (docs/run-directory.md)."""
        verdict = self.verdict
        return {"kind": verdict.kind, "value": verdict.value, "level": verdict.level, "z": verdict.z,
                "action": self.action}


class SpikeGuard:
    """Decides before the weights move; for `on_spike` skip and rewind. `most` actions, then it only warns.

    Not finite is different: the trainer never applies such an update, and the cap does not change that.
    """

    def __init__(self, action: Action, most: int, meshes: Meshes | None) -> None:
        self.action = action
        self.most = most
        self.meshes = meshes
        self.detector = OnlineDetector()
        self.taken = 0

    def judge(self, loss: Tensor, norms: Tensor) -> Spike | None:
        """The verdict on a step's global `loss` and `norms` [rows]; collective, and waits for the device."""
        values = torch.stack([loss.float(), norms.float().square().sum().sqrt()]).tolist()
        verdict = self.detector.judge(*values)
        if not self._agreed(verdict is not None, loss.device):
            self.detector.accept(*values)
            return None
        verdict = verdict or Verdict("loss", values[0])  # another rank's numbers differ in the last bit
        self.detector.reject()
        if self.taken >= self.most:
            return Spike(verdict, "skip" if verdict.kind == "nan" else "warn")
        self.taken += 1
        return Spike(verdict, self.action)

    def rewound(self) -> None:
        """The run went back. The history stays, or a stretch of bad data would be learned as the level."""
        self.detector.rejected = 0

    def _agreed(self, mine: bool, device: torch.device) -> bool:
        if self.meshes is None:
            return mine
        vote = torch.tensor(float(mine), device=device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.meshes.world.get_group())
        return vote.item() > 0


class SpikeWatch:
    """Reports spikes among the recorded rows; for `on_spike` warn. A listener of the recorder, on rank 0."""

    def __init__(self, report: Callable[[int, Spike], None]) -> None:
        self.detector = OnlineDetector()
        self.report = report

    def row(self, row: Mapping[str, Any]) -> None:
        """One row of metrics. Of a spike that lasts only the onset is reported."""
        loss, norm = _number(row.get("loss")), _number(row.get("grad_norm"))
        if loss is None:
            return
        onset = not self.detector.rejected
        (verdict,) = self.detector.feed([(loss, norm)])
        if verdict is not None and onset:
            self.report(int(row["step"]), Spike(verdict, "skip" if row.get("skipped") == 1 else "warn"))


def _number(value: Any) -> float | None:
    """A recorded value; NaN and infinities are texts there."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
