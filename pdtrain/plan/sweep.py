"""Every layout of N devices: what is legal, what fits, how fast each would be, and why the others are out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from diag.errors import UsageError
from pdtrain.config.layout_rules import (
    MOST_EXPERT,
    MOST_TENSOR,
    batch_identity,
    expert_divides_experts,
    ranks_factorise,
    sequence_parallel_divides,
    tensor_divides_heads,
    tensor_divides_widths,
)
from pdtrain.config.mistakes import divisors
from pdtrain.config.resolved import fill
from pdtrain.config.rules import layers_fit
from pdtrain.config.schema import Run
from pdtrain.plan import memory, timing
from pdtrain.plan.estimate import layout_json
from pdtrain.plan.hardware import Hardware
from pdtrain.plan.setup import Options, Recompute, Setup, Sharding, layout_text

#: Micro-batches that are tried.
MICRO_BATCHES = (1, 2, 4)
#: Interleaved chunks per stage that are tried.
CHUNKS = (1, 2, 4)
#: Rules of the configuration that a layout can break; the last is asked without context parallel only.
RULES = (tensor_divides_heads, tensor_divides_widths, sequence_parallel_divides, expert_divides_experts,
         ranks_factorise, layers_fit, batch_identity)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits: its time and memory."""

    setup: Setup
    step: float
    mfu: float
    worst: float
    pareto: bool = False


@dataclass(slots=True)
class Sweep:
    """Candidates by step time; rejected layouts by reason, with one example each."""

    devices: int
    memory_bytes: float
    candidates: list[Candidate] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    tried: int = 0

    def reject(self, layout: str, kind: str, reason: str) -> None:
        """Note why a layout is out; `kind` groups reasons, `reason` is this layout's own."""
        self.reasons[kind] += 1
        self.examples.setdefault(kind, f"{layout}: {reason}")
        self.rejected.append((layout, reason))


def sweep(
    run: Run, options: Options, hardware: Hardware, memory_bytes: float, *, trainable: bool = False,
    micro_batches: Sequence[int] = MICRO_BATCHES, progress: Callable[[int, int], None] | None = None,
) -> Sweep:  # fmt: skip
    """All layouts of `run.parallel.ranks` devices.

    trainable: only what pdtrain trains today (no pipeline stages, no context parallel, ZeRO-3 or none).
    The global batch stays: DP that does not divide it is rejected.
    """
    found = Sweep(run.parallel.ranks, memory_bytes)
    for index, (pp, tp, ep, cp) in enumerate(grid := list(_degrees(run, options, hardware, trainable))):
        if progress is not None:
            progress(index, len(grid))
        _layout(found, run, options, hardware, (pp, tp, ep, cp), micro_batches, trainable=trainable)
    found.candidates.sort(key=lambda item: (item.step, item.worst))
    found.candidates = _pareto(found.candidates)
    return found


def _degrees(run: Run, options: Options, hardware: Hardware, trainable: bool) -> Iterator[tuple[int, int, int, int]]:
    """(pipeline, tensor, expert, context): divisors of the devices, and the degrees that are tried beyond them."""
    ranks, model = run.parallel.ranks, run.model
    moe = model.layers > model.dense_layers
    pipelines = [1] if trainable else [p for p in divisors(ranks) if p <= 2 * model.layers]
    tensors = [t for t in divisors(ranks) if t <= max(2 * MOST_TENSOR, hardware.devices_per_node)]
    experts = [e for e in divisors(ranks) if e <= 2 * model.moe.experts] if moe else [1]
    contexts = [1] if trainable or options.context == 1 else [c for c in divisors(ranks) if c <= options.context]
    return itertools.product(pipelines, tensors, experts, contexts)


def _layout(
    found: Sweep, run: Run, options: Options, hardware: Hardware, degrees: tuple[int, int, int, int],
    micro_batches: Sequence[int], *, trainable: bool,
) -> None:  # fmt: skip
    pp, tp, ep, cp = degrees
    label = f"PP{pp} TP{tp} EP{ep}" + (f" CP{cp}" if cp > 1 else "")
    changed = _with_degrees(run, pp, tp, ep, cp)
    found.tried += 1
    for rule in RULES[:-1] if cp > 1 else RULES:
        for mistake in rule(changed):
            if not mistake.warning:
                found.reject(label, rule.__name__.replace("_", " "), mistake.line())
                return
    if tp > hardware.devices_per_node:
        found.reject(label, "TP leaves the node", f"TP {tp} crosses nodes of {hardware.devices_per_node}")
        return
    if ep > MOST_EXPERT:
        found.reject(label, f"EP above {MOST_EXPERT}", f"EP {ep}: the all-to-all of larger groups is seldom hidden")
        return
    shardings: list[Sharding] = ["none", "zero3"] if trainable else ["zero1", "zero3"] if pp == 1 else ["zero1"]
    recomputes: list[Recompute | None] = [None] if trainable else ["none", "full"]
    for micro, sharding, recompute in itertools.product(micro_batches, shardings, recomputes):
        own = f"{label} {sharding} micro-batch {micro}" + (f" recompute {recompute}" if recompute else "")
        found.tried += 1
        timed = _timed(found, own, changed, options, hardware, micro, sharding, recompute, cp)
        if timed is not None:
            found.candidates += timed


