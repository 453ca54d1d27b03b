"""A CUDA memory snapshot's pickle -> columns, while it is being unpickled.

The C unpickler builds a dictionary per event, half a kilobyte each, and its memo keeps them all: a file of 1 GB would
need ten. Here it reads through `_Tap`, which looks at what has been built each time more bytes are asked for: lists of
events are emptied into numpy columns as they grow, and stacks become numbers. No class can be named in the file
(`find_class` refuses), no object outside of it, and nothing of it is ever called.

Layouts (from the artefacts and wheels of torch 2.0 to 2.14): blocks with `history` and without addresses (2.0); with
addresses and frames, events without `time_us` (2.1); with it (2.2); `allocator_settings` (2.3); `external_annotations`
(2.5); `compile_context` (2.9); `user_metadata` (2.11). A bare list of segments is what `memory_snapshot()` returns.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

from diag.errors import ArtefactError
from diag.memory.nouns import ACTIONS, OTHER, Annotation, Blocks, OomEvent, Snapshot, Stacks, Trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Events of a file beyond this size are emptied after they are read: a gigabyte of them must not stay.
EMPTY_BEYOND_BYTES = 96 << 20
#: The pickler writes lists in batches of this many.
BATCH = 1000
#: Bytes read between two looks for new lists of events, at first; then a growing share of what was built.
_LOOK_GROWTH, _LOOK_PAUSE = 1.5, 2 << 20
#: More devices than this has no machine.
MAX_DEVICES = 1024
_NO_TIME = -1


_FIRST = itemgetter(0)
#: Actions that need no address.
_PLACELESS = ("oom", "annotate", "snapshot")


class _Number(int):
    """The number of a stack, left in the list of frames that it replaces: nothing in a file can be of this type."""

    __slots__ = ()


class _Interned:
    """Stacks by content; the frames of each are read once."""

    def __init__(self) -> None:
        self.found = Stacks()
        self._frames: dict[int, int] = {}  # id of a frame's dictionary, which the unpickler's memo keeps alive
        self._texts: dict[tuple[str, int, str], int] = {}
        self._stacks: dict[int, _Number] = {}
        self._keep: list[Any] = []

    def number(self, frames: Any) -> int:
        """The number of the stack `frames`, a list of dictionaries; -1 for none. Leaves the number in the list."""
        if type(frames) is not list or not frames:
            return -1
        if type(frames[0]) is _Number:
            return frames[0]
        known = self._frames
        try:
            key = hash(tuple(map(id, frames)))  # 64 bits: the tuples themselves would take half a gigabyte
            number = self._stacks.get(key)
            if number is None:
                members = []
                for frame in frames:
                    place = known.get(id(frame))
                    if place is None:
                        place = known[id(frame)] = self._frame(frame)
                        self._keep.append(frame)  # its id must not be given to another
                    members.append(place)
                number = self._stacks[key] = _Number(len(self.found.stacks))
                self.found.stacks.append(members)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ArtefactError("is damaged: a stack is no list of frames") from error
        frames[:] = (number,)
        return number

    def _frame(self, frame: Any) -> int:
        line = frame.get("line", 0)
        text = (str(frame.get("filename", ""))[:4096], line if type(line) is int else 0,
                str(frame.get("name", ""))[:4096])
        place = self._texts.get(text)
        if place is None:
            place = self._texts[text] = len(self.found.frames)
            self.found.frames.append(text)
        return place


class _Events:
    """The columns of one device's events, growing."""

    def __init__(self, owner: list[Any], stacks: _Interned, tags: dict[str, int]) -> None:
        self.owner, self.stacks, self.tags = owner, stacks, tags
        self.parts: list[tuple[Any, ...]] = []
        self.count = 0
        self.unknown = 0
        self.ooms: list[OomEvent] = []
        self._emptied = False

    def take(self, *, empty: bool) -> None:
        """Move what the list holds into columns; with `empty` the dictionaries give back their memory too."""
        batch = self.owner[:]
        del self.owner[:]
        for start in range(0, len(batch), 50 * BATCH):
            self._take(batch[start : start + 50 * BATCH])
        if empty:
            self._emptied = True
            for event in batch:
                event.clear()

    def _take(self, batch: list[dict[str, Any]]) -> None:
        import numpy as np

        if not batch:
            return
        try:
            first, count = batch[0], len(batch)
            timed, tagged = "time_us" in first, "user_metadata" in first
            names = ["action", "addr", "size", "frames", *(["time_us"] if timed else []),
                     *(["user_metadata"] if tagged else [])]
            try:
                rows = list(map(itemgetter(*names), batch))
            except KeyError:  # an oom among them has no address, or there are no frames, or a mixture of layouts
                timed, tagged = any("time_us" in e for e in batch), any("user_metadata" in e for e in batch)
                rows = [self._row(event, at, timed, tagged) for at, event in enumerate(batch)]
            columns: list[Any] = list(zip(*rows))
            action = self._codes(columns[0])
            address = np.fromiter(columns[1], np.uint64, count)
            size = np.fromiter(columns[2], np.int64, count)
            time = np.fromiter(columns[4], np.int64, count) if timed else np.zeros(0, np.int64)
            tag = self._tags(columns[-1]) if tagged else None
            stack = self._stacks(columns[3])
        except ArtefactError:
            raise
        except (TypeError, ValueError, OverflowError, KeyError, AttributeError) as error:
            what = "an event was emptied before: the file shares one between places" if self._emptied and not all(
                batch) else "an event is not what torch writes"
            raise ArtefactError(f"is damaged: {what} ({type(error).__name__}, near event {self.count:,})") from error
        if (size < 0).any() or int(size.max()) > 1 << 50:
            raise ArtefactError("is damaged: an event of an impossible size")
        self.parts.append((action, address, size, time, stack, tag))
        self.count += len(batch)

    def _row(self, event: dict[str, Any], at: int, timed: bool, tagged: bool) -> tuple[Any, ...]:
        if event["action"] == "oom":
            free, stream = event.get("device_free"), event.get("stream")
            self.ooms.append(OomEvent(index=self.count + at, size=int(event["size"]),
                                      device_free=free if type(free) is int else None,
                                      stream=stream if type(stream) is int else None))
        action = event["action"]
        placed = action in ACTIONS and action not in _PLACELESS
        row = [action, event["addr"] if placed else event.get("addr", 0),
               event["size"] if placed else event.get("size", 0), event.get("frames")]
        if timed:
            row.append(event.get("time_us", _NO_TIME))
        if tagged:
            row.append(event.get("user_metadata", ""))
        return tuple(row)

    def _stacks(self, lists: tuple[Any, ...]) -> npt.NDArray[np.int32]:
        import numpy as np

        count = len(lists)
        try:
            heads = list(map(_FIRST, lists))
            if set(map(type, heads)) == {_Number}:
                return np.fromiter(heads, np.int32, count)
        except (TypeError, IndexError, KeyError):
            pass
        number = self.stacks.number
        return np.fromiter((f[0] if f and type(f) is list and type(f[0]) is _Number else number(f) for f in lists),
                           np.int32, count)

    def _codes(self, names: tuple[Any, ...]) -> npt.NDArray[np.uint8]:
        import numpy as np

        try:
            return np.array(list(map(ACTIONS.__getitem__, names)), np.uint8)
        except KeyError:
            self.unknown += sum(name not in ACTIONS for name in names)
            return np.array([ACTIONS.get(name, OTHER) for name in names], np.uint8)

    def _tags(self, texts: tuple[Any, ...]) -> npt.NDArray[np.int32] | None:
        import numpy as np

        if not any(texts):
            return None
        return np.array([self.tags.setdefault(str(text)[:200], len(self.tags)) if text else -1 for text in texts],
                        np.int32)

    def trace(self) -> Trace:
        """All columns joined; the parts are given up."""
        import numpy as np

        parts, self.parts = self.parts, []
        timed = bool(parts) and all(len(p[3]) == len(p[0]) for p in parts)

        def joined(place: int, kind: Any) -> Any:
            column = np.concatenate([p[place] for p in parts]) if parts else np.zeros(0, kind)
            return column.astype(kind, copy=False)

        tagged = any(p[5] is not None for p in parts)
        tag: Any = np.concatenate([np.full(len(p[0]), -1, np.int32) if p[5] is None else p[5] for p in parts]) \
            if tagged else np.zeros(0, np.int32)
        return Trace(action=joined(0, np.uint8), address=joined(1, np.uint64), size=joined(2, np.int64),
                     time=joined(3, np.int64) if timed else np.zeros(0, np.int64), stack=joined(4, np.int32), tag=tag,
                     ooms=self.ooms)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise ArtefactError(f"asks for {module}.{name}, which is not plain data; nothing was run")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise ArtefactError("refers to objects outside the file, which is not plain data")


