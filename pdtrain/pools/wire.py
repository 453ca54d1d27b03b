"""Buckets as payloads: the pieces of a bucket, one after the other, in the payload's dtype, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdtrain.pools.plan import Bucket


@torch.no_grad()
def encode(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One new contiguous host tensor with the elements of `tensors`, in `dtype`: nothing else refers to it."""
    packed = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])
    return packed.cpu() if packed.is_cuda else packed


@torch.no_grad()
def decode(payload: Tensor, bucket: Bucket, dtype: torch.dtype) -> list[Tensor]:
    """The pieces of `bucket` in `payload` (bytes), FP32, each in its own shape; views where `dtype` is FP32."""
    flat = payload.view(dtype).float()
    return [part.view(piece.local) for part, piece in
            zip(flat.split([piece.numel for piece in bucket.pieces]), bucket.pieces, strict=True)]
