"""Layers that know their compute dtype: weights are stored in FP32 and cast where they are used.

The cast is a no-op when a sharding wrapper already hands the weight over in the compute dtype, so the same code gives
the same numbers with and without one. Shapes: see pdtrain.model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pdtrain.model import gemm


class Linear(nn.Linear):
    """`x @ weight.T` without bias, computed in the dtype of `x`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return gemm.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed and returned in its own dtype.

    FP32 whatever the rest is, unless the row `norm` says otherwise (to show what that does).
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.dtype), self.weight.shape, self.weight.to(self.dtype), self.eps)


class SwiGlu(nn.Module):
    """`w2(silu(w1 x) * w3 x)` (arXiv 2002.05202): the dense FFN and the shared expert."""

    def __init__(self, hidden: int, ffn_hidden: int, dtype: torch.dtype, recompute: bool) -> None:
        super().__init__()
        self.w1 = Linear(hidden, ffn_hidden)
        self.w3 = Linear(hidden, ffn_hidden)
        self.w2 = Linear(ffn_hidden, hidden)
        self.dtype = dtype
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in the compute dtype."""
        return maybe_recompute(self._forward, x, recompute=self.recompute and self.training)

    def _forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Embedding(nn.Embedding):
    """Token embedding; the residual stream leaves it in the compute dtype."""

    def __init__(self, vocab_size: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(vocab_size, hidden)
        self.dtype: torch.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).to(self.dtype)


class Head(Linear):
    """The output projection: hidden states to logits, computed in the compute dtype."""

    def __init__(self, hidden: int, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden, vocab_size)
        self.dtype: torch.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.dtype))


def maybe_recompute(function, *inputs: Tensor, recompute: bool) -> Tensor:
    """`function(*inputs)`, its activations recomputed in the backward pass when `recompute` is set."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)
