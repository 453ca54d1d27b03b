"""A small caching allocator that leaves snapshots like torch's: blocks are split and merged, the truth is known.

It follows the rules of CUDACachingAllocator.cpp that matter here: two pools, best fit, requests rounded to 512 bytes,
segments of 2 MiB, 20 MiB or a multiple of 2 MiB, no split that would leave 1 MiB or less of a large block, wholly free
segments given back before a request fails. With `expandable` there is one range per pool that grows page by page.
"""

from __future__ import annotations

import pickle
from typing import Any

MIB = 1 << 20
Frames = list[dict[str, Any]]


def frames(*places: str) -> Frames:
    """A stack, innermost first, from texts like "model/attention.py:57 forward"."""
    found = []
    for text in places:
        place, name = text.split(" ", 1)
        file, line = place.rsplit(":", 1)
        found.append({"filename": f"/job/{file}" if not file.startswith("/") else file, "line": int(line),
                      "name": name})
    return found


class Block:
    def __init__(self, address: int, size: int, segment: Segment) -> None:
        self.address, self.size, self.segment = address, size, segment
        self.requested, self.state, self.frames = 0, "inactive", []


class Segment:
    def __init__(self, address: int, size: int, small: bool, pool: tuple[int, int], expandable: bool) -> None:
        self.address, self.size, self.small, self.pool, self.expandable = address, size, small, pool, expandable
        self.blocks = [Block(address, size, self)]


class OutOfMemory(Exception):
    pass