def _timed(
    found: Sweep, label: str, run: Run, options: Options, hardware: Hardware, micro: int, sharding: Sharding,
    recompute: Recompute | None, cp: int,
) -> list[Candidate] | None:  # fmt: skip
    """The layout with its best schedule, or None when it is out."""
    tried = fill(msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, micro_batch=micro,
                                                                            accumulation=None)))  # fmt: skip
    best: Candidate | None = None
    for chunks in CHUNKS if tried.parallel.pipeline > 1 else (1,):
        kind = "interleaved" if chunks > 1 else options.schedule if tried.parallel.pipeline > 1 else "1f1b"
        chosen = replace(options, sharding=sharding, recompute=recompute, context=cp, schedule=kind, virtual=chunks)
        try:
            setup = Setup(tried, chosen)
        except UsageError as error:
            if chunks == 1:
                found.reject(label, _kind_of(str(error)), str(error))
            continue
        if setup.pp > 1 and setup.micro_batches < setup.pp and chunks == 1:
            found.reject(
                label, "fewer micro-batches than stages",
                f"{setup.micro_batches} micro-batches for {setup.pp} stages leave most of the pipeline idle",
            )  # fmt: skip
            return None
        _, worst = memory.peak(setup, device=hardware.kind)
        limit = memory.WATERMARK * found.memory_bytes
        if worst.total + hardware.runtime_bytes > limit:
            if chunks == 1:
                what = "states alone" if worst.states > limit else "with activations"
                found.reject(
                    label, f"does not fit ({what})",
                    f"{(worst.total + hardware.runtime_bytes) / 1e9:,.1f} GB > {limit / 1e9:,.1f} GB, "
                    f"states {worst.states / 1e9:,.1f} GB",
                )  # fmt: skip
            continue
        times, _ = timing.times(setup, hardware)
        candidate = Candidate(setup, times.step, timing.mfu(setup, hardware, times.step), worst.total)
        if best is None or candidate.step < best.step:
            best = candidate
    return [best] if best is not None else None


def _kind_of(reason: str) -> str:
    if "multiple of" in reason:
        return "DP does not divide the batch"
    return "more stages than layers" if "layers" in reason else "context parallel does not divide"


def _with_degrees(run: Run, pp: int, tp: int, ep: int, cp: int) -> Run:
    modules = msgspec.structs.replace(
        run.modules,
        attention=msgspec.structs.replace(run.modules.attention, tensor=tp),
        experts=msgspec.structs.replace(run.modules.experts, expert=ep),
    )
    train = msgspec.structs.replace(run.train, accumulation=None, micro_batch=1)
    parallel = msgspec.structs.replace(run.parallel, pipeline=pp)
    changed = msgspec.structs.replace(run, modules=modules, train=train, parallel=parallel)
    return fill(changed) if cp == 1 else changed


def _pareto(candidates: list[Candidate]) -> list[Candidate]:
    """Marks what no other layout beats in both step time and memory; the list is sorted by step time."""
    least, marked = float("inf"), []
    for item in candidates:
        on_front = item.worst < least
        least = min(least, item.worst)
        marked.append(replace(item, pareto=on_front))
    return marked


def as_json(found: Sweep) -> dict[str, Any]:
    """Candidates by step time, and every rejected layout with its reason."""
    return {
        "schema": "pdtrain.sweep/1",
        "devices": found.devices,
        "memory_bytes": found.memory_bytes,
        "tried": found.tried,
        "candidates": [
            layout_json(item.setup) | {"step_seconds": item.step, "mfu": item.mfu, "peak_bytes": item.worst,
                                       "pareto": item.pareto, "trainable_today": not item.setup.runnable}
            for item in found.candidates
        ],
        "rejected": [{"layout": layout, "reason": reason} for layout, reason in found.rejected],
    }  # fmt: skip


def text(found: Sweep, rows: int = 20) -> Iterator[str]:
    """The best layouts, the Pareto front (*), and the reasons of the rest."""
    yield (
        f"{found.tried:,} layouts of {found.devices:,} devices: {len(found.candidates):,} fit "
        f"{memory.WATERMARK:.0%} of {found.memory_bytes / 1e9:g} GB"
    )
    if found.candidates:
        yield ""
        yield f"  {'step':>9} {'MFU':>6} {'memory':>9}  micro  {'recompute':<10}{'schedule':<16}layout (* Pareto)"
    front = [item for item in found.candidates[rows:] if item.pareto]
    for item in [*found.candidates[:rows], *front]:
        options = item.setup.options
        chunks = f" x{options.virtual}" if options.virtual > 1 else ""
        schedule = f"{options.schedule}{chunks}" if item.setup.pp > 1 else "-"
        yield (
            f"  {item.step:>7.2f} s {item.mfu:>6.1%} {item.worst / 1e9:>6.1f} GB  {item.setup.run.train.micro_batch:>5}"
            f"  {options.recompute or 'as is':<10}{schedule:<16}{layout_text(item.setup)}{' *' if item.pareto else ''}"
        )
    if found.reasons:
        yield ""
        yield "rejected:"
        for kind, count in found.reasons.most_common():
            yield f"  {count:>6,}  {kind}; e.g. {found.examples[kind]}"
