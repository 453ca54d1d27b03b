"""The benchmarks still run and print what they promise; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> dict[str, object]:
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return json.loads(line)


@pytest.mark.slow
def test_recorder_overhead():
    pytest.importorskip("torch", reason="the extra 'train' is not installed")
    row = run("recorder_overhead.py", "--rounds", "2", "--threads", "1")
    assert row["rounds"] == 2 and row["call_cpu_seconds"] > 0


@pytest.mark.slow
def test_pool_curves(tmp_path: Path):
    pytest.importorskip("torch", reason="the extra 'train' is not installed")
    picture = tmp_path / "curves.svg"
    row = run("pool_curves.py", "--out", str(tmp_path / "runs"), "--steps", "3", "--only", "unseparated,stream",
              "--svg", str(picture), "--json")
    assert row["variants"]["stream"]["largest"] == 0, "FP32 and in order: the same bits"
    assert row["variants"]["stream"]["gradient_bytes"] > 1e6
    assert picture.read_text().count("<polyline") == 3


@pytest.mark.slow
def test_train_step():
    pytest.importorskip("transformers", reason="the extra 'bench' is not installed")
    row = run("train_step.py", "--dtype", "fp32", "--rounds", "1", "--threads", "1")
    assert row["ours"] > 0 and row["peer"] > 0 and row["peer_version"].startswith("transformers ")
    ours, peer = row["losses"]["ours"], row["losses"]["peer"]
    assert 4 < ours[0] < 6.5 and 4 < peer[0] < 6.5, "both read the same text with fresh weights of 512 ids"


@pytest.mark.slow
def test_router_alarms():
    row = run("router_alarms.py", "--streams", "10")
    assert row["streams"] == 10 and row["uniform"] == row["benign"] == row["cliff"] == "2/2"
