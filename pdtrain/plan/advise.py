"""What to change first in a layout, what each change buys, and when not to separate at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from diag.errors import UsageError
from pdtrain.config.layout_rules import MOST_FAMILIES, MOST_TENSOR
from pdtrain.config.resolved import fill
from pdtrain.config.rules import check
from pdtrain.config.schema import Run
from pdtrain.parallel.layout import Layout
from pdtrain.plan import memory
from pdtrain.plan.estimate import Estimate, estimate
from pdtrain.plan.pools import MeasuredPools, measured_json, measured_text
from pdtrain.plan.setup import Drop, Setup, layout_text
from pdtrain.plan.text import duration, size

#: All-to-all above this share of the step: the expert layout needs change (DOMAIN: 30 % of forward time).
ALL_TO_ALL_SHARE = 0.30
#: MFU below this: look for queued communication first, then for recomputation.
LOW_MFU = 0.30
#: Bubble above this share of a step is worth more micro-batches or chunks.
BUBBLE_SHARE = 0.10
#: A change of the step time below this is noise of the model.
NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the layout and what it does; `found` None: it cannot be, and `why` says so."""

    name: str
    found: Estimate | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """The present layout, changes with the best first, remarks, and verdicts on both separations."""

    now: Estimate
    changes: list[Change]
    impossible: list[Change]
    remarks: list[str]
    module_separation: str
    phase_separation: str
    measured: Sequence[MeasuredPools] = ()


def advise(now: Estimate, measured: Sequence[MeasuredPools] = ()) -> Advice:
    """Every single change of `now`, tried. `measured`: separated runs, whose seconds outweigh the model's."""
    tried = [_try(now, name, change) for name, change in _changes(now.setup)]
    possible = [change for change in tried if change.found is not None]
    helpful = [change for change in possible if _helps(now, change)]
    helpful.sort(key=_order)
    return Advice(now, helpful, [c for c in tried if c.found is None], list(_remarks(now)), _modules(now),
                  _phases(now, measured), measured)


def _helps(now: Estimate, change: Change) -> bool:
    found = change.found
    assert found is not None
    if now.fits and not found.fits:
        return False
    faster = found.times.step < now.times.step * (1 - NOISE)
    smaller = found.worst.total < now.worst.total * (1 - NOISE)
    return faster or (smaller and not now.within_budget)


def _order(change: Change) -> tuple[bool, float]:
    found = change.found
    assert found is not None
    return not found.fits, found.times.step if found.fits else found.worst.total


def _try(now: Estimate, name: str, change: Callable[[], Setup]) -> Change:
    try:
        setup = change()
        mistakes = [mistake.line() for mistake in check(setup.run) if not mistake.warning]
        if mistakes:
            return Change(name, None, mistakes[0])
        return Change(name, estimate(setup, now.hardware, now.memory_bytes, now.tokens))
    except UsageError as error:
        return Change(name, None, str(error))


def _changes(setup: Setup) -> Iterator[tuple[str, Callable[[], Setup]]]:
    options, train = setup.options, setup.run.train
    for recompute in ("none", "op", "full"):
        if options.recompute != recompute:
            yield f"--recompute {recompute}", partial(_option, setup, recompute=recompute)
    model = setup.run.model
    moe = model.layers > model.dense_layers
    if options.recompute in (None, "none", "selective") and not options.drop:
        light: tuple[Drop, ...] = ("norm",)
        light += ("mla-up",) if model.attention == "mla" else ()
        light += ("moe-act",) if moe else ()
        for drop in (light, ("moe",)) if moe else (light,):
            yield f"--recompute-modules {','.join(drop)}", partial(_option, setup, drop=drop)
    for factor in (0.5, 2):
        micro = int(train.micro_batch * factor)
        if micro >= 1:
            yield f"train.micro_batch = {micro}", partial(_with, setup, micro_batch=micro)
        for name, degree, key in (
            ("parallel.pipeline", setup.pp, "pipeline"), ("modules.attention.tensor", setup.tp, "tensor"),
            ("modules.experts.expert", setup.ep, "expert"),
        ):  # fmt: skip
            value = int(degree * factor)
            if value >= 1 and not (key == "expert" and not moe):
                yield f"{name} = {value}", partial(_with, setup, **{key: value})
    if setup.pp > 1 and options.schedule == "1f1b":
        yield "--virtual 2", partial(_option, setup, schedule="interleaved", virtual=2)
        yield "--schedule zero-bubble", partial(_option, setup, schedule="zero-bubble")
    if setup.tp > 1 and setup.run.train.sequence_length >= 8192:
        yield f"--context {setup.cp * 2}", partial(_option, setup, context=setup.cp * 2)
    if setup.ep > 1 and options.dispatch_bytes is None:
        yield "--fp8-dispatch", partial(_option, setup, dispatch_bytes=1.03125)
    if setup.ep > 1 and not options.node_limited and setup.run.model.moe.top_groups > 1:
        yield "--node-limited", partial(_option, setup, node_limited=True)
    for sharding in ("zero1", "zero3"):
        if setup.sharding != sharding and not (sharding == "zero3" and setup.pp > 1):
            yield f"--optimizer-sharding {sharding}", partial(_option, setup, sharding=sharding)


def _option(setup: Setup, **changed: Any) -> Setup:
    return replace(setup, options=replace(setup.options, **changed))


