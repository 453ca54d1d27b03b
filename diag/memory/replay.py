"""The arithmetic of an allocator trace: from events and the final blocks to a table of allocations, and peaks.

The file says what is alive at the end and what happened before, so the course is known backwards: live before the
first event = live at the end - what the window added. A free counts when the program asks for it (`free_requested`,
as `torch.cuda.memory_allocated` does); the block is reusable only at `free_completed`. `alloc.size` is what was
asked for. The block that was set aside for it is known exactly where it is alive at the end, and is otherwise the
request rounded as the allocator rounds (to 512 bytes, or as `roundup_power2_divisions` says); a large block may in
truth be up to 1 MiB larger, where the rest was too small to be split off (CUDACachingAllocator.cpp, should_split).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diag.memory.nouns import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Blocks,
    Trace,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

#: kMinBlockSize of the allocator.
ROUND = 512


@dataclass(slots=True, kw_only=True)
class Replay:
    """A window of n events and the m allocations that were alive at some time in it.

    `begin[i]` is the event that made allocation i (-1: alive before the window), `end[i]` the one that freed it (n:
    alive at the end). It is alive just after event p when begin <= p < end.
    """

    events: int
    begin: Ints
    end: Ints
    requested: Ints
    block: Ints
    stack: Ints
    address: npt.NDArray[np.uint64]
    course: Ints  # [n] requested bytes alive after each event
    course_block: Ints  # [n]
    course_reserved: Ints  # [n]
    start_requested: int
    start_block: int
    start_reserved: int
    frees_of_unknown: int
    notes: list[str] = field(default_factory=list)

    def peak(self) -> tuple[int, int]:
        """(event, bytes) of the highest requested total; event -1 when it is never above what the window began with."""
        return _peak(self.course, self.start_requested)

    def peak_block(self) -> int:
        """Highest total of block sizes."""
        return _peak(self.course_block, self.start_block)[1]

    def peak_reserved(self) -> int:
        """Highest total that was held from the driver."""
        return _peak(self.course_reserved, self.start_reserved)[1]

    def alive(self, event: int) -> npt.NDArray[np.bool_]:
        """[m] which allocations are alive just after `event` (-1: before the window)."""
        return (self.begin <= event) & (self.end > event)

    def reserved_after(self, event: int) -> int:
        """Bytes held from the driver just after `event`."""
        return int(self.course_reserved[event]) if event >= 0 else self.start_reserved


def _peak(course: Ints, start: int) -> tuple[int, int]:
    if not len(course):
        return -1, start
    at = int(course.argmax())
    return (at, int(course[at])) if course[at] > start else (-1, start)


def rounded(size: Ints, divisions: dict[str, Any] | None = None) -> Ints:
    """Block sizes [n] for requests [n]: multiples of 512; `divisions` is the setting roundup_power2_divisions."""
    import numpy as np

    blocks = np.maximum((size + (ROUND - 1)) // ROUND * ROUND, ROUND)
    if divisions and any(divisions.values()):
        exponent = np.frexp(np.maximum(size, 1).astype(np.float64))[1] - 1
        for key, parts in divisions.items():
            if not parts or parts < 2 or not key.isdigit():
                continue
            # the key is the upper bound in MiB of the requests that it is for: floor(log2) picks the row
            level = int(key).bit_length() - 1 + 20
            low, high = (0 if key == "1" else level), (64 if key == "32768" else level)
            mine = (size > ROUND * 4) & (exponent >= low) & (exponent <= high) & ((size & (size - 1)) != 0)
            step = np.maximum((np.int64(1) << exponent[mine].astype(np.int64)) // int(parts), ROUND)
            blocks[mine] = (size[mine] + step - 1) // step * step
    return blocks


def replay(trace: Trace | None, blocks: Blocks | None, settings: dict[str, Any]) -> Replay:
    """Join events and final blocks of one device. Either may be missing."""
    import numpy as np

    divisions = settings.get("roundup_power2_divisions")
    divisions = divisions if isinstance(divisions, dict) else None
    notes: list[str] = []
    live = np.flatnonzero(blocks.state == 1) if blocks is not None else np.zeros(0, np.int64)
    end_requested = int(blocks.requested[live].sum()) if blocks is not None else 0
    end_block = int(blocks.size[live].sum()) if blocks is not None else 0
    end_reserved = int(blocks.segment_size.sum()) if blocks is not None else 0
    empty = np.zeros(0, np.int64)
    if trace is None or not len(trace.action):
        table = _final(blocks, live, None)
        return Replay(events=0, begin=np.full(len(live), -1, np.int64), end=np.ones(len(live), np.int64),
                      requested=table[0], block=table[1], stack=table[2], address=table[3], course=empty,
                      course_block=empty, course_reserved=empty, start_requested=end_requested, start_block=end_block,
                      start_reserved=end_reserved, frees_of_unknown=0)
    n = len(trace.action)
    action = trace.action
    is_alloc = action == ALLOC
    is_free = action == FREE_REQUESTED
    if not is_free.any() and is_alloc.any():
        is_free = action == FREE_COMPLETED  # no such file was seen, but it would be read wrongly otherwise
    chosen = np.flatnonzero(is_alloc | is_free)
    order = chosen[np.argsort(trace.address[chosen], kind="stable")]
    address = trace.address[order]
    alloc = is_alloc[order]
    same = np.zeros(len(order), bool)  # the next event of the same address
    if len(order):
        same[:-1] = address[:-1] == address[1:]
    following = np.full(len(order), n, np.int64)
    following[:-1][same[:-1]] = order[1:][same[:-1]]
    begin_rows = np.flatnonzero(alloc)
    first = np.ones(len(order), bool)
    first[1:] = ~same[:-1]
    after_free = np.zeros(len(order), bool)
    after_free[1:] = same[:-1] & ~alloc[:-1]
    unknown_rows = np.flatnonzero(~alloc & (first | after_free))  # frees of what was allocated before the window
    twice = int((alloc[:-1] & alloc[1:] & same[:-1]).sum()) if len(order) else 0
    if twice:
        notes.append(f"{twice:,} addresses were allocated twice without a free between: the trace has gaps")

    requested = trace.size[order]
    block = rounded(requested, divisions)
    # Blocks alive at the end: their true size and, for those the window did not see being made, their place.
    seen_live = _match_live(address, alloc, same, requested, block, blocks, live, notes)
    table = _final(blocks, live, seen_live)
    begin = np.concatenate([order[begin_rows], np.full(len(unknown_rows) + len(table[0]), -1, np.int64)])
    end = np.concatenate([following[begin_rows], order[unknown_rows], np.full(len(table[0]), n, np.int64)])
    rows = np.concatenate([begin_rows, unknown_rows])
    stack = trace.stack[order]
    # A block from before the window: the stack of its free says who let it go, not who made it.
    made = np.where(alloc, stack, -1)
    result = Replay(
        events=n, begin=begin, end=end, requested=np.concatenate([requested[rows], table[0]]),
        block=np.concatenate([block[rows], table[1]]), stack=np.concatenate([made[rows], table[2]]).astype(np.int64),
        address=np.concatenate([address[rows], table[3]]), course=empty, course_block=empty, course_reserved=empty,
        start_requested=0, start_block=0, start_reserved=0, frees_of_unknown=len(unknown_rows), notes=notes)
    delta = np.zeros(n, np.int64)
    delta[is_alloc] = trace.size[is_alloc]
    delta[is_free] = -trace.size[is_free]
    result.course, result.start_requested = _backwards(delta, end_requested, notes, "requested bytes")
    delta[:] = 0
    delta[order] = np.where(alloc, block, -block)
    result.course_block, result.start_block = _backwards(delta, end_block, [], "block bytes")
    delta[:] = 0
    for code, sign in ((SEGMENT_ALLOC, 1), (SEGMENT_MAP, 1), (SEGMENT_FREE, -1), (SEGMENT_UNMAP, -1)):
        mine = action == code
        delta[mine] = sign * trace.size[mine]
    result.course_reserved, result.start_reserved = _backwards(delta, end_reserved, notes, "reserved bytes")
    return result


def _match_live(address: npt.NDArray[np.uint64], alloc: npt.NDArray[np.bool_], same: npt.NDArray[np.bool_],
                requested: Ints, block: Ints, blocks: Blocks | None, live: npt.NDArray[np.int64],
                notes: list[str]) -> npt.NDArray[np.bool_] | None:
    """Give the last allocation of each address its true block; [len(live)] which live blocks the window saw made."""
    import numpy as np

    if blocks is None:
        return None
    last = np.flatnonzero(~same & alloc)  # rows whose address is not touched again, and are allocations
    seen = np.zeros(len(live), bool)
    if not len(live) or not len(last) or not blocks.addressed:
        if len(last) and blocks.addressed:
            notes.append(f"{len(last):,} allocations of the trace are not among the final blocks")
        return seen
    places = np.searchsorted(address[last], blocks.address[live])
    places = np.minimum(places, len(last) - 1)
    seen = address[last][places] == blocks.address[live]
    rows = last[places[seen]]
    sizes = blocks.size[live][seen]
    true = requested[rows] == blocks.requested[live][seen]
    block[rows[true]] = sizes[true]
    # frees of the same row keep the rounded size: they belong to earlier allocations
    lost = len(last) - int(seen.sum())
    if lost > max(2, len(last) // 100):
        notes.append(f"{lost:,} of {len(last):,} allocations that were never freed are not among the final blocks: "
                     "the trace was cut or stopped before the snapshot was taken")
    return seen


def _final(blocks: Blocks | None, live: npt.NDArray[np.int64], seen: npt.NDArray[np.bool_] | None) -> tuple[
        Ints, Ints, Ints, npt.NDArray[np.uint64]]:
    """(requested, block, stack, address) of the live blocks that the window did not see being made."""
    import numpy as np

    if blocks is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint64)
    rows = live if seen is None else live[~seen]
    return blocks.requested[rows], blocks.size[rows], blocks.stack[rows].astype(np.int64), blocks.address[rows]


def _backwards(delta: Ints, at_end: int, notes: list[str], what: str) -> tuple[Ints, int]:
    """The running total after each event, given the total at the end; and the one before the first event."""
    course = delta.cumsum()
    start = at_end - (int(course[-1]) if len(course) else 0)
    lowest = min(int(course.min()), 0) + start if len(course) else start
    if lowest < 0:
        notes.append(f"the {what} of trace and final blocks do not fit together (short by {-lowest:,}); "
                     "totals are lower bounds")
        start -= lowest
    course += start
    return course, start
