"""What to change, and how many bytes it would save, where the snapshot tells."""

from __future__ import annotations

from typing import Any

from diag.memory.nouns import DeviceMemory, Oom
from diag.memory.stacks import UNKNOWN
from diag.report.model import size

#: Savings below this part of the peak are not worth a line.
WORTH = 0.02
#: Rounding up requests that takes more than this part of the peak is worth a line.
ROUNDING = 0.05
MAX_STEPS = 6
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF from torch 2.9 on)"


def advice(device: DeviceMemory, settings: dict[str, Any], *, fragmented: bool = False) -> list[str]:
    """Steps in the order of what they save; an empty list where nothing is known."""
    steps: list[tuple[float, str]] = []
    peak = max(device.peak_requested_bytes, 1)
    oom = device.ooms[-1] if device.ooms else None
    if device.growth:
        first = device.growth.owners[0]
        steps.append((1e18, f"Stop keeping what {first.owner} allocates: {size(first.bytes)} stay behind per step"))
    if fragmented or _idle_at_peak(device) > 0.1 * device.peak_reserved_bytes:
        steps.append((_idle(device, oom) + (1e17 if fragmented else 0), _expandable(device, settings, oom)))
    if device.unusual and device.unusual.excess_bytes > WORTH * peak:
        u = device.unusual
        steps.append((u.excess_bytes, f"Cap or bucket the sequence length: {u.owner} asks for {size(u.bytes)} at the "
                      f"peak and for {size(u.median_bytes)} as a rule; one long batch costs "
                      f"about {size(u.excess_bytes)}"))
    by_phase = {share.name: share for share in device.phases}
    if (forward := by_phase.get("forward")) and forward.bytes > 0.1 * peak:
        module = next(((m, sum(o.bytes for o in device.owners if o.module == m.name and o.phase == "forward"))
                       for m in device.modules if any(o.module == m.name and o.phase == "forward"
                                                      for o in device.owners)), None)
        if module and module[1] > WORTH * peak:
            steps.append((module[1] * 0.9, f"Recompute the activations of {module[0].name} (activation checkpointing): "
                          f"up to {size(module[1])} of the peak"))
        steps.append((forward.bytes * 0.45, f"Halve the micro-batch and double the accumulation: about "
                      f"{size(forward.bytes // 2)} of the {size(forward.bytes)} of activations"))
    if (states := by_phase.get("optimizer")) and states.bytes > 0.1 * peak:
        steps.append((states.bytes * 0.5, f"Shard the optimizer states (FSDP, ZeRO), or offload them: up to "
                      f"{size(states.bytes)}; over N ranks all but 1/N of it"))
    if device.rounding_bytes > ROUNDING * peak:
        steps.append((device.rounding_bytes, f"Requests are rounded up by {size(device.rounding_bytes)} in all: fewer "
                      "and larger tensors, or no roundup_power2_divisions"))
    if oom is not None and oom.elsewhere_bytes > WORTH * peak:
        steps.append((oom.elsewhere_bytes, f"{size(oom.elsewhere_bytes)} are free in private pools or in pools of "
                      "other streams: share one pool among CUDA graphs, and allocate on the stream that uses it"))
    return [text for _, text in sorted(steps, key=lambda s: -s[0])[:MAX_STEPS]]


def _idle(device: DeviceMemory, oom: Oom | None) -> int:
    if oom is not None and oom.free_bytes is not None:
        return oom.free_bytes
    return _idle_at_peak(device)


def _idle_at_peak(device: DeviceMemory) -> int:
    """What was held from the driver at most beyond what was ever allocated at once; of a trace only."""
    return max(device.peak_reserved_bytes - device.peak_allocated_bytes, 0) if device.events > 1 else 0


def _expandable(device: DeviceMemory, settings: dict[str, Any], oom: Oom | None) -> str:
    idle = size(_idle(device, oom))
    if settings.get("expandable_segments"):
        return f"Expandable segments are on already, and {idle} lie idle all the same: look at private pools, other " \
               "streams and tensors that live long between short-lived ones"
    return f"Set {EXPANDABLE}: up to {idle} that are reserved and idle become usable"


def activations(device: DeviceMemory) -> str:
    """The line that holds most at the peak, in words; empty where no stack is known, or none holds much."""
    top = next((o for o in device.owners if o.owner != UNKNOWN), None)
    if top is None or top.bytes < 0.05 * device.peak_requested_bytes:
        return ""
    share = 100 * top.bytes / max(device.peak_requested_bytes, 1)
    return f"{top.owner} holds {size(top.bytes)} ({share:.0f} %)"
