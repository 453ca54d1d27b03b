"""Which rank belongs to which group: plain arithmetic for any world size, no torch.

Attention/dense and experts are two factorisations of the same ranks ("folding"):

    ranks = pipeline x DP x TP     attention, dense FFN, embedding, head, norms
          = pipeline x EDP x EP    routed experts
    router, shared expert: replicated over all token ranks of a stage (DP x TP)

Pipeline stages are outermost, TP and EP innermost, so that both stay inside a node. Ranks of the update pool come after
the compute ranks and take part in no other group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdtrain.config.schema import Run

#: Every group family, in the order in which all ranks create their groups. A second order on some rank is a hang.
FAMILIES = ("tp", "dp", "ep", "edp", "router", "pp", "update")
#: DP, EDP and the router's DP carry the same kind of traffic and count as one family.
FAMILY_NAMES = {"tp": "TP", "ep": "EP", "dp": "DP", "edp": "DP", "router": "DP", "pp": "PP"}
#: Groups of a family that the text shows in full; of more, the first and the last.
SHOWN_GROUPS = 16


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands: its index along each axis; all None but `update` for a rank of the update pool."""

    rank: int
    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    edp: int | None = None
    ep: int | None = None
    update: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of one job and every group among them. `world` includes `update` ranks of the update pool.

    >>> Layout(8, tensor=2, expert=4).groups()["dp"]
    [[0, 2, 4, 6], [1, 3, 5, 7]]

    Raises:
        ValueError: a degree does not divide. `pdtrain.config` reports that to the user before a layout is made.
    """

    world: int
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    update: int = 0

    def __post_init__(self) -> None:
        if min(self.world, self.pipeline, self.tensor, self.expert) < 1 or self.update < 0 or self.ranks < 1:
            raise ValueError(f"degrees must be at least 1: {self}")
        for name, degree in (("tensor", self.tensor), ("expert", self.expert)):
            if self.ranks % (self.pipeline * degree):
                parts = f"pipeline {self.pipeline} x {name} {degree}"
                raise ValueError(f"{self.ranks} compute ranks are no multiple of {parts}")

    @classmethod
    def from_run(cls, run: Run) -> Layout:
        """The layout of a validated configuration."""
        return cls(
            world=run.parallel.ranks + run.pools.update_ranks,
            pipeline=run.parallel.pipeline,
            tensor=run.modules.attention.tensor,
            expert=run.modules.experts.expert,
            update=run.pools.update_ranks,
        )

    @property
    def ranks(self) -> int:
        """Compute ranks."""
        return self.world - self.update

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage = token ranks that share one router."""
        return self.ranks // self.pipeline

    @property
    def dp(self) -> int:
        """Ranks of a stage that see different data."""
        return self.stage // self.tensor

    @property
    def edp(self) -> int:
        """Copies of each expert in a stage."""
        return self.stage // self.expert

    @property
    def axes(self) -> dict[str, int]:
        """Size of every axis, outermost first: the dense view is (pp, dp, tp), the expert view (pp, edp, ep)."""
        return {
            "pp": self.pipeline,
            "dp": self.dp,
            "tp": self.tensor,
            "edp": self.edp,
            "ep": self.expert,
            "router": self.stage,
            "update": self.update,
        }

    def of(self, rank: int) -> Coordinates:
        """The coordinates of `rank`.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}")
        if rank >= self.ranks:
            return Coordinates(rank, update=rank - self.ranks)
        pp, inner = divmod(rank, self.stage)
        return Coordinates(
            rank,
            pp=pp,
            dp=inner // self.tensor,
            tp=inner % self.tensor,
            edp=inner // self.expert,
            ep=inner % self.expert,
        )

    def groups(self) -> dict[str, list[list[int]]]:
        """Every group by family, families and groups in the one order in which all ranks create them.

        Families of size 1 are listed too (nobody needs to create them). `pp` and `update` are there only when used.
        """
        stages = [list(range(start, start + self.stage)) for start in range(0, self.ranks, self.stage)]
        found = {
            "tp": [ranks for stage in stages for ranks in _runs(stage, self.tensor)],
            "dp": [stage[i :: self.tensor] for stage in stages for i in range(self.tensor)],
            "ep": [ranks for stage in stages for ranks in _runs(stage, self.expert)],
            "edp": [stage[i :: self.expert] for stage in stages for i in range(self.expert)],
            "router": stages,
        }
        if self.pipeline > 1:
            found["pp"] = [list(range(i, self.ranks, self.stage)) for i in range(self.stage)]
        if self.update:
            found["update"] = [list(range(self.ranks, self.world))]
        return found

    def group_of(self, family: str, rank: int) -> list[int]:
        """The ranks of `rank`'s group in `family`, in group order.

        Raises:
            KeyError: the layout has no such family, or `rank` takes no part in it.
        """
        for ranks in self.groups().get(family, []):
            if rank in ranks:
                return ranks
        raise KeyError(f"rank {rank} is in no {family} group of {self}")

    def families(self) -> list[str]:
        """Distinct group families of the module separation that communicate: TP, EP, DP (with EDP and router), PP.

        The pools' groups are none: pairs over host memory, one thread each, beside the collectives.
        """
        used = [FAMILY_NAMES[family] for family in FAMILIES if family != "update" and self.axes[family] > 1]
        return list(dict.fromkeys(used))

    def text(self) -> str:
        """The resolved groups for people: one line of degrees, then one line per family with its rank lists."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        pipeline = f"PP {self.pipeline} x " if self.pipeline > 1 else ""
        yield (
            f"layout: {_count(self.ranks, 'rank')} = {pipeline}DP {self.dp:,} x TP {self.tensor} (attention, dense)"
            f" = {pipeline}EDP {self.edp:,} x EP {self.expert} (experts); router DP {self.stage:,}"
            + (f"; + {_count(self.update, 'update rank')}" if self.update else "")
        )
        for family, groups in self.groups().items():
            size = len(groups[0])
            head = f"  {family:<7}{_count(len(groups), 'group')} of {size:,}"
            yield f"{head:<32}" + ("(no communication)" if size == 1 else _shown(groups))


def _runs(ranks: list[int], size: int) -> list[list[int]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _shown(groups: list[list[int]]) -> str:
    if len(groups) <= SHOWN_GROUPS:
        return " ".join(compress(group) for group in groups)
    first = " ".join(compress(group) for group in groups[:3])
    return f"{first} ... {compress(groups[-1])}"


def compress(ranks: list[int]) -> str:
    """A rank list in brackets; evenly spaced lists of more than 8 as first-last, with the spacing after a colon.

    >>> compress([0, 2, 4, 6]), compress(list(range(64))), compress(list(range(0, 2048, 128)))
    ('[0,2,4,6]', '[0-63]', '[0-1920:128]')
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) <= 8 and (step != 1 or len(ranks) <= 2):
        return f"[{','.join(map(str, ranks))}]"
    if all(b - a == step for a, b in zip(ranks, ranks[1:])):
        return f"[{ranks[0]}-{ranks[-1]}{'' if step == 1 else f':{step}'}]"
    return f"[{','.join(map(str, ranks))}]"
