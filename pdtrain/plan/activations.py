"""What the forward pass keeps for the backward pass, per module of a block, in bytes per micro-batch and rank.

Two inventories, named in every output:

    pdtrain  what this trainer's modules keep (eager SwiGLU: w1, silu, w3, product; FP32 norms; the input gathered over
             TP is kept), compared with a measurement in tests/plan
    fused    what Megatron-LM-like kernels keep (SwiGLU 3 f, norms in the compute dtype, gathered inputs thrown away)

Shapes: T tokens of a micro-batch in attention (b x s / CP), L = T / TP tokens elsewhere, h hidden, n heads, f FFN
hidden, e experts, k experts per token, v vocabulary, c bytes of the compute dtype. Routed part, per token: k rows of
2 h + 3 f (fused); the worst rank's is multiplied by the overload factor (fullest / balanced).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pdtrain.config.schema import Model
from pdtrain.plan.hardware import Device
from pdtrain.plan.setup import Drop, Recompute, Setup, Stage

Inventory = Literal["pdtrain", "fused"]
FP32 = 4
#: Bytes of an FP8 element with one FP32 scale per tile of 128 (arXiv 2412.19437, 3.3).
FP8 = 1 + 4 / 128
INDEX = 8  # bytes of an int64 index


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes kept from one block's forward pass, by module; `again` is what a backward pass brings back for a moment
    because it was recomputed."""

    norms: float
    attention: float
    feed_forward: float
    again: float = 0.0

    @property
    def total(self) -> float:
        return self.norms + self.attention + self.feed_forward


def inventory_of(setup: Setup) -> Inventory:
    """As the option says; else pdtrain's own where the states are kept as pdtrain keeps them, fused elsewhere."""
    if setup.options.kernels is not None:
        return "pdtrain" if setup.options.kernels == "eager" else "fused"
    return "pdtrain" if setup.states == "fsdp" else "fused"


def _norm(setup: Setup, size: int, device: Device, inventory: Inventory) -> float:
    """Bytes per token that an RMSNorm of `size` keeps: its input, 1 / rms, and on CPUs the normalised input."""
    if inventory == "fused":
        return size * setup.itemsize("attention") + FP32
    item = setup.itemsize("norm")
    return size * item * (2 if device == "cpu" else 1) + FP32


def attention(setup: Setup, device: Device, inventory: Inventory) -> tuple[float, float]:
    """(kept, kept under recompute) of one attention, per micro-batch; inner norms included."""
    model, c, t = setup.run.model, setup.itemsize("attention"), setup.tokens
    heads = model.heads / setup.tp
    gathered = t if inventory == "pdtrain" else setup.local_tokens
    into = kept_input(setup, c)
    own_input = 0.0 if drops(setup, "norm") else gathered * model.hidden * into
    if model.attention == "gqa":
        kv = model.kv_heads / setup.tp
        inner = t * model.head_dim * (c * (heads + 2 * kv) + into * heads)  # q, k and v; output
        explicit = not setup.options.flash
    else:
        mla = model.mla
        qk, q_lora, kv_lora = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.q_lora_rank, mla.kv_lora_rank
        latents = q_lora * into + (_norm(setup, q_lora, device, inventory) if q_lora else 0)
        latents += kv_lora * into + _norm(setup, kv_lora, device, inventory)
        if inventory == "pdtrain" and setup.itemsize("norm") == c:
            latents += mla.qk_rope_head_dim * c  # the norm's input is a view into the joint projection
        other_size = device == "cpu" and mla.v_head_dim != qk  # no fused kernel on CPUs then
        explicit = other_size or not setup.options.flash
        values = mla.v_head_dim if explicit else mla.qk_nope_head_dim + mla.v_head_dim  # v is a view into k and v
        up = 0.0 if drops(setup, "mla-up") else 2 * qk + values
        inner = t * (latents + heads * (c * up + into * mla.v_head_dim))
    if setup.recompute("attention") != "selective":
        length = setup.run.train.sequence_length
        inner += t * heads * (c * length if explicit else FP32)  # the score matrix, or log-sum-exp per row
    recomputed = gathered * model.hidden * (setup.itemsize("norm") if inventory == "pdtrain" else c)
    return own_input + inner, recomputed


def kept_input(setup: Setup, item: int) -> float:
    """Bytes per element in which the input of a matrix product is kept."""
    return FP8 if setup.options.fp8_activations else item


def _swiglu(tokens: float, hidden: float, item: float, inventory: Inventory, *, short: bool = False) -> float:
    """Without its input: gate, silu, up and product; fused kernels recompute silu and keep three. `short`: the product
    (and silu) is computed again."""
    return tokens * hidden * item * (2 if short else 4 if inventory == "pdtrain" else 3)


