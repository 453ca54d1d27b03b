"""Floating-point operations of training, per token: arithmetic on the configuration, no torch.

6 per weight of every matrix product that a token goes through (forward 2, backward 4), plus attention scores and values
3 x layers x 2 x s x heads x (d_qk + d_v) / 2 under the causal convention, where a token sees half the sequence on
average. Excluded: embedding lookup, norms, routing bias, recomputation. Golden: the DeepSeek-V3 shape at sequence
length 4096 is 250.45 GFLOP/token (tests/plan).
"""

from __future__ import annotations

from pdtrain.config.schema import Model
from pdtrain.plan.extras import plain_model
from pdtrain.plan.parameters import count

CONVENTION = "causal attention, model FLOP only (no recomputation), embedding lookup excluded, head included"

#: Dense peak in FLOP/s per device by name fragment and dtype, without sparsity; source: the vendor's data sheets.
PEAK_FLOPS = {
    ("H200", "bf16"): 989.5e12,
    ("H100", "bf16"): 989.5e12,
    ("H800", "bf16"): 989.5e12,
    ("A100", "bf16"): 312e12,
    ("A800", "bf16"): 312e12,
    ("B200", "bf16"): 2250e12,
}


NON_CAUSAL = "full attention scores (as torchtitan and PaLM report), otherwise the same"


def per_token(model: Model, sequence_length: int, *, causal: bool = True) -> float:
    """FLOP per trained token, forward and backward; not `causal`: attention scores counted in full."""
    parameters = count(plain_model(model))  # biases and gains are no products
    bias = parameters.routing_bias
    norms = parameters.rows["norm"].activated
    matrices = parameters.activated - norms - (bias if parameters.rows["router"].activated else 0)
    if model.attention == "mla":
        dims = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
    else:
        dims = 2 * model.head_dim
    attention = 3 * model.layers * 2 * sequence_length * model.heads * dims / (2 if causal else 1)
    return 6 * matrices + attention


def peak_per_device(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device, or None where it is not known: then MFU is "n/a", never a guess."""
    for (fragment, kind), peak in PEAK_FLOPS.items():
        if fragment in device_name and kind == dtype:
            return peak
    return None
