"""Tensor parallelism with sequence parallelism, by DTensor.

What is split: attention heads and FFN columns over `tp` (Megatron-LM, arXiv 1909.08053); between them activations are
split along the sequence (arXiv 2205.05198), so norms and MoE layers see s / tp tokens. Collectives per attention or
FFN: one all-gather before, one reduce-scatter after, the mirror image backward. Must divide: heads, kv_heads, FFN
hidden sizes and the sequence length.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from pdtrain.model.attention import MultiHeadLatentAttention
from pdtrain.model.transformer import Block, Transformer
from pdtrain.parallel.meshes import Meshes

SEQUENCE = Shard(1)  # of [b, s, h]


class Replicated(ParallelStyle):
    """Weights on every rank of the group, inputs and outputs DTensors: a partial gradient is summed by DTensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class ToLocalPartial(nn.Module):
    """DTensor -> local tensor whose gradient differs per rank and must be summed over the group."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x


def apply_tensor_parallel(model: Transformer, tp: DeviceMesh) -> None:
    """Split `model` over the mesh `tp`, in place. The residual stream becomes a local [b, s / tp, h]."""
    for block in model.layers():
        parallelize_module(block, tp, _block_plan(block))
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False),
        },
    )


def _block_plan(block: Block) -> dict[str, ParallelStyle]:
    gather = PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=Replicate(), use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": gather,
        "attention.wo": RowwiseParallel(output_layouts=SEQUENCE),
        "ffn_norm": SequenceParallel(),
    }
    if isinstance(block.attention, MultiHeadLatentAttention):
        plan |= {"attention.wkv_a": Replicated(), "attention.kv_norm": Replicated()}
        plan |= {"attention.wkv_b": ColwiseParallel(), "attention.wq_b": ColwiseParallel()}
        if block.attention.wq_a is not None:
            plan |= {"attention.wq_a": Replicated(), "attention.q_norm": Replicated()}
        block.attention.shared_key = ToLocalPartial()
    else:
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    if block.dense_ffn is not None:
        plan |= {
            "dense_ffn": gather,
            "dense_ffn.w1": ColwiseParallel(),
            "dense_ffn.w3": ColwiseParallel(),
            "dense_ffn.w2": RowwiseParallel(output_layouts=SEQUENCE),
        }
    else:  # every rank routes its own part of the sequence
        plan["moe"] = PrepareModuleInput(
            input_layouts=SEQUENCE, desired_input_layouts=SEQUENCE, use_local_output=True
        )
    return plan


def vocabulary_parallel_loss(meshes: Meshes | None) -> AbstractContextManager[None]:
    """Context for loss and backward: with tensor parallelism the logits stay split along the vocabulary."""
    return loss_parallel() if meshes is not None and meshes.layout.tensor > 1 else nullcontext()
