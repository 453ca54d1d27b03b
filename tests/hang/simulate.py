"""A small model of collectives, and the flight-recorder dumps that it would leave.

Each rank runs a program, a list of `Call`s, in order. It may be `depth` calls ahead of the one that runs; calls of one
rank run one after the other, as on one stream. A collective completes when every member runs the matching call with
the same number; a send when the peer runs the matching receive. What is left when nothing moves any more is a hang.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

NS = 1_757_000_000 * 10**9


@dataclass(frozen=True)
class Call:
    """`peer` is a global rank for send and recv. `parts`: a coalesced batch of calls on the same group."""

    group: str
    op: str
    sizes: tuple[tuple[int, ...], ...] = ((1024,),)
    out: tuple[tuple[int, ...], ...] | None = None
    dtype: str = "Float"
    peer: int = -1
    line: int = 10
    parts: tuple[Call, ...] = ()

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        return self.sizes if self.out is None else self.out


@dataclass
class Group:
    ranks: tuple[int, ...]
    desc: str


@dataclass
class Issued:
    call: Call
    seq: int
    p2p_seq: int
    op_id: int
    at: int
    done: bool = False
    done_at: int = 0


@dataclass
class World:
    """`hung` calls, as (group, number), never complete: the network's fault. `passes`: see `_fits`."""

    size: int
    groups: dict[str, Group]
    programs: dict[int, list[Call]]
    depth: int = 1
    hung: set[tuple[str, int]] = field(default_factory=set)
    issued: dict[int, list[Issued]] = field(default_factory=dict)
    clock: int = 0

    def run(self) -> World:
        """Until nothing moves."""
        self.issued = {rank: [] for rank in range(self.size)}
        counters: dict[tuple[int, str, bool], int] = {}
        moved = True
        while moved:
            moved = False
            for rank in range(self.size):
                mine = self.issued[rank]
                while len(mine) < len(self.programs[rank]) and sum(not i.done for i in mine) < self.depth:
                    call = self.programs[rank][len(mine)]
                    p2p = is_p2p(call)
                    key = (rank, call.group, p2p)
                    counters[key] = counters.get(key, 0) + 1
                    self.clock += 1000
                    mine.append(Issued(call, counters.get((rank, call.group, False), 0),
                                       counters.get((rank, call.group, True), 0),
                                       sum(counters.get((rank, call.group, kind), 0) for kind in (False, True)),
                                       self.clock))
                    moved = True
            moved = self._complete() or moved
        return self

    @property
    def finished(self) -> bool:
        """Everybody came to the end: no hang."""
        return all(len(mine) == len(self.programs[rank]) and all(item.done for item in mine)
                   for rank, mine in self.issued.items())

    def _running(self, rank: int) -> Issued | None:
        return next((item for item in self.issued[rank] if not item.done), None)

    def _complete(self) -> bool:
        heads = {rank: head for rank in range(self.size) if (head := self._running(rank)) is not None}
        for rank, head in heads.items():
            call = head.call
            if is_p2p(call):
                wanted = [(part.peer, "recv" if part.op == "send" else "send", part) for part in call.parts or (call,)]
                ready = [peer in heads and any(
                    part.op == op and part.peer == rank and part.group == call.group
                    and prod(part.sizes[0]) == prod(mine.sizes[0])
                    for part in heads[peer].call.parts or (heads[peer].call,)) for peer, op, mine in wanted]
                partners = {peer for peer, _, _ in wanted}
                if all(ready) and all(len(heads[p].call.parts) < 2 for p in partners):
                    self._finish([rank, *partners])
                    return True
                ring = {r for r, h in heads.items() if h.call.parts and h.call.group == call.group and is_p2p(h.call)}
                if all(ready) and all(self._batch_ready(r, heads) for r in ring):
                    self._finish(sorted(ring))
                    return True
                continue
            members = self.groups[call.group].ranks
            if all(m in heads and heads[m].call.group == call.group and not is_p2p(heads[m].call)
                   and heads[m].seq == head.seq for m in members) and (call.group, head.seq) not in self.hung \
                    and fits([heads[m].call for m in members]):
                self._finish(members)
                return True
        return False

    def _batch_ready(self, rank: int, heads: dict[int, Issued]) -> bool:
        return all(p.peer in heads and any(q.peer == rank and q.op != p.op for q in heads[p.peer].call.parts)
                   for p in heads[rank].call.parts)

    def _finish(self, ranks: Any) -> None:
        self.clock += 1000
        for rank in ranks:
            head = self._running(rank)
            assert head is not None
            head.done, head.done_at = True, self.clock


