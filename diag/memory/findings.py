"""The answers of all snapshots as findings: one per device, and one for each leak and for ranks that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from diag.artefacts.memory_snapshot import MemorySnapshot
from diag.detectors import NotChecked
from diag.memory import compare
from diag.memory.advice import activations, advice
from diag.memory.nouns import DeviceMemory, Oom
from diag.report.model import rank_list, size
from diag.schema import Evidence, Finding, Severity, Where

#: A failed allocation that was followed by more than this many successful ones did not end the run.
SURVIVED = 500
#: Free between live blocks: more than this part of what is reserved, and at least so many bytes, is worth a warning.
SPLIT_SHARE, SPLIT_BYTES = 0.30, 2 << 30
#: Plan for 70 % of the device; 90 % is the watermark with peaks.
WATERMARK = 0.90
#: Memory of the device that is not PyTorch's: context, NCCL and cuBLAS take one to three GiB. More is somebody else.
OTHERS_SHARE = 0.15
#: Idle without a failure: this part of what is reserved, and this part of it between live blocks, is worth a note.
IDLE_SHARE, IDLE_SPLIT_SHARE = 1 / 3, 0.05
POINTS_IN_JSON = 200


def findings_of(snapshots: Sequence[MemorySnapshot], *, logged: bool = False) -> Iterator[Finding | NotChecked]:
    """All findings; `logged`: a log among the inputs already tells of an out-of-memory error, and leads."""
    for snapshot in snapshots:
        for device in snapshot.devices:
            yield device_finding(snapshot, device, snapshots, logged=logged)
            if device.growth:
                yield _leak(snapshot, device, snapshots)
        if not snapshot.devices:
            yield NotChecked(f"{snapshot.path} holds no memory of any device")
    yield from _between_ranks(snapshots)


def device_finding(snapshot: MemorySnapshot, device: DeviceMemory, among: Sequence[MemorySnapshot], *,
                   logged: bool = False) -> Finding:
    """What one device's memory shows; severity "info" when nothing is wrong."""
    cause, severity, summary = _verdict(snapshot, device)
    oom = device.ooms[-1] if device.ooms else None
    failed = [s.rank for s in among if any(d.ooms for d in s.devices)]
    # a fault of every rank names no ranks
    everywhere = len(among) > 1 and len(failed) == len(among)
    ranks = [snapshot.rank] if snapshot.rank is not None and not (oom and everywhere) else []
    who = _who(snapshot, among)
    fix = advice(device, snapshot.settings, fragmented=cause == "cuda_oom_fragmentation") if severity != "info" else []
    finding = Finding(
        cause=cause, severity=severity, role="context" if severity == "info" or (logged and oom) else "symptom",
        confidence=0.9 if oom is None or oom.free_bytes is not None else 0.7,
        summary=f"{who}{_name(device)}: {summary}", where=Where(ranks=ranks, gpus=[str(device.device)]),
        evidence=[_evidence(snapshot, device)], fix=fix, numbers=numbers(snapshot, device))
    if cause == "healthy":
        finding.where = Where(ranks=ranks)
    return finding


def _who(snapshot: MemorySnapshot, among: Sequence[MemorySnapshot]) -> str:
    """What tells this snapshot from others in a sentence: its rank, or its file where there are several."""
    if snapshot.rank is not None:
        return f"rank {snapshot.rank}, "
    return f"{'/'.join(Path(snapshot.path).parts[-2:])}, " if len(among) > 1 else ""


def _name(device: DeviceMemory) -> str:
    return f"GPU {device.device}" if isinstance(device.device, int) else str(device.device)


def _verdict(snapshot: MemorySnapshot, device: DeviceMemory) -> tuple[str, Severity, str]:
    if device.ooms:
        return _oom(snapshot, device, device.ooms[-1])
    text = _peak(device)
    if snapshot.device_memory and device.peak_reserved_bytes > WATERMARK * snapshot.device_memory:
        share = 100 * device.peak_reserved_bytes / snapshot.device_memory
        return "memory_pressure", "warning", f"{share:.0f} % of the device's {size(snapshot.device_memory)} were " \
            f"reserved at the most; 90 % is the watermark. {text}"
    if device.split_bytes >= SPLIT_BYTES and device.split_bytes > SPLIT_SHARE * device.end_reserved_bytes \
            and not _expandable_only(device):
        share = 100 * device.split_bytes / device.end_reserved_bytes
        return "memory_fragmentation", "warning", f"{size(device.split_bytes)} ({share:.0f} % of what is reserved) " \
            f"lie free between live blocks, the largest of them {size(device.largest_free_bytes)}. {text}"
    if note := _idle(device):
        return "memory_fragmentation", "info", f"{note}. {text}"
    return "healthy", "info", text


