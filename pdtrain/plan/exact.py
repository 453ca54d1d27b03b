"""The model that the trainer really builds, on the meta device under the fake process group, counted rank by rank.

The same calls as in training: `create_meshes`, tensor and expert parallel, `fully_shard` per unit, for the full world
size, only that no tensor has storage. A few ranks are built whole. Ranks fall into runs of equal estimates; at both
ends of every run the sizes come from DTensor's own arithmetic on the placements of the built parameters.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from diag.errors import UsageError
from pdtrain.config.rules import refusals
from pdtrain.config.schema import MODULES
from pdtrain.model.transformer import row_of
from pdtrain.parallel.layout import Coordinates, Layout
from pdtrain.parallel.meshes import create_meshes
from pdtrain.parallel.parallelize import build_parallel_model
from pdtrain.plan import states
from pdtrain.plan.setup import Setup, stages

#: Ranks that are built whole, at most: a few seconds each for 61 layers in a world of 2,048.
MOST_BUILT = 4
#: Ranks from which on only the first and the last are built: FSDP makes that many chunks of every parameter.
LARGE_WORLD = 512


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: bytes of its FP32 parameters by policy row, as built (or by DTensor's arithmetic) and as estimated."""

    rank: int
    found: dict[str, int]
    estimated: dict[str, int]

    @property
    def equal(self) -> bool:
        return self.found == self.estimated


@dataclass(frozen=True, slots=True)
class Exact:
    """What was counted. `built`: ranks whose model was built; `kinds`: runs of equal ranks, both ends of which were
    counted; `different`: ranks that differ."""

    world: int
    built: list[Rank]
    kinds: list[Kind]
    different: list[Rank]
    least: int
    most: int

    @property
    def agrees(self) -> bool:
        return not self.different


def exact(setup: Setup) -> Exact:
    """Count every rank of a layout that the trainer can run.

    Raises:
        UsageError: the layout is only planned today.
    """
    run = setup.run
    refused = refusals(run)
    reasons = [f"{m.key} = {m.value} {m.what}" for m in refused] + (setup.runnable if not refused else [])
    if reasons:
        raise UsageError(
            f"plan exact builds what pdtrain trains today, and this is only planned: {'; '.join(reasons)}; "
            "try --set parallel.pipeline=1"
        )
    layout = Layout.from_run(run)
    classes = kinds(setup, layout)
    built: list[Rank] = []
    shapes: dict[_Shape, int] = {}
    for rank in _to_build(classes):
        shapes, found = _built(setup, layout, rank)
        built.append(Rank(rank, found, _estimated(setup, layout.of(rank))))
    different = [rank for rank in built if not rank.equal]
    known = {rank.rank for rank in built}
    for kind in classes:
        for end in sorted({kind.first, kind.last} - known):
            found = _derived(shapes, layout.of(end), layout)
            if found != kind.estimated:
                different.append(Rank(end, found, kind.estimated))
    totals = [sum(kind.estimated.values()) for kind in classes]
    return Exact(layout.ranks, built, classes, different, min(totals), max(totals))


@dataclass(frozen=True, slots=True)
class Kind:
    """Ranks `first` to `last`, whose estimates are the same."""

    first: int
    last: int
    estimated: dict[str, int]


def kinds(setup: Setup, layout: Layout) -> list[Kind]:
    """Every rank, in runs of equal estimates.

    The index in each sharding group grows with the rank, and a shard never grows with its index. So when the model
    agrees with the estimate on the first and the last rank of a run, it agrees on every rank between.
    """
    found: list[Kind] = []
    for rank in range(layout.ranks):
        estimated = _estimated(setup, layout.of(rank))
        if found and found[-1].estimated == estimated:
            found[-1] = Kind(found[-1].first, rank, estimated)
        else:
            found.append(Kind(rank, rank, estimated))
    return found