def _with(setup: Setup, **degrees: int) -> Setup:
    """`setup` with other degrees or another micro-batch; the global batch stays."""
    run: Run = setup.run
    modules, parallel, train = run.modules, run.parallel, msgspec.structs.replace(run.train, accumulation=None)
    if "tensor" in degrees:
        modules = msgspec.structs.replace(
            modules, attention=msgspec.structs.replace(modules.attention, tensor=degrees["tensor"])
        )
    if "expert" in degrees:
        modules = msgspec.structs.replace(
            modules, experts=msgspec.structs.replace(modules.experts, expert=degrees["expert"])
        )
    if "pipeline" in degrees:
        parallel = msgspec.structs.replace(parallel, pipeline=degrees["pipeline"])
    if "micro_batch" in degrees:
        train = msgspec.structs.replace(train, micro_batch=degrees["micro_batch"])
    changed = msgspec.structs.replace(run, modules=modules, parallel=parallel, train=train)
    options = replace(setup.options, sharding=setup.sharding, states=setup.states)
    return Setup(fill(changed) if options.context == 1 else changed, options)


def _remarks(now: Estimate) -> Iterator[str]:
    step = now.times.step
    for item in now.traffic:
        share = item.exposed / step
        if item.group == "EP" and item.seconds / step > ALL_TO_ALL_SHARE:
            yield (
                f"the all-to-all takes {item.seconds / step:.0%} of a step on the links ({share:.0%} exposed), above "
                f"{ALL_TO_ALL_SHARE:.0%}: change EP; no plan is credible here without a measured all-to-all (--probe)"
            )
    if now.mfu < LOW_MFU:
        yield f"MFU {now.mfu:.1%} is below {LOW_MFU:.0%}: look for queued communication first, then recomputation"
    if now.times.recompute / step > 0.15:
        yield f"recomputation takes {now.times.recompute / step:.0%} of a step: recompute modules, not whole blocks"
    if now.times.bubble / step > BUBBLE_SHARE:
        yield f"the pipeline idles {now.times.bubble / step:.0%} of a step: more micro-batches, or chunks (--virtual)"
    if now.setup.tp > MOST_TENSOR:
        yield f"TP {now.setup.tp} leaves an NVLink domain of {MOST_TENSOR}"
    if not now.within_budget:
        share = now.worst.total / now.memory_bytes
        yield f"the fullest rank holds {share:.0%} of memory, the budget is {memory.BUDGET:.0%}"
    if now.worst.activations > now.worst.states and now.setup.run.train.sequence_length >= 8192:
        yield "activations outweigh states at this length: split the sequence (SP, CP) before anything else"


def _modules(now: Estimate) -> str:
    """Whether own layouts per module pay; the reasons not to, where DOMAIN knows one."""
    setup = now.setup
    if setup.run.model.layers == setup.run.model.dense_layers:
        return "do not separate modules: the model has no routed experts"
    if setup.ranks <= now.hardware.devices_per_node and 16.0 * now.parameters.total < 0.7 * now.memory_bytes:
        return "do not separate modules: the model fits on one device; replicate it"
    exposed = now.times.exposed / now.times.step
    try:
        families = Layout.from_run(setup.run).families()
    except ValueError:
        families = []
    if len(families) > MOST_FAMILIES:
        return f"{' + '.join(families)} are more than {MOST_FAMILIES} group families: they contend; drop one"
    if exposed < 0.05:
        return f"separated modules leave {exposed:.1%} of a step exposed: plain FLOP decide; add devices"
    return f"separate modules: {' + '.join(families)}; {exposed:.0%} of a step is exposed communication"


def _phases(now: Estimate, measured: Sequence[MeasuredPools]) -> str:
    if measured:
        pays, why = measured[0].pays(not now.fits)
        return f"{'do not separate phases: ' if pays is False else 'phase separation: '}{why}"
    pools = now.pools
    if pools.pays:
        return f"phase separation may pay: {pools.reason}"
    return f"do not separate phases: {pools.reason}"


def as_json(found: Advice) -> dict[str, Any]:
    """The advice as one object."""
    return {
        "schema": "pdtrain.advice/1",
        "layout": layout_text(found.now.setup),
        "fits": found.now.fits,
        "step_seconds": found.now.times.step,
        "peak_bytes": found.now.worst.total,
        "changes": [
            {"change": c.name, "step_seconds": c.found.times.step, "peak_bytes": c.found.worst.total,
             "fits": c.found.fits, "mfu": c.found.mfu, "layout": layout_text(c.found.setup)}
            for c in found.changes if c.found is not None
        ],
        "impossible": [{"change": c.name, "why": c.why} for c in found.impossible],
        "remarks": found.remarks,
        "module_separation": found.module_separation,
        "phase_separation": found.phase_separation,
        "measured_pools": measured_json(found.measured, not found.now.fits),
    }  # fmt: skip


def text(found: Advice) -> Iterator[str]:
    """For people."""
    now = found.now
    yield f"now: {layout_text(now.setup)}"
    verdict = "fits" if now.fits else "does NOT fit"
    yield f"  step {duration(now.times.step)}, MFU {now.mfu:.1%}, fullest rank {size(now.worst.total)}: {verdict}"
    for remark in found.remarks:
        yield f"  - {remark}"
    yield ""
    if found.changes:
        yield f"change one thing at a time, best first{'' if now.fits else ' (what makes it fit, then what helps)'}:"
    else:
        yield "no single change helps: see `pdtrain plan sweep`"
    for change in found.changes:
        after = change.found
        assert after is not None
        faster = after.times.step / now.times.step - 1
        fits = "" if after.fits else "  still does not fit"
        yield (
            f"  {change.name:<42} step {duration(after.times.step):>9} ({faster:+.0%})  memory "
            f"{size(after.worst.total):>10} ({after.worst.total / now.worst.total - 1:+.0%})  MFU {after.mfu:.1%}{fits}"
        )
    if found.impossible:
        yield "not possible:"
        for change in found.impossible:
            yield f"  {change.name:<42} {change.why}"
    yield ""
    yield found.module_separation
    yield found.phase_separation
    yield from measured_text(found.measured, not now.fits)
