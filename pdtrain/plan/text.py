"""A plan for people: plain text tables; widths are fixed so that a pipe gets what a terminal shows."""

from __future__ import annotations

from collections.abc import Iterator

from pdtrain.plan import memory
from pdtrain.plan.estimate import STATE_BYTES, Estimate, conventions
from pdtrain.plan.flops import per_token
from pdtrain.plan.setup import layout_text, stages
from pdtrain.plan.timing import mfu


def size(number: float) -> str:
    """Bytes as GB (decimal), or smaller units where that would be 0.

    >>> size(14183e6), size(1.07e13), size(52_000)
    ('14.18 GB', '10.70 TB', '52.00 kB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def flop(number: float) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if number >= scale:
            return f"{number / scale:,.2f} {unit}"
    return f"{number:,.0f} FLOP"


def text(found: Estimate) -> str:
    """The whole plan."""
    return "\n".join([*_model(found), *_memory(found), *_traffic(found), *_time(found), *_verdict(found),
                      *_conventions(found)])  # fmt: skip


def _model(found: Estimate) -> Iterator[str]:
    setup, length = found.setup, found.setup.run.train.sequence_length
    model = setup.run.model
    yield f"layout: {setup.ranks:,} x {found.hardware.key}: {layout_text(setup)}"
    sizes = [stage.layers for stage in stages(setup)]
    if setup.pp > 1:
        yield f"  stages: {' '.join(map(str, sizes))} blocks; schedule {setup.options.schedule}"
    yield (
        f"batch: {setup.tokens_per_step:,} tokens per step = {setup.micro_batches} micro-batches x "
        f"{setup.run.train.micro_batch} x {length:,} x DP {setup.dp}"
    )
    parameters = found.parameters
    yield f"parameters: {parameters.total:,}; activated per token {parameters.activated:,}"
    yield f"states: {size(STATE_BYTES * parameters.total)} unsharded"
    causal, full = per_token(model, length), per_token(model, length, causal=False)
    yield f"FLOP per token: {flop(causal)} causal, {flop(full)} non-causal; {causal * found.tokens:.3g} FLOP for "\
          f"{found.tokens:.3g} tokens"  # fmt: skip


def _memory(found: Estimate) -> Iterator[str]:
    yield ""
    yield f"memory per rank {'':<11}{'mean stage':>14}{f'stage {found.worst.stage}':>14}"
    for name in ("parameters", "gradients", "optimizer", "activations", "buffers", "total"):
        mean, worst = getattr(found.mean, name), getattr(found.worst, name)
        yield f"  {name:<25}{size(mean):>14}{size(worst):>14}"
    share = found.worst.total / found.memory_bytes
    yield f"  {'of ' + size(found.memory_bytes):<25}{found.mean.total / found.memory_bytes:>14.0%}{share:>14.0%}"


def _traffic(found: Estimate) -> Iterator[str]:
    if not found.traffic:
        return
    yield ""
    yield f"communication per rank and step {'':<12}{'ranks':>6}{'sent':>12}{'off node':>10}{'time':>11}{'exposed':>11}"
    for item in found.traffic:
        name = f"{item.group}: {item.collective}"
        yield (
            f"  {name:<42}{item.size:>6}{size(item.bytes):>12}{item.across:>10.0%}{duration(item.seconds):>11}"
            f"{duration(item.exposed):>11}"
        )


def _time(found: Estimate) -> Iterator[str]:
    times = found.times
    yield ""
    yield (
        f"step: {duration(times.step)} = compute {duration(times.compute)} (recomputation "
        f"{duration(times.recompute)}) + exposed communication {duration(times.exposed)} + bubble "
        f"{duration(times.bubble)} + optimizer {duration(times.optimizer)}"
    )
    other = mfu(found.setup, found.hardware, times.step, causal=False)
    rate = found.setup.tokens_per_step / times.step
    each = rate / found.setup.ranks
    yield f"MFU: {found.mfu:.1%} causal, {other:.1%} non-causal; {rate:,.0f} tokens/s, {each:,.0f} per device"
    lost = found.overhead
    yield (
        f"days: {found.days:,.1f} for {found.tokens:.3g} tokens ({found.steps:,.0f} steps); "
        f"{found.days * (1 + lost.share):,.1f} with checkpoints and failures (+{lost.share:.1%})"
    )
    pools = found.pools
    yield (
        f"phase separation: {pools.ranks} update ranks hold {size(pools.state_bytes_per_rank)} each; exchange "
        f"{size(pools.exchange_bytes_per_step)} per step, {size(pools.exchange_bytes_per_token)} per token; "
        f"{'pays' if pools.pays else 'do not separate'}: {pools.reason}"
    )


def _verdict(found: Estimate) -> Iterator[str]:
    share = found.worst.total / found.memory_bytes
    yield ""
    if not found.fits:
        yield (
            f"verdict: does NOT fit: stage {found.worst.stage} needs {size(found.worst.total)} + "
            f"{size(found.hardware.runtime_bytes)} for context and NCCL, the watermark is {memory.WATERMARK:.0%} of "
            f"{size(found.memory_bytes)}; see `pdtrain plan advise`"
        )
    elif not found.within_budget:
        yield (
            f"verdict: fits below the {memory.WATERMARK:.0%} watermark, but {share:.0%} is above the "
            f"{memory.BUDGET:.0%} budget"
        )
    else:
        yield f"verdict: fits, {share:.0%} of memory, within the {memory.BUDGET:.0%} budget"
    if found.setup.runnable:
        yield f"not trained by pdtrain today: {'; '.join(found.setup.runnable)}"


def _conventions(found: Estimate) -> Iterator[str]:
    yield ""
    yield "conventions:"
    for line in conventions(found):
        yield f"  - {line}"
