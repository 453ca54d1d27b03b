"""One layout planned: everything that `pdtrain plan` says, as values and as the JSON of DESIGN's contract."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pdtrain.plan import memory, timing
from pdtrain.plan.activations import inventory_of
from pdtrain.plan.communication import OVERLAP, Traffic, overlap
from pdtrain.plan.flops import CONVENTION, NON_CAUSAL, per_token
from pdtrain.plan.hardware import Hardware
from pdtrain.plan.parameters import Parameters, count
from pdtrain.plan.pools import Pools, pools
from pdtrain.plan.reliability import Overhead, overhead
from pdtrain.plan.setup import Setup, layout_text, stages

SCHEMA = "pdtrain.plan/1"
#: Unsharded: BF16 weight and gradient, FP32 master, m, v.
STATE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """A planned layout. `mean` and `worst`: memory of a rank of an average stage, and of the fullest stage."""

    setup: Setup
    hardware: Hardware
    memory_bytes: float
    tokens: float
    parameters: Parameters
    mean: memory.Memory
    worst: memory.Memory
    times: timing.Times
    traffic: list[Traffic]
    overhead: Overhead
    pools: Pools

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays below the watermark."""
        return self.worst.total + self.hardware.runtime_bytes <= memory.WATERMARK * self.memory_bytes

    @property
    def within_budget(self) -> bool:
        """Whether it also keeps the 70 % rule."""
        return self.worst.total <= memory.BUDGET * self.memory_bytes

    @property
    def steps(self) -> float:
        return self.tokens / self.setup.tokens_per_step

    @property
    def days(self) -> float:
        """Steps x step time, nothing lost."""
        return self.steps * self.times.step / 86_400

    @property
    def mfu(self) -> float:
        return timing.mfu(self.setup, self.hardware, self.times.step)


