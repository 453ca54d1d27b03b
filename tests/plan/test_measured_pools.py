"""`pdtrain plan advise --measured`: what separated runs showed outweighs what the model predicts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.diag.helpers import pdtrain
from tests.diag.pools.made import Run


def advice(*runs: Path, status: int = 0) -> dict[str, Any]:
    given = [word for run in runs for word in ("--measured", str(run))]
    done = pdtrain("plan", "advise", "--preset", "tiny", "--gpus", "2", "--memory", "80GB", "--json", *given)
    assert done.status == status, done.err
    return done.json()


def without_pools(path: Path, like: Path, seconds: float) -> Path:
    """A run of the same job on its compute ranks alone."""
    path.mkdir()
    text = (like / "config.toml").read_text()
    (path / "config.toml").write_text(re.sub(r"(?s)\[pools\].*", '[pools]\nmode = "off"\nupdate_ranks = 0\n', text))
    (path / "metrics.jsonl").write_text("".join(
        json.dumps({"step": s, "loss": 3 + 1 / s, "step_seconds": seconds, "tokens_per_second": 1e4}) + "\n"
        for s in range(1, 40)))
    return path


def test_it_does_not_pay_with_both_numbers(tmp_path: Path) -> None:
    run = Run(compute=2, update=1, update_seconds=0.03).write(tmp_path / "with")
    found = advice(run)
    verdict = "do not separate phases: separation does not pay here: 0.308 s per step"
    assert found["phase_separation"].startswith(verdict)
    assert "about 0.215 s on 3 without (estimated" in found["phase_separation"]
    (row,) = found["measured_pools"]
    assert row["pays"] is False and row["balances"] is False and row["change"] is None


@pytest.mark.parametrize("seconds, pays", [(0.2, False), (0.6, True), (0.466, None)])
def test_a_measured_run_without_pools_decides(tmp_path: Path, seconds: float, pays: bool | None) -> None:
    """3 ranks at 0.308 s with pools cost 0.92 rank-seconds; two ranks without, twice their step time."""
    run = Run(compute=2, update=1, update_seconds=0.03).write(tmp_path / "with")
    (row,) = advice(run, without_pools(tmp_path / "alone", run, seconds))["measured_pools"]
    assert row["pays"] is pays and f"{seconds:.3g} s without (2 ranks" in row["why"]


def test_the_ratio_with_the_command(tmp_path: Path) -> None:
    run = Run(compute=4, update=4, update_seconds=0.09).write(tmp_path / "with")
    (row,) = advice(run)["measured_pools"]
    assert row["balances"] and (row["best"]["compute"], row["best"]["update"]) == (6, 2)
    assert "--set pools.update_ranks=2" in row["change"]
    shown = pdtrain("plan", "advise", "--preset", "tiny", "--gpus", "2", "--memory", "80GB", "--measured", run).out
    assert "6 + 2 (compute + update) would balance" in shown


def test_no_separated_run_is_one_clear_line(tmp_path: Path) -> None:
    run = Run().write(tmp_path / "with")
    done = pdtrain("plan", "advise", "--preset", "tiny", "--measured", without_pools(tmp_path / "alone", run, 0.3))
    assert done.status == 2 and "no separated run with measured steps" in done.err and len(done.err.splitlines()) <= 3
