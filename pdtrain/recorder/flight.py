"""Flight-recorder dumps: the last collectives of this rank, as c10d's ring buffer has them.

Format: a pickle of plain values, written to dumps/flight_recorder_<rank> (see docs/run-directory.md).
`prepare_environment` sizes the buffer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from diag.artefacts.restricted_pickle import load
from pdtrain.recorder.files import write_atomically


def dump_flight_recorder(folder: Path, rank: int) -> list[Path]:
    """Write what the flight recorder holds to `folder`; the files written, none where it holds nothing.

    Waits for no device and takes no part in any collective, so it may run while the rank hangs in one. A CUDA build
    keeps NCCL's ring apart: where both rings hold something the second file is `flight_recorder_gloo_<rank>`.
    Raises OSError.
    """
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return []
    written: list[Path] = []
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(c10d, name, None)
        data = dump() if dump is not None else b""
        if data and load(data, scanned=False).get("entries"):  # made by this process a moment ago
            path = folder / f"flight_recorder_{'gloo_' if written else ''}{rank}"
            write_atomically(path, data)
            written.append(path)
    return written


def set_aside_earlier(folder: Path, rank: int, starts: int) -> None:
    """Move the dumps that an earlier process of this run left to `earlier_<starts>/`.

    Dumps of two incidents must not be read as one set. `starts` is how often this rank has started before, the same
    number on all ranks. Raises OSError.
    """
    for path in (folder / f"flight_recorder_{rank}", folder / f"flight_recorder_gloo_{rank}",
                 folder / f"stacks_{rank}.txt"):
        if path.exists() and path.stat().st_size:
            target = folder / f"earlier_{starts}"
            target.mkdir(parents=True, exist_ok=True)
            path.replace(target / path.name)
