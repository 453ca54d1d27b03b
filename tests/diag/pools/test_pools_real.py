"""`pdtrain diag` on separated runs that really ran: a killed rank; a ratio that is recommended, then measured."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.commands.test_train_job import OUTSIDE, PDTRAIN, SMALL
from tests.diag.helpers import pdtrain
from tests.planting import plant_modules

#: Work that takes its time without a processor: so much per sequence on compute ranks, and per step over all the state.
PLANT = """
import os, time
PER_SEQUENCE, PER_STEP = (float(text) for text in os.environ["PLANTED_SECONDS"].split())

def update(module):
    made, applied = module.UpdateSide.__init__, module.OwnedBucket.apply
    def init(self, resolved, plan, *rest):
        module.ELEMENTS = sum(bucket.numel for bucket in plan.buckets)
        made(self, resolved, plan, *rest)
    def apply(self, *rest):
        time.sleep(PER_STEP * self.bucket.numel / module.ELEMENTS)
        applied(self, *rest)
    module.UpdateSide.__init__, module.OwnedBucket.apply = init, apply

def step(module):
    read = module.TrainStep._micro_batch
    def micro_batch(self, *rest):
        time.sleep(PER_SEQUENCE * self.resolved.micro_batch)
        return read(self, *rest)
    module.TrainStep._micro_batch = micro_batch

PLANTS = {"pdtrain.pools.update": update, "pdtrain.step": step}
"""
SEPARATED = (SMALL.replace("{tensor = 2}", "{tensor = 1}").replace("{expert = 2}", "{expert = 1}")
             .replace("layers = 2", "layers = 1\ndense_layers = 1").replace("ranks = 2", "ranks = 2\nfsdp = false")
             .replace("train_batch = 4", "train_batch = 6").replace("micro_batch = 2", "micro_batch = 1")
             .replace("val_sequences = 4", "val_sequences = 0").replace("steps = 6", "steps = 12"))


def train(folder: Path, name: str, compute: int, update: int, *, mode: str = "sync", **environment: str) -> int:
    """One job in `folder`; its exit status."""
    (folder / "run.toml").write_text(SEPARATED)
    sets = (f"parallel.ranks={compute}", f"pools.update_ranks={update}", f"pools.mode={mode}",
            "pools.timeout_seconds=30")
    command = [*PDTRAIN, "train", "run.toml", "--nproc", str(compute + update), "--run-dir", name,
               *(word for text in sets for word in ("--set", text))]
    done = subprocess.run(command, cwd=folder, env=OUTSIDE | environment, capture_output=True, text=True, timeout=240)
    return done.returncode


def imbalance(found: dict[str, Any]) -> dict[str, Any] | None:
    return next((f for f in found["findings"] if f["cause"] == "pool_imbalance"), None)


@pytest.mark.slow
@pytest.mark.parametrize("mode, planted, first, best", [
    ("sync", (0.30, 0.75), (2, 2), (3, 1)),  # 1.8 s of compute in all, 0.75 s of update: both pools have two ranks
    ("sync", (0.15, 1.20), (3, 1), (2, 2)),  # an update pool that is too small
    ("stream", (0.20, 0.50), (1, 3), (3, 1)),  # one that is far too large
])
def test_the_recommended_ratio_measures_within_twenty_points(
    tmp_path: Path, mode: str, planted: tuple[float, float], first: tuple[int, int], best: tuple[int, int]
) -> None:
    """Out of balance as planted, told the split that evens it out, and even when that is run."""
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("the processors are taken by others: what the ranks really compute outweighs what was planted")
    plant_modules(tmp_path, PLANT)
    seconds = {"PYTHONPATH": str(tmp_path), "PLANTED_SECONDS": " ".join(map(str, planted))}
    assert train(tmp_path, "first", *first, mode=mode, **seconds) == 0
    one = imbalance(pdtrain("diag", "pools", tmp_path / "first", "--json").json())
    assert one is not None and abs(one["numbers"]["gap_points"]) > 20 and one["numbers"]["balances"]
    assert (one["numbers"]["recommended_compute"], one["numbers"]["recommended_update"]) == best
    assert train(tmp_path, "second", *best, mode=mode, **seconds) == 0
    assert imbalance(pdtrain("diag", "pools", tmp_path / "second", "--json").json()) is None


@pytest.mark.slow
def test_a_killed_update_rank_leads_the_post_mortem(tmp_path: Path) -> None:
    kill = json.dumps([{"kind": "kill", "rank": 2, "direction": "down", "step": 6}])
    assert train(tmp_path, "run", 2, 1, mode="stream", PDTRAIN_POOL_FAULTS=kill) != 0
    found = pdtrain("diag", "postmortem", tmp_path / "run", "--json").json()
    root = found["findings"][0]
    assert found["verdict"] == "failed" and root["role"] == "root" and root["where"]["ranks"] == [2]
    assert root["cause"] in ("killed_unconfirmed", "pool_member_lost")
    lost = next(f for f in found["findings"] if f["cause"] == "pool_member_lost")
    assert lost["where"]["ranks"] == [2] and lost["role"] in ("root", "victim")
