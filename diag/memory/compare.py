"""Snapshots of several ranks: which rank needs more than its peers, and for what.

A hot expert, an uneven pipeline stage, rank 0 with its extra work: the rank that runs out first is the one to look
at. Half of the ranks being fuller than the other half is a layout (pipeline stages), not a fault, so only a minority
stands out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from diag.memory.nouns import DeviceMemory, Owner

#: Fewer ranks have no majority.
MIN_RANKS = 3
#: At most this part of the ranks can be the exception.
MINORITY = 0.25
#: More than the median rank by this part is worth a line; by that one, a warning.
NOTE, WARN = 0.10, 0.25
#: Differences below this are buffers.
MIN_BYTES = 256 << 20
_EXPERT = re.compile(r"expert|moe|router|dispatch|permut|token_", re.IGNORECASE)
_STAGE = re.compile(r"embed|lm_head|logit|cross_entropy|loss|output_layer|vocab", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Ranks above their peers: by how many bytes of `median_bytes`, and whose memory makes it, largest first."""

    ranks: list[int]
    excess_bytes: int
    median_bytes: int
    owners: list[Owner]
    reading: str

    @property
    def share(self) -> float:
        """The excess as a part of the median rank."""
        return self.excess_bytes / max(self.median_bytes, 1)


def differing(ranks: Sequence[tuple[int, DeviceMemory]]) -> Difference | None:
    """The minority of `ranks` (rank, its fullest device) that needs more; None where all are alike or none is few."""
    if len({rank for rank, _ in ranks}) < MIN_RANKS or len({rank for rank, _ in ranks}) != len(ranks):
        return None
    peaks = {rank: device.peak_requested_bytes for rank, device in ranks}
    middle = int(median(peaks.values()))
    spread = median(abs(p - middle) for p in peaks.values())
    limit = middle + max(NOTE * middle, MIN_BYTES, 5 * spread)
    above = sorted(rank for rank, peak in peaks.items() if peak > limit)
    if not above or len(above) > max(1, int(MINORITY * len(ranks))):
        return None
    others = [device for rank, device in ranks if rank not in above]
    worst = max((device for rank, device in ranks if rank in above), key=lambda d: d.peak_requested_bytes)
    usual = [_by_owner(device) for device in others]
    found = []
    for name, owner in _by_owner(worst).items():
        extra = owner.bytes - int(median(u[name].bytes if name in u else 0 for u in usual))
        if extra >= max(MIN_BYTES // 4, 0.05 * (worst.peak_requested_bytes - middle)):
            found.append(Owner(owner=name, phase=owner.phase, module=owner.module, bytes=extra, blocks=owner.blocks))
    found.sort(key=lambda o: -o.bytes)
    words = " ".join(f"{o.owner} {o.module}" for o in found[:3])
    reading = "an expert that gets more tokens than its peers" if _EXPERT.search(words) else \
        "a pipeline stage with more work (embedding, logits or loss)" if _STAGE.search(words) else ""
    return Difference(ranks=above, excess_bytes=worst.peak_requested_bytes - middle, median_bytes=middle,
                      owners=found[:8], reading=reading)


def _by_owner(device: DeviceMemory) -> dict[str, Owner]:
    found: dict[str, Owner] = {}
    for owner in device.owners:
        entry = found.setdefault(owner.owner, Owner(owner=owner.owner, phase=owner.phase, module=owner.module))
        entry.bytes += owner.bytes
        entry.blocks += owner.blocks
    return found
