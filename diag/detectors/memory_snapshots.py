"""Memory snapshots: out of memory by fragmentation or by demand, leaks, ranks that differ, who holds the peak.

Sees: what `diag.memory` replays (docs/memory.md). Cannot see: memory that is not PyTorch's (contexts, NCCL, other
processes), except as what is missing from the device's size where that is given; anything before the recorded window
but its total. One finding per device, of severity "info" when nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.log_facts import Log
from diag.artefacts.memory_snapshot import MemorySnapshot
from diag.detectors import NotChecked, detector
from diag.schema import Finding


@detector("memory", needs=MemorySnapshot, subject="memory snapshots")
def memory_snapshots(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """One finding per device, per leak and per set of ranks."""
    from diag.memory.findings import findings_of

    logged = any(event.rule in log.rules and (log.rules[event.rule].cause or "").startswith("cuda_oom")
                 for log in artefacts.of(Log) for event in log.events)
    yield from findings_of(artefacts.of(MemorySnapshot), logged=logged)