def is_p2p(call: Call) -> bool:
    return call.op in ("send", "recv") or bool(call.parts and call.parts[0].op in ("send", "recv"))


def fits(calls: list[Call]) -> bool:
    """Would these calls, one per member, complete together?"""
    if len({call.op for call in calls}) > 1 or len({call.dtype for call in calls}) > 1:
        return False
    into = [sum(map(prod, call.sizes)) for call in calls]
    out = [sum(map(prod, call.outputs)) for call in calls]
    if "all_to_all" in calls[0].op:
        if all(len(c.sizes) == len(calls) for c in calls):
            return all(prod(c.sizes[j]) == prod(d.outputs[i]) for i, c in enumerate(calls) for j, d in enumerate(calls))
        return sum(into) == sum(out)
    if calls[0].op == "gather":
        return len(set(into)) == 1
    if "gather" in calls[0].op:
        return len(set(out)) == 1 and (len(set(into)) == 1 or sum(into) == out[0])
    return len(set(into)) == 1 and len(set(out)) == 1


# -- dumps ------------------------------------------------------------------------------------------------------------


def raw_dump(world: World, rank: int, *, version: str = "2.10", backend: str = "nccl", ring: int = 2000,
             active: bool = False, frames: bool = True, hashed: bool = False, status: bool = True) -> dict[str, Any]:
    """What torch would write on `rank`: `version` 1.4 to 2.10, `backend` nccl or gloo, the last `ring` entries,
    with `active` the incomplete ones only, group names `hashed` or numbers of the rank's own."""
    mine = [name for name, group in world.groups.items() if rank in group.ranks]
    names = {name: _hash(name) if hashed else str(i) for i, name in enumerate(mine)}
    entries: list[dict[str, Any]] = []
    for item in world.issued[rank]:
        parts = item.call.parts
        for part in parts or (item.call,):
            entries.append(_entry(world, rank, part, item, names, mine, backend, part_of=bool(parts)))
        if parts:
            closing = replace(item.call, op="coalesced", sizes=(), out=(), parts=())
            entry = _entry(world, rank, closing, item, names, mine, backend, part_of=False)
            entry["is_p2p"] = is_p2p(item.call)
            entries.append(entry)
    for number, entry in enumerate(entries):
        entry["record_id"] = number
        if not frames:
            del entry["frames"]
    if active:
        entries = [e for e in entries if e["state"] != "completed"]
    entries = entries[-ring:]
    if backend == "gloo":
        config: dict[Any, Any] = {"": {"name": "", "desc": "", "ranks": "[]"}}
    else:
        config = {names[n]: {"name": names[n], "desc": world.groups[n].desc,
                             "ranks": str(list(world.groups[n].ranks))} for n in sorted(mine)}
    dump: dict[str, Any] = {"version": version, "pg_config": config, "entries": entries}
    major = tuple(map(int, version.split(".")))
    if major >= (2, 0) and status:
        dump["pg_status"] = {str(i): _status(world, rank, name, backend) for i, name in enumerate(mine)}
    if major >= (2, 10):
        dump["comm_lib_version"] = "2.27.3"
    elif major >= (2, 9):
        dump["nccl_version"] = "2.27.3"
    if major < (2, 0):
        return _as_1_4(dump, world, mine)
    return dump


def _hash(name: str) -> str:
    return f"{hash(('group', name)) & (2**64 - 1):016x}"


