"""The decoder-only transformer. Shapes: see pdtrain.model."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pdtrain.config.schema import Model
from pdtrain.model.attention import GroupedQueryAttention, MultiHeadLatentAttention
from pdtrain.model.layers import Embedding, Head, RMSNorm, SwiGlu
from pdtrain.model.moe import MoeLayer


class Block(nn.Module):
    """Pre-norm block: attention, then a dense FFN or a MoE layer, each added to the residual stream."""

    def __init__(self, model: Model, layer: int, dtypes: dict[str, torch.dtype], recompute: dict[str, bool]) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden, model.norm_eps, dtypes["norm"])
        kind = MultiHeadLatentAttention if model.attention == "mla" else GroupedQueryAttention
        self.attention: GroupedQueryAttention | MultiHeadLatentAttention = kind(
            model, dtypes, recompute["attention"]
        )
        self.ffn_norm = RMSNorm(model.hidden, model.norm_eps, dtypes["norm"])
        self.dense_ffn: SwiGlu | None = None
        self.moe: MoeLayer | None = None
        if layer < model.dense_layers:
            self.dense_ffn = SwiGlu(model.hidden, model.ffn_hidden, dtypes["dense_ffn"], recompute["dense_ffn"])
        else:
            self.moe = MoeLayer(model, dtypes, recompute)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x = x + self.attention(self.attention_norm(x))
        feed_forward = self.dense_ffn or self.moe
        assert feed_forward is not None
        return x + feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Tokens [b, s] int64 -> logits [b, s, vocabulary] in the head's compute dtype."""

    def __init__(self, model: Model, dtypes: dict[str, torch.dtype], recompute: dict[str, bool]) -> None:
        super().__init__()
        self.embed = Embedding(model.vocab_size, model.hidden, dtypes["embed_head"])
        self.blocks = nn.ModuleList(Block(model, layer, dtypes, recompute) for layer in range(model.layers))
        self.norm = RMSNorm(model.hidden, model.norm_eps, dtypes["norm"])
        self.head = Head(model.hidden, model.vocab_size, dtypes["embed_head"])
        self.tied = model.tie_embeddings
        self.tie()

    def tie(self) -> None:
        """Let the head use the embedding's weight, where the model asks for it; again after either was replaced."""
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers():
            x = block(x)
        return self.head(self.norm(x))

    def layers(self) -> list[Block]:
        """The blocks, in order."""
        return cast(list[Block], list(self.blocks))

    def moe_layers(self) -> dict[int, MoeLayer]:
        """Layer index -> MoE layer, in order."""
        return {index: block.moe for index, block in enumerate(self.layers()) if block.moe is not None}


def row_of(name: str) -> str:
    """The policy-table row that a parameter's fully qualified name belongs to."""
    parts = name.split(".")
    if any(part == "norm" or part.endswith("_norm") for part in parts):
        return "norm"
    for row in ("attention", "experts", "shared_expert", "router", "dense_ffn"):
        if row in parts:
            return row
    return "embed_head"
