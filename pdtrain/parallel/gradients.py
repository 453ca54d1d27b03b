"""What happens to gradients between backward and the optimizer: scale, norm, clip.

Scale. A sharding unit averages its gradients over its own mesh. The loss of a step is the mean over DP ranks, so a unit
whose mesh has m ranks must be multiplied by m / dp: experts (m = edp) also receive, through the all-to-all, the
gradients of other ranks' tokens, and a router (m = world) sees 1/tp of a DP rank's tokens. Missing this is the classic
factor-EP bug (pytorch#160285).

Norm. One all-reduce of one number per policy row. A parameter held by several ranks is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pdtrain.config.schema import MODULES
from pdtrain.model.moe import local
from pdtrain.model.transformer import Transformer, row_of
from pdtrain.parallel.meshes import Meshes

#: The denominator's guard of torch.nn.utils.clip_grad_norm_.
CLIP_EPS = 1e-6


@dataclass(slots=True)
class RowParameters:
    """The parameters of one policy row, with the factor that makes their reduced gradients right."""

    row: str
    parameters: list[nn.Parameter]
    scales: list[float]
    copies: list[int]

    def gradients(self) -> list[Tensor]:
        """This rank's part of each gradient; parameters without one are skipped."""
        return [local(p.grad) for p in self.parameters if p.grad is not None]


def rows_of(model: Transformer, meshes: Meshes | None) -> dict[str, RowParameters]:
    """The model's parameters by policy row, in table order; rows the model does not have are absent."""
    rows: dict[str, RowParameters] = {}
    named = list(model.named_parameters())
    for row in MODULES:
        parameters = [p for name, p in named if row_of(name) == row]
        if parameters:
            scale = _gradient_scale(row, meshes)
            rows[row] = RowParameters(
                row, parameters, [scale] * len(parameters), [_copies(p, meshes) for p in parameters]
            )
    return rows


def _gradient_scale(row: str, meshes: Meshes | None) -> float:
    if meshes is None:
        return 1.0
    reduced_over = {"experts": meshes.edp, "router": meshes.world, "shared_expert": meshes.world}.get(row, meshes.dp)
    return reduced_over.size() / meshes.dp.size()


def _copies(parameter: Tensor, meshes: Meshes | None) -> int:
    """How many ranks hold the same elements of `parameter`."""
    if meshes is None:
        return 1
    if not isinstance(parameter, DTensor):
        return meshes.layout.ranks
    mesh = parameter.device_mesh
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():  # plain and strided shards alike
            shards *= mesh.size(axis)
    return meshes.layout.ranks // shards


@torch.no_grad()
def scale_gradients(rows: Iterable[RowParameters]) -> None:
    """Make every reduced gradient the gradient of the global mean loss."""
    for row in rows:
        scale = row.scales[0]
        if scale != 1.0 and row.gradients():
            torch._foreach_mul_(row.gradients(), scale)


@torch.no_grad()
def gradient_norms(rows: dict[str, RowParameters], meshes: Meshes | None, flag: Tensor) -> tuple[Tensor, Tensor]:
    """L2 norm per row [rows] FP32, and the sum of `flag` over ranks, in one all-reduce.

    `flag` is any number that ranks must agree on at this point (a stop request); it travels for free.
    """
    squares = []
    for row in rows.values():
        gradients = row.gradients()
        if not gradients:
            squares.append(torch.zeros((), device=flag.device))
            continue
        copies = [c for p, c in zip(row.parameters, row.copies, strict=True) if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).float()
        squares.append((norms.square() / torch.tensor(copies, device=norms.device)).sum())
    vector = torch.stack([*squares, flag.float()])
    if meshes is not None:
        dist.all_reduce(vector, group=meshes.world.get_group())
    return vector[:-1].sqrt(), vector[-1]


def clip_factors(rows: Iterable[str], norms: Tensor, limits: dict[str, float | None]) -> Tensor:
    """By what each row's gradients are multiplied [rows], to keep its norm within its limit; 1 where there is none."""
    bounds = torch.tensor([limits[row] or float("inf") for row in rows], device=norms.device)
    return (bounds / (norms + CLIP_EPS)).clamp(max=1.0)


@torch.no_grad()
def clip_gradients(rows: dict[str, RowParameters], norms: Tensor, limits: dict[str, float | None]) -> Tensor:
    """Scale each row's gradients to its own limit; returns the norms after clipping [rows].

    No wait for the device: the factor stays where it is. A non-finite norm leaves the gradients as they are; the
    caller must not step on them.
    """
    factors = clip_factors(rows, norms, limits)
    for factor, (name, row) in zip(factors, rows.items(), strict=True):
        if limits[name] is not None and row.gradients():
            torch._foreach_mul_(row.gradients(), factor)
    return norms * factors
