"""One device's trace and blocks -> `DeviceMemory`: everything a report says about it, small enough to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diag.memory.growth import growth_of
from diag.memory.holes import holes_at
from diag.memory.nouns import (
    ALLOC,
    Annotation,
    Blocks,
    DeviceMemory,
    Digest,
    Oom,
    Owner,
    Pool,
    Share,
    Snapshot,
    Timeline,
    Trace,
    Unusual,
)
from diag.memory.replay import Replay, replay
from diag.memory.stacks import NOBODY, Caller, callers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Points of the timeline: more than the pixels of a screen, so that zooming shows more.
POINTS = 4000
LAYERS = 12
MAX_OWNERS = 40
MAX_OOMS = 50
MAX_MARKS = 200
#: An allocation this many times the usual one of its line, which is known from at least so many others.
UNUSUAL, UNUSUAL_SAMPLES, UNUSUAL_LINES = 1.5, 5, 3
#: Size classes of what is alive at the peak.
CLASSES = ((1 << 20, "up to 1 MiB"), (10 << 20, "1 to 10 MiB"), (100 << 20, "10 to 100 MiB"),
           (1 << 30, "100 MiB to 1 GiB"), (1 << 62, "over 1 GiB"))
BEFORE = "allocated before the window"


def digest(snapshot: Snapshot) -> Digest:
    """The answers for all devices of `snapshot` that hold or held anything."""
    who = callers(snapshot.stacks)
    devices = sorted({*snapshot.traces, *snapshot.blocks})
    found = [analyse(device, snapshot.traces.get(device), snapshot.blocks.get(device), snapshot, who)
             for device in devices]
    notes = list(snapshot.notes)
    if snapshot.unknown_actions:
        notes.append(f"{snapshot.unknown_actions:,} events of kinds that are not known here were passed over")
    return Digest(devices=found, layout=snapshot.layout, settings=snapshot.settings, notes=notes)


def analyse(device: int, trace: Trace | None, blocks: Blocks | None, snapshot: Snapshot,
            who: list[Caller]) -> DeviceMemory:
    """The answer for one device; `who` has one caller per stack."""
    result = DeviceMemory(device=device)
    replayed = replay(trace, blocks, snapshot.settings)
    result.notes = replayed.notes
    result.events = replayed.events
    at, peak = replayed.peak()
    result.peak_index, result.peak_requested_bytes = at, peak
    result.peak_reserved_bytes = replayed.peak_reserved()
    result.reserved_at_peak_bytes = replayed.reserved_after(at)
    result.peak_allocated_bytes = _peak_allocated(replayed, trace, blocks)
    result.before_window_bytes = replayed.start_requested if replayed.events else 0
    result.frees_of_unknown = replayed.frees_of_unknown
    if blocks is not None:
        _final_state(result, blocks)
    alive = replayed.alive(at)
    if trace is not None and replayed.events:
        _window(result, trace, at)
        result.before_window_at_peak_bytes = int(replayed.requested[alive & (replayed.begin < 0)].sum())
    result.rounding_bytes = int((replayed.block[alive] - replayed.requested[alive]).sum())
    _who_at_peak(result, replayed, alive, who)
    if trace is not None and replayed.events:
        result.annotations = _by_annotation(trace, replayed, alive, snapshot.annotations, device, snapshot.tags)
        result.ooms = _ooms(trace, blocks, replayed, who)
        result.growth = growth_of(replayed, trace, [a for a in snapshot.annotations if a.device in (device, -1)], who,
                                  snapshot.tags)
        result.unusual = _unusual(replayed, alive, who)
        result.timeline = _timeline(trace, replayed, alive, who, result, snapshot.annotations)
    return result


def _peak_allocated(replayed: Replay, trace: Trace | None, blocks: Blocks | None) -> int:
    """Highest total of block sizes, with the unsplit rests that are found at that moment."""
    peak = replayed.peak_block()
    if trace is not None and blocks is not None and replayed.events:
        course = replayed.course_block
        at = int(course.argmax()) if int(course.max()) > replayed.start_block else -1
        holes = holes_at(at, trace, blocks, replayed)
        if holes is not None:
            peak += holes.unsplit
    return min(peak, max(replayed.peak_reserved(), replayed.peak_block()))


def _final_state(result: DeviceMemory, blocks: Blocks) -> None:
    import numpy as np

    live, pending = blocks.state == 1, blocks.state == 2
    result.end_requested_bytes = int(blocks.requested[live].sum())
    result.end_allocated_bytes = int(blocks.size[live].sum())
    result.end_reserved_bytes = int(blocks.segment_size.sum())
    result.pending_free_bytes = int(blocks.size[pending].sum())
    result.end_rounding_bytes = result.end_allocated_bytes - result.end_requested_bytes
    result.segments = len(blocks.segment_size)
    free = blocks.state == 0
    used = np.zeros(len(blocks.segment_size), bool)
    used[blocks.segment[~free]] = True
    result.split_bytes = int(blocks.size[free & used[blocks.segment]].sum())
    result.cached_bytes = int(blocks.segment_size[~used].sum())
    result.largest_free_bytes = int(blocks.size[free].max()) if free.any() else 0
    names = np.array(["", "small requests", "private pools (CUDA graphs, MemPool)", "large requests",
                      "expandable segments"])
    kind = np.where(blocks.segment_private == 1, 2, np.where(blocks.segment_expandable == 1, 4,
                                                             np.where(blocks.segment_small == 1, 1, 3)))
    held = np.bincount(blocks.segment[live], blocks.size[live].astype(np.float64), len(kind))
    result.pools = [Pool(name=str(names[k]), reserved_bytes=int(blocks.segment_size[kind == k].sum()),
                         allocated_bytes=int(held[kind == k].sum()), segments=int((kind == k).sum()))
                    for k in (3, 4, 1, 2) if (kind == k).any()]


def _window(result: DeviceMemory, trace: Trace, at: int) -> None:
    if len(trace.time):
        known = trace.time[trace.time >= 0]
        if len(known):
            result.seconds = max(float(known[-1] - known[0]) / 1e6, 0.0)
        if at >= 0 and trace.time[at] >= 0:
            result.peak_time_us = int(trace.time[at])
    # max_entries is given as a round number or a power of two; a ring that is not full has any number
    n = result.events
    result.ring_full = n >= 1000 and (n % 10_000 == 0 or n & (n - 1) == 0)


def _who_at_peak(result: DeviceMemory, replayed: Replay, alive: npt.NDArray[np.bool_], who: list[Caller]) -> None:
    import numpy as np

    rows = np.flatnonzero(alive)
    size, stack = replayed.requested[rows], replayed.stack[rows]
    result.has_frames = bool((replayed.stack >= 0).any())
    people = [NOBODY, *who]
    bytes_of = np.bincount(stack + 1, size.astype(np.float64), len(people))
    count_of = np.bincount(stack + 1, minlength=len(people))
    owners: dict[tuple[str, str, str], Owner] = {}
    phases: dict[str, Share] = {}
    modules: dict[str, Share] = {}
    for index in np.flatnonzero(count_of).tolist():
        person, held, blocks = people[index], int(bytes_of[index]), int(count_of[index])
        entry = owners.setdefault((person.owner, person.phase, person.module), Owner(
            owner=person.owner, phase=person.phase, module=person.module))
        entry.bytes += held
        entry.blocks += blocks
        for table, name in ((phases, person.phase), (modules, person.module)):
            if name:
                share = table.setdefault(name, Share(name=name, bytes=0, blocks=0))
                share.bytes += held
                share.blocks += blocks
    result.owners = sorted(owners.values(), key=lambda o: -o.bytes)[:MAX_OWNERS]
    result.phases = sorted(phases.values(), key=lambda s: -s.bytes)
    result.modules = sorted(modules.values(), key=lambda s: -s.bytes)[:MAX_OWNERS]
    low = 0
    for high, name in CLASSES:
        mine = (size > low) & (size <= high)
        if mine.any():
            result.sizes.append(Share(name=name, bytes=int(size[mine].sum()), blocks=int(mine.sum())))
        low = high
    for row in np.argsort(-size, kind="stable")[:10].tolist():
        person = people[int(stack[row]) + 1]
        result.largest.append(Owner(owner=person.owner, phase=person.phase, module=person.module,
                                    bytes=int(size[row]), blocks=1))


def _by_annotation(trace: Trace, replayed: Replay, alive: npt.NDArray[np.bool_], annotations: list[Annotation],
                   device: int, tags: list[str]) -> list[Share]:
    """What is alive at the peak, by the innermost annotation (or user metadata) that it was allocated under."""
    import numpy as np

    rows = np.flatnonzero(alive & (replayed.begin >= 0))
    if not len(rows):
        return []
    made = replayed.begin[rows]
    names: list[str] = []
    label = np.full(len(rows), -1, np.int64)
    if len(trace.tag):
        names, label = list(tags), trace.tag[made].astype(np.int64)
    elif len(trace.time) and annotations:
        times, values, names = _innermost(annotations, device)
        if len(times):
            place = np.searchsorted(times, trace.time[made], side="right") - 1
            label = np.where(place >= 0, values[np.maximum(place, 0)], -1)
    if not (label >= 0).any():
        return []
    size = replayed.requested[rows].astype(np.float64)
    held, count = np.bincount(label + 1, size, len(names) + 1), np.bincount(label + 1, minlength=len(names) + 1)
    return sorted((Share(name=(["outside of any", *names])[i], bytes=int(held[i]), blocks=int(count[i]))
                   for i in np.flatnonzero(count).tolist()), key=lambda s: -s.bytes)[:MAX_OWNERS]


def _innermost(annotations: list[Annotation], device: int) -> tuple[Any, Any, list[str]]:
    """(times, index of the innermost open name from then on or -1, names)."""
    import numpy as np

    names: dict[str, int] = {}
    opened: list[int] = []
    times, values = [], []
    for item in sorted((a for a in annotations if a.device in (device, -1)), key=lambda a: a.time):
        index = names.setdefault(item.name, len(names))
        if item.stage == "START":
            opened.append(index)
        elif index in opened:
            del opened[len(opened) - 1 - opened[::-1].index(index)]
        if len(opened) > 1000:
            break  # ends are missing; what follows would be guessed
        times.append(item.time)
        values.append(opened[-1] if opened else -1)
    return np.array(times, np.int64), np.array(values, np.int64), list(names)


def _ooms(trace: Trace, blocks: Blocks | None, replayed: Replay, who: list[Caller]) -> list[Oom]:
    import numpy as np

    found = []
    for event in trace.ooms[-MAX_OOMS:]:
        at = event.index
        caller = who[stack] if (stack := int(trace.stack[at])) >= 0 else NOBODY
        held = int(replayed.course_block[at])
        oom = Oom(index=at, requested_bytes=event.size, device_free_bytes=event.device_free,
                  time_us=int(trace.time[at]) if len(trace.time) and trace.time[at] >= 0 else None,
                  reserved_bytes=replayed.reserved_after(at), allocated_bytes=held, owner=caller.owner,
                  phase=caller.phase, events_after=int(np.count_nonzero(trace.action[at + 1 :] == ALLOC)))
        holes = holes_at(at, trace, blocks, replayed, request=event.size,
                         stream=_stream(event.stream)) if blocks is not None else None
        if holes is not None:
            oom.allocated_bytes += holes.unsplit
            oom.free_bytes, oom.largest_free_bytes = holes.free, holes.largest
            oom.elsewhere_bytes, oom.small_pool_free_bytes = holes.elsewhere, holes.small_pool
            oom.fragmented = holes.free >= event.size > holes.largest
        found.append(oom)
    return found


def _stream(value: int | None) -> int | None:
    return None if value is None else hash(value) & ((1 << 62) - 1)


def _unusual(replayed: Replay, alive: npt.NDArray[np.bool_], who: list[Caller]) -> Unusual | None:
    """The largest activation of the peak that dwarfs what its line usually asks for: one long batch.

    Only where the line asks for much the same most of the time, and at least `UNUSUAL_LINES` lines grew alike:
    parameters of many shapes pass through one line too.
    """
    import numpy as np

    inside = np.flatnonzero((replayed.begin >= 0) & (replayed.stack >= 0))
    rows = np.flatnonzero(alive & (replayed.begin >= 0) & (replayed.stack >= 0) & (replayed.requested >= 1 << 20))
    held = np.bincount(replayed.stack[rows], replayed.requested[rows].astype(np.float64), len(who))
    factors: list[tuple[float, Unusual]] = []
    for stack in np.argsort(-held)[:60].tolist():
        if held[stack] <= 0 or who[stack].phase != "forward":
            continue
        sizes = replayed.requested[inside[replayed.stack[inside] == stack]]
        now = replayed.requested[rows[replayed.stack[rows] == stack]]
        median, largest = int(np.median(sizes)), int(now.max())
        alike = float((np.abs(sizes - median) <= 0.5 * median).mean())
        if len(sizes) > UNUSUAL_SAMPLES and alike >= 0.6 and UNUSUAL * median <= largest <= 32 * median:
            factors.append((largest / median, Unusual(
                owner=who[stack].owner, bytes=largest, median_bytes=median, samples=len(sizes),
                excess_bytes=int((now[now >= UNUSUAL * median] - median).sum()))))
    if not factors:
        return None
    typical = float(np.median([factor for factor, _ in factors]))
    same = [item for factor, item in factors if 0.7 * typical <= factor <= 1.4 * typical]
    if len(same) < UNUSUAL_LINES:
        return None
    best = max(same, key=lambda item: item.bytes)
    best.excess_bytes = sum(item.excess_bytes for item in same)
    return best


def _timeline(trace: Trace, replayed: Replay, alive: npt.NDArray[np.bool_], who: list[Caller], result: DeviceMemory,
              annotations: Sequence[Annotation]) -> Timeline:
    """At most `POINTS` moments, the fullest of each stretch of the trace, with the largest owners as layers."""
    import numpy as np

    n = replayed.events
    width = max(-(-n // POINTS), 1)
    cut = n // width * width
    at = replayed.course[:cut].reshape(-1, width).argmax(1) + np.arange(cut // width) * width
    if cut < n:
        at = np.append(at, cut + int(replayed.course[cut:].argmax()))
    names = list(dict.fromkeys(o.owner for o in result.owners))[:LAYERS]
    layer_of = {name: i + 1 for i, name in enumerate(names)}
    other = len(names) + 1
    lookup = np.array([other, *(layer_of.get(c.owner, other) for c in who)], np.int64)
    layer = lookup[replayed.stack + 1]
    layer[replayed.begin < 0] = 0
    points = len(at)
    born, died = np.searchsorted(at, replayed.begin), np.searchsorted(at, replayed.end)
    size = replayed.requested.astype(np.float64)
    width_all = (other + 1) * (points + 1)
    change = np.bincount(layer * (points + 1) + born, size, width_all) - np.bincount(
        layer * (points + 1) + died, size, width_all)
    values = change.reshape(other + 1, points + 1)[:, :points].cumsum(1)
    keep = [i for i in range(other + 1) if values[i].max() > 0]
    labels = [BEFORE, *names, "all others"]
    marks: list[tuple[int, str]] = [(oom.index, "out of memory") for oom in result.ooms]
    if result.peak_index >= 0:
        marks.append((result.peak_index, "peak"))
    if len(trace.time):
        times = [a for a in annotations if a.stage == "START" and a.device in (result.device, -1)][:MAX_MARKS]
        places = np.searchsorted(trace.time, np.array([a.time for a in times], np.int64)).tolist()
        marks += [(place, a.name[:80]) for place, a in zip(places, times) if place < n]
    return Timeline(
        index=at.tolist(), time_us=trace.time[at].tolist() if len(trace.time) else [],
        allocated=replayed.course[at].tolist(), reserved=replayed.course_reserved[at].tolist(),
        layers=[labels[i] for i in keep], values=[values[i].astype(np.int64).tolist() for i in keep],
        marks=sorted(marks)[:MAX_MARKS])
