"""What a sweep tries: every combination of a grid, or the legal layouts that the plan finds for N ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from diag.errors import UsageError
from pdtrain.config import read_run
from pdtrain.config.load import Loaded
from pdtrain.config.mistakes import show
from pdtrain.config.resolved import fill
from pdtrain.config.schema import Run
from pdtrain.plan.hardware import Hardware
from pdtrain.plan.setup import Options, Setup, layout_text
from pdtrain.plan.sweep import MICRO_BATCHES
from pdtrain.plan.sweep import sweep as plan_sweep

#: Steps at the start of a trial that are not measured: the first allocates, the second is watched by MemTracker.
WARM_UP = 3
#: The step whose tensors are counted.
WATCHED_STEP = 2
#: Combinations of a grid beyond which nobody waits for the end.
MOST_COMBINATIONS = 1000
#: A plan without a limit of memory.
NO_LIMIT = 1e18


@dataclass(frozen=True, slots=True)
class Trial:
    """One short run. `changes` are what tells it from the others; `key` is made of everything that decides its result.

    refused: why the combination cannot be run at all; then there is no `run`.
    """

    key: str
    label: str
    changes: dict[str, str]
    run: Run | None
    refused: str = ""


def short_run(run: Run, *, steps: int, timeout: float, cpu: bool) -> Run:
    """`run` as a trial: few steps, nothing but steps, and collectives that give up before the trial does."""
    replace = msgspec.structs.replace
    return replace(
        run,
        train=replace(run.train, steps=steps, log_every=1, val_every=0, val_sequences=0, on_spike="warn",
                      timeout_seconds=min(run.train.timeout_seconds, timeout / 2)),
        checkpoint=replace(run.checkpoint, every=0),
        modules=msgspec.structs.replace(run.modules, **{
            name: replace(getattr(run.modules, name), checkpoint_every=None)
            for name in run.modules.__struct_fields__}),
        recorder=replace(run.recorder, tensorboard=False, wandb=False,
                         memory_snapshot_steps=(WATCHED_STEP,) if cpu else ()),
    )  # fmt: skip


def parse_grid(grid: Sequence[str]) -> dict[str, list[str]]:
    """`KEY=a,b,c` texts as key -> values.

    Raises:
        UsageError: no values, a key given twice, or more combinations than anybody waits for.
    """
    found: dict[str, list[str]] = {}
    for text in grid:
        key, equals, values = text.partition("=")
        key, parts = key.strip(), [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not key or not parts:
            raise UsageError(f"--grid takes KEY=a,b,c, got {show(text)}")
        if key in found:
            raise UsageError(f"--grid {key} is given twice; put all its values into one")
        found[key] = list(dict.fromkeys(parts))
    total = 1
    for parts in found.values():
        total *= len(parts)
    if total > MOST_COMBINATIONS:
        raise UsageError(f"--grid makes {total:,} combinations, more than {MOST_COMBINATIONS:,}; use fewer values")
    return found


def from_grid(
    config: Path | None, preset: str | None, overrides: Sequence[str], grid: dict[str, list[str]], *,
    ranks: int, steps: int, timeout: float, cpu: bool,
) -> list[Trial]:  # fmt: skip
    """Every combination of `grid` on `ranks` ranks. One that the rules refuse stays, with the reason."""
    found = []
    for values in itertools.product(*grid.values()):
        changes = dict(zip(grid, values, strict=True))
        texts = [f"{key}={value}" for key, value in changes.items()]
        label = ", ".join(texts)
        try:
            free = [] if "train.accumulation" in grid else ["train.accumulation=none"]
            run = read_run(config, preset=preset, overrides=[*overrides, *free, *texts], world=ranks, train=True).run
        except UsageError as error:
            reason = " ".join(str(error).split())
            if "is not a known key" in reason:
                raise UsageError(f"--grid: {reason}") from None
            found.append(Trial(_key("refused", label, str(ranks)), label, changes, None, reason))
            continue
        found.append(_trial(label, changes, short_run(run, steps=steps, timeout=timeout, cpu=cpu)))
    return found


def from_layouts(
    loaded: Loaded, hardware: Hardware, *, memory: float | None, most: int, steps: int, timeout: float, cpu: bool
) -> tuple[list[Trial], int]:
    """(at most `most` of the layouts that the plan finds legal, how many there are).

    The best predicted one is always among them, the others are spread evenly over the plan's ranking: a plan that is
    wrong must not decide alone what is measured.
    """
    run = loaded.run
    micro = sorted({*MICRO_BATCHES, run.train.micro_batch})
    planned = plan_sweep(run, Options(), hardware, memory or NO_LIMIT, trainable=True, micro_batches=micro)
    legal = planned.candidates
    if not legal:
        reasons = "; ".join(planned.examples[kind] for kind, _ in planned.reasons.most_common(3))
        raise UsageError(f"no layout of {run.parallel.ranks} ranks can be tried: {reasons}")
    count = min(most, len(legal))
    chosen = {round(index * (len(legal) - 1) / max(1, count - 1)) for index in range(count)}
    found = []
    for index in sorted(chosen):
        setup = legal[index].setup
        fsdp = setup.sharding != "none"
        parallel = msgspec.structs.replace(setup.run.parallel, fsdp=fsdp)
        tried = fill(msgspec.structs.replace(setup.run, parallel=parallel))
        changes = {
            "modules.attention.tensor": str(setup.tp), "modules.experts.expert": str(setup.ep),
            "parallel.fsdp": str(fsdp).lower(), "train.micro_batch": str(tried.train.micro_batch),
        }  # fmt: skip
        label = f"{layout_text(setup)}, micro-batch {tried.train.micro_batch}"
        found.append(_trial(label, changes, short_run(tried, steps=steps, timeout=timeout, cpu=cpu)))
    return found, len(legal)


def _trial(label: str, changes: dict[str, str], run: Run) -> Trial:
    return Trial(_key(json.dumps(_chosen(run, Run()), sort_keys=True)), label, changes, run)


def _chosen(value: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    """What differs from the defaults: a new key of a later version leaves the trials of this one what they are."""
    found: dict[str, Any] = {}
    for name in value.__struct_fields__:
        own, usual = getattr(value, name), getattr(default, name)
        if isinstance(own, msgspec.Struct):
            if inner := _chosen(own, usual):
                found[name] = inner
        elif own != usual:
            found[name] = own
    return found


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def setup_of(trial: Trial) -> Setup | None:
    """The trial as the plan sees it; None where the plan has no such layout."""
    if trial.run is None:
        return None
    try:
        return Setup(fill(trial.run))
    except UsageError:
        return None
