"""From a flight-recorder file to the `Dump` that is kept of it.

`digest_bytes` runs in a guarded child (or, for small files, in the process itself) and turns the pickle or JSON of
one rank into a `Dump`: per group what was issued, completed and is pending, with the last few operations in full.
Formats read (torch's "version" in brackets): 2.2 (a bare list), 2.3 [1.4], 2.4 [2.1], 2.5-2.7 [2.4], 2.8 [2.9],
2.9 and later [2.10]; pickle of any protocol, or the JSON of `_dump_fr_trace_json`.

What an entry's fields mean differs more than the version says:
  * `state` stays "scheduled" while NCCL waits (only TORCH_NCCL_ENABLE_TIMING shows "started"); Gloo never changes it
    and marks completion by `retired` alone. Retired and not completed on NCCL is an operation that timed out.
  * Members of a coalesced batch share one sequence number and are never updated; the batch's last entry, named
    `coalesced` or `ALLGATHER_coalesced`, has the state of all of them.
  * `collective_seq_id` counts the collectives of a group, `p2p_seq_id` its sends and receives; 1.4 has one `seq_id`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import msgspec

from diag.artefacts.fr_dump import Dump, Entry, Frame, GroupLog, Op
from diag.artefacts.restricted_pickle import load
from diag.errors import ArtefactError

#: Of each group: so many completed operations are kept, newest first (for votes on order and on what is usual) ...
KEPT_DONE = 16
#: ... and so many pending ones, oldest first.
KEPT_PENDING = 24
#: Pending operations of a group whose call stacks are kept, and frames per stack.
KEPT_STACKS = 2
KEPT_FRAMES = 12
#: Longest text taken from a dump.
MAX_TEXT = 400
#: No call passes more tensors (one per peer of a large all_to_all), no tensor has more dimensions.
MAX_TENSORS, MAX_DIMENSIONS = 1 << 14, 32
#: Backends that mark completion by `state`. All others retire an entry when it is done.
_STATEFUL = ("nccl", "xccl")
_INTERNAL = re.compile(r"(?:^|/)torch/(?:distributed/(?!checkpoint|fsdp|tensor|pipelining|optim)|_|utils/_|autograd/)"
                       r"|(?:^|/)contextlib\.py$|^<(?:frozen|string)")


class _Raw(msgspec.Struct):
    """An entry as written, for those that are kept; checked and converted in one go."""

    profiling_name: str
    record_id: int = 0
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    seq_id: int = 0
    time_created_ns: int = 0
    timeout_ms: int | None = 0
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    state: str | None = None
    retired: bool = False
    frames: list[dict[str, Any]] = []
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None


class _RawGroup(msgspec.Struct):
    name: str | int = ""
    desc: str = ""
    ranks: str | list[int] = ""


class _RawStatus(msgspec.Struct):
    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


def digest_bytes(data: bytes, hint: str = "", *, scanned: bool = False) -> bytes:
    """`Dump` of the file content `data`, as msgpack. Raises `ArtefactError`. `hint` is unused."""
    return msgspec.msgpack.encode(parse(data, scanned=scanned))


def parse(data: bytes, *, scanned: bool = True) -> Dump:
    """The `Dump` in the file content `data`; `scanned` as in `restricted_pickle.load`. Raises `ArtefactError`."""
    if not data:
        raise ArtefactError("is empty: its rank was stopped before it wrote anything")
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            raw = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ArtefactError(f"is cut or no JSON: {error}") from error
        except RecursionError as error:
            raise ArtefactError("is nested too deeply") from error
    else:
        raw = load(data, scanned=scanned)
    try:
        return digest(raw)
    except ArtefactError:
        raise
    except (msgspec.ValidationError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ArtefactError(f"has a flight recorder's keys but not its types: {_clip(str(error))}") from error


def digest(raw: Any) -> Dump:
    """The `Dump` of the decoded content `raw`. Raises `ArtefactError`, or what a wrong type raises."""
    if isinstance(raw, list):
        raw = {"version": "1.0", "entries": raw}
    if not isinstance(raw, dict) or not ("entries" in raw or "pg_config" in raw or "pg_status" in raw):
        raise ArtefactError("is plain data, but no flight-recorder dump: it has neither entries nor groups")
    entries = raw.get("entries") or []
    if not isinstance(entries, list):
        raise ArtefactError("has no list of entries")
    walk = _Walk(entries)
    walk.run()
    groups = walk.logs()
    _add_config(groups, raw.get("pg_config") or {})
    _add_status(groups, walk.ids, raw.get("pg_status") or {})
    dump = Dump(version=_clip(str(raw.get("version", "?")), 20), groups=groups, entries=len(entries))
    if entries:
        newest, oldest = entries[-1], entries[0]
        dump.newest_record = int(newest.get("record_id", len(entries) - 1))
        dump.wrapped = int(oldest.get("record_id", 0)) > 0
        dump.newest_ns = int(newest.get("time_created_ns") or 0)
        dump.last = walk.last()
    return dump


class _Pile:
    """The entries of one group while they are walked, newest first."""

    __slots__ = ("batch", "counts", "done", "gloo_op", "issued", "kept", "log_key", "p2p_pending", "pending", "seen",
                 "waiting")

    def __init__(self, log_key: tuple[str, str]) -> None:
        self.log_key = log_key
        self.kept: list[tuple[dict[str, Any], bool]] = []
        self.waiting: list[dict[str, Any]] = []
        self.seen = [0, 0]  # completed entries kept: collectives, p2p
        self.issued = self.done = self.pending = self.p2p_pending = 0
        self.gloo_op = -1
        self.counts: dict[str, int] = {}
        self.batch: tuple[int, int, bool] = (-1, -1, False)


class _Walk:
    """One pass over the entries from the newest to the oldest: what is kept of each group."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = entries
        self.piles: dict[Any, _Pile] = {}
        self.ids: dict[str, int] = {}
        first = entries[0] if entries else {}
        self.old = "collective_seq_id" not in first
        self.flagged = "is_p2p" in first

    def run(self) -> None:
        piles, flagged, seq_key = self.piles, self.flagged, "seq_id" if self.old else "collective_seq_id"
        for entry in reversed(self.entries):
            key = entry.get("process_group")
            if key.__class__ is not tuple:
                key = tuple(key) if key.__class__ is list else ("#", entry.get("pg_id", 0))
            pile = piles.get(key)
            if pile is None:
                pile = piles[key] = self._pile(key, entry)
            name = entry["profiling_name"]
            p2p = entry.get("is_p2p") if flagged else _names_p2p(name)
            done = entry.get("state") == "completed" or _finished(entry, name)
            if p2p:
                pile.counts[name] = pile.counts.get(name, 0) + 1
            if name[-9:] == "coalesced":
                pile.batch = (entry.get("collective_seq_id", -1), entry.get("p2p_seq_id", -1), done)
            elif not done and pile.batch[1 if p2p else 0] == entry.get("p2p_seq_id" if p2p else "collective_seq_id"):
                done = pile.batch[2]
            if done:
                seen = pile.seen
                if not p2p:
                    seq = entry[seq_key]
                    if seq > pile.done:
                        pile.done = seq
                    if seq > pile.issued:
                        pile.issued = seq
                if seen[1 if p2p else 0] < KEPT_DONE:
                    seen[1 if p2p else 0] += 1
                    pile.kept.append((entry, True))
            else:
                pile.waiting.append(entry)
                if p2p:
                    pile.p2p_pending += 1
                else:
                    pile.pending += 1
                    if entry[seq_key] > pile.issued:
                        pile.issued = entry[seq_key]

    def _pile(self, key: Any, entry: dict[str, Any]) -> _Pile:
        if key[0] == "#":
            name, desc = str(key[1]), ""
        else:
            name, desc = str(key[0]), str(key[1]) if len(key) > 1 else ""
        if isinstance(pg_id := entry.get("pg_id"), int):
            self.ids[name] = pg_id
        pile = _Pile((_clip(name), _clip(desc)))
        if entry["profiling_name"].startswith("gloo:"):
            pile.gloo_op = int(entry.get("op_id", -1))
        return pile

    def logs(self) -> list[GroupLog]:
        return [self._log(pile) for pile in self.piles.values()]

    def _log(self, pile: _Pile) -> GroupLog:
        waiting = pile.waiting[::-1]
        rows = [(entry, False) for entry in waiting[:KEPT_PENDING]]
        if len(waiting) > KEPT_PENDING:
            rows.append((waiting[-1], False))
        stacks = {id(entry) for entry in waiting[:KEPT_STACKS]}
        rows += pile.kept
        entries = [self._entry(entry, done, id(entry) in stacks) for entry, done in rows]
        entries.sort(key=lambda e: e.record)
        return GroupLog(name=pile.log_key[0], desc=pile.log_key[1], ranks="", issued=pile.issued, done=pile.done,
                        pending=pile.pending, p2p_pending=pile.p2p_pending,
                        has_p2p=bool(pile.counts), entries=entries,
                        unlisted=pile.gloo_op,
                        p2p_counts={_clip(name.rpartition(":")[2]): count for name, count in pile.counts.items()})

    def last(self) -> tuple[int, Entry]:
        """The newest entry of all with its call stack, and the index of its group."""
        entry = self.entries[-1]
        for index, (_, pile) in enumerate(self.piles.items()):
            if any(entry is other for other in pile.waiting[:1]):
                return index, self._entry(entry, False, True)
            if any(entry is other for other, _ in pile.kept[:1]):
                return index, self._entry(entry, True, True)
        return 0, self._entry(entry, True, True)

    def _entry(self, entry: dict[str, Any], done: bool, stack: bool) -> Entry:
        raw = msgspec.convert(entry, _Raw, strict=False)
        p2p = bool(entry.get("is_p2p")) if self.flagged else _names_p2p(raw.profiling_name)
        backend, _, name = raw.profiling_name.rpartition(":")
        seq = raw.seq_id if self.old else raw.p2p_seq_id if p2p else raw.collective_seq_id
        return Entry(
            seq=seq, record=raw.record_id, done=done, p2p=p2p,
            op=Op(_clip(backend), _clip(name), _shapes(raw.input_sizes), _shapes(raw.output_sizes),
                  tuple(map(_clip, raw.input_dtypes)), tuple(map(_clip, raw.output_dtypes))),
            timed_out=raw.retired and not done,
            started=raw.state == "started" or bool(raw.time_discovered_started_ns),
            time_ns=raw.time_created_ns, timeout_ms=raw.timeout_ms or 0,
            site=_site(raw.frames), stack=_stack(raw.frames) if stack else (),
        )


