"""How much memory this rank needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory_bytes(device: torch.device | None = None, *, reset: bool = True) -> int:
    """Bytes at the peak since the last `reset` (CUDA: allocated by torch on `device`), or resident now (CPU).

    Without `device`: the current GPU where CUDA is in use, else the CPU. Waits for no device.
    """
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    if torch is None or not on_gpu or (device is not None and device.type != "cuda"):
        return resident_bytes()
    peak = torch.cuda.max_memory_allocated(device)
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return int(peak)


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        return int(psutil.Process().memory_info().rss)