class Allocator:
    """One device of `capacity` bytes, of which others hold `others`. Peaks are kept as the truth for tests."""

    def __init__(self, capacity: int = 80 << 30, *, others: int = 0, expandable: bool = False, device: int = 0) -> None:
        self.capacity, self.others, self.expandable, self.device = capacity, others, expandable, device
        self.segments: list[Segment] = []
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, Block] = {}
        self.requested = self.allocated = self.reserved = 0
        self.peaks = {"requested": 0, "allocated": 0, "reserved": 0}
        self.next_address = 0x7F00_0000_0000
        self.now = 1_700_000_000_000_000
        self.recording = True
        self.annotations: list[dict[str, Any]] = []
        self.pool = (0, 0)

    # -- what a program does ---------------------------------------------------------------------------------------

    def alloc(self, size: int, stack: Frames | None = None) -> int:
        """The address of a block for `size` bytes. Raises `OutOfMemory` after recording the event."""
        stack = stack or []
        rounded = max(-(-size // 512) * 512, 512)
        small = rounded <= MIB
        block = self._fit(rounded, small) or self._new_segment(rounded, small, stack)
        if block is None:
            self._release(stack)
            block = self._fit(rounded, small) or self._new_segment(rounded, small, stack)
        if block is None:
            self._event("oom", None, size, stack, device_free=self.capacity - self.others - self.reserved)
            raise OutOfMemory(size)
        rest = block.size - rounded
        if rest >= 512 if (small or block.segment.expandable) else rest > MIB:
            place = block.segment.blocks.index(block)
            block.segment.blocks.insert(place + 1, Block(block.address + rounded, rest, block.segment))
            block.size = rounded
        block.requested, block.state, block.frames = size, "active_allocated", stack
        self.live[block.address] = block
        self.requested += size
        self.allocated += block.size
        self._event("alloc", block.address, size, stack)
        self._mark()
        return block.address

    def free(self, address: int, *, pending: bool = False) -> None:
        """Give a block back; `pending`: another stream still uses it."""
        block = self.live.pop(address)
        self.requested -= block.requested
        self.allocated -= block.size
        self._event("free_requested", address, block.requested, block.frames)
        if pending:
            block.state = "active_pending_free"
            return
        self._event("free_completed", address, block.requested, block.frames)
        block.requested, block.state, block.frames = 0, "inactive", []
        self._merge(block)

    def annotate(self, stage: str, name: str) -> None:
        """Begin or end a named range."""
        self.now += 10
        self.annotations.append({"stage": stage, "name": name, "device": self.device, "time_us": self.now})

    def start_recording(self) -> None:
        """Forget what happened: the window begins here."""
        self.events.clear()
        self.peaks = {"requested": self.requested, "allocated": self.allocated, "reserved": self.reserved}

    # -- what torch writes -----------------------------------------------------------------------------------------

    def segment_list(self) -> list[dict[str, Any]]:
        found = []
        for s in self.segments:
            live = [b for b in s.blocks if b.state == "active_allocated"]
            active = [b for b in s.blocks if b.state != "inactive"]
            found.append({
                "device": self.device, "address": s.address, "total_size": s.size,
                "allocated_size": sum(b.size for b in live), "active_size": sum(b.size for b in active),
                "requested_size": sum(b.requested for b in active), "stream": 0,
                "segment_type": "small" if s.small else "large", "segment_pool_id": s.pool,
                "is_expandable": s.expandable, "frames": [],
                "blocks": [{"address": b.address, "size": b.size, "requested_size": b.requested, "state": b.state,
                            "frames": b.frames} for b in s.blocks]})
        return found

    def snapshot(self, *, version: str = "2.5", **settings: Any) -> Any:
        """The object that torch of `version` would pickle ("list", "2.0", "2.1", "2.3", "2.5", "2.11")."""
        return snapshot([self], version=version, **settings)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _event(self, action: str, address: int | None, size: int, stack: Frames, **more: Any) -> None:
        self.now += 1
        event = {"action": action, **({} if address is None else {"addr": address}), "size": size, "stream": 0,
                 "time_us": self.now, "frames": stack, **more}
        self.events.append(event)

    def _mark(self) -> None:
        for name in self.peaks:
            self.peaks[name] = max(self.peaks[name], getattr(self, name))

    def _fit(self, size: int, small: bool) -> Block | None:
        free = [b for s in self.segments if s.small == small and s.pool == self.pool for b in s.blocks
                if b.state == "inactive" and b.size >= size]
        return min(free, key=lambda b: (b.size, b.address), default=None)

    def _new_segment(self, size: int, small: bool, stack: Frames) -> Block | None:
        length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.expandable:
            return self._expand(size, small, stack)
        if self.reserved + length > self.capacity - self.others:
            return None
        segment = Segment(self.next_address, length, small, self.pool, False)
        self.next_address += length + 2 * MIB
        self.segments.append(segment)
        self.reserved += length
        self._event("segment_alloc", segment.address, length, stack)
        self._mark()
        return segment.blocks[0]

    def _expand(self, size: int, small: bool, stack: Frames) -> Block | None:
        segment = next((s for s in self.segments if s.small == small and s.expandable), None)
        tail = segment.blocks[-1] if segment and segment.blocks[-1].state == "inactive" else None
        length = -(-(size - (tail.size if tail else 0)) // (2 * MIB)) * 2 * MIB
        if self.reserved + length > self.capacity - self.others:
            return None
        if segment is None:
            segment = Segment(self.next_address, 0, small, self.pool, True)
            segment.blocks = []
            self.next_address += 1 << 40
            self.segments.append(segment)
        start = segment.address + segment.size
        segment.size += length
        self.reserved += length
        self._event("segment_map", start, length, stack)
        self._mark()
        if tail:
            tail.size += length
            return tail
        segment.blocks.append(Block(start, length, segment))
        return segment.blocks[-1]

    def _release(self, stack: Frames) -> None:
        for segment in [s for s in self.segments if len(s.blocks) == 1 and s.blocks[0].state == "inactive"]:
            self.segments.remove(segment)
            self.reserved -= segment.size
            self._event("segment_unmap" if segment.expandable else "segment_free", segment.address, segment.size, stack)

    def _merge(self, block: Block) -> None:
        blocks = block.segment.blocks
        place = blocks.index(block)
        if place + 1 < len(blocks) and blocks[place + 1].state == "inactive":
            block.size += blocks.pop(place + 1).size
        if place and blocks[place - 1].state == "inactive":
            blocks[place - 1].size += block.size
            blocks.pop(place)


def snapshot(devices: list[Allocator], *, version: str = "2.5", **settings: Any) -> Any:
    """Several devices of one process in one file, in the layout of a torch version."""
    segments = [s for d in devices for s in d.segment_list()]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(d.device for d in devices) + 1)]
    for d in devices:
        traces[d.device] = [dict(event) for event in d.events]
    if version == "list":
        return segments
    if version == "2.0":
        for segment in segments:
            for key in ("is_expandable", "segment_pool_id", "frames"):
                del segment[key]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    block["history"] = [{"addr": block["address"], "real_size": block["requested_size"],
                                         "frames": block["frames"]}]
                del block["address"], block["frames"]
        return {"segments": segments, "device_traces": traces}
    if version == "2.1":
        for event in (e for t in traces for e in t):
            del event["time_us"]
        return {"segments": segments, "device_traces": traces}
    top: dict[str, Any] = {"segments": segments, "device_traces": traces, "allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": devices[0].expandable,
        "roundup_power2_divisions": {"1": 0, "2": 0}, **settings}}
    if version >= "2.5" or version == "2.11":
        top["external_annotations"] = [a for d in devices for a in d.annotations]
    if version == "2.11":
        for event in (e for t in traces for e in t):
            event |= {"compile_context": "N/A", "user_metadata": ""}
    return top


def pickled(item: Any, protocol: int = 4) -> bytes:
    """As torch writes it."""
    return pickle.dumps(item, protocol)