def _finished(entry: dict[str, Any], name: str) -> bool:
    if entry.get("time_discovered_completed_ns"):
        return True
    return bool(entry.get("retired")) and not name.startswith(_STATEFUL)


def _names_p2p(name: str) -> bool:
    return name.partition(":")[2].startswith(("send ", "recv "))


def _shapes(sizes: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(size[:MAX_DIMENSIONS]) for size in sizes[:MAX_TENSORS]])


@lru_cache(maxsize=4096)
def _is_internal(filename: str) -> bool:
    return _INTERNAL.search(filename) is not None


def _site(frames: Iterable[dict[str, Any]]) -> int:
    """A number for the innermost line outside of torch's own plumbing, equal on all ranks of a job."""
    for frame in frames:
        filename = str(frame.get("filename", "?"))
        if not _is_internal(filename):
            return zlib.crc32(f"{filename}:{frame.get('line')}".encode(errors="replace")) or 1
    return 0


def _stack(frames: Iterable[dict[str, Any]]) -> tuple[Frame, ...]:
    """The innermost frames outside of torch's own plumbing; all of them where nothing else is left."""
    found = [Frame(_clip(str(f.get("filename", "?"))), int(f.get("line") or 0), _clip(str(f.get("name", "?"))))
             for f in frames]
    return tuple([f for f in found if not _is_internal(f.filename)][:KEPT_FRAMES] or found[:KEPT_FRAMES])


