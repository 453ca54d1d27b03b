"""Update state in files that is larger than the memory the update rank may have trains as if it had all."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diag.errors import UsageError
from pdtrain.config.schema import Moe
from tests.distributed import run_distributed
from tests.pools.pooled import pooled_run, pooled_steps

MEMORY = Path("/sys/fs/cgroup/memory")
#: 15 M parameters: 180 MB of masters and moments, 60 MB of gradients; no piece of a bucket is above 2.1 MB.
MODEL = {"hidden": 256, "layers": 5, "ffn_hidden": 1024,
         "moe": Moe(experts=8, top_k=2, expert_hidden=512, shared_experts=1)}
LIMIT_BYTES = 170_000_000


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup (v1) of LIMIT_BYTES, gone afterwards."""
    folder = MEMORY / f"pdtrain_test_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


def limited(rank: int, group: str, *arguments: Any) -> Any:
    """The update rank, 2, allocates within `group`: what the fork server had before is charged to nobody here."""
    if rank == 2:
        gc.freeze()  # else a collection writes to every object of the fork server's, which copies its pages
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    return pooled_steps(rank, *arguments)


@pytest.mark.slow
@pytest.mark.root
def test_state_larger_than_memory_trains_from_files_and_not_without(tmp_path: Path, group: Path) -> None:
    pools = {"bucket_mb": 2.0, "buffers": 1}
    run = pooled_run("stream", compute=2, update=1, model=MODEL, pools=pools | {"offload": str(tmp_path / "state")})
    results = run_distributed(limited, 3, tmp_path, str(group), run, 3, tmp_path / "run", timeout=200)
    (joined,) = [event for event in results[2][1] if event["event"] == "pool"]
    assert joined["state_bytes"] > LIMIT_BYTES
    assert int((group / "memory.max_usage_in_bytes").read_text()) <= LIMIT_BYTES
    free = run_distributed(
        pooled_steps, 3, tmp_path, pooled_run("stream", compute=2, update=1, model=MODEL, pools=pools), 3,
        tmp_path / "free", timeout=200,
    )  # fmt: skip
    assert results[0][0].losses == free[0][0].losses
    assert all((results[0][0].weights[name] == weight).all() for name, weight in free[0][0].weights.items())
    with pytest.raises(AssertionError, match=r"ranks \[2\] died|closed"):
        run_distributed(
            limited, 3, tmp_path, str(group), pooled_run("stream", compute=2, update=1, model=MODEL, pools=pools), 3,
            tmp_path / "killed", timeout=60,
        )  # fmt: skip


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    from pdtrain.pools.offload import mapped_zeros

    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(UsageError, match=r"pools\.offload = .* cannot be used"):
        mapped_zeros(taken, 2)((4, 4))
    zeros = mapped_zeros(tmp_path, 2)((3, 5))
    assert zeros.shape == (3, 5) and not zeros.any() and sorted(tmp_path.iterdir()) == [taken]
