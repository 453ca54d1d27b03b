"""Hangs with a known culprit: the twelve of the comparison with other tools, and as many generated ones as asked for.

Every scenario comes from `simulate` (a run that really stops there), is seeded, and says exactly who is guilty.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.hang.simulate import Call, Group, World, write

MISSING, MISMATCH, ORDER = "collective_missing_rank", "collective_mismatch", "group_order_deadlock"
P2P, ABSENT, ALL, UNDETERMINED = "p2p_unmatched", "rank_dump_missing", "hang_all_waiting", "hang_undetermined"
Programs = dict[int, list[Call]]


@dataclass
class Scenario:
    """`ranks` are exactly the guilty; `causes` the slugs that would be right. `options` go to `simulate.write`."""

    name: str
    world: World
    ranks: set[int]
    causes: set[str]
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """The dumps that this hang leaves."""
        write(self.world.run(), folder, **self.options)


def only_world(size: int = 8, calls: int = 10) -> tuple[dict[str, Group], Programs]:
    """One group of all, one all_reduce after the other, each from its own line."""
    return ({"w": Group(tuple(range(size)), "default_pg")},
            {rank: [Call("w", "all_reduce", line=20 + i) for i in range(calls)] for rank in range(size)})


def named() -> list[Scenario]:
    """The scenarios A to L on which two other analysers were measured."""
    found = []

    def add(name: str, change: Callable[[Programs], Any] | None, ranks: set[int], cause: str, *, size: int = 8,
            hung: set[tuple[str, int]] | None = None, **options: Any) -> None:
        groups, programs = only_world(size)
        if change is not None:
            change(programs)
        found.append(Scenario(name, World(size, groups, programs, hung=hung or set()), ranks, {cause}, options))

    add("A", lambda p: p[3].__delitem__(slice(8, None)), {3}, MISSING)
    add("B", lambda p: p[0].__setitem__(7, Call("w", "broadcast", line=99)), {0}, MISMATCH)
    add("B2", lambda p: p[5].__setitem__(7, Call("w", "broadcast", line=99)), {5}, MISMATCH)
    add("C", None, set(), ALL, hung={("w", 9)})
    add("D", lambda p: p[5].__delitem__(slice(8, None)), {5}, ABSENT, without=frozenset({5}))
    add("E", None, set(), ALL, hung={("w", 9)}, rings={r: 3 + r for r in range(8)})
    add("G", lambda p: p[0].__setitem__(6, Call("w", "all_reduce", sizes=((1025,),))), {0}, MISMATCH)
    add("I", lambda p: p[6].__delitem__(slice(7, None)), {6}, MISSING, versions={2: "2.4", 4: "1.4", 5: "2.9"})

    def lonely_send(programs: Programs) -> None:
        programs[0][8:] = [Call("w", "send", peer=1)]
        for rank in range(1, 8):
            programs[rank][8:] = []

    add("J", lonely_send, {1}, P2P)

    def unequal_splits(programs: Programs) -> None:
        for rank, program in programs.items():
            rows = 4096 + 64 * (rank == 2)
            program[6] = Call("w", "all_to_all", sizes=((rows, 16),), out=((4096, 16),))

    add("K", unequal_splits, {2}, MISMATCH)
    found.append(_f())
    found.append(_l())
    return sorted(found, key=lambda s: s.name)


def _f() -> Scenario:
    groups = {"w": Group(tuple(range(8)), "default_pg"),
              "e0": Group((0, 1, 2, 3), "EP"), "e1": Group((4, 5, 6, 7), "EP")}
    programs = {r: [Call(f"e{r // 4}", "all_to_all", line=31), Call("w", "all_reduce", line=32)] * 3 for r in range(8)}
    for rank in (2, 3):
        programs[rank][4:] = programs[rank][:3:-1]
    return Scenario("F", World(8, groups, programs), {2, 3}, {ORDER})


class _Unfinished(World):
    """L: everybody completed the last call but rank 4, which took part and never saw the end."""

    def run(self) -> World:
        super().run()
        self.issued[4][-1].done = False
        return self


def _l() -> Scenario:
    groups, programs = only_world()
    return Scenario("L", _Unfinished(8, groups, programs), {4}, {MISSING})


# -- generated --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How many ranks, in groups of what size; `pp` stages of size / pp ranks each."""

    size: int
    tp: int
    ep: int
    pp: int = 1

    def groups(self) -> dict[str, Group]:
        """default_pg, then TP, EP, DP and PP groups, with Megatron's descriptions."""
        every = list(range(self.size))
        stage = self.size // self.pp
        found = {"w": Group(tuple(every), "default_pg")}
        for base in range(0, self.size, stage):
            ranks = every[base : base + stage]
            for i in range(0, stage, self.tp):
                if self.tp > 1:
                    found[f"tp{ranks[i]}"] = Group(tuple(ranks[i : i + self.tp]), "TENSOR_MODEL_PARALLEL_GROUP")
            for i in range(0, stage, self.ep):
                if self.ep > 1:
                    found[f"ep{ranks[i]}"] = Group(tuple(ranks[i : i + self.ep]), "EXPERT_MODEL_PARALLEL_GROUP")
            for i in range(self.tp):
                if stage > self.tp:
                    found[f"dp{ranks[i]}"] = Group(tuple(ranks[i :: self.tp]), "DATA_PARALLEL_GROUP")
        if self.pp > 1:
            for i in range(stage):
                found[f"pp{i}"] = Group(tuple(every[i::stage]), "PIPELINE_MODEL_PARALLEL_GROUP")
        return found

    def programs(self, groups: dict[str, Group], steps: int, random: random.Random) -> Programs:
        """Steps of a transformer with experts: forward, backward, gradients, one world all_reduce at the end."""
        mine = {rank: {name[:2].rstrip("0123456789"): name for name, group in groups.items() if rank in group.ranks}
                for rank in range(self.size)}
        stage = self.size // self.pp
        programs: Programs = {rank: [] for rank in range(self.size)}
        for step in range(steps):
            routed = {rank: random.randrange(500, 1500) for rank in range(self.size)}
            for rank, program in programs.items():
                of = mine[rank]
                level = rank // stage
                shape = ((2048, 1, 512),)
                if level > 0:
                    program.append(Call(of["pp"], "recv", shape, peer=rank - stage, line=50))
                for layer in range(2):
                    if "tp" in of:
                        program.append(Call(of["tp"], "_all_gather_base", ((2048 // self.tp, 512),),
                                            ((2048, 512),), "BFloat16", line=60))
                    if "ep" in of:
                        program += self._experts(groups[of["ep"]], of["ep"], rank, routed, layer)
                    if "tp" in of:
                        program.append(Call(of["tp"], "_reduce_scatter_base", ((2048, 512),),
                                            ((2048 // self.tp, 512),), "BFloat16", line=63))
                if level < self.pp - 1:
                    program.append(Call(of["pp"], "send", shape, peer=rank + stage, line=51))
                if "dp" in of:
                    program.append(Call(of["dp"], "all_reduce", ((4096,), (512,)), line=70))
                if step % 2 == 0:
                    program.append(Call("w", "all_reduce", ((1,),), line=71))
        return programs

    @staticmethod
    def _experts(group: Group, name: str, rank: int, routed: dict[int, int], layer: int) -> list[Call]:
        """Dispatch and combine: what one sends less than a peer, another receives less."""
        place = group.ranks.index(rank)
        before = group.ranks[place - 1]
        sent, received = 2000 + routed[rank] % 97, 2000 + routed[before] % 97
        return [Call(name, "all_to_all", ((sent, 512),), ((received, 512),), "BFloat16", line=61),
                Call(name, "all_to_all", ((received, 512),), ((sent, 512),), "BFloat16", line=62 + layer)]


LAYOUTS = (Layout(4, 2, 2), Layout(8, 2, 4), Layout(8, 1, 8), Layout(8, 4, 2), Layout(16, 4, 8), Layout(8, 2, 2, pp=2),
           Layout(16, 2, 4, pp=4), Layout(16, 8, 8), Layout(6, 3, 3), Layout(32, 4, 8, pp=2))
FAULTS = ("stop", "die", "operation", "size", "dtype", "skip", "extra", "swap", "network", "splits", "p2p", "two")
FORMS: tuple[dict[str, Any], ...] = (
    {}, {"version": "2.9"}, {"version": "2.4", "name": "trace-{rank}.pkl"}, {"form": "json", "name": "fr_{rank}.json"},
    {"name": "gpu-node-17_rank{rank}"}, {"hashed": True, "name": "host3.rank_{rank}.pickle"}, {"active": True},
    {"version": "2.1"},
)


def generated(number: int) -> Scenario:
    """Scenario `number`: the fault goes round, the rest is drawn; the guilty rank is 0 in every fourth."""
    draw = random.Random(f"hang-{number}")
    fault = FAULTS[number % len(FAULTS)]
    layouts = [layout for layout in LAYOUTS
               if (fault != "p2p" or layout.pp > 1) and (fault != "splits" or layout.ep > 2)]
    layout = draw.choice(layouts)
    groups = layout.groups()
    programs = layout.programs(groups, draw.randrange(2, 6), draw)
    guilty = 0 if number // len(FAULTS) % 4 == 0 else draw.randrange(layout.size)
    depth = draw.choice((1, 1, 2, 3))
    options = dict(draw.choice(FORMS))
    if fault in ("stop", "operation", "size", "network") and draw.random() < 0.4:
        options["rings"] = {rank: draw.randrange(12, 40) for rank in range(layout.size)}
    world = World(layout.size, groups, programs, depth)
    ranks, causes = {guilty}, set()
    later = len(programs[guilty]) // 2
    match fault:
        case "stop" | "die" | "two":
            if fault == "two":
                ranks = {guilty, (guilty + layout.size // 2) % layout.size}
            place = draw.randrange(later, len(programs[guilty]) - 1)
            for rank in ranks:
                del programs[rank][min(place, len(programs[rank]) - 2):]
            causes = {MISSING, P2P}
            if fault == "die":
                options["without"] = frozenset(ranks)
                causes = {ABSENT}
        case "operation" | "size" | "dtype":
            place = _choose(draw, programs[guilty], later,
                            lambda c: c.op == "all_reduce" and len(groups[c.group].ranks) > 2)
            call = programs[guilty][place]
            programs[guilty][place] = {"operation": replace(call, op="broadcast"), "dtype": replace(call, dtype="Half"),
                                       "size": replace(call, sizes=(*call.sizes[:-1], (call.sizes[-1][0] + 3,)))}[fault]
            causes = {MISMATCH}
            if fault == "dtype" and options.get("version", "2.10") < "2":
                options = {}
        case "skip":
            place = _choose(draw, programs[guilty], later, lambda c: c.op not in ("send", "recv"))
            del programs[guilty][place]
            causes = {MISSING, MISMATCH, ORDER}
        case "extra":
            place = _choose(draw, programs[guilty], later,
                            lambda c: c.op == "all_reduce" and len(groups[c.group].ranks) > 2)
            programs[guilty].insert(place, replace(programs[guilty][place], sizes=((77,),)))
            causes = {MISMATCH, ORDER}
        case "swap":
            program = programs[guilty]
            causes, world.depth = {ORDER}, draw.choice((1, 4))
            places = [i for i in range(later, len(program) - 1) if program[i].group != program[i + 1].group
                      and not {program[i].op, program[i + 1].op} & {"send", "recv"}]
            for place in draw.sample(places, len(places)):  # two groups that share one rank only may be swapped safely
                program[place], program[place + 1] = program[place + 1], program[place]
                if not world.run().finished:
                    break
                program[place], program[place + 1] = program[place + 1], program[place]
        case "network":
            call = programs[guilty][_choose(draw, programs[guilty], later, lambda c: c.op not in ("send", "recv"))]
            last = sum(c.group == call.group and c.op not in ("send", "recv") for c in programs[guilty])
            world.hung = {(call.group, draw.randrange(last // 2 + 1, last + 1))}
            ranks, causes = set(), {ALL}
        case "splits":
            place = _choose(draw, programs[guilty], later, lambda c: c.op == "all_to_all")
            call = programs[guilty][place]
            group = groups[call.group]
            index = sum(c.group == call.group for c in programs[guilty][:place])
            for member in group.ranks:
                at = [i for i, c in enumerate(programs[member]) if c.group == call.group][index]
                me, n = group.ranks.index(member), len(group.ranks)
                rows = tuple((16 + (i - me) % n, 8) for i in range(n))  # every row has the same sum
                columns = tuple((16 + (me - i) % n, 8) for i in range(n))
                wrong = ((99, 8), *rows[1:]) if me else (rows[0], (99, 8), *rows[2:])
                programs[member][at] = replace(call, sizes=wrong if member == guilty else rows, out=columns)
            causes = {MISMATCH}
        case "p2p":
            halves = [i for i in range(len(programs[guilty])) if programs[guilty][i].op in ("send", "recv")]
            del programs[guilty][draw.choice(halves[len(halves) // 2:])]
            causes = {P2P, MISMATCH, ORDER}
    world.run()
    if fault == "two":  # one of them may itself wait for the other before it stops
        ranks = {rank for rank in ranks if all(item.done for item in world.issued[rank])}
    return Scenario(f"{number:02d}-{fault}-{layout.size}", world, ranks, causes, options)


def _choose(draw: random.Random, program: list[Call], start: int, fits: Callable[[Call], bool]) -> int:
    places = [i for i, call in enumerate(program) if fits(call)]
    return draw.choice([i for i in places if i >= start] or places)
