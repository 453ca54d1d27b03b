"""Small tensors of published decoders that this trainer's model has not: planned and counted, not trained.

Biases, norms on queries and keys, attention sinks, the gate of a shared expert. Each is some thousand entries per
block, so that they decide no layout; but without them no count equals the published one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pdtrain.config.schema import Model, Run, Section


class Extras(Section, frozen=True):
    """What a block has beside matrices and its two norms.

    qk_norm: gains on queries and keys, over one head's dimension (Qwen3) or over all heads (OLMoE).
    qkv_bias, out_bias, router_bias: of those projections; expert_bias: of every expert's joint gate and up, and down.
    sinks: one entry per head (GPT-OSS). shared_gate: one row of the hidden width (Qwen2-MoE).
    index_heads, index_dim: the indexer that chooses tokens for sparse attention (DeepSeek-V3.2), fed by the query
    latent; with a LayerNorm on its keys.
    """

    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    index_heads: int = 0
    index_dim: int = 0

    def named(self) -> list[str]:
        """What there is, in words."""
        return [text for name, text in WORDS.items() if getattr(self, name) not in (0, "none")]


WORDS = {
    "qk_norm": "norms on queries and keys", "qkv_bias": "biases of queries, keys and values",
    "out_bias": "output biases", "sinks": "attention sinks", "router_bias": "router biases",
    "expert_bias": "expert biases", "shared_gate": "the gate of the shared expert",
    "index_heads": "the indexer of sparse attention",
}  # fmt: skip


class PublishedModel(Model, frozen=True):
    """A model with such tensors; everything that takes a `Model` takes it."""

    extras: Extras = msgspec.field(default_factory=Extras)


def with_extras(model: Model, extras: Extras) -> Model:
    """`model` with them; as it is where there are none."""
    return PublishedModel(**_fields(model), extras=extras) if extras.named() else model


def extras_of(model: Model) -> Extras:
    """None at all for a plain model."""
    return model.extras if isinstance(model, PublishedModel) else Extras()


def plain(run: Run) -> Run:
    """The run that `pdtrain train` would take: the model without them."""
    return msgspec.structs.replace(run, model=plain_model(run.model))


def plain_model(model: Model) -> Model:
    """`model` without them."""
    if not isinstance(model, PublishedModel):
        return model
    return Model(**{name: value for name, value in _fields(model).items() if name != "extras"})


def _fields(model: Model) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__struct_fields__}


def attention_entries(model: Model) -> tuple[int, int]:
    """(entries of biases, sinks and indexer, entries of norms) of one block's attention."""
    extras = extras_of(model)
    if extras.index_heads:
        return sum(rows * columns for rows, columns in indexer(model)), 2 * extras.index_dim
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = (queries + 2 * keys) * extras.qkv_bias + model.hidden * extras.out_bias + model.heads * extras.sinks
    norms = {"none": 0, "head": 2 * model.head_dim, "full": queries + keys}[extras.qk_norm]
    return found, norms


def indexer(model: Model) -> list[tuple[int, int]]:
    """Shapes of the indexer's matrices: queries from their latent, keys, weights of its heads."""
    extras, hidden = extras_of(model), model.hidden
    queries = (extras.index_heads * extras.index_dim, model.mla.q_lora_rank or hidden)
    return [queries, (extras.index_dim, hidden), (extras.index_heads, hidden)]


def expert_entries(model: Model) -> int:
    """Entries of one expert's biases."""
    return (2 * model.moe.expert_hidden + model.hidden) * extras_of(model).expert_bias
