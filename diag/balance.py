"""How uneven is the load of E experts, and how uneven would perfectly uniform routing look at the same token count?

Symbols: E experts, K chosen per token, T tokens, m = T K / E mean tokens per expert, p = K / E.

Even perfect routing is uneven by chance: with 16 tokens per expert the Gini index is 0.13, and 0.44 with one. Every
judgement is therefore made on the *excess* of the measured value over its sampling floor, the value expected when each
token picks K distinct experts uniformly at random. Then each count is Binomial(T, p), any two differ with variance
2 T p (1 - p) E / (E - 1), and the floors follow:

    CV        sqrt((1 - p) / m) c4(E)                 c4: mean of a sample's standard deviation over its sigma
    Gini      (E - 1) / E  E|X - Y| / (2 lambda)      X, Y ~ Poisson(lambda), lambda = m (E - 1) / ((1 - p) E)
    MaxVio    sigma/m (z + (z^2 - 1)/6 skew)          z: Blom's expected normal maximum of E, Cornish-Fisher for skew
    entropy   1 - (E - 1)/E (E[X ln X]/lambda - ln lambda) / ln E

The usual approximations Gini = CV / sqrt(pi) and MaxVio = CV sqrt(2 ln E) are the large-m, large-E limits. Accuracy
against 400 to 3,000 simulated draws for E = 2..256, K = 1..8, m = 1..192 (tests/test_balance.py, seeded): Gini within
2 %, CV within 3 %, MaxVio within 8 %, entropy within 0.005 absolute (0.02 below two tokens per expert).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

#: Above this the Poisson sums equal their normal limit to 1e-3 relative and are not worth their time.
_POISSON_LIMIT = 400.0


def gini(counts: Sequence[float]) -> float:
    """Gini index of `counts` (length E): 0 when even, (E - 1)/E when one expert gets everything."""
    total, experts = sum(counts), len(counts)
    if not total:
        return 0.0
    ranked = sum(rank * count for rank, count in enumerate(sorted(counts), 1))
    return 2 * ranked / (experts * total) - (experts + 1) / experts


def cv(counts: Sequence[float]) -> float:
    """Coefficient of variation: population standard deviation / mean."""
    mean = sum(counts) / len(counts)
    return math.sqrt(sum((c - mean) ** 2 for c in counts) / len(counts)) / mean if mean else 0.0


def max_vio(counts: Sequence[float]) -> float:
    """(max - mean) / mean (DeepSeek, arXiv 2408.15664 eq. 4): 0 when even, E - 1 when one expert gets everything."""
    mean = sum(counts) / len(counts)
    return (max(counts) - mean) / mean if mean else 0.0


def load_entropy(counts: Sequence[float]) -> float:
    """Entropy of the load / ln E: 1 when even, 0 when one expert gets everything."""
    total, experts = sum(counts), len(counts)
    if not total or experts < 2:
        return 1.0
    return -sum(c / total * math.log(c / total) for c in counts if c) / math.log(experts)


def cv_floor(experts: int, top_k: int, mean: float) -> float:
    """Expected CV of uniform routing at `mean` tokens per expert."""
    c4 = math.sqrt(2 / experts) * math.exp(math.lgamma(experts / 2) - math.lgamma((experts - 1) / 2))
    return math.sqrt(_spread(experts, top_k) / mean) * c4 * math.sqrt(experts / (experts - 1))


def gini_floor(experts: int, top_k: int, mean: float) -> float:
    """Expected Gini index of uniform routing at `mean` tokens per expert."""
    return (experts - 1) / experts * _poisson_gap(_equivalent(experts, top_k, mean))


def max_vio_floor(experts: int, top_k: int, mean: float) -> float:
    """Expected MaxVio of uniform routing at `mean` tokens per expert."""
    z = NormalDist().inv_cdf((experts - 0.375) / (experts + 0.25)) * math.sqrt(experts / (experts - 1))
    sigma = math.sqrt(_spread(experts, top_k) / mean)
    return z * sigma + (z * z - 1) / 6 * (1 - 2 * _share(experts, top_k)) / mean


def load_entropy_floor(experts: int, top_k: int, mean: float) -> float:
    """Expected normalised load entropy of uniform routing: a ceiling, since chance only lowers it."""
    lam = _equivalent(experts, top_k, mean)
    if lam > _POISSON_LIMIT:
        deficit = 1 / (2 * lam)
    else:
        deficit, term = -math.log(lam), math.exp(-lam)
        for k in range(1, math.ceil(lam + 12 * math.sqrt(lam) + 12)):
            term *= lam / k
            deficit += term * k * math.log(k) / lam
    return 1 - (experts - 1) / experts * deficit / math.log(experts)


def drop_floor(experts: int, top_k: int, tokens: float, capacity: float) -> float:
    """Expected share of assignments dropped by uniform routing of `tokens` at `capacity` tokens per expert.

    E[max(c - C, 0)] / m with c normal of variance T p (1 - p): the loss integral. `tokens` and `capacity` are those of
    one rank and one micro-step, because that is where capacity is enforced.
    """
    mean = tokens * top_k / experts
    sigma = math.sqrt(mean * _spread(experts, top_k))
    if not sigma:
        return max(0.0, 1 - capacity / mean)
    normal, z = NormalDist(), (capacity - mean) / sigma
    return sigma * (normal.pdf(z) - z * (1 - normal.cdf(z))) / mean


def _share(experts: int, top_k: int) -> float:
    return min(top_k / experts, 1.0)


def _spread(experts: int, top_k: int) -> float:
    """1 - p, kept above zero: with K = E every expert gets every token and nothing varies."""
    return max(1 - _share(experts, top_k), 1e-12)


def _equivalent(experts: int, top_k: int, mean: float) -> float:
    """The Poisson mean whose relative spread between two experts is that of uniform top-K routing."""
    return mean * (experts - 1) / (_spread(experts, top_k) * experts)


def _poisson_gap(lam: float) -> float:
    """E|X - Y| / (2 lam) of two Poisson(lam) variables = exp(-2 lam) (I0(2 lam) + I1(2 lam)) -> 1/sqrt(pi lam)."""
    if lam > _POISSON_LIMIT:
        return 1 / math.sqrt(math.pi * lam)
    total, term = 0.0, math.exp(-2 * lam)
    for k in range(1, math.ceil(lam + 12 * math.sqrt(lam) + 12)):
        total += term * (1 + lam / k)
        term *= (lam / k) ** 2
    return total