def _to_build(classes: list[Kind]) -> list[int]:
    """First rank, last rank, and in worlds that are built quickly first ranks of kinds between."""
    if classes[-1].last >= LARGE_WORLD:
        return sorted({classes[0].first, classes[-1].last})
    middle = [kind.first for kind in classes[1:-1]]
    step = max(1, len(middle) // max(1, MOST_BUILT - 2))
    return sorted({classes[0].first, classes[-1].last, *middle[::step][: MOST_BUILT - 2]})


@dataclass(frozen=True, slots=True)
class _Shape:
    """One parameter: its row, global shape, the mesh's axis names with sizes, and its placements."""

    row: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    placements: tuple[object, ...]


def _built(setup: Setup, layout: Layout, rank: int) -> tuple[dict[_Shape, int], dict[str, int]]:
    """Parameters of `rank`, from the model that it would train."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("plan exact needs a process without a process group of its own")
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        meshes = create_meshes(layout, "cpu")
        model = build_parallel_model(setup.run, meshes, torch.device("meta"))
        found, shapes = dict.fromkeys(MODULES, 0), Counter[_Shape]()
        for name, parameter in model.named_parameters():
            row = row_of(name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found[row] += local.numel() * local.element_size()
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                axes = tuple(mesh.mesh_dim_names or ())
                shapes[_Shape(row, tuple(parameter.shape), axes, tuple(mesh.shape), tuple(parameter.placements))] += 1
            else:
                shapes[_Shape(row, tuple(parameter.shape), (), (), ())] += 1
        del model, meshes
        return shapes, found
    finally:
        dist.destroy_process_group()
        gc.collect()


_SIZES: dict[tuple[_Shape, tuple[int, ...]], int] = {}


def _derived(shapes: dict[_Shape, int], where: Coordinates, layout: Layout) -> dict[str, int]:
    """Bytes by row of a rank that was not built, by DTensor's arithmetic."""
    index = {"dp": where.dp, "tp": where.tp, "edp": where.edp, "ep": where.ep, "world": where.rank % layout.stage}
    found = dict.fromkeys(MODULES, 0)
    for shape, count in shapes.items():
        at = tuple(index[axis] or 0 for axis in shape.axes)
        if (shape, at) not in _SIZES:
            _SIZES[shape, at] = _local_entries(shape, at)
        found[shape.row] += 4 * count * _SIZES[shape, at]
    return found


def _local_entries(shape: _Shape, at: tuple[int, ...]) -> int:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    if not shape.axes:
        return states.entries(shape.shape)
    local, _ = _compute_local_shape_and_global_offset(
        torch.Size(shape.shape), torch.Size(shape.sizes), lambda axis: at[axis],
        shape.placements,  # type: ignore[arg-type]
    )
    return states.entries(tuple(local))


def _estimated(setup: Setup, where: Coordinates) -> dict[str, int]:
    stage = stages(setup)[where.pp or 0]
    place = states.Where(where.dp or 0, where.edp or 0, where.rank % setup.stage_ranks)
    return {row: 4 * entries for row, entries in states.rows_entries(setup, place, stage).items()}


def text(found: Exact) -> Iterator[str]:
    """For people."""
    yield (
        f"{found.world:,} ranks in {len(found.kinds)} kinds: {len(found.built)} ranks built on the meta device, both "
        "ends of every kind by DTensor's arithmetic"
    )
    yield f"  {'rank':>6} {'parameter bytes':>18} {'estimate':>18}"
    for rank in found.built:
        mark = "" if rank.equal else "  DIFFERS"
        yield f"  {rank.rank:>6} {sum(rank.found.values()):>18,} {sum(rank.estimated.values()):>18,}{mark}"
    yield f"least {found.least:,}, most {found.most:,} bytes per rank"
    if found.agrees:
        yield "the estimate equals the model on every rank, byte for byte"
        return
    yield f"{len(found.different):,} ranks differ:"
    for rank in found.different[:8]:
        rows = [row for row in MODULES if rank.found[row] != rank.estimated[row]]
        parts = ", ".join(f"{row} {rank.found[row]:,} != {rank.estimated[row]:,}" for row in rows)
        yield f"  rank {rank.rank}: {parts}"
