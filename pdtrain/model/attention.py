"""Causal self-attention: grouped-query and multi-head latent. Shapes: see pdtrain.model.

The number of heads is read off the projections' outputs, so a module whose projections hold only some of the heads
computes just those.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pdtrain.config.schema import Model
from pdtrain.model import gemm
from pdtrain.model.layers import Linear, RMSNorm, maybe_recompute


class Rope(nn.Module):
    """Rotary position embedding (arXiv 2104.09864), the half-split ("rotate half") pairing, angles in FP32."""

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim = dim
        self.theta = theta
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, each [s, d/2] FP32, computed once per length and device."""
        key = (length, device)
        if key not in self._tables:
            exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
            angles = torch.outer(torch.arange(length, device=device).float(), self.theta**-exponents)
            self._tables[key] = (angles.cos(), angles.sin())
        return self._tables[key]

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x [b, s, n, d] by its position along s; same dtype out."""
        cos, sin = (table[:, None, :] for table in self.tables(x.shape[1], x.device))
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention over [b, s, n, d] tensors (k, v may have fewer heads); returns [b, s, n x d_v]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return gemm.attention(q, k, v).transpose(1, 2).flatten(2)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245): kv_heads keys and values serve all query heads."""

    def __init__(self, model: Model, dtypes: dict[str, torch.dtype], recompute: bool) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.wq = Linear(model.hidden, model.heads * model.head_dim)
        self.wk = Linear(model.hidden, model.kv_heads * model.head_dim)
        self.wv = Linear(model.hidden, model.kv_heads * model.head_dim)
        self.wo = Linear(model.heads * model.head_dim, model.hidden)
        self.rope = Rope(model.head_dim, model.rope_theta)
        self.dtype = dtypes["attention"]
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h] in the compute dtype."""
        return maybe_recompute(self._forward, x, recompute=self.recompute and self.training)

    def _forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return self.wo(causal_attention(self.rope(q), self.rope(k), v))


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434 §2.1): keys and values are expanded from one small latent.

    Each head's query and key have a part without position and a part with rotary position; the rotary key is shared
    by all heads.
    """

    def __init__(self, model: Model, dtypes: dict[str, torch.dtype], recompute: bool) -> None:
        super().__init__()
        mla = model.mla
        self.nope, self.rotary, self.v_dim = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        self.kv_lora_rank = mla.kv_lora_rank
        q_dim = model.heads * (self.nope + self.rotary)
        if mla.q_lora_rank:
            self.wq_a: nn.Module | None = Linear(model.hidden, mla.q_lora_rank)
            self.q_norm: nn.Module | None = RMSNorm(mla.q_lora_rank, model.norm_eps, dtypes["norm"])
            self.wq_b = Linear(mla.q_lora_rank, q_dim)
        else:
            self.wq_a = self.q_norm = None
            self.wq_b = Linear(model.hidden, q_dim)
        self.wkv_a = Linear(model.hidden, mla.kv_lora_rank + self.rotary)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, model.norm_eps, dtypes["norm"])
        self.wkv_b = Linear(mla.kv_lora_rank, model.heads * (self.nope + self.v_dim))
        self.wo = Linear(model.heads * self.v_dim, model.hidden)
        self.rope = Rope(self.rotary, model.rope_theta)
        self.shared_key: nn.Module = nn.Identity()  # all heads use this key: where they are split, gradients add up
        self.dtype = dtypes["attention"]
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h] in the compute dtype."""
        return maybe_recompute(self._forward, x, recompute=self.recompute and self.training)

    def _forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        latent_q = x
        if self.wq_a is not None and self.q_norm is not None:
            latent_q = self.q_norm(self.wq_a(x)).to(self.dtype)
        q = self.wq_b(latent_q).unflatten(-1, (-1, self.nope + self.rotary))
        q_nope, q_rope = q.split((self.nope, self.rotary), dim=-1)

        latent_kv, k_rope = self.wkv_a(x).split((self.kv_lora_rank, self.rotary), dim=-1)
        kv = self.wkv_b(self.kv_norm(latent_kv).to(self.dtype)).unflatten(-1, (-1, self.nope + self.v_dim))
        k_nope, v = kv.split((self.nope, self.v_dim), dim=-1)

        k_rope = self.rope(self.shared_key(k_rope).unsqueeze(2)).expand(-1, -1, k_nope.shape[2], -1)
        q = torch.cat((q_nope, self.rope(q_rope)), dim=-1)
        return self.wo(causal_attention(q, torch.cat((k_nope, k_rope), dim=-1), v))
