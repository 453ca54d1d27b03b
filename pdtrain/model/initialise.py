"""Deterministic initialisation: each parameter's values depend on the seed and its own name, never on the layout.

Any rank can therefore make any slice of any parameter by itself; experts are drawn one by one, each from its own seed
(one shared seed for all experts is a known cause of lasting imbalance).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator keyed by (seed, name); the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_value(
    name: str, shape: torch.Size, *, seed: int, std: float, layers: int, experts: range | None = None
) -> Tensor:
    """FP32 CPU values for parameter `name` of full `shape`; with `experts`, only those rows of an expert stack.

    Norm weights are ones. Output projections into the residual stream (wo, w2) get std / sqrt(2 layers) (GPT-2),
    everything else std; all are truncated at three standard deviations.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    leaf = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
    std = std / (2 * layers) ** 0.5 if leaf in ("wo", "w2") else std

    def draw(key: str, size: torch.Size) -> Tensor:
        value = torch.empty(size)
        return torch.nn.init.trunc_normal_(value, std=std, a=-3 * std, b=3 * std, generator=generator_for(seed, key))

    if ".experts." in name:
        rows = experts if experts is not None else range(shape[0])
        return torch.stack([draw(f"{name}/{expert}", shape[1:]) for expert in rows])
    return draw(name, shape)
