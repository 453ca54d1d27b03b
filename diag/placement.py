"""Which rank carries which expert, how loaded it is, and how experts could be spread more evenly.

pdtrain lays experts out in order: EP rank i of a group holds the i-th part of each layer's experts, and the EP groups
of a stage are copies of each other (docs/config.md). A proposal keeps the number of experts per rank and assigns the
most loaded expert first, each to the least loaded rank that has room (longest processing time first, Graham 1969: at
most a third above the optimum).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diag.artefacts.metrics import MetricsLog
from diag.artefacts.run_config import RunConfig

#: Logged windows of the end of a run whose counts are added up.
RECENT_WINDOWS = 8
#: A proposal that lowers the heaviest load by less is not worth moving experts for.
WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks, EP degree and pipeline stages of a run."""

    ranks: int
    expert: int
    pipeline: int = 1

    @classmethod
    def of(cls, config: RunConfig | None) -> Layout | None:
        """The layout that the configuration states; None when it does not, or when no experts are spread."""
        if config is None:
            return None
        ranks, expert = config.number("parallel.ranks"), config.number("modules.experts.expert")
        pipeline = config.number("parallel.pipeline") or 1
        if ranks is None or expert is None or expert < 2 or not 1 <= ranks <= 1e7 or ranks % (expert * pipeline):
            return None
        return cls(int(ranks), int(expert), int(pipeline))

    def carriers(self, group: int) -> list[int]:
        """The ranks of EP index `group`: one per EP group, in every stage."""
        return [rank for rank in range(self.ranks) if rank % (self.ranks // self.pipeline) % self.expert == group]

    def group_of(self, expert: int, experts: int) -> int:
        """The EP index that holds `expert` of `experts`."""
        return expert // -(-experts // self.expert)


def group_loads(counts: Sequence[float], groups: int) -> list[float]:
    """Tokens per EP index when experts are laid out in order; counts [experts]."""
    size = -(-len(counts) // groups)
    return [float(sum(counts[g * size : (g + 1) * size])) for g in range(groups)]


def recent_counts(log: MetricsLog) -> dict[int, list[float]]:
    """Tokens per expert in each layer over the last windows of the run."""
    found: dict[int, list[float]] = {}
    for layer, router in log.routers.items():
        counted = [w.counts for w in router.windows[-RECENT_WINDOWS:] if w.counts is not None]
        same = [c for c in counted if len(c) == len(counted[-1])]
        if same:
            found[layer] = [float(value) for value in sum(same)]  # type: ignore[union-attr,arg-type]
    return found


def rank_loads(config: RunConfig | None, log: MetricsLog | None) -> dict[int, float]:
    """rank -> tokens of the experts it carries, over all layers, relative to an even share; empty when not known.

    Only without pipeline stages: which stage holds which layer is not in the metrics.
    """
    layout = Layout.of(config)
    if layout is None or log is None or layout.pipeline > 1:
        return {}
    total = [0.0] * layout.expert
    for counts in recent_counts(log).values():
        for group, load in enumerate(group_loads(counts, layout.expert)):
            total[group] += load
    mean = sum(total) / len(total)
    if not mean:
        return {}
    return {rank: total[group] / mean for group in range(layout.expert) for rank in layout.carriers(group)}


def proposal(counts: Sequence[float], groups: int) -> list[list[int]] | None:
    """Experts per EP index, equally many on each, with a lower heaviest load; None when it would gain nothing."""
    experts = len(counts)
    if groups < 2 or experts % groups or not sum(counts):
        return None
    room = experts // groups
    placed: list[list[int]] = [[] for _ in range(groups)]
    load = [0.0] * groups
    for expert in sorted(range(experts), key=lambda e: (-counts[e], e)):
        group = min((g for g in range(groups) if len(placed[g]) < room), key=lambda g: (load[g], g))
        placed[group].append(expert)
        load[group] += counts[expert]
    if max(load) > (1 - WORTH) * max(group_loads(counts, groups)):
        return None
    return [sorted(group) for group in placed]


def describe(layer: int, counts: Sequence[float], layout: Layout, hosts: Mapping[int, str]) -> dict[str, object]:
    """One layer's hottest expert, who carries it, what its ranks take, and the proposal: a row for `numbers`.

    `placement` lists the experts of EP index 0, 1, ..., separated by slashes.
    """
    hottest = max(range(len(counts)), key=lambda e: counts[e])
    group = layout.group_of(hottest, len(counts))
    loads = group_loads(counts, layout.expert)
    mean = sum(loads) / len(loads)
    ranks = layout.carriers(group)
    row: dict[str, object] = {
        "layer": layer, "hottest_expert": hottest, "expert_load": counts[hottest] * len(counts) / sum(counts),
        "ranks": ranks[:64], "rank_load": loads[group] / mean,
    }
    if named := sorted({hosts[rank] for rank in ranks if rank in hosts}):
        row["hosts"] = named
    placed = proposal(counts, layout.expert)
    if placed is not None:
        row["placement"] = " / ".join(" ".join(map(str, group)) for group in placed)
        row["rank_load_then"] = max(sum(counts[e] for e in group) for group in placed) / mean
    return row
