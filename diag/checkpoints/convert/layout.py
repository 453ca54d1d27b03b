"""Which axes of a target tensor model parallelism cuts, from the row of its family's table."""

from __future__ import annotations

from dataclasses import dataclass

from diag.checkpoints.convert.contents import Contents, Entry
from diag.checkpoints.convert.mapping import Family, Row
from diag.checkpoints.convert.recipe import Recipe, concat, narrow, split
from diag.errors import UsageError


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of the tensor (None: not there): stacked layers, stacked experts, what tensor parallelism cuts and in how
    many fused pieces; the layer and expert that the name tells."""

    layers: int | None
    experts: int | None
    split: int | None
    pieces: int
    layer: int | None
    expert: int | None


def axes_of(name: str, family: Family, contents: Contents) -> Axes:
    """Raises `UsageError` for a name that the family does not know."""
    found = family.find(name, contents.facts)
    if found is None:
        raise UsageError(f"{name}: is no name of the family {family.name}")
    row, (layer, expert) = found
    lead = ("layers" in row.how) + ("stack" in row.how)
    return Axes(0 if "layers" in row.how else None, lead - 1 if "stack" in row.how else None,
                None if row.split is None else row.split + lead, _pieces(row), layer, expert)


def _pieces(row: Row) -> int:
    return len(row.hub) if "rows" in row.how else 1


def tensor_slice(name: str, recipe: Recipe, axes: Axes, tp: int, rank: int) -> Recipe:
    """What tensor-parallel rank `rank` of `tp` holds: its part of every fused piece. Raises `UsageError`."""
    if tp == 1 or axes.split is None or axes.split >= len(recipe.shape):
        return recipe
    own = []
    for piece in split(recipe, axes.pieces, axes.split):
        length = piece.shape[axes.split]
        if length % tp:
            raise UsageError(f"--tp {tp}: does not divide {length} rows of {name}")
        own.append(narrow(piece, axes.split, rank * (length // tp), length // tp))
    return concat(own, axes.split)


def stages(contents: Contents, entries: dict[str, Entry], family: Family, pp: int) -> dict[int, int]:
    """Layer -> pipeline stage, equal numbers of consecutive layers. Raises `UsageError`."""
    layers = {axes.layer for name in entries if (axes := axes_of(name, family, contents)).layer is not None}
    for name, entry in entries.items():
        axes = axes_of(name, family, contents)
        if axes.layers is not None:
            layers |= set(range(entry.weight.shape[0]))
    count = len(layers)
    if pp > 1 and (count == 0 or count % pp):
        raise UsageError(f"--pp {pp}: does not divide {count} layers")
    return {layer: layer // max(count // pp, 1) for layer in sorted(n for n in layers if n is not None)}


def stage_of(name: str, axes: Axes, by_layer: dict[int, int], pp: int) -> int:
    """The pipeline stage that holds a tensor: its layer's; the first for embeddings, the last for the rest."""
    if axes.layer is not None:
        return by_layer[axes.layer]
    return 0 if name.startswith("embedding.") else pp - 1
