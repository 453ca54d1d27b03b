"""How many parameters a model has, per row of the policy table: arithmetic on the configuration, no model, no torch.

Golden values for the DeepSeek-V3 shape: 671,026,419,200 in total, of which 14,848 are routing-bias entries, and
36,625,618,432 activated per token without the embedding lookup (tests/plan/test_parameters.py; the model that is
trained is compared with this in tests/model).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdtrain.config.schema import MODULES, Model
from pdtrain.plan.extras import attention_entries, expert_entries, extras_of

ACTIVATED_CONVENTION = "per token: top-k routed and all shared experts, head included, embedding lookup excluded"


@dataclass(frozen=True, slots=True)
class RowCount:
    """Entries of one policy row: `trained` weights, `bias` entries of the routing bias (a buffer), and how many of
    both one token uses."""

    trained: int = 0
    bias: int = 0
    activated: int = 0

    @property
    def total(self) -> int:
        return self.trained + self.bias


@dataclass(frozen=True, slots=True)
class Parameters:
    """The counts of one model. `rows` has every row of the policy table, in its order."""

    rows: dict[str, RowCount]
    embedding: int  #: entries of the embedding that only the lookup uses: none where the head shares its weight
    convention: str = field(default=ACTIVATED_CONVENTION)

    @property
    def trained(self) -> int:
        """Weights that the optimizer updates."""
        return sum(row.trained for row in self.rows.values())

    @property
    def routing_bias(self) -> int:
        """Entries of the bias-update balancing: part of the model, without gradient."""
        return sum(row.bias for row in self.rows.values())

    @property
    def total(self) -> int:
        """Trained weights and routing bias."""
        return self.trained + self.routing_bias

    @property
    def activated(self) -> int:
        """Entries that one token uses, by `convention`: without the embedding lookup."""
        return sum(row.activated for row in self.rows.values())

    @property
    def activated_with_embedding(self) -> int:
        """The same with the whole embedding counted."""
        return self.activated + self.embedding


def count(model: Model) -> Parameters:
    """The parameters of `model` by policy row. All RMSNorm gains, those inside MLA included, are in row `norm`."""
    moe, hidden = model.moe, model.hidden
    moe_layers = model.layers - model.dense_layers
    expert = 3 * hidden * moe.expert_hidden  # SwiGLU: gate, up, down
    extras = extras_of(model)
    attention_extra, norm_extra = attention_entries(model)
    routed = expert + expert_entries(model)
    bias = moe_layers * moe.experts if moe.bias_update_speed > 0 else 0
    matrix = model.vocab_size * hidden
    weights = {
        "attention": model.layers * (_attention(model) + attention_extra),
        "experts": moe_layers * moe.experts * routed,
        "shared_expert": moe_layers * (moe.shared_experts * expert + hidden * extras.shared_gate),
        "router": moe_layers * (hidden + extras.router_bias) * moe.experts,
        "dense_ffn": model.dense_layers * 3 * hidden * model.ffn_hidden,
        "norm": model.layers * (2 * hidden + _latent_norms(model) + norm_extra) + hidden,
        "embed_head": matrix if model.tie_embeddings else 2 * matrix,
    }
    activated = weights | {
        "experts": moe_layers * moe.top_k * routed,
        "router": weights["router"] + bias,
        "embed_head": matrix,
    }
    rows = {
        row: RowCount(trained=weights[row], bias=bias if row == "router" else 0, activated=activated[row])
        for row in MODULES
    }
    return Parameters(rows=rows, embedding=0 if model.tie_embeddings else matrix)


def _attention(model: Model) -> int:
    """Projections of one layer."""
    hidden, heads = model.hidden, model.heads
    if model.attention == "gqa":
        return hidden * model.head_dim * (2 * heads + 2 * model.kv_heads)  # q and output; key and value
    mla = model.mla
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    queries = hidden * mla.q_lora_rank + mla.q_lora_rank * query if mla.q_lora_rank else hidden * query
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    keys_values = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + latent + keys_values + heads * mla.v_head_dim * hidden


def _latent_norms(model: Model) -> int:
    """RMSNorm gains on the latents of one MLA layer."""
    return model.mla.q_lora_rank + model.mla.kv_lora_rank if model.attention == "mla" else 0
