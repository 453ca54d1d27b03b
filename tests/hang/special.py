"""Hangs, and runs without one, that need their own construction: the quirks of formats and backends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.hang.scenarios import (
    ABSENT,
    ALL,
    LAYOUTS,
    MISMATCH,
    MISSING,
    ORDER,
    P2P,
    UNDETERMINED,
    Layout,
    Programs,
    Scenario,
    only_world,
)
from tests.hang.simulate import Call, Group, World


def _scenario(name: str, change: Callable[[Programs], Any] | None, ranks: set[int], cause: str | set[str], *,
              size: int = 8, calls: int = 10, hung: set[tuple[str, int]] | None = None, depth: int = 1, **options: Any
              ) -> Scenario:
    groups, programs = only_world(size, calls)
    if change is not None:
        change(programs)
    causes = {cause} if isinstance(cause, str) else cause
    return Scenario(name, World(size, groups, programs, depth, hung=hung or set()), ranks, causes, options)


def _stop(rank: int, at: int = 8) -> Callable[[Programs], None]:
    return lambda programs: programs[rank].__delitem__(slice(at, None))


def _set(rank: int, at: int, call: Call) -> Callable[[Programs], None]:
    return lambda programs: programs[rank].__setitem__(at, call)


def special() -> list[Scenario]:
    """All of them; names say what is odd."""
    return [
        # who is guilty although dumps of innocents are missing, and where too many are
        _scenario("stop-and-an-innocent-dump-missing", _stop(3), {3}, MISSING, without=frozenset({6})),
        _scenario("wrong-op-and-the-guilty-is-rank-0-without-rank-1", _set(0, 7, Call("w", "broadcast")), {0}, MISMATCH,
                  without=frozenset({1})),
        _scenario("two-die", lambda p: (_stop(2)(p), _stop(7)(p)), {2, 7}, ABSENT, without=frozenset({2, 7})),
        _scenario("most-dumps-missing", _stop(2), set(), UNDETERMINED, without=frozenset({1, 2, 3, 4, 5})),
        _scenario("rank-0-dies", _stop(0), {0}, ABSENT, without=frozenset({0})),
        _scenario("two-ranks-one-stops", _stop(1), {1}, MISSING, size=2),
        # one more than all others
        _scenario("one-batch-more", lambda p: p[5].append(Call("w", "all_reduce")), {5}, MISMATCH),
        # the two of a pair disagree: nobody can say who is right ...
        _scenario("pair-disagrees", _set(1, 2, Call("w", "broadcast")), set(), UNDETERMINED, size=2, calls=3),
        _scenario("half-and-half", lambda p: [_set(r, 6, Call("w", "broadcast"))(p) for r in range(4)], set(),
                  UNDETERMINED),
        # ... unless what they always did tells
        _scenario("pair-size-by-habit", _set(1, 9, Call("w", "all_reduce", ((1000,),))), {1}, MISMATCH, size=2),
        # Gloo: no members, no states, failed calls retired
        _scenario("gloo-stop", _stop(3), {3}, MISSING, backend="gloo"),
        _scenario("gloo-wrong-size", _set(4, 7, Call("w", "all_reduce", ((2048,),))), {4}, MISMATCH, backend="gloo"),
        _scenario("gloo-network", None, set(), ALL, backend="gloo", hung={("w", 10)}),
        _scenario("gloo-died", _stop(5), {5}, ABSENT, backend="gloo", without=frozenset({5})),
        _scenario("gloo-json", _stop(0), {0}, MISSING, backend="gloo", form="json"),
        # versions
        _scenario("all-1.4", _stop(3), {3}, MISSING, versions=dict.fromkeys(range(8), "1.4")),
        _scenario("1.4-wrong-op", _set(0, 5, Call("w", "broadcast")), {0}, MISMATCH,
                  versions=dict.fromkeys(range(8), "1.4")),
        _scenario("mixed-versions-network", None, set(), ALL, hung={("w", 8)}, versions={0: "2.4", 3: "2.9", 5: "1.4"}),
        # ring buffers that hold nothing of the group, and dumps of waiting calls only
        _scenario("active-only", _stop(6), {6}, MISSING, active=True),
        _scenario("tiny-rings", _stop(6), {6}, MISSING, rings=dict.fromkeys(range(8), 1)),
        _scenario("far-ahead", _stop(6), {6}, MISSING, depth=60, calls=120),
        *_batches(), *_uneven(), *_started(), *_twins(), *_chains(),
    ]


def _batches() -> list[Scenario]:
    """batch_isend_irecv round a ring, and coalesced collectives: members of a batch stay "scheduled" for ever."""
    def ring(size: int = 4) -> tuple[dict[str, Group], Programs]:
        every = tuple(range(size))
        groups = {"w": Group(every, "default_pg"), "cp": Group(every, "CONTEXT_PARALLEL_GROUP")}
        programs: Programs = {}
        for rank in range(size):
            parts = (Call("cp", "send", peer=(rank + 1) % size), Call("cp", "recv", peer=(rank - 1) % size))
            gather = Call("w", "_all_gather_base", parts=tuple(
                Call("w", "_all_gather_base", ((n,),), ((n * size,),)) for n in (64, 32, 8)))
            programs[rank] = [Call("cp", "send", parts=parts), gather, Call("w", "all_reduce")] * 3
        return groups, programs

    found = []
    groups, programs = ring()
    del programs[2][6:]
    found.append(Scenario("batched-p2p-stop", World(4, groups, programs), {2}, {P2P, MISSING}))
    groups, programs = ring()
    found.append(Scenario("batched-network", World(4, groups, programs, hung={("w", 5)}), set(), {ALL}))
    groups, programs = ring()
    gather = programs[3][4]
    programs[3][4] = replace(gather, parts=(gather.parts[0], replace(gather.parts[1], sizes=((33,),)), gather.parts[2]))
    found.append(Scenario("batched-size", _Blocked(4, groups, programs, blocked=("w", 3)), {3}, {MISMATCH}))
    return found


class _Blocked(World):
    """Call `blocked` (group, number) does not complete, because its members differ in a way the model ignores."""

    def __init__(self, *args: Any, blocked: tuple[str, int]) -> None:
        super().__init__(*args)
        self.hung = {blocked}


def _uneven() -> list[Scenario]:
    """Unequal sizes that are legal, and one that is not."""
    def gather(rank: int, extra: int = 0) -> Call:
        return Call("w", "all_gather", ((10 + rank + extra,),), tuple((10 + r,) for r in range(4)))

    def change(programs: Programs, guilty: int | None = None) -> None:
        for rank, program in programs.items():
            program[5] = gather(rank, 7 * (rank == guilty))
            program[6] = Call("w", "reduce_scatter", tuple((10 + r,) for r in range(4)), ((10 + rank,),))

    return [
        _scenario("uneven-all-gather-network", change, set(), ALL, size=4, hung={("w", 6)}),
        _scenario("uneven-reduce-scatter-network", change, set(), ALL, size=4, hung={("w", 7)}),
        _scenario("all-gather-output-odd", lambda p: [_set(r, 5, Call("w", "_all_gather_base", ((10,),),
                                                                      ((80 + 10 * (r == 0),),)))(p) for r in range(8)],
                  {0}, MISMATCH),
    ]


def _started() -> list[Scenario]:
    """With TORCH_NCCL_ENABLE_TIMING a call that the device began is "started"; rank 2's device did not begin it."""
    def began(dump: dict[str, Any], rank: int) -> None:
        for entry in dump["entries"]:
            if entry["state"] == "completed" or rank != 2:
                entry["time_discovered_started_ns"] = entry["time_created_ns"] + 5
                entry["state"] = "started" if entry["state"] == "scheduled" else entry["state"]

    return [_scenario("device-stuck", None, {2}, MISSING, hung={("w", 10)}, edit=began)]


