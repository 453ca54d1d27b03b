"""Free memory inside the segments at one moment of the trace: how much, and how large its largest block is.

At the end the blocks say it. At an earlier event the segments are those of the end with later segment events undone,
and what is free is what no live allocation covers. A gap of up to 1 MiB behind a block of the large pool was not
split off and belongs to that block (CUDACachingAllocator.cpp, should_split); it is no free memory.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diag.memory.nouns import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, Blocks, Trace
from diag.memory.replay import Replay

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

#: kSmallSize: requests up to this are served by the pool for small ones, of segments of kSmallBuffer.
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
#: More segment events than this after the moment are not undone.
MAX_UNDONE = 200_000


@dataclass(slots=True, kw_only=True)
class Holes:
    """Free memory at a moment. `usable` and `largest` count what a request like the one asked about could take."""

    free: int = 0
    usable: int = 0
    largest: int = 0
    elsewhere: int = 0
    """In private pools, or in the pool of another stream."""
    small_pool: int = 0
    """In the pool for small requests, when the request is large (and the other way round)."""
    whole_segments: int = 0
    """In segments that are wholly free, which the allocator gives back before it fails."""
    unsplit: int = 0
    """Rests that belong to the blocks before them."""


@dataclass(slots=True)
class _Span:
    start: int
    end: int
    small: bool
    private: bool
    stream: int | None
    expandable: bool


def holes_at(event: int, trace: Trace, blocks: Blocks, replayed: Replay, *, request: int = SMALL_REQUEST + 1,
             stream: int | None = None) -> Holes | None:
    """The holes just after `event`, as a request of `request` bytes on `stream` sees them; None: cannot be told."""
    if not blocks.addressed:
        return None
    spans = _spans_at(event, trace, blocks)
    if spans is None:
        return None
    alive = replayed.alive(event)
    return _measure(spans, replayed.address[alive], replayed.block[alive], request, stream)


def _spans_at(event: int, trace: Trace, blocks: Blocks) -> list[_Span] | None:
    import numpy as np

    spans = [_Span(int(a), int(a) + int(s), bool(small), bool(private), int(stream), bool(expandable))
             for a, s, small, private, stream, expandable in sorted(zip(
                 blocks.segment_address.tolist(), blocks.segment_size.tolist(), blocks.segment_small.tolist(),
                 blocks.segment_private.tolist(), blocks.segment_stream.tolist(), blocks.segment_expandable.tolist()))]
    action = trace.action[event + 1 :]
    later = np.flatnonzero((action >= SEGMENT_ALLOC) & (action <= SEGMENT_UNMAP)) + event + 1
    if len(later) > MAX_UNDONE:
        return None
    starts = [s.start for s in spans]
    for at in later[::-1].tolist():
        start, size, code = int(trace.address[at]), int(trace.size[at]), int(trace.action[at])
        if code in (SEGMENT_FREE, SEGMENT_UNMAP):
            place = bisect.bisect_left(starts, start)
            spans.insert(place, _Span(start, start + size, size == SMALL_SEGMENT and code == SEGMENT_FREE, False, None,
                                      code == SEGMENT_UNMAP))
            starts.insert(place, start)
        elif code in (SEGMENT_ALLOC, SEGMENT_MAP):
            _cut(spans, starts, start, start + size)
    return _merged(spans)


def _cut(spans: list[_Span], starts: list[int], start: int, end: int) -> None:
    """Take [start, end) out of the spans."""
    place = max(bisect.bisect_right(starts, start) - 1, 0)
    while place < len(spans) and spans[place].start < end:
        span = spans[place]
        if span.end <= start:
            place += 1
            continue
        parts = []
        if span.start < start:
            parts.append(_Span(span.start, start, span.small, span.private, span.stream, span.expandable))
        if span.end > end:
            parts.append(_Span(end, span.end, span.small, span.private, span.stream, span.expandable))
        spans[place : place + 1] = parts
        starts[place : place + 1] = [p.start for p in parts]
        place += len(parts)


def _merged(spans: list[_Span]) -> list[_Span]:
    """Neighbouring expandable spans as one: a block may lie across the pages."""
    found: list[_Span] = []
    for span in spans:
        if found and span.expandable and found[-1].expandable and found[-1].end == span.start:
            last = found[-1]
            last.end = span.end
            if last.stream is None:
                last.stream, last.small, last.private = span.stream, span.small, span.private
        elif found and span.start < found[-1].end:
            continue  # overlap: the trace does not fit; the earlier one stands
        else:
            found.append(span)
    return found


def _measure(spans: list[_Span], address: npt.NDArray[np.uint64], size: Ints, request: int,
             stream: int | None) -> Holes:
    import numpy as np

    if not spans:
        return Holes()
    starts = np.array([s.start for s in spans], np.uint64)
    ends = np.array([s.end for s in spans], np.uint64)
    place = np.searchsorted(starts, address, side="right") - 1
    inside = (place >= 0) & (address < ends[np.maximum(place, 0)])
    address, size = address[inside], size[inside]
    zero = np.zeros(len(spans), np.int64)
    rows = np.concatenate([ends, starts, address])
    length = np.concatenate([zero, zero, size]).astype(np.uint64)
    kind = np.concatenate([np.zeros(len(spans), np.int8), np.ones(len(spans), np.int8), np.full(len(size), 2, np.int8)])
    order = np.lexsort((kind, rows))
    rows, length, kind = rows[order], length[order], kind[order]
    span = np.cumsum(kind == 1) - 1
    stop = rows + length
    gap = np.zeros(len(rows), np.int64)
    gap[:-1] = np.maximum(rows[1:].astype(np.int64) - stop[:-1].astype(np.int64), 0)
    gap[kind == 0] = 0
    small, private, expandable = (np.array([getattr(s, name) for s in spans], bool)[span]
                                  for name in ("small", "private", "expandable"))
    unsplit = (gap > 0) & (gap <= SMALL_REQUEST) & (kind == 2) & ~small & ~expandable
    whole = np.zeros(len(rows), bool)
    whole[:-1] = (kind[:-1] == 1) & (kind[1:] == 0)
    rest = int(gap[unsplit].sum())
    gap[unsplit] = 0
    # Expandable segments serve small and large requests from pools of their own as well.
    other_pool = small if request > SMALL_REQUEST else ~small
    foreign = private.copy()
    if stream is not None:
        streams = [s.stream for s in spans]
        foreign |= np.array([s is not None and s != stream for s in streams], bool)[span]
    usable = gap * (~foreign & ~other_pool)
    return Holes(free=int(gap.sum()), usable=int(usable.sum()), largest=int(usable.max()),
                 elsewhere=int(gap[foreign].sum()), small_pool=int(gap[other_pool & ~foreign].sum()),
                 whole_segments=int(gap[whole].sum()), unsplit=rest)
