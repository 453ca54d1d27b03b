"""Router metrics of one MoE layer: the `router/<layer>/...` keys of metrics.jsonl.

The formulas and their sampling floors are `diag.balance`'s, so that the doctor and the trainer cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from diag import balance

#: The floor depends on the number of tokens, which hardly ever changes from step to step.
_gini_floor = lru_cache(maxsize=1024)(balance.gini_floor)


def router_values(
    layer: int, counts: Sequence[float], *, top_k: int, token_entropy: float | None = None,
    drop_rate: float | None = None, aux_loss: float | None = None, z_loss: float | None = None,
    bias_range: float | None = None, with_counts: bool = True,
) -> dict[str, Any]:
    """What one layer's routing looked like in one step, over the global batch. What is None is left out.

    counts [e]: tokens routed to each expert before any drop, summed over micro-batches and token ranks.
    token_entropy: mean over tokens of the entropy of the router's probabilities, in nat. drop_rate: dropped share of
    the (token, choice) pairs. aux_loss, z_loss: unscaled. bias_range: max - min of the balancing bias.
    `with_counts` false leaves the list itself out.
    """
    experts, total = len(counts), float(sum(counts))
    found: dict[str, Any] = {}
    if with_counts:
        found["counts"] = [round(count) for count in counts]
    if experts and total:
        found |= {
            "gini": balance.gini(counts), "cv": balance.cv(counts), "max_vio": balance.max_vio(counts),
            "load_entropy": balance.load_entropy(counts), "dead_experts": sum(not count for count in counts),
        }
        if experts > 1:
            found["gini_floor"] = _gini_floor(experts, top_k, total / experts)
    if token_entropy is not None and experts > 1:
        found["token_entropy"] = token_entropy / math.log(experts)
    measured = {"drop_rate": drop_rate, "aux_loss": aux_loss, "z_loss": z_loss, "bias_range": bias_range}
    found |= {name: value for name, value in measured.items() if value is not None}
    return {f"router/{layer}/{name}": value for name, value in found.items()}