def _twins() -> list[Scenario]:
    """Two groups of the same members and description, and groups named alike on different ranks."""
    every = (0, 1, 2, 3)
    groups = {"w": Group(every, "default_pg"), "a": Group(every, "mesh_tp"), "b": Group(every, "mesh_tp")}
    programs = {r: [Call("a", "all_reduce"), Call("b", "all_reduce"), Call("w", "all_reduce")] * 4 for r in range(4)}
    del programs[1][7:]
    return [Scenario("twin-groups", World(4, groups, programs), {1}, {MISSING}),
            Scenario("twin-groups-hashed", World(4, groups, programs), {1}, {MISSING}, {"hashed": True})]


def _chains() -> list[Scenario]:
    """Waits that lead through several groups to one rank, and head-on sends."""
    held = Layout(16, 4, 8, pp=2)  # two ranks held the GIL: dumps of waiting calls only, so theirs are empty
    groups = held.groups()
    programs = held.programs(groups, 3, random.Random(3))
    for rank in (9, 14):
        place = [i for i, call in enumerate(programs[rank]) if call.op == "all_to_all"][-3]
        del programs[rank][place:]
    gil = Scenario("two-held-the-gil", World(16, groups, programs, 5), {9, 14}, {MISSING}, {"active": True})
    layout = LAYOUTS[5]
    groups = layout.groups()
    programs = layout.programs(groups, 4, random.Random(5))
    del programs[0][len(programs[0]) // 2:]
    found = [gil, Scenario("pipeline-source-stops", World(layout.size, groups, programs), {0}, {P2P, MISSING})]
    groups, programs = only_world(4, 4)
    programs[2][3:] = [Call("w", "send", peer=3), Call("w", "all_reduce")]
    programs[3][3:] = [Call("w", "all_reduce")]
    found.append(Scenario("send-then-all-reduce", World(4, groups, programs), {3}, {P2P, ORDER}))
    groups, programs = only_world(2, 2)
    for rank in (0, 1):
        programs[rank] += [Call("w", "send", peer=1 - rank), Call("w", "recv", peer=1 - rank)]
    found.append(Scenario("head-on-sends", World(2, groups, programs), {0, 1}, {P2P}))
    return found


def healthy() -> list[Scenario]:
    """Runs that came to their end: nothing to find, in any form."""
    found = []
    for number, layout in enumerate(LAYOUTS):
        groups = layout.groups()
        world = World(layout.size, groups, layout.programs(groups, 3, random.Random(number)), 1 + number % 3)
        options: list[dict[str, Any]] = [{}, {"backend": "gloo"}, {"form": "json"}, {"version": "2.4"},
                                         {"rings": {r: 9 + r for r in range(layout.size)}}, {"hashed": True}]
        found.append(Scenario(f"healthy-{number}", world, set(), set(), options[number % len(options)]))
    groups, programs = only_world(4)
    for rank in range(4):
        programs[rank][5] = Call("w", "all_gather", ((10 + rank,),), ((46,),))
        programs[rank][6] = Call("w", "gather", ((10,),), ((10,),) * 4 if rank == 0 else ())
    found.append(Scenario("healthy-uneven", World(4, groups, programs), set(), set()))
    batched = next(s for s in special() if s.name == "batched-network")
    batched.world.hung = set()
    found.append(Scenario("healthy-batched", batched.world, set(), set()))
    return found


def write_all(folder: Path) -> None:
    """Every scenario into a folder of its own, to look at: python -c 'import tests.hang.special as s; ...'."""
    for scenario in [*special(), *healthy()]:
        scenario.write(folder / scenario.name)
