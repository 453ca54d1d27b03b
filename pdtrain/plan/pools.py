"""Phase separation in numbers: what an update pool holds, what crosses between the pools, and whether that pays."""

from __future__ import annotations

from dataclasses import dataclass

from pdtrain.plan.hardware import Hardware
from pdtrain.plan.parameters import count
from pdtrain.plan.setup import Setup

#: Cross-pool traffic above this share of a step calls for deeper buffers, compression or another placement.
WORTH_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Pools:
    """An update pool of `ranks`. Bytes per step: gradients there, weights back, both in the payload's dtype.

    saved_bytes: optimizer state that one compute rank no longer holds. exchange_seconds: on the network devices of the
    compute ranks and of the pool, whichever is slower.
    """

    ranks: int
    state_bytes_per_rank: float
    exchange_bytes_per_step: float
    exchange_bytes_per_token: float
    exchange_seconds: float
    saved_bytes: float
    pays: bool
    reason: str


def pools(setup: Setup, hardware: Hardware, step_seconds: float, optimizer_seconds: float, saved: float) -> Pools:
    """The pool of `pools.update_ranks`, or of one rank in eight where the configuration has none yet."""
    total = count(setup.run.model).trained
    ranks = setup.run.pools.update_ranks or max(1, setup.ranks // 8)
    payload = 2 if setup.run.precision.all == "bf16" else 4
    exchange = 2.0 * payload * total  # every gradient once, every weight once
    rate = hardware.network_bandwidth * 0.8
    seconds = max(exchange / 2 / (rate * ranks), exchange / 2 / (rate * setup.ranks)) * 2
    share = seconds / step_seconds
    if share > WORTH_SHARE:
        pays, why = False, f"the exchange takes {share:.0%} of a step, above {WORTH_SHARE:.0%}"
    elif setup.ranks <= hardware.devices_per_node:
        pays, why = False, "the job fits on one node"
    elif optimizer_seconds < 0.05 * step_seconds and setup.sharding in ("zero1", "zero2", "zero3"):
        part = optimizer_seconds / step_seconds
        pays, why = False, f"the update takes {part:.1%} of a step and its state is already sharded"
    else:
        pays, why = True, f"the exchange takes {share:.1%} of a step; it frees {saved / 1e9:.1f} GB per compute rank"
    return Pools(
        ranks, 12.0 * total / ranks, exchange, exchange / setup.tokens_per_step, seconds, saved, pays, why
    )