class _Tap:
    """The stream that the unpickler reads, which calls `look` whenever more bytes are wanted."""

    def __init__(self, stream: io.BufferedReader, look: Callable[[int], None]) -> None:
        self.stream, self.look, self.delivered = stream, look, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.delivered += len(data)
        if size > 16:
            self.look(self.delivered)
        return data

    def peek(self, size: int) -> bytes:
        return self.stream.peek(size)

    def readline(self) -> bytes:
        data = self.stream.readline(1 << 20)
        self.delivered += len(data)
        return data


class _Reading:
    """One file being unpickled."""

    def __init__(self, stream: BinaryIO, progress: Callable[[int], None] | None = None) -> None:
        self.stacks = _Interned()
        self.tags: dict[str, int] = {}
        self.events: dict[int, _Events] = {}
        buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(Any, stream), 1 << 18)
        self.tap = _Tap(cast(Any, buffered), self.look)
        self.unpickler = _Unpickler(self.tap)  # type: ignore[arg-type]
        self.next_look = 1 << 18

    def run(self) -> Any:
        """The object, its lists of events emptied. Raises `ArtefactError`."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self.unpickler.load()
        except ArtefactError:
            raise
        except EOFError as error:
            raise ArtefactError(f"is cut: the pickle ends early, after {self.tap.delivered:,} bytes") from error
        except MemoryError as error:
            raise ArtefactError("asks for more memory than a reader may take") from error
        except Exception as error:  # a damaged pickle can raise anything; what it raises is not our bug
            at = f"near byte {self.tap.delivered:,}"
            if "truncated" in str(error) or "ran out of input" in str(error).lower():
                raise ArtefactError(f"is cut: the pickle ends early, after {self.tap.delivered:,} bytes") from error
            raise ArtefactError(f"is damaged {at} ({type(error).__name__})") from error
        finally:
            if collecting:
                gc.enable()

    def look(self, delivered: int) -> None:
        """Take what the known lists hold; now and then search for new ones."""
        for events in self.events.values():
            if len(events.owner) >= BATCH:
                events.take(empty=delivered > EMPTY_BEYOND_BYTES)
                # the next device's list begins only when this one is full
                self.next_look = max(self.next_look, delivered + _LOOK_PAUSE)
        if delivered >= self.next_look:
            self.next_look = int(delivered * _LOOK_GROWTH)
            for item in self.unpickler.memo.copy().values():  # type: ignore[attr-defined]
                if type(item) is list and item and id(item) not in self.events and _is_event(item[0]):
                    self.adopt(item).take(empty=delivered > EMPTY_BEYOND_BYTES)

    def release(self) -> None:
        """Let go of all that was unpickled; the cycle of this, the tap and the unpickler would keep it."""
        del self.unpickler, self.tap
        self.events.clear()

    def adopt(self, owner: list[Any]) -> _Events:
        """The columns of the list `owner`, which is kept alive and so keeps its identity."""
        return self.events.setdefault(id(owner), _Events(owner, self.stacks, self.tags))


def _is_event(item: Any) -> bool:
    return type(item) is dict and "action" in item


def load(stream: BinaryIO, *, keep: list[object] | None = None) -> Snapshot:
    """The snapshot in `stream` (plain bytes of a pickle). Raises `ArtefactError` where there is none.

    What was unpickled is left in `keep`: to free a million dictionaries takes as long as to read them.
    """
    reading = _Reading(stream)
    top = reading.run()
    large = reading.tap.delivered > EMPTY_BEYOND_BYTES
    if keep is not None and not large:  # a large file's million husks must go before the replay
        keep += (reading, top)
    if type(top) is list:
        top = {"segments": top}
    if type(top) is not dict or not isinstance(top.get("segments", []), list) or not (
            "segments" in top or "device_traces" in top):
        raise ArtefactError("is a pickle, and no memory snapshot: neither segments nor device_traces are in it")
    traces = top.get("device_traces") or []
    if type(traces) is not list or any(type(t) is not list for t in traces) or len(traces) > MAX_DEVICES:
        raise ArtefactError("is damaged: device_traces is no list of lists")
    found: dict[int, Trace] = {}
    unknown = 0
    for device, owner in enumerate(traces):
        events = reading.adopt(owner)
        events.take(empty=False)
        unknown += events.unknown
        if events.count:
            found[device] = events.trace()
    blocks, layout = _blocks(top.get("segments") or [], reading.stacks)
    if large:
        reading.release()
    settings = top.get("allocator_settings")
    return Snapshot(traces=found, blocks=blocks, stacks=reading.stacks.found,
                    settings=_plain(settings) if type(settings) is dict else {},
                    annotations=_annotations(top.get("external_annotations")), tags=list(reading.tags),
                    layout=layout_of(top, layout, found, bool(reading.tags)), unknown_actions=unknown)


def layout_of(top: dict[str, Any], blocks: str, traces: dict[int, Trace], tagged: bool) -> str:
    """Which torch writes such files, as far as its layout tells."""
    if blocks == "history":
        return "torch 2.0"
    if tagged:
        return "torch 2.11 or later"
    if "host_segments" in top:
        return "torch 2.14 or later"
    if "external_annotations" in top:
        return "torch 2.5 or later"
    if "allocator_settings" in top:
        return "torch 2.3 or later"
    if any(len(t.time) for t in traces.values()):
        return "torch 2.2 or later"
    return "torch 2.1 or later"


def _blocks(segments: list[Any], stacks: _Interned) -> tuple[dict[int, Blocks], str]:
    import numpy as np

    states = {"inactive": 0, "active_allocated": 1, "active_pending_free": 2, "active_awaiting_free": 2}
    by_device: dict[int, tuple[list[Any], list[Any], list[bool]]] = {}
    layout = ""
    try:
        for segment in segments:
            device = segment.get("device", 0)
            if type(device) is not int or not 0 <= device < MAX_DEVICES:
                raise ArtefactError(f"is damaged: a segment of device {str(device)[:40]}")
            rows, heads, addressed = by_device.setdefault(device, ([], [], []))
            address = segment["address"]
            pool = segment.get("segment_pool_id")
            heads.append((address, segment["total_size"], segment.get("segment_type") == "small",
                          pool is not None and tuple(pool) != (0, 0), bool(segment.get("is_expandable")),
                          segment.get("stream", 0)))
            place, at = len(heads) - 1, address
            for block in segment["blocks"]:
                size = block["size"]
                frames, requested = block.get("frames"), block.get("requested_size", size)
                if history := block.get("history"):
                    layout = "history"
                    frames = history[0].get("frames") if frames is None else frames
                    requested = block.get("requested_size", history[0].get("real_size", size))
                elif "address" not in block:
                    layout = "history"
                rows.append((block.get("address", at), size, requested, states[block["state"]], stacks.number(frames),
                             place))
                addressed.append("address" in block)
                at += size
        found = {}
        for device, (rows, heads, addressed) in by_device.items():
            columns = list(zip(*rows)) if rows else [()] * 6
            tops = list(zip(*heads))
            kinds = (np.uint64, np.int64, np.int64, np.uint8, np.int32, np.int32)
            address_, size_, requested_, state_, stack_, segment_ = (
                np.array(c, k) for c, k in zip(columns, kinds))
            # Old blocks say no address, but lie one after the other in their segment, so `at` was right.
            found[device] = Blocks(
                address=address_, size=size_, requested=requested_, state=state_, stack=stack_, segment=segment_,
                segment_address=np.array(tops[0], np.uint64), segment_size=np.array(tops[1], np.int64),
                segment_small=np.array(tops[2], np.uint8), segment_private=np.array(tops[3], np.uint8),
                segment_expandable=np.array(tops[4], np.uint8), segment_stream=_streams(tops[5]),
                addressed=all(addressed))
            if (size_ < 0).any() or (requested_ < 0).any() or (size_ > 1 << 50).any() or \
                    (found[device].segment_size < 0).any() or (requested_ > 1 << 50).any() or \
                    (found[device].segment_size > 1 << 50).any():
                raise ArtefactError("is damaged: a block of an impossible size")
    except ArtefactError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ArtefactError(f"is damaged: a segment is not what torch writes ({type(error).__name__})") from error
    return found, layout


def _streams(values: Any) -> Any:
    """Streams as small numbers: they are pointers, and only equality counts."""
    import numpy as np

    return np.array([hash(v) & ((1 << 62) - 1) if type(v) is int else 0 for v in values], np.int64)


def _annotations(items: Any) -> list[Annotation]:
    found = []
    for item in items if type(items) is list else ():
        if type(item) is not dict:
            continue
        stage, name, device, time = (item.get(k) for k in ("stage", "name", "device", "time_us"))
        if type(time) is int and type(name) is str and -1 << 62 < time < 1 << 62:
            found.append(Annotation(stage=str(stage), name=name[:200], device=device if type(device) is int else 0,
                                    time=time))
    return found


def _plain(settings: dict[Any, Any]) -> dict[str, Any]:
    """Settings that are numbers, texts or flags; dictionaries of these one level down."""
    found: dict[str, Any] = {}
    for key, value in list(settings.items())[:64]:
        if type(value) in (int, float, bool) or value is None:
            found[str(key)[:80]] = value if type(value) is not int or abs(value) < 1 << 62 else None
        elif type(value) is str:
            found[str(key)[:80]] = value[:400]
        elif type(value) is dict:
            found[str(key)[:80]] = {str(k)[:40]: v for k, v in list(value.items())[:64] if type(v) in (int, float)
                                    and abs(v) < 1 << 62}
    return found
