"""The router: which experts a token visits and with what weight. FP32 throughout. Shapes: see pdtrain.model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdtrain.config.schema import Model


@dataclass(slots=True)
class Routing:
    """A routing decision: experts [t, k] int64, weights [t, k] FP32, counts [e] int64 (before any drop)."""

    experts: Tensor
    weights: Tensor
    counts: Tensor


class RouterStatistics:
    """Sums since the last `take`, kept on the device; the trainer reads and resets them at its intervals."""

    #: names of the scalar sums, in the order of `scalars`
    SCALARS = ("token_entropy", "aux_loss", "z_loss", "tokens", "assignments", "dropped", "micro_batches")

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.counts: Tensor | None = None
        self.scalars: Tensor | None = None
        self._counted: Tensor | None = None  # counts at the end of the previous step

    @torch.no_grad()
    def add(self, counts: Tensor, **values: Tensor | float) -> None:
        """Add this micro-batch's local counts [e] and scalar sums; unnamed scalars count as 0."""
        if self.counts is None or self.scalars is None:
            self.counts = torch.zeros(self.experts, dtype=torch.float32, device=counts.device)
            self.scalars = torch.zeros(len(self.SCALARS), dtype=torch.float32, device=counts.device)
        self.counts += counts
        for name, value in values.items():
            self.scalars[self.SCALARS.index(name)] += value

    @torch.no_grad()
    def add_dropped(self, dropped: Tensor) -> None:
        """Add the number of (token, choice) pairs that the capacity dropped in the micro-batch added last."""
        if self.scalars is not None:
            self.scalars[self.SCALARS.index("dropped")] += dropped

    def step_counts(self, device: torch.device) -> Tensor:
        """Local counts [e] since this was called last: those of one step when it is called once per step."""
        if self.counts is None:
            return torch.zeros(self.experts, device=device)
        counts = self.counts if self._counted is None else self.counts - self._counted
        self._counted = self.counts.clone()
        return counts.clone()

    def take(self, device: torch.device) -> Tensor:
        """Counts and scalars as one vector [e + len(SCALARS)] FP32, local to this rank; resets the sums."""
        if self.counts is None or self.scalars is None:
            return torch.zeros(self.experts + len(self.SCALARS), device=device)
        vector = torch.cat((self.counts, self.scalars))
        self.counts = self.scalars = self._counted = None
        return vector


class _AddLoss(torch.autograd.Function):
    """Identity on `x` that puts `loss` into the backward pass, so that it survives recomputation and sharding."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return grad, torch.ones_like(ctx.loss)


class Router(nn.Module):
    """Top-k routing with softmax or sigmoid scores, group limit, selection bias, balance loss and z-loss.

    Balance loss (Switch, arXiv 2101.03961): e * sum_i f_i P_i, f from counts over the global batch of the micro-step,
    P the mean score; 1 when balanced. Z-loss (ST-MoE, arXiv 2202.08906): mean logsumexp(logits)^2. Bias-update
    balancing (arXiv 2408.15664): the bias enters the choice of experts only, never the weights, and has no gradient.
    Group-limited choice (DeepSeek-V3, arXiv 2412.19437): a group's score is the sum of its two best experts.
    """

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.moe = model.moe
        self.dtype = dtype  # FP32; a drill may lower it to show what that does
        self.weight = nn.Parameter(torch.empty(model.moe.experts, model.hidden))
        self.bias: Tensor | None
        if model.moe.bias_update_speed > 0:
            self.register_buffer("bias", torch.zeros(model.moe.experts))
        else:
            self.bias = None
        self.statistics = RouterStatistics(model.moe.experts)
        #: Share of the step's loss that this call stands for: 1 / (accumulation x ranks that split its tokens).
        self.loss_weight = 1.0
        #: Counts of this rank -> counts over all token ranks. Replaced when the model is distributed.
        self.reduce_counts: Callable[[Tensor], Tensor] = lambda counts: counts

    def forward(self, x: Tensor) -> Routing:
        """Route x [t, h]."""
        moe = self.moe
        x = x.to(self.dtype)
        if moe.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - moe.jitter, 1 + moe.jitter)
        logits = F.linear(x, self.weight.to(self.dtype)).float()
        scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()

        experts = self._choose(scores.detach())
        counts = torch.zeros(moe.experts, dtype=torch.int64, device=x.device)  # bincount would wait for the device
        counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(experts).flatten())
        probabilities = scores if moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        if self.training:
            scores = self._add_losses(scores, probabilities, logits, counts)

        weights = scores.gather(1, experts)
        if moe.normalize_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * moe.route_scale, counts)

    def _choose(self, scores: Tensor) -> Tensor:
        moe = self.moe
        if self.bias is not None:
            scores = scores + self.bias
        if moe.groups > 1:
            grouped = scores.unflatten(1, (moe.groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = best.topk(moe.top_groups, dim=-1).indices
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
        return scores.topk(moe.top_k, dim=-1, sorted=False).indices

    def _add_losses(self, scores: Tensor, probabilities: Tensor, logits: Tensor, counts: Tensor) -> Tensor:
        moe = self.moe
        aux = z = torch.zeros((), device=logits.device)
        if moe.aux_loss:
            total = self.reduce_counts(counts).float()
            aux = moe.experts * ((total / total.sum()) * probabilities.mean(0)).sum()
            scores = _AddLoss.apply(scores, aux * (moe.aux_loss * self.loss_weight))
        if moe.z_loss:
            z = logits.logsumexp(-1).square().mean()
            scores = _AddLoss.apply(scores, z * (moe.z_loss * self.loss_weight))
        detached = probabilities.detach()
        entropy = -torch.xlogy(detached, detached).sum()
        tokens = counts.sum() // moe.top_k
        self.statistics.add(
            counts, token_entropy=entropy, aux_loss=aux.detach() * tokens, z_loss=z.detach() * tokens,
            tokens=tokens, assignments=counts.sum(), micro_batches=1.0,
        )
        return scores

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """One bias-update step from the counts [e] of the whole step: up for the underloaded, centred on zero."""
        if self.bias is not None:
            self.bias += self.moe.bias_update_speed * torch.sign(counts.mean() - counts)
            self.bias -= self.bias.mean()