def _status(world: World, rank: int, name: str, backend: str) -> dict[str, int]:
    mine = [i for i in world.issued[rank] if i.call.group == name]

    def number(item: Issued) -> int:
        return item.op_id if backend == "gloo" else item.p2p_seq if is_p2p(item.call) else item.seq

    finished = [i for i in mine if i.done]
    return {"last_enqueued_collective": number(mine[-1]) if mine else -1, "last_started_collective": -1,
            "last_completed_collective": number(finished[-1]) if finished else -1}


def _entry(world: World, rank: int, call: Call, item: Issued, names: dict[str, str], mine: list[str], backend: str, *,
           part_of: bool) -> dict[str, Any]:
    group = world.groups[call.group]
    local = group.ranks.index(rank)
    name = call.op
    if call.op in ("send", "recv"):
        arrow = "->" if call.op == "send" else "<-"
        name = f"{call.op} {local}{arrow}{group.ranks.index(call.peer)}"
    done = item.done and not part_of and backend != "gloo"
    return {
        "frames": [{"name": call.op.strip("_"), "filename": "/env/site-packages/torch/distributed/distributed_c10d.py",
                    "line": 2900},
                   {"name": "forward", "filename": "/job/model.py", "line": call.line},
                   {"name": "<module>", "filename": "/job/train.py", "line": 7}],
        "record_id": 0, "pg_id": mine.index(call.group), "process_group": (names[call.group], group.desc),
        "collective_seq_id": item.seq, "p2p_seq_id": item.p2p_seq, "op_id": item.op_id,
        "profiling_name": f"{backend}:{name}", "time_created_ns": NS + item.at,
        "input_sizes": [list(s) for s in call.sizes], "input_dtypes": [call.dtype] * len(call.sizes),
        "output_sizes": [list(s) for s in call.outputs], "output_dtypes": [call.dtype] * len(call.outputs),
        "state": "completed" if done else "scheduled", "time_discovered_started_ns": None,
        "time_discovered_completed_ns": NS + item.done_at if done else None,
        "retired": item.done and not part_of, "timeout_ms": 600_000,
        "is_p2p": call.op in ("send", "recv"), "thread_id": "140", "thread_name": "python",
    }


def _as_1_4(dump: dict[str, Any], world: World, mine: list[str]) -> dict[str, Any]:
    gone = ("collective_seq_id", "p2p_seq_id", "op_id", "process_group", "input_dtypes", "output_dtypes", "timeout_ms",
            "is_p2p", "thread_id", "thread_name")
    entries = [{k: v for k, v in e.items() if k not in gone} | {"seq_id": e["collective_seq_id"]}
               for e in dump["entries"]]
    return {"version": "1.4", "entries": entries,
            "pg_config": {i: list(world.groups[name].ranks) for i, name in enumerate(mine)}}


def as_json(dump: dict[str, Any]) -> bytes:
    """The JSON form: no frames, numbers of pg_status as text, 0 for absent times."""
    plain = json.loads(json.dumps(dump))
    for entry in plain["entries"]:
        entry.pop("frames", None)
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = entry[key] or 0
    plain["pg_status"] = {k: {key: str(n) for key, n in row.items()} for k, row in plain.get("pg_status", {}).items()}
    plain["nccl_comm_state"] = {}
    return json.dumps(plain).encode()


def write(world: World, folder: Path, *, name: str = "nccl_trace_rank_{rank}", without: frozenset[int] = frozenset(),
          form: str = "pickle", versions: dict[int, str] | None = None, rings: dict[int, int] | None = None,
          edit: Callable[[dict[str, Any], int], None] | None = None, **options: Any) -> None:
    """Dumps of all ranks but those in `without`; `versions` and `rings` by rank, other options as `raw_dump`'s.

    `edit(dump, rank)` may change what is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world.size):
        if rank in without:
            continue
        raw = raw_dump(world, rank, **{"version": (versions or {}).get(rank, "2.10"),
                                       "ring": (rings or {}).get(rank, 2000), **options})
        if edit is not None:
            edit(raw, rank)
        data = as_json(raw) if form == "json" else pickle.dumps(raw, protocol=2)
        (folder / name.format(rank=rank)).write_bytes(data)
