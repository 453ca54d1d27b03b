"""Buckets as payloads: the pieces of a bucket, one after the other, in the payload's dtype, in host memory.

Of thinned gradients only the largest travel: their indices in the bucket (int32, ascending), then their values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdtrain.pools.plan import INDEX_BYTES, Bucket, kept_elements


@torch.no_grad()
def encode(tensors: Sequence[Tensor], dtype: torch.dtype, *, share: bool = False) -> Tensor:
    """One contiguous host tensor with the elements of `tensors`, in `dtype`: a new one that nothing else refers to.

    `share`: it may be the memory of a single tensor, which the caller leaves alone until it has been sent.
    """
    if share and len(tensors) == 1 and tensors[0].dtype is dtype and tensors[0].device.type == "cpu":
        return tensors[0].detach().reshape(-1)
    packed = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])
    return packed.cpu() if packed.is_cuda else packed


@torch.no_grad()
def thinned(values: Tensor, top_k: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(payload, what it carries as a dense FP32 tensor) of the share `top_k` of flat FP32 `values`, the largest."""
    indices = torch.topk(values.abs(), kept_elements(values.numel(), top_k), sorted=False).indices.sort().values
    chosen = values[indices].to(dtype)
    carried = torch.zeros_like(values)
    carried[indices] = chosen.float()
    return torch.cat([indices.to(torch.int32).view(torch.uint8), chosen.view(torch.uint8)]), carried


@torch.no_grad()
def spread(payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The dense payload (bytes) of `numel` elements that a thinned one stands for."""
    count = payload.numel() // (INDEX_BYTES + dtype.itemsize)
    dense = torch.zeros(numel, dtype=dtype)
    dense[payload[: INDEX_BYTES * count].view(torch.int32).long()] = payload[INDEX_BYTES * count :].view(dtype)
    return dense.view(torch.uint8)


@torch.no_grad()
def decode(payload: Tensor, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
    """The pieces of `bucket` in `payload` (bytes), FP32, each in its own shape; views where `dtype` is FP32."""
    flat = payload.view(dtype).float()
    return [part.view(piece.local) for part, piece in
            zip(flat.split([piece.numel for piece in bucket.pieces]), bucket.pieces, strict=True)]
