"""What a memory snapshot says, as columns, and what the analysis of one device answers, as plain values.

Sizes are bytes. `requested` is what the program asked for, `block` what the allocator set aside for it (a multiple of
512), `reserved` what the allocator holds from the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]
    Addresses = npt.NDArray[np.uint64]

#: Codes of `Trace.action`, by the names in the file; anything else is OTHER.
ACTIONS = {"alloc": 0, "free_requested": 1, "free_completed": 2, "segment_alloc": 3, "segment_free": 4,
           "segment_map": 5, "segment_unmap": 6, "snapshot": 7, "oom": 8, "annotate": 9}
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SNAPSHOT, OOM = range(9)
OTHER = 10

Frame = tuple[str, int, str]
"""(file name, line, function)"""


@dataclass(slots=True)
class Stacks:
    """Interned stacks: `stacks[i]` lists indexes into `frames`, innermost first. Index -1 means "not recorded"."""

    frames: list[Frame] = field(default_factory=list)
    stacks: list[list[int]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class OomEvent:
    """A failed allocation: its place in the trace, the bytes asked for, what the driver had free (None: not said)."""

    index: int
    size: int
    device_free: int | None
    stream: int | None


@dataclass(slots=True, kw_only=True)
class Trace:
    """The events of one device, oldest first; n rows. `time` is microseconds since 1970, empty where not recorded."""

    action: Bytes  # [n]
    address: Addresses  # [n], 0 for an oom
    size: Ints  # [n], requested bytes; of segment events the segment's
    time: Ints  # [n] or [0]
    stack: Ints  # [n], index into Stacks.stacks or -1
    tag: Ints  # [n], index into Snapshot.tags or -1
    ooms: list[OomEvent] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Blocks:
    """The blocks that a device's segments are divided into at the end; n rows over m segments."""

    address: Addresses  # [n]
    size: Ints  # [n]
    requested: Ints  # [n]
    state: Bytes  # [n]: 0 inactive, 1 allocated, 2 freed but still used by another stream
    stack: Ints  # [n]
    segment: Ints  # [n], row of the segment
    segment_address: Addresses  # [m]
    segment_size: Ints  # [m]
    segment_small: Bytes  # [m]: 1 in the pool for requests up to 1 MiB
    segment_private: Bytes  # [m]: 1 in a private pool (CUDA graphs, MemPool)
    segment_expandable: Bytes  # [m]
    segment_stream: Ints  # [m]
    addressed: bool = True
    """False for torch 2.0, whose blocks tell no address."""


@dataclass(slots=True, kw_only=True)
class Annotation:
    """A named range of the program (record_function, profiler step): "START" or "END" at `time` (microseconds)."""

    stage: str
    name: str
    device: int
    time: int


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """One file, read. `traces` and `blocks` are by device; a device without either is not in them."""

    traces: dict[int, Trace]
    blocks: dict[int, Blocks]
    stacks: Stacks
    settings: dict[str, Any]
    annotations: list[Annotation]
    tags: list[str]
    layout: str
    """The oldest torch whose layout this is, in words."""
    notes: list[str] = field(default_factory=list)
    unknown_actions: int = 0


class Owner(msgspec.Struct, kw_only=True):
    """Somebody's memory at one moment: the line of code that asked for it, and the phase of the step."""

    owner: str
    phase: str = ""
    module: str = ""
    bytes: int = 0
    blocks: int = 0


class Share(msgspec.Struct, kw_only=True):
    """One row of a division of the memory at the peak (by phase, module, annotation, size class)."""

    name: str
    bytes: int
    blocks: int


class Pool(msgspec.Struct, kw_only=True):
    """One kind of pool at the end of the window."""

    name: str
    reserved_bytes: int
    allocated_bytes: int
    segments: int


class Oom(msgspec.Struct, kw_only=True):
    """One failed allocation, with the state of the allocator around it."""

    index: int
    requested_bytes: int
    device_free_bytes: int | None = None
    time_us: int | None = None
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    #: free inside the segments, usable or not
    free_bytes: int | None = None
    #: the largest free block that this request could have taken
    largest_free_bytes: int | None = None
    #: free, in a private pool or in the pool of another stream
    elsewhere_bytes: int = 0
    #: free in the pool for small requests, which a large one cannot use
    small_pool_free_bytes: int = 0
    owner: str = ""
    phase: str = ""
    events_after: int = 0
    fragmented: bool = False


class Growth(msgspec.Struct, kw_only=True):
    """What stays behind after each step."""

    steps: int
    how: str
    bytes_per_step: int
    troughs: list[int]
    owners: list[Owner]


class Unusual(msgspec.Struct, kw_only=True):
    """An allocation of the peak that is far larger than the same line usually asks for."""

    owner: str
    bytes: int
    median_bytes: int
    samples: int
    #: all that is alive at the peak in proportion to it, beyond the usual
    excess_bytes: int


class Timeline(msgspec.Struct, kw_only=True):
    """A decimated course: at each point the fullest moment of its bucket. All lists have one entry per point."""

    index: list[int]
    time_us: list[int]
    allocated: list[int]
    reserved: list[int]
    layers: list[str]
    values: list[list[int]]  # by layer, bytes
    marks: list[tuple[int, str]] = []


class DeviceMemory(msgspec.Struct, kw_only=True):
    """The answer for one device."""

    device: int | str
    events: int = 0
    seconds: float | None = None
    has_frames: bool = False
    peak_requested_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_index: int = -1
    """Event of the peak; -1: before the first one, or there is no trace."""
    peak_time_us: int | None = None
    reserved_at_peak_bytes: int = 0
    before_window_bytes: int = 0
    before_window_at_peak_bytes: int = 0
    frees_of_unknown: int = 0
    ring_full: bool = False
    end_requested_bytes: int = 0
    end_allocated_bytes: int = 0
    end_reserved_bytes: int = 0
    pending_free_bytes: int = 0
    rounding_bytes: int = 0
    """Block minus requested, at the peak."""
    end_rounding_bytes: int = 0
    cached_bytes: int = 0
    """In segments that are wholly free at the end: given back to the driver when something is short."""
    split_bytes: int = 0
    """Free between live blocks at the end: nobody else can have it."""
    largest_free_bytes: int = 0
    segments: int = 0
    owners: list[Owner] = []
    phases: list[Share] = []
    modules: list[Share] = []
    annotations: list[Share] = []
    sizes: list[Share] = []
    pools: list[Pool] = []
    largest: list[Owner] = []
    ooms: list[Oom] = []
    growth: Growth | None = None
    unusual: Unusual | None = None
    timeline: Timeline | None = None
    notes: list[str] = []

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved and not allocated: at the last failed allocation where there is one, else at the end."""
        if self.ooms:
            return max(self.ooms[-1].reserved_bytes - self.ooms[-1].allocated_bytes, 0)
        return max(self.end_reserved_bytes - self.end_allocated_bytes, 0)


class Digest(msgspec.Struct, kw_only=True):
    """The answer for one file; what a reading process hands back."""

    devices: list[DeviceMemory]
    layout: str = ""
    settings: dict[str, Any] = {}
    rank: int | None = None
    notes: list[str] = []
