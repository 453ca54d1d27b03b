"""Activation memory of the dense transformer by the published formulas (Korthikanti et al., arXiv 2205.05198).

For GPT blocks in 16 bit with dropout and a 4 h FFN, s sequence, b micro-batch, h hidden, a heads, t tensor parallel:

    none                      s b h (10 + 24/t + 5 a s / (h t))      t = 1: s b h (34 + 5 a s / h)
    with sequence parallel    s b h / t (34 + 5 a s / h)
    selective                 the same without 5 a s / h
    full                      2 s b h

A first pipeline stage holds all L layers (p micro-batches of L / p layers); interleaved it holds
(1 + (p - 1) / (p m)) as much. Figure 1 of the paper is the golden (tests/plan/test_goldens.py).
"""

from __future__ import annotations

from typing import Literal


def per_layer(
    s: int, b: int, h: int, a: int, t: int, *, sequence_parallel: bool, recompute: Literal["none", "selective", "full"]
) -> float:
    """Bytes of one layer on one rank."""
    if recompute == "full":
        return 2 * s * b * h
    scores = 5 * a * s / h if recompute == "none" else 0.0
    if sequence_parallel:
        return s * b * h / t * (34 + scores)
    return s * b * h * (10 + (24 + scores) / t)


def first_stage(
    layers: int, s: int, b: int, h: int, a: int, t: int, *, p: int = 1, m: int = 1,
    sequence_parallel: bool, recompute: Literal["none", "selective", "full"],
) -> float:  # fmt: skip
    """Bytes of the blocks on the first of p stages with m chunks each; embedding, dropout and logits not counted."""
    factor = 1 + (p - 1) / (p * m) if m > 1 else 1.0
    return per_layer(s, b, h, a, t, sequence_parallel=sequence_parallel, recompute=recompute) * layers * factor
