"""From a configuration to this rank's part of the model: the order in which the parallelisms are applied."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pdtrain.config.schema import Run
from pdtrain.model.build import build_model, build_on_meta
from pdtrain.model.initialise import initial_value
from pdtrain.model.moe import local
from pdtrain.model.transformer import Transformer
from pdtrain.parallel.expert import apply_expert_parallel
from pdtrain.parallel.meshes import Meshes
from pdtrain.parallel.shard import shard_unit, units
from pdtrain.parallel.tensor import apply_tensor_parallel


def build_parallel_model(run: Run, meshes: Meshes | None, device: torch.device) -> Transformer:
    """This rank's part of the model, initialised exactly as the single-device model is.

    Order: structure on meta, tensor parallel, expert parallel, then unit by unit storage, initial values and sharding,
    so that at no time more than one whole unit is in memory. `meshes` None: one device.
    """
    if meshes is None:
        return build_model(run, device)
    model = build_on_meta(run)
    if meshes.layout.tensor > 1:
        apply_tensor_parallel(model, meshes.tp)
        model.tie()
    if meshes.layout.expert > 1:
        apply_expert_parallel(model, meshes.ep)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for modules, mesh, dtype in units(model, meshes):
        _materialise(modules, names, run, device)
        shard_unit(modules, mesh, dtype, shard=run.parallel.fsdp)
    fully_shard(model, mesh=meshes.dp)  # the root: owns no parameter, orders the units
    _reduce_router_counts(model, meshes)
    return model


def _materialise(modules: list[nn.Module], names: dict[Tensor, str], run: Run, device: torch.device) -> None:
    """Give the modules' meta parameters storage on `device` and their initial values; buffers become zero."""
    filled: dict[Tensor, nn.Parameter] = {}
    for owner in (inner for module in modules for inner in module.modules()):
        for key, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.is_meta or parameter not in names:
                continue  # belongs to a unit that is already sharded
            if parameter not in filled:  # a tied weight is met twice
                values = torch.empty_like(parameter, device=device)
                if device.type != "meta":  # where only shapes matter (pdtrain plan exact), nothing is drawn
                    with torch.no_grad():
                        local(values).copy_(_initial_local_value(parameter, names[parameter], run))
                filled[parameter] = nn.Parameter(values)
            owner.register_parameter(key, filled[parameter])
        for key, buffer in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(key, torch.zeros_like(buffer, device=device))


def _initial_local_value(parameter: Tensor, name: str, run: Run) -> Tensor:
    arguments = {"seed": run.train.seed, "std": run.model.init_std, "layers": run.model.layers}
    if not isinstance(parameter, DTensor):
        return initial_value(name, parameter.shape, **arguments)  # type: ignore[arg-type]
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    window = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    if ".experts." in name:
        held = range(offset[0], offset[0] + shape[0])
        return initial_value(name, parameter.shape, experts=held, **arguments)[(slice(None), *window[1:])]  # type: ignore[arg-type]
    return initial_value(name, parameter.shape, **arguments)[window]  # type: ignore[arg-type]


def _reduce_router_counts(model: Transformer, meshes: Meshes) -> None:
    """Balance statistics cover the global batch: counts are summed over all token ranks."""
    group = meshes.world.get_group()

    def over_all_ranks(counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=group)
        return total

    for layer in model.moe_layers().values():
        layer.router.reduce_counts = over_all_ranks