def drops(setup: Setup, name: Drop) -> bool:
    """Whether the plan's option has this module computed again."""
    return name in setup.options.drop


def dense_ffn(setup: Setup, inventory: Inventory) -> tuple[float, float]:
    """(kept, kept under recompute) of one dense FFN."""
    model, c, t = setup.run.model, setup.itemsize("dense_ffn"), setup.tokens
    gathered = t if inventory == "pdtrain" else setup.local_tokens
    item = setup.itemsize("norm") if inventory == "pdtrain" else c
    into = kept_input(setup, c)
    kept = _swiglu(t, model.ffn_hidden / setup.tp, into, inventory, short=setup.options.fp8_activations)
    kept += 0.0 if drops(setup, "norm") else gathered * model.hidden * into
    return kept, gathered * model.hidden * item


def routed_rows(setup: Setup) -> tuple[float, float]:
    """Rows (token, choice) that leave a rank per micro-batch, and that the fullest expert rank receives."""
    moe = setup.run.model.moe
    rows = setup.local_tokens * moe.top_k
    overload = setup.options.overload if setup.ep > 1 else 1.0
    if moe.capacity_factor is not None:
        overload = min(overload, moe.capacity_factor)
    return rows, rows * overload


def moe_layer(setup: Setup, inventory: Inventory) -> tuple[float, float]:
    """(kept, what recomputing rows `experts` and `shared_expert` would drop of it) of one MoE layer."""
    model, moe = setup.run.model, setup.run.model.moe
    c, router_item, tokens = setup.itemsize("experts"), setup.itemsize("router"), setup.local_tokens
    leaving, arriving = routed_rows(setup)
    h, f = model.hidden, moe.expert_hidden
    shared_hidden = moe.shared_experts * f
    if inventory == "fused":
        kept = 0.0 if drops(setup, "norm") else tokens * h * kept_input(setup, setup.itemsize("attention"))
        if not setup.options.early_weights:
            kept += leaving * h * c  # what the experts send back, for the gradient of the weights
        small = tokens * (2 * FP32 * moe.experts + 2 * INDEX * moe.top_k)
    else:
        kept = 0.0 if drops(setup, "norm") else tokens * h * router_item
        if shared_hidden and router_item != setup.itemsize("shared_expert"):
            kept += tokens * h * setup.itemsize("shared_expert")
        kept += leaving * h * c * 2  # what the experts send back, plain and weighted
        scores = 2 + (1 if moe.z_loss else 0) + (1 if moe.score == "sigmoid" else 0)
        small = tokens * (scores * FP32 * moe.experts + 2 * FP32 + moe.top_k * (INDEX + FP32))
        small += leaving * (3 * INDEX + FP32) + (2 * arriving * INDEX if setup.ep > 1 else 0)
    fp8, into = setup.options.fp8_activations, kept_input(setup, c)
    inside = _swiglu(arriving, f, into, inventory, short=fp8 or drops(setup, "moe-act"))
    shared = _swiglu(tokens, shared_hidden, kept_input(setup, setup.itemsize("shared_expert")), inventory, short=fp8)
    kept += small + arriving * h * into + inside + shared
    if drops(setup, "moe"):
        return tokens * h * setup.itemsize("attention"), 0.0
    dropped = (inside if setup.recompute("experts") == "full" else 0) + (
        shared if setup.recompute("shared_expert") == "full" else 0
    )
    return kept, dropped