def _clip(text: str, limit: int = MAX_TEXT) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _add_config(groups: list[GroupLog], config: Any) -> None:
    """Member lists out of pg_config ({name: {name, desc, ranks}}; in 1.4 {pg id: [ranks]}) into `groups`."""
    known = {group.name: group for group in groups}
    for key, value in config.items():
        item = _RawGroup(name=str(key), ranks=value) if isinstance(value, list) else msgspec.convert(value, _RawGroup)
        name = _clip(str(item.name) or str(key))
        ranks = item.ranks if isinstance(item.ranks, str) else str(item.ranks)
        if ranks.replace(" ", "") in ("", "[]"):
            continue  # Gloo: one nameless group without members
        group = known.get(name)
        if group is None:
            group = known[name] = GroupLog(name=name, desc=_clip(item.desc), ranks="")
            groups.append(group)
        group.ranks = ranks
        group.desc = group.desc or _clip(item.desc)


def _add_status(groups: list[GroupLog], ids: dict[str, int], status: dict[Any, Any]) -> None:
    """pg_status is keyed by the rank's own group numbers; entries say which group has which number.

    A group without entries is found by order where names are numbers (both count up as groups are made), or when it
    is the only one left.
    """
    rows = {int(key): msgspec.convert(value, _RawStatus, strict=False) for key, value in status.items()}
    by_id = {ids[group.name]: group for group in groups if group.name in ids}
    named = [group for group in groups if group.name.isdecimal()]
    if len(named) == len(groups) == len(rows):
        pairs = dict(zip(sorted(rows), sorted(named, key=lambda g: int(g.name)), strict=True))
        if all(pairs.get(pg_id) is group for pg_id, group in by_id.items()):
            by_id = pairs
    left = [group for group in groups if group.name not in ids]
    free = [pg_id for pg_id in rows if pg_id not in by_id]
    if len(left) == len(free) == 1 and len(by_id) < len(rows):
        by_id[free[0]] = left[0]
    for pg_id, row in rows.items():
        if pg_id in by_id:
            group = by_id[pg_id]
            group.status_issued, group.status_done = row.last_enqueued_collective, row.last_completed_collective
    for group in groups:  # until here the op_id of the newest Gloo entry
        group.unlisted = max(group.status_issued - group.unlisted, 0) if group.unlisted > 0 else 0
