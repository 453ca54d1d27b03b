"""Between the loop and the black box: what is measured at which step, and what a person sees meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from pdtrain.checkpoint import Restored
from pdtrain.config import Resolved
from pdtrain.data.store import DocumentSpan
from pdtrain.measure import all_to_all_bytes, expected_all_to_all_bytes, router_statistics, routing_by_layer
from pdtrain.model.transformer import Transformer
from pdtrain.parallel.meshes import Meshes
from pdtrain.plan import flops
from pdtrain.pools.compute import ComputeSide
from pdtrain.process import Place
from pdtrain.recorder import Recorder
from pdtrain.recorder.memory import peak_memory_bytes
from pdtrain.recorder.progress import Progress
from pdtrain.recorder.routing import router_values
from pdtrain.spikes import Spike
from pdtrain.step import StepResult

#: Share of a step that measuring the modules may cost; a step that is long enough is measured each time, so that a
#: rank that becomes slow is known after few steps.
MEASURING_SHARE = 0.005
#: Documents of a suspect batch that are named.
NAMED_DOCUMENTS = 64


class Instruments:
    """Feeds the recorder and the progress line. Collective where it says so: every rank calls it alike."""

    def __init__(
        self,
        resolved: Resolved,
        model: Transformer,
        rows: Sequence[str],
        recorder: Recorder,
        meshes: Meshes | None,
        place: Place,
        pools: ComputeSide | None = None,
    ) -> None:
        self.resolved = resolved
        self.run = resolved.run
        self.recorder = recorder
        self.meshes = meshes
        self.pools = pools
        if pools is not None:
            pools.attach(recorder)
        self.place = place
        self.layers = model.moe_layers()
        self.rows = rows
        self.expected_bytes = expected_all_to_all_bytes(resolved)
        self.flops_per_token = flops.per_token(self.run.model, self.run.train.sequence_length)
        name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU"
        self.peak = flops.peak_per_device(name, self.run.precision.all)
        self.progress = Progress(self.run.train.steps, enabled=place.leader)
        if place.leader:
            recorder.listeners.append(self.progress.update)
            recorder.closers.append(self.progress.close)  # before a traceback is printed
        recorder.watch(model, _watched(model), every=self.run.recorder.module_times_every)
        self.documents: Callable[[int, int], list[list[DocumentSpan]]] | None = None
        """The documents of training sequences, to name those of a suspect batch."""
        self._aside: dict[str, float] = {}  # seconds since the interval began that were not training
        self._since = (0, time.perf_counter())  # step and time of the last interval's end

    def announce(
        self, layout: str, data: str, start: Restored, removed: list[str], aside: list[str]
    ) -> None:
        """Say once what is about to run: groups, data, where it resumes and what that meant."""
        self._since = (start.step, time.perf_counter())
        rejoined = self.pools.rejoined if self.pools is not None else None
        if start.source is not None or start.step or rejoined is not None:
            self.recorder.resume(start.step)
        if start.source is not None:
            self.recorder.event("restored", step=start.step, source=str(start.source), mixed_steps=start.mixed)
        for name in removed:
            self.recorder.event("checkpoint_leftover_removed", folder=name)
        for name in aside:
            self.recorder.event("checkpoint_set_aside", folder=name)
        if not self.place.leader:
            return
        self.note(layout)
        self.note(f"data: {data}")
        for why in start.passed_over:
            self.note(f"warning: a newer checkpoint was passed over: {why}")
        if removed:
            self.note(f"removed what interrupted saves left: {', '.join(removed)}")
        if aside:
            self.note(f"set aside as *.abandoned, because they lie beyond step {start.step}: {', '.join(aside)}")
        if start.source is not None:
            self.note(f"resumed from {start.source} at step {start.step}")
        if rejoined is not None:
            self.recorder.event("pool_restart", **rejoined.fields())
            self.note(rejoined.line())
        elif start.source is not None and self.pools is not None and (lost := self.pools.lost_steps):
            self.recorder.event("pool_restored", step=start.step, reached=start.step + lost, lost_steps=lost)
            self.note(f"pools: the run had reached step {start.step + lost}; what the update pool held of the last "
                      f"{lost} step{'s' if lost > 1 else ''} is lost and computed again")
        for row, step in start.mixed.items():
            self.note(f"  {row}: restored from step {step}, {start.step - step} steps older than the rest")

    @contextmanager
    def aside(self, name: str, step: int) -> Iterator[None]:
        """A span whose time is not training time: validation, checkpoint."""
        began = time.perf_counter()
        with self.recorder.span(name, step):
            yield
        seconds = time.perf_counter() - began
        self._aside[name] = self._aside.get(name, 0.0) + seconds

    def after_step(
        self,
        step: int,
        result: StepResult,
        lr: float,
        seconds: float,
        data_seconds: float,
        extra: Mapping[str, float | None],
    ) -> None:
        """Record one step and `extra` values of it (data, validation); collective at logging intervals."""
        values: dict[str, Any] = {"loss": result.loss, "lr": lr, "step_seconds": seconds, "data_seconds": data_seconds}
        values["grad_norm"] = result.norms.square().sum().sqrt()
        for index, row in enumerate(self.rows):
            values[f"grad_norm/{row}"] = result.norms[index]
            values[f"grad_norm_clipped/{row}"] = result.clipped[index]
        values["skipped"] = result.skipped
        if self.run.train.on_spike != "warn":
            values["spike"] = float(result.spike is not None)
        values |= extra
        values["tokens"] = step * self.resolved.tokens_per_step
        if self.recorder.due(step):
            values |= self._interval(step)
        if step % self.run.recorder.router_every == 0:
            values |= self._routing()
        self.recorder.log(step, **values)

    def _interval(self, step: int) -> dict[str, Any]:
        now = time.perf_counter()
        steps = max(1, step - self._since[0])
        wall = (now - self._since[1] - sum(self._aside.values())) / steps
        aside, self._aside = self._aside, {}
        self._since = (step, now)
        modules = self.recorder.module_seconds()
        self.recorder.times(step, {name: seconds for name, seconds in modules.items() if "/" not in name})
        sent = all_to_all_bytes(self.layers)
        reduced = self.recorder.reduce(
            {f"time/{name}": (seconds, "mean") for name, seconds in modules.items()}
            | {
                "memory_bytes": (float(peak_memory_bytes(self.place.device)), "max"),
                "all_to_all_bytes": (sent / steps, "mean"),
                "measuring": (self.recorder.measuring_seconds, "max"),
                "wall": (wall, "mean"),  # one rank's own may be short because the one before was long
            }
            | ({} if self.pools is None else self.pools.measured()),
            group=None if self.pools is None else self.pools.group,
        )
        if self.pools is not None:
            reduced |= self.pools.heard()
            self.pools.journal.alone(modules, tensor_parallel=self.resolved.tp > 1)
        # The same on all ranks, and so is what follows from it.
        if share := reduced.pop("measuring") / reduced.pop("wall"):
            self.recorder.measure_every(min(self.run.recorder.module_times_every, math.ceil(share / MEASURING_SHARE)))
        tokens_per_second = self.resolved.tokens_per_step / wall
        values: dict[str, Any] = reduced | {f"{name}_seconds": seconds for name, seconds in aside.items()}
        values["tokens_per_second"] = tokens_per_second
        if self.resolved.ep > 1:
            values["all_to_all_bytes_expected"] = self.expected_bytes
            if "time/dispatch" in reduced:
                values["all_to_all_seconds"] = reduced["time/dispatch"] + reduced["time/combine"]
        if self.peak:
            values["mfu"] = self.flops_per_token * tokens_per_second / (self.peak * self.resolved.ranks)
        return values

    def _routing(self) -> dict[str, Any]:
        if not self.layers:
            return {}
        statistics = router_statistics(self.layers, self.meshes, self.place.device)
        values: dict[str, Any] = {}
        for index, numbers in routing_by_layer(self.layers, statistics).items():
            values |= router_values(index, numbers.counts, top_k=self.run.model.moe.top_k, **numbers.measured)
        return values

    def record(self, step: int, values: dict[str, Any]) -> None:
        """Record values outside a step: the validation before the first one."""
        if values:
            self.recorder.log(step, **values)
        self._aside.clear()
        self._since = (step, time.perf_counter())

    def checkpoint_saved(self, step: int, saved: bool) -> None:
        """Record that a checkpoint was written, or could not be."""
        self.recorder.event("checkpoint_saved" if saved else "checkpoint_failed", step=step)

    def spike(self, step: int, spike: Spike, consumed: int | None = None) -> None:
        """Record a suspect step, what is done about it, its sequences and their documents; rank 0 only.

        `consumed`: the first sequence of the step, where it is known not to be that of a run without detours.
        """
        if not self.place.leader:
            return
        count = self.resolved.train_batch
        if consumed is None and self.documents is not None:
            consumed = (step - 1) * count
        batch: dict[str, Any] = {}
        if consumed is not None:
            batch["sequences"] = [consumed, consumed + count - 1]
        if consumed is not None and self.documents is not None:
            spans = (span for sequence in self.documents(consumed, count) for span in sequence)
            names = (f"{span.name}:{span.record}" if span.record else span.name for span in spans)
            batch["documents"] = list(islice(dict.fromkeys(names), NAMED_DOCUMENTS))
        self.recorder.event("spike", step=step, **spike.fields(), **batch)
        done = {"warn": "", "skip": ": the update was dropped", "rewind": ": going back to the last checkpoint"}
        self.note(f"step {step}: {spike.verdict.words()}{done[spike.action]}")

    def rewound(self, step: int, start: Restored, consumed: int) -> None:
        """Record that the run went back from `step` to `start` and goes on with sequence `consumed`."""
        self.recorder.flush()  # lines of the discarded steps belong before the one that supersedes them
        self.recorder.resume(start.step)
        self.recorder.event("rewound", step=step, to_step=start.step, source=str(start.source), consumed=consumed,
                            mixed_steps=start.mixed)
        self._aside.clear()
        self._since = (start.step, time.perf_counter())
        self.note(f"step {step}: restored {start.source}; goes on after step {start.step} with sequence {consumed}")

    def note(self, text: str) -> None:
        """A line for the person who watches, rank 0 only."""
        if self.place.leader:
            self.progress.note(text)

    def finish(self, step: int, *, regroups: bool = False) -> None:
        """The run is over, for whatever good reason, or goes on with another split of its ranks."""
        self.recorder.event("regrouping" if regroups else "finished", step=step)
        self.progress.close()


def _watched(model: Transformer) -> dict[str, list[nn.Module]]:
    """Name in `time/<name>` -> the modules whose time it sums: the policy rows, and the two exchanges apart."""
    groups: dict[str, list[nn.Module]] = {"embed_head": [model.embed, model.head]}
    for block in model.layers():
        groups.setdefault("attention", []).append(block.attention)
        groups.setdefault("norm", []).extend((block.attention_norm, block.ffn_norm))
        if block.dense_ffn is not None:
            groups.setdefault("dense_ffn", []).append(block.dense_ffn)
    for layer in model.moe_layers().values():
        parts = {
            "router": layer.router,
            "dispatch": layer.dispatcher.dispatch,
            "experts": layer.experts,
            "combine": layer.dispatcher.combine,
            "shared_expert": layer.shared_expert,
        }
        for name, module in parts.items():
            if module is not None:
                groups.setdefault(name, []).append(module)
    return groups
