"""Days for a token budget: FLOP over sustained FLOP/s, and what checkpoints and failures add."""

from __future__ import annotations

from dataclasses import dataclass

#: Hours between unexpected interruptions per device: 419 in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, 3.3.4).
DEVICE_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419
#: Seconds from a failure to the first new step: noticing, rescheduling, start, restore. An assumption; set your own.
RESTART_SECONDS = 600.0
#: Bytes per second that one node writes to shared storage. An assumption; set your own.
STORAGE_PER_NODE = 2e9


@dataclass(frozen=True, slots=True)
class Overhead:
    """What checkpoints and failures cost: share of the time, interval chosen, seconds of one save, failures per day."""

    share: float
    interval_seconds: float
    save_seconds: float
    failures_per_day: float


def days(flop: float, devices: int, peak: float, utilisation: float) -> float:
    """Days for `flop` on `devices` of `peak` FLOP/s at `utilisation`.

    >>> round(days(6 * 37e9 * 5e12, 1000, 500e12, 0.4))
    64
    """
    return flop / (devices * peak * utilisation) / 86_400


def training_flop(activated: float, tokens: float) -> float:
    """6 N T: the usual estimate, without attention scores.

    >>> f"{training_flop(37e9, 5e12):.3g}"
    '1.11e+24'
    """
    return 6 * activated * tokens


def overhead(
    devices: int, nodes: int, checkpoint_bytes: float, *,
    device_hours_per_failure: float = DEVICE_HOURS_PER_FAILURE, restart_seconds: float = RESTART_SECONDS,
    storage_per_node: float = STORAGE_PER_NODE, interval_seconds: float | None = None,
) -> Overhead:  # fmt: skip
    """Blocking saves at the interval of Young and Daly, sqrt(2 save MTBF), half an interval lost per failure."""
    mtbf = device_hours_per_failure * 3600 / devices
    save = checkpoint_bytes / (storage_per_node * nodes)
    interval = interval_seconds or (2 * save * mtbf) ** 0.5
    share = save / interval + (interval / 2 + restart_seconds) / mtbf
    return Overhead(share, interval, save, 86_400 / mtbf)
