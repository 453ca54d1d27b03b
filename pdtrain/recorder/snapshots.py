"""Memory snapshots of this rank: on CUDA the allocator's history, on CPU the peak of each module.

CUDA: `dumps/memory_rank<R>_oom.pickle` at the first failed allocation, `dumps/memory_rank<R>_step<N>.pickle` after each
chosen step, as torch.cuda.memory writes them. CPU: `dumps/memory_rank<R>_step<N>.json` (schema pdtrain.memory/1, see
docs/memory.md), from torch's MemTracker, which makes that one step several times slower. `pdtrain diag memory` reads
both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from pdtrain.recorder.files import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import nn

SCHEMA = "pdtrain.memory/1"


class MemoryCapture:
    """Writes snapshots to `folder`; what fails in it is one complaint and never ends the run.

    `entries`: allocator events kept on CUDA, 0: no history and no snapshot when memory runs out. `steps`: the steps
    (1-based) after which a snapshot is written.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device, *, entries: int, steps: Collection[int],
                 complain: Callable[[str], None]) -> None:
        self.folder, self.rank, self.device, self.complain = folder, rank, device, complain
        self.steps = frozenset(steps)
        self.recording = False
        self._failed = False
        if device.type == "cuda" and entries:
            self._start(entries)

    def step(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
        """Put around the work of `step`."""
        if step not in self.steps:
            return nullcontext()
        if self.device.type == "cuda":
            return _After(lambda: self._dump(f"step{step}"))
        if self.device.type == "cpu":
            return _ModulePeaks(self, step, model, optimizer)
        return nullcontext()

    def path(self, what: str, suffix: str) -> Path:
        """Where the snapshot `what` of this rank goes."""
        return self.folder / f"memory_rank{self.rank}_{what}.{suffix}"

    def _start(self, entries: int) -> None:
        import torch

        try:
            torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python", device=self.device)
            self.recording = True
            attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
            attach(self._out_of_memory)
        except Exception as error:
            self.complain(f"the allocator's history is not recorded: {error!r}")

    def _out_of_memory(self, device: int, alloc: int, allocated: int, free: int) -> None:
        """Called by the allocator before it raises. The first failure tells most: handlers allocate and fail again."""
        if not self._failed:
            self._failed = True
            self._dump("oom")

    def _dump(self, what: str) -> None:
        import torch

        if not self.recording:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.path(what, "pickle")
            scratch = path.with_suffix(".tmp")
            torch.cuda.memory._dump_snapshot(str(scratch))
            os.replace(scratch, path)  # noqa: PTH105
        except Exception as error:
            self.complain(f"no memory snapshot ({what}): {error!r}")


class _After:
    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.then()


def _tracker(root: nn.Module) -> Any:
    """A MemTracker that lives through several forward passes of `root`: one per micro-batch of a step.

    torch's own raises at the second one. `kept` holds (peak by device, parameter bytes, output bytes) per module, the
    peak of the fullest pass.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, tuple[dict[Any, int], int, int]] = {}

        def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
            if module is root and module in self.memory_tracking and not self._mod_tracker.is_bw:
                self.keep()
                self.reset_mod_stats()
            super()._pre_fw_hook(module, inputs)

        def keep(self) -> None:
            for stats in self.memory_tracking.values():
                most = {device: int(size) for device, size in stats.local_peak.items()}
                if stats.mod_fqn in self.kept:
                    for device, size in self.kept[stats.mod_fqn][0].items():
                        most[device] = max(size, most.get(device, 0))
                self.kept[stats.mod_fqn] = most, int(stats.parameter_mem), int(stats.output_mem)

    return Tracker()


class _ModulePeaks:
    """torch's MemTracker around one step on CPU, written as JSON."""

    def __init__(self, capture: MemoryCapture, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.capture, self.step, self.external = capture, step, (model, optimizer)
        self.tracker: Any = None

    def __enter__(self) -> None:
        try:
            tracker = _tracker(self.external[0])
            tracker.track_external(*self.external)
            tracker.__enter__()
            self.tracker = tracker
        except Exception as error:
            self.capture.complain(f"no module peaks of step {self.step}: {error!r}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.tracker is None:
            return
        try:
            self.tracker.__exit__(kind, error, tb)
            if kind is None:
                self.capture.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(self.capture.path(f"step{self.step}", "json"), msgspec.json.encode(self._answer()))
        except Exception as failure:
            self.capture.complain(f"no module peaks of step {self.step}: {failure!r}")

    def _answer(self) -> dict[str, Any]:
        device = self.capture.device
        peak = {str(getattr(kind, "value", kind)): int(held)
                for kind, held in self.tracker.get_tracker_snapshot("peak").get(device, {}).items()}
        self.tracker.keep()
        modules = [{"module": name, "peak_bytes": most.get(device, 0), "parameter_bytes": parameters,
                    "output_bytes": output} for name, (most, parameters, output) in self.tracker.kept.items()]
        total = peak.pop("Total", sum(peak.values()))
        return {"schema": SCHEMA, "rank": self.capture.rank, "step": self.step, "device": str(device),
                "peak_bytes": total, "by_kind": {k: v for k, v in peak.items() if v}, "modules": modules}
