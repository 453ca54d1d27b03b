"""With pools a compute rank's peak of resident memory is without optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdtrain.config.schema import Run
from tests.distributed import run_distributed
from tests.pools.pooled import Notes, pooled_run, pooled_steps
from tests.small_run import NoSpans, small_run, train_steps

#: 19.3 M parameters: 77 MB of weights, as much of gradients, twice that of moments.
SHAPE: dict[str, Any] = {"hidden": 512, "layers": 4, "dense_layers": 4, "ffn_hidden": 3072}


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the kernel keeps no peak of resident memory")


class PeakNotes(Notes):
    """The peak at the end of every step."""

    def event(self, name: str, **fields: Any) -> None:
        super().event(name, **fields, **({"peak": peak_bytes()} if name == "pool_step" else {}))


def with_pools(rank: int, run: Run, folder: Path) -> tuple[int, int, int]:
    """Parameters exchanged or held, what the steps added to resident memory at most, state bytes."""
    import tests.pools.pooled

    before = peak_bytes()
    tests.pools.pooled.Notes = PeakNotes  # type: ignore[misc]
    _, events = pooled_steps(rank, run, 3, folder)
    steps = [event for event in events if event["event"] == "pool_step"]
    return steps[-1]["bytes_sent"] // 4, max(event["peak"] for event in steps) - before, steps[-1]["state_bytes"]


def without_pools(rank: int, run: Run) -> int:
    """What the steps added, optimizer included."""
    import torch

    import tests.small_run

    before, seen = peak_bytes(), []

    @contextmanager
    def span(self: NoSpans, name: str) -> Iterator[None]:
        yield
        if name == "optimizer":
            seen.append(peak_bytes())

    NoSpans.span = span  # type: ignore[method-assign, assignment]
    tests.small_run.whole = lambda tensor: torch.empty(0)  # type: ignore[assignment]
    train_steps(rank, run, 3)
    return seen[-1] - before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_compute_ranks_hold_no_optimizer_state(tmp_path: Path, mode: str) -> None:
    together = run_distributed(without_pools, 1, tmp_path / "off", small_run(model=SHAPE))[0]
    (parameters, compute, none), (sent, _, state) = run_distributed(
        with_pools, 2, tmp_path, pooled_run(mode, compute=1, update=1, model=SHAPE), tmp_path / "run"
    )
    moments = 8 * parameters
    assert none == 0 and sent == parameters and state == 12 * parameters
    # besides weights and gradients, a compute rank has what is on its way in either direction: a few buckets
    assert together > 16 * parameters and compute < together - 0.6 * moments, (parameters, together, compute)
