"""Data parallelism with sharded parameters (FSDP2), one unit per policy row: each row has its own mesh and dtype.

What is split: every parameter over the ranks that see different tokens of it: `dp` for attention, dense FFN, norms,
embedding and head; `edp` for experts; the world for router and shared expert. Collectives per unit: all-gather before
forward and backward, reduce-scatter after backward. Expert stacks are split along dimension 1 where it divides, since
the expert axis may be shorter than the group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from pdtrain.model.layers import RMSNorm
from pdtrain.model.transformer import Transformer
from pdtrain.parallel.meshes import Meshes


def units(model: Transformer, meshes: Meshes) -> Iterator[tuple[list[nn.Module], DeviceMesh, torch.dtype]]:
    """Every sharding unit in forward order: its modules, the mesh over which its gradients are reduced, its dtype.

    A unit holds modules of one policy row only: norms inside an attention belong to the block's norm unit.
    """
    tied = model.tied
    embedding: list[nn.Module] = [model.embed, model.head] if tied else [model.embed]
    yield embedding, meshes.dp, model.head.dtype
    for block in model.layers():
        norms: list[nn.Module] = [module for module in block.modules() if isinstance(module, RMSNorm)]
        yield norms, meshes.dp, model.norm.dtype
        yield [block.attention], meshes.dp, block.attention.dtype
        if block.dense_ffn is not None:
            yield [block.dense_ffn], meshes.dp, block.dense_ffn.dtype
        if block.moe is None:
            continue
        yield [block.moe.router], meshes.world, block.moe.router.dtype
        yield [block.moe.experts], meshes.edp, block.moe.experts.dtype
        if block.moe.shared_expert is not None:
            yield [block.moe.shared_expert], meshes.world, block.moe.shared_expert.dtype
    yield [model.norm], meshes.dp, model.norm.dtype
    if not tied:
        yield [model.head], meshes.dp, model.head.dtype


def shard_unit(modules: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype, *, shard: bool) -> None:
    """Shard (or, with `shard` off, replicate) one unit over `mesh`; gradients are averaged over it in FP32."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    target = modules if len(modules) > 1 else modules[0]
    if shard:
        fully_shard(target, mesh=mesh, mp_policy=precision, shard_placement_fn=_placement(mesh.size()))  # type: ignore[arg-type]
    else:
        for module in modules:
            replicate(module, mesh=mesh, mp_policy=precision)


def _placement(size: int):
    def place(parameter: nn.Parameter) -> Shard | None:
        is_expert_stack = parameter.ndim == 3
        return Shard(1) if is_expert_stack and parameter.shape[1] % size == 0 else None

    return place