def _idle(device: DeviceMemory) -> str:
    """What lies idle at the end where some of it cannot be given back; empty where that is little, or all of it can."""
    reserved = max(device.end_reserved_bytes, 1)
    idle = device.end_reserved_bytes - device.end_allocated_bytes - device.pending_free_bytes
    if idle < max(SPLIT_BYTES, IDLE_SHARE * reserved) or device.split_bytes < IDLE_SPLIT_SHARE * reserved \
            or _expandable_only(device):
        return ""
    return f"{size(idle)} ({100 * idle / reserved:.0f} %) of the reserved {size(reserved)} are idle: " \
        f"{size(device.cached_bytes)} in wholly free segments, which are given back when memory runs short, and " \
        f"{size(device.split_bytes)} between live blocks, which cannot be; no allocation failed"


def _expandable_only(device: DeviceMemory) -> bool:
    return all(pool.name == "expandable segments" for pool in device.pools)


def _peak(device: DeviceMemory) -> str:
    if not isinstance(device.device, int):
        kinds = ", ".join(f"{share.name} {size(share.bytes)}" for share in device.phases[:4])
        fullest = f"; fullest inside {device.modules[0].name}" if device.modules else ""
        return f"{size(device.peak_requested_bytes)} in use at the peak of the step" \
            + (f" ({kinds})" if kinds else "") + f"{fullest}."
    if not device.events:
        when = "at the time of the snapshot (no history was recorded)"
    elif device.peak_index < 0:
        when = f"before the first of {device.events:,} recorded event{'s' if device.events > 1 else ''}"
    else:
        when = f"at event {device.peak_index:,} of {device.events:,}"
    parts = [f"{size(device.peak_requested_bytes)} in use {when}, {size(device.peak_reserved_bytes)} reserved at most"]
    if top := activations(device):
        parts.append(top)
    idle = device.end_reserved_bytes - device.end_allocated_bytes
    if not _idle(device) and idle > 0.25 * max(device.end_reserved_bytes, 1) and idle > 1 << 30:
        parts.append(f"{size(idle)} of the reserved {size(device.end_reserved_bytes)} are idle at the end: "
                     f"{size(device.cached_bytes)} in wholly free segments, {size(device.split_bytes)} between "
                     "live blocks")
    return "; ".join(parts) + "."


def _oom(snapshot: MemorySnapshot, device: DeviceMemory, oom: Oom) -> tuple[str, Severity, str]:
    severity: Severity = "warning" if oom.events_after > SURVIVED else "fatal"
    asked = f"{size(oom.requested_bytes)} were asked for" + (f" by {oom.owner}" if oom.phase != "unknown" else "")
    survived = f" The run went on: {oom.events_after:,} allocations followed." if severity == "warning" else ""
    free = f", {size(oom.device_free_bytes)} free on the device" if oom.device_free_bytes is not None else ""
    total = snapshot.device_memory
    if total and oom.device_free_bytes is not None:
        others = total - oom.device_free_bytes - oom.reserved_bytes
        if others > OTHERS_SHARE * total:
            return "cuda_oom_shared_gpu", severity, \
                f"out of memory, and {size(others)} of {size(total)} are not PyTorch's: another process, or NCCL and " \
                f"contexts. {asked}{free}.{survived}"
    if oom.fragmented:
        return "cuda_oom_fragmentation", severity, \
            f"out of memory by fragmentation: {asked}, {size(oom.free_bytes or 0)} are free in the segments, the " \
            f"largest block that could serve it is {size(oom.largest_free_bytes or 0)}{free}.{survived}"
    inside = f"only {size(oom.free_bytes)} are free in the segments" if oom.free_bytes is not None else \
        "what is free in the segments is not known"
    text = f"out of memory by true demand: {asked}, {inside}{free}; {size(oom.allocated_bytes)} of " \
           f"{size(oom.reserved_bytes)} reserved are allocated"
    both = (oom.free_bytes or 0) + (oom.device_free_bytes or 0)
    if oom.free_bytes is not None and both >= oom.requested_bytes:
        text += f". Together with the free part of the device ({size(both)}) it would just fit with expandable segments"
    if top := activations(device):
        text += f". At the peak {top}"
    cause = "cuda_oom_optimizer" if oom.phase == "optimizer" else "cuda_oom"
    return cause, severity, text + "." + survived


