"""The process groups of a run, made once, by one function, in one order on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from pdtrain.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Meshes:
    """One world mesh seen through two factorisations of the same ranks.

    world  all token ranks: the router and the shared experts, which every token visits (router DP)
    dense  (dp, tp): attention, dense FFN, embedding and head
    sparse (edp, ep): routed experts
    """

    layout: Layout
    world: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh

    @property
    def dp(self) -> DeviceMesh:
        return self.dense["dp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.dense["tp"]

    @property
    def edp(self) -> DeviceMesh:
        return self.sparse["edp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.sparse["ep"]


def create_meshes(layout: Layout, device_type: str, timeout_seconds: float | None = None) -> Meshes:
    """Create every group of `layout`; the only place of the trainer that does. Needs an initialised default group.

    `timeout_seconds`: limit of one collective; torch gives new groups its own default, not that of the default group.

    Every rank of the job calls it: creating a group is collective. Ranks of the update pool are in none of them.
    Raises RuntimeError when a group's members differ from what `layout.groups()` printed at start.
    """
    world = init_device_mesh(device_type, (layout.ranks,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (layout.dp, layout.tensor), ("dp", "tp"))
    sparse = world._unflatten(0, (layout.edp, layout.expert), ("edp", "ep"))
    meshes = Meshes(layout, world, dense, sparse)
    if world.get_coordinate() is None:
        return meshes
    if timeout_seconds is not None:
        for axis in (world, meshes.dp, meshes.tp, meshes.edp, meshes.ep):
            if axis.size() > 1 and axis.get_group() is not dist.group.WORLD:
                _set_pg_timeout(timedelta(seconds=timeout_seconds), axis.get_group())
    printed = layout.groups()
    for family, mesh in (("dp", meshes.dp), ("tp", meshes.tp), ("edp", meshes.edp), ("ep", meshes.ep)):
        ranks = mesh.mesh.flatten().tolist()
        if ranks not in printed[family]:
            raise RuntimeError(f"{family} group {ranks} is not among the groups announced: {printed[family]}")
    return meshes