def estimate(setup: Setup, hardware: Hardware, memory_bytes: float | None = None, tokens: float | None = None,
             **failure: float) -> Estimate:  # fmt: skip
    """Plan one layout. tokens: the budget (absent: train.steps of the configuration); failure: see `overhead`."""
    parameters = count(setup.run.model)
    mean, worst = memory.peak(setup, device=hardware.kind)
    times, traffic = timing.times(setup, hardware)
    wanted = tokens or float(setup.run.train.steps * setup.tokens_per_step)
    nodes = max(1, -(-setup.ranks // hardware.devices_per_node))
    lost = overhead(setup.ranks, nodes, 12.0 * parameters.trained, **failure)
    found_pools = pools(setup, hardware, times.step, times.optimizer, worst.optimizer)
    return Estimate(
        setup, hardware, memory_bytes or hardware.memory_bytes, wanted, parameters, mean, worst, times, traffic, lost,
        found_pools,
    )  # fmt: skip


def conventions(found: Estimate) -> list[str]:
    """What every number means: printed always."""
    setup, hardware = found.setup, found.hardware
    scheme = {
        "fsdp": f"FP32 weights are the master copy (4 B), gradients {setup.options.gradient_bytes or 4} B, "
        f"Adam moments 2 x {setup.options.moment_bytes} B",
        "megatron": f"weights in the compute dtype, main gradients {setup.options.gradient_bytes or 4} B, FP32 master "
        f"copy (4 B), Adam moments 2 x {setup.options.moment_bytes} B",
    }[setup.states]
    hidden = ", ".join(f"{key.upper()} {overlap(setup, key):.0%}" for key in OVERLAP)
    measured = f"; measured by the probe: {', '.join(hardware.measured)}" if hardware.measured else ""
    experts = "dropless" if setup.run.model.moe.capacity_factor is None else "capped by the capacity factor"
    return [
        f"activated: {found.parameters.convention}",
        f"flops_per_token: {CONVENTION}; at sequence length {setup.run.train.sequence_length}, no MTP; non-causal: "
        f"{NON_CAUSAL}",
        f"states_bytes: {STATE_BYTES} B x total, unsharded (BF16 weight and gradient, FP32 master, m, v)",
        f"per rank: {setup.sharding} over DP (experts: EDP), {scheme}; per_rank is the mean over pipeline stages, "
        "worst_rank decides `fits`",
        f"activations: inventory `{inventory_of(setup)}`, {'flash' if setup.options.flash else 'explicit'} attention, "
        f"overload factor {setup.options.overload:g} on routed rows, {experts}",
        f"fits: worst rank + {hardware.runtime_bytes / 1e9:g} GB for context and NCCL <= {memory.WATERMARK:.0%} of "
        f"memory; budget: <= {memory.BUDGET:.0%} without them",
        f"hardware: {hardware.name}, {hardware.source} ({hardware.date}){measured}",
        f"time: model, not measurement (docs/plan.md says how far off); routing balanced up to the overload factor; "
        f"hidden under compute: {hidden}",
        f"mfu: {MFU_CONVENTION.format(dtype=setup.run.precision.all)}",
        f"days: tokens / tokens per step x step time; with overhead: blocking checkpoints every "
        f"{found.overhead.interval_seconds / 60:.0f} min of {found.overhead.save_seconds:.0f} s, "
        f"{found.overhead.failures_per_day:.2g} failures a day (Llama 3's rate per device, arXiv 2407.21783)",
    ]


MFU_CONVENTION = "causal model FLOP (no recomputation) / step time / dense {dtype} peak of all compute ranks"


def as_json(found: Estimate) -> dict[str, Any]:
    """The contract's keys, and more. Bytes, seconds, FLOP."""
    setup, model = found.setup, found.setup.run.model
    length = setup.run.train.sequence_length
    causal, full = per_token(model, length), per_token(model, length, causal=False)
    times = found.times
    return {
        "schema": SCHEMA,
        "layout": layout_json(setup),
        "parameters": {
            "total": found.parameters.total,
            "trained": found.parameters.trained,
            "activated": found.parameters.activated,
            "activated_convention": found.parameters.convention,
            "activated_with_embedding": found.parameters.activated_with_embedding,
        },
        "states_bytes": STATE_BYTES * found.parameters.total,
        "flops_per_token": causal,
        "flops_per_token_non_causal": full,
        "flops_convention": CONVENTION,
        "tokens": found.tokens,
        "tokens_per_step": setup.tokens_per_step,
        "training_flops": causal * found.tokens,
        "per_rank": _rank(found.mean),
        "worst_rank": {"stage": found.worst.stage} | _rank(found.worst),
        "memory_bytes": found.memory_bytes,
        "within_budget": found.within_budget,
        "fits": found.fits,
        "communication": [asdict(item) for item in found.traffic],
        "compute_seconds": times.compute,
        "recompute_seconds": times.recompute,
        "exposed_communication_seconds": times.exposed,
        "bubble_seconds": times.bubble,
        "optimizer_seconds": times.optimizer,
        "step_seconds": times.step,
        "tokens_per_second_per_rank": setup.tokens_per_step / times.step / setup.ranks,
        "mfu": found.mfu,
        "mfu_convention": MFU_CONVENTION.format(dtype=setup.run.precision.all),
        "mfu_non_causal": timing.mfu(setup, found.hardware, times.step, causal=False),
        "days": found.days,
        "days_with_overhead": found.days * (1 + found.overhead.share),
        "overhead": asdict(found.overhead),
        "pools": asdict(found.pools),
        "trainable_today": not setup.runnable,
        "not_trainable_because": setup.runnable,
        "hardware": {"key": found.hardware.key, "name": found.hardware.name, "source": found.hardware.source,
                     "date": found.hardware.date, "measured": list(found.hardware.measured)},
        "conventions": conventions(found),
    }  # fmt: skip


def _rank(item: memory.Memory) -> dict[str, float]:
    return {
        "parameters_bytes": item.parameters,
        "gradients_bytes": item.gradients,
        "optimizer_bytes": item.optimizer,
        "activations_bytes": item.activations,
        "buffers_bytes": item.buffers,
        "total_bytes": item.total,
    }


def layout_json(setup: Setup) -> dict[str, Any]:
    """Degrees and policies of a layout."""
    recompute = setup.options.recompute or "as configured"
    return {
        "text": layout_text(setup), "ranks": setup.ranks, "pipeline": setup.pp, "tensor": setup.tp, "context": setup.cp,
        "data": setup.dp, "expert": setup.ep, "expert_data": setup.edp, "sharding": setup.sharding,
        "schedule": setup.options.schedule, "virtual": setup.options.virtual, "recompute": recompute,
        "micro_batch": setup.run.train.micro_batch, "micro_batches": setup.micro_batches,
        "layers_per_stage": [stage.layers for stage in stages(setup)],
    }  # fmt: skip