def products(model: Model, *, dense: bool) -> list[tuple[str, int, int]]:
    """(module, input width, output width) of a block's plain matrix products in forward order; grouped ones of the
    experts and the router's, which runs in FP32, are none of them."""
    h, heads = model.hidden, model.heads
    if model.attention == "gqa":
        kv, out = model.kv_heads * model.head_dim, heads * model.head_dim
        found = [("attention", h, out), ("attention", h, kv), ("attention", h, kv), ("attention", out, h)]
    else:
        mla, q = model.mla, heads * (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim)
        low = [("attention", h, mla.q_lora_rank), ("attention", mla.q_lora_rank, q)]
        found = low if mla.q_lora_rank else [("attention", h, q)]
        found += [
            ("attention", h, mla.kv_lora_rank + mla.qk_rope_head_dim),
            ("attention", mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
            ("attention", heads * mla.v_head_dim, h),
        ]
    wide = model.ffn_hidden if dense else model.moe.shared_experts * model.moe.expert_hidden
    name = "feed forward" if dense else "shared expert"
    return [*found, (name, h, wide), (name, h, wide), (name, wide, h)] if wide else found


def _by_operation(setup: Setup, *, dense: bool) -> float:
    """Bytes that per-operation recomputation keeps of one block: its input, the output of the 1st, 3rd, 5th ... matrix
    product, of attention (with log-sum-exp), and what an all-to-all brought.

    Source: torchtitan's save list and "every second mm" (torchtitan/distributed/activation_checkpoint.py; the H100
    benchmarks of 2024-12 ran it).
    """
    model, c = setup.run.model, setup.itemsize("attention")
    out_heads = model.head_dim if model.attention == "gqa" else model.mla.v_head_dim
    kept = setup.tokens * model.heads / setup.tp * (out_heads * c + FP32) + setup.local_tokens * model.hidden * c
    for number, (*_, width) in enumerate(products(model, dense=dense), 1):
        if number % 2:
            tokens = setup.tokens / setup.tp  # split over TP: the width, or for what returns to the stream the tokens
            kept += tokens * width * c
    if not dense and setup.ep > 1:
        kept += sum(routed_rows(setup)) * model.hidden * setup.itemsize("experts")
    return kept


def block(
    setup: Setup, *, dense: bool, device: Device = "gpu", inventory: Inventory | None = None,
    policy: Recompute | None = None,
) -> Kept:  # fmt: skip
    """What one block keeps per micro-batch on one rank, under the recompute policies in effect; `policy`: the plan's
    option for this block, where it is not the same for all."""
    inventory = inventory or inventory_of(setup)
    policy = policy or setup.options.recompute
    model = setup.run.model
    norms = 2 * setup.local_tokens * _norm(setup, model.hidden, device, inventory)
    kept_attention, short_attention = attention(setup, device, inventory)
    if dense:
        kept_ffn, short_ffn = dense_ffn(setup, inventory)
        dropped_ffn = kept_ffn - short_ffn if setup.recompute("dense_ffn") == "full" else 0.0
    else:
        kept_ffn, dropped_ffn = moe_layer(setup, inventory)
    if policy in ("full", "op"):
        entering = setup.local_tokens * model.hidden * setup.itemsize("attention")
        kept = entering if policy == "full" else _by_operation(setup, dense=dense)
        return Kept(kept, 0.0, 0.0, again=max(0.0, norms + kept_attention + kept_ffn - kept))
    dropped_attention = kept_attention - short_attention if setup.recompute("attention") == "full" else 0.0
    again = max(dropped_attention, dropped_ffn)
    if setup.options.drop:
        whole = undropped(setup)
        ffn = dense_ffn(whole, inventory)[0] if dense else moe_layer(whole, inventory)[0]
        again = max(again, attention(whole, device, inventory)[0] - kept_attention, ffn - kept_ffn)
    return Kept(norms, kept_attention - dropped_attention, kept_ffn - dropped_ffn, again)


def undropped(setup: Setup) -> Setup:
    """The same layout with nothing of `Options.drop`."""
    return replace(setup, options=replace(setup.options, drop=())) if setup.options.drop else setup


def ends(setup: Setup, stage: Stage, *, device: Device = "gpu") -> tuple[float, float]:
    """(kept, the peak beside it) of embedding, final norm, head and loss of a stage, per micro-batch.

    Loss: log-probabilities in FP32 stay until the backward pass, which holds two more of that size for a moment. Fused
    (Megatron-LM's vocab_parallel_cross_entropy): the FP32 softmax stays and becomes the gradient in place, so that
    beside it there is only the logits' gradient in the compute dtype.
    """
    model, t = setup.run.model, setup.tokens
    inventory = inventory_of(setup)
    kept = t * INDEX if stage.embedding else 0.0
    if not stage.head:
        return kept, 0.0
    tokens = setup.local_tokens
    gathered = t if inventory == "pdtrain" else tokens
    kept += tokens * _norm(setup, model.hidden, device, inventory)
    kept += gathered * model.hidden * setup.itemsize("embed_head")
    logits = t * model.vocab_size / setup.tp
    kept += logits * FP32
    if inventory == "fused":
        return kept, logits * setup.itemsize("embed_head")
    # split over TP, the loss needs one more: DTensor's loss_parallel works with a copy
    return kept, logits * (3 if setup.tp > 1 and inventory == "pdtrain" else 2) * FP32


def rope_tables(setup: Setup, stage: Stage) -> float:
    """cos and sin in FP32, kept by every attention of this trainer."""
    model = setup.run.model
    dim = model.head_dim if model.attention == "gqa" else model.mla.qk_rope_head_dim
    return float(stage.layers * setup.run.train.sequence_length * dim * FP32)
