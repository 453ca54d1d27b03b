"""Matrix products in the dtype of their input, by the fastest way that the device has for it.

A CPU without BF16 instructions multiplies BF16 matrices in a plain loop (about 30 times slower than FP32, measured on
an AVX2 machine with torch 2.13). There the operands, already rounded to BF16, are multiplied in FP32 and the result is
rounded to BF16: the numbers of a BF16 GEMM with FP32 accumulation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for x [..., in] and weight [out, in]; computed in and returned as the dtype of x."""
    weight = weight.to(x.dtype)
    if _through_fp32(x):
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


def grouped(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows [r, in] sorted by group times weight [groups, in, out]; `offsets` [groups] int32 are the groups' ends."""
    weight = weight.to(rows.dtype)
    if _through_fp32(rows):
        return F.grouped_mm(rows.float(), weight.float(), offs=offsets).to(rows.dtype)
    return F.grouped_mm(rows, weight, offs=offsets)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention over [b, n, s, d] tensors; k and v may have fewer heads, a divisor of q's."""
    shared = k.shape[1] != q.shape[1]
    if _through_fp32(q):
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=shared)
        return out.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


def _through_fp32(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _cpu_has_bf16()


@lru_cache(maxsize=1)
def _cpu_has_bf16() -> bool:
    """Whether oneDNN multiplies BF16 with this CPU's own instructions."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