def _evidence(snapshot: MemorySnapshot, device: DeviceMemory) -> Evidence:
    if device.ooms:
        oom = device.ooms[-1]
        free = "not said" if oom.device_free_bytes is None else f"{oom.device_free_bytes:,}"
        return Evidence(path=snapshot.path, rank=snapshot.rank,
                        text=f"event {oom.index:,} of {device.events:,}: oom, size {oom.requested_bytes:,}, "
                             f"device_free {free}")
    if not isinstance(device.device, int):
        return Evidence(path=snapshot.path, rank=snapshot.rank, text=snapshot.layout)
    return Evidence(path=snapshot.path, rank=snapshot.rank,
                    text=f"{device.events:,} events, {device.segments:,} segments; {snapshot.layout}")


def numbers(snapshot: MemorySnapshot, device: DeviceMemory) -> dict[str, Any]:
    """The figures of the JSON contract, and those behind them. All in bytes."""
    if not isinstance(device.device, int):  # module peaks: nothing is known of an allocator
        return {"device": device.device, "peak_requested_bytes": device.peak_requested_bytes,
                "peak_allocated_bytes": device.peak_allocated_bytes,
                "at_peak": {"kinds": msgspec.to_builtins(device.phases),
                            "modules": msgspec.to_builtins(device.modules[:200])}}
    found: dict[str, Any] = {
        "device": device.device, "peak_requested_bytes": device.peak_requested_bytes,
        "peak_allocated_bytes": device.peak_allocated_bytes, "peak_reserved_bytes": device.peak_reserved_bytes,
        "fragmentation_bytes": device.fragmentation_bytes, "split_bytes": device.split_bytes,
        "cached_bytes": device.cached_bytes, "rounding_bytes": device.rounding_bytes,
        "pending_free_bytes": device.pending_free_bytes, "end_requested_bytes": device.end_requested_bytes,
        "end_allocated_bytes": device.end_allocated_bytes, "end_reserved_bytes": device.end_reserved_bytes,
        "events": device.events,
    }
    if device.events:
        found |= {"peak_event": device.peak_index, "before_window_bytes": device.before_window_bytes,
                  "frees_of_earlier_blocks": device.frees_of_unknown}
    if device.seconds is not None:
        found["window_seconds"] = device.seconds
    private = sum(p.reserved_bytes for p in device.pools if p.name.startswith("private"))
    if private:
        found["private_pools_bytes"] = private
    if snapshot.device_memory:
        found["device_memory_bytes"] = snapshot.device_memory
    if device.ooms:
        found |= {f"oom_{k}": v for k, v in msgspec.to_builtins(device.ooms[-1]).items() if v not in (None, "")}
        oom = device.ooms[-1]
        if snapshot.device_memory and oom.device_free_bytes is not None:
            found["not_pytorch_bytes"] = snapshot.device_memory - oom.device_free_bytes - oom.reserved_bytes
    rows = {"owners": device.owners, "phases": device.phases, "modules": device.modules,
            "annotations": device.annotations, "sizes": device.sizes, "largest": device.largest, "pools": device.pools}
    found["at_peak"] = {name: msgspec.to_builtins(value) for name, value in rows.items() if value}
    if device.timeline:
        found["timeline"] = _thin(device)
    notes = [*snapshot.notes, *device.notes, *_window_notes(device)]
    if notes:
        found["notes"] = notes
    return found


def _thin(device: DeviceMemory) -> dict[str, list[int]]:
    line = device.timeline
    assert line is not None
    step = max(-(-len(line.index) // POINTS_IN_JSON), 1)
    keep = [max(range(s, min(s + step, len(line.index))), key=lambda i: line.allocated[i])
            for s in range(0, len(line.index), step)]
    found = {"event": [line.index[i] for i in keep], "requested_bytes": [line.allocated[i] for i in keep],
             "reserved_bytes": [line.reserved[i] for i in keep]}
    if line.time_us:
        found["time_us"] = [line.time_us[i] for i in keep]
    return found


def _window_notes(device: DeviceMemory) -> Iterator[str]:
    if device.frees_of_unknown or (device.events and device.before_window_bytes):
        yield f"{size(device.before_window_bytes)} were allocated before the first event; " \
              f"{device.frees_of_unknown:,} of those blocks were freed in the window"
    if device.ring_full:
        yield f"the ring was full, it seems ({device.events:,} events): earlier ones were overwritten. Record more " \
              "(max_entries), or dump earlier"
    if device.events and not device.has_frames:
        yield "no stacks were recorded, so nobody can be named: " \
              "torch.cuda.memory._record_memory_history(stacks='python')"


def _leak(snapshot: MemorySnapshot, device: DeviceMemory, among: Sequence[MemorySnapshot]) -> Finding:
    growth = device.growth
    assert growth is not None
    first = growth.owners[0]
    fatal = any(oom.events_after <= SURVIVED for oom in device.ooms)
    who = _who(snapshot, among)
    room = (snapshot.device_memory or 0) - device.peak_reserved_bytes
    left = f"; at this rate the device is full after about {room // growth.bytes_per_step:,} more steps" \
        if room > 0 and growth.bytes_per_step > 0 else ""
    return Finding(
        cause="memory_leak", severity="fatal" if fatal else "error", role="symptom", confidence=0.85,
        summary=f"{who}{_name(device)}: {size(growth.bytes_per_step)} stay behind after each of {growth.steps} steps; "
                f"{first.owner} keeps {size(first.bytes)} of it{left}.",
        where=Where(ranks=[snapshot.rank] if snapshot.rank is not None else [], gpus=[str(device.device)],
                    module=first.owner),
        evidence=[Evidence(path=snapshot.path, rank=snapshot.rank,
                           text=f"lowest point of each step (by {growth.how}): "
                                + ", ".join(size(t) for t in growth.troughs[-8:]))],
        fix=[f"Find what keeps the result of {first.owner}: a list of losses or outputs (append(loss.item())), a graph "
             "kept by retain_graph or a hook, a cache without limit",
             "Compare two snapshots some steps apart: what is only in the second, with its stack, is the leak"],
        numbers={"bytes_per_step": growth.bytes_per_step, "steps": growth.steps,
                 "growing": [{"owner": o.owner, "phase": o.phase, "bytes_per_step": o.bytes,
                              "blocks_per_step": o.blocks} for o in growth.owners]})


def _between_ranks(snapshots: Sequence[MemorySnapshot]) -> Iterator[Finding]:
    groups: dict[str, list[MemorySnapshot]] = {}
    known = [s for s in snapshots if s.rank is not None and s.devices]
    once = len({s.rank for s in known}) == len(known)
    for item in known:
        groups.setdefault("" if once else item.directory, []).append(item)
    for group in groups.values():
        best: dict[int, tuple[int, MemorySnapshot, DeviceMemory]] = {}
        for item in group:  # of several moments of one rank the fullest
            device = max(item.devices, key=lambda d: d.peak_requested_bytes)
            entry = (device.peak_requested_bytes, item, device)
            if item.rank is not None and (item.rank not in best or entry[0] > best[item.rank][0]):
                best[item.rank] = entry
        members = [best[rank][1] for rank in sorted(best)]
        fullest = [(rank, best[rank][2]) for rank in sorted(best)]
        found = compare.differing(fullest)
        if found is None:
            continue
        severity: Literal["warning", "info"] = "warning" if found.share >= compare.WARN else "info"
        reading = f": {found.reading}, by the names of these lines" if found.reading else ""
        most = f"; most of it is {found.owners[0].owner}{reading}" if found.owners else ""
        yield Finding(
            cause="memory_rank_differs", severity=severity, role="symptom" if severity == "warning" else "context",
            confidence=0.75,
            summary=f"rank{'s' if len(found.ranks) > 1 else ''} {rank_list(found.ranks)} needs "
                    f"{size(found.excess_bytes)} ({100 * found.share:.0f} %) more at the peak than the median of "
                    f"{len(fullest)} ranks, {size(found.median_bytes)}{most}.",
            where=Where(ranks=found.ranks),
            evidence=[Evidence(path=m.path, rank=m.rank, text=f"peak {size(d.peak_requested_bytes)}")
                      for m, (_, d) in zip(members, fullest) if m.rank in found.ranks][:8],
            numbers={"excess_bytes": found.excess_bytes, "median_bytes": found.median_bytes,
                     "more_than_peers": [{"owner": o.owner, "phase": o.phase, "bytes": o.bytes} for o in found.owners],
                     "peaks": [{"rank": r, "peak_requested_bytes": d.peak_requested_bytes}
                               for r, d in sorted(fullest, key=lambda x: x[0])]})
