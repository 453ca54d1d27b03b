"""`pdtrain diag router` end to end, as its user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.diag.helpers import config, pdtrain, records, route, write

HOT = [6.0, 3.0, 0, 0, 0, 0, 0, 0]
SLOPE = np.linspace(0, 3.0, 8).tolist()


def run_dir(path: Path, push=lambda s: None, *, steps: int = 300, drop=None, **settings) -> Path:
    path.mkdir()
    rng = np.random.default_rng(1)
    counts = (route(8, 2, 512, rng, push(s)) for s in range(1, steps + 1))
    rows = list(records(range(1, steps + 1), counts))
    for row in rows:
        if drop is not None:
            row["router/1/drop_rate"] = drop(row["step"])
    write(path / "metrics.jsonl", iter(rows))
    (path / "config.toml").write_text(config(**settings))
    return path


def root(document: dict) -> dict:
    assert document["findings"][0]["role"] == "root"
    return document["findings"][0]


def test_a_healthy_run_is_healthy_with_its_numbers(tmp_path: Path) -> None:
    done = pdtrain("diag", "router", run_dir(tmp_path / "run"), "--json")
    report = done.json()
    assert (done.status, report["verdict"]) == (0, "healthy")
    assert [f["severity"] for f in report["findings"]] == ["info"]
    (row,) = report["findings"][0]["numbers"]["layers"]
    assert row["state"] == "balanced" and row["gini_excess"] < 0.05 and row["dead_experts"] == 0
    assert row["gini_excess"] == pytest.approx(row["gini"] - row["gini_floor"])


def test_collapse_is_the_root_with_onset_evidence_suspects_and_playbook(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", lambda s: HOT if s >= 150 else None, aux_loss=0.0, dtype="bf16")
    done = pdtrain("diag", "router", path, "--json")
    report = done.json()
    found = root(report)
    assert (done.status, report["verdict"], found["cause"]) == (1, "degraded", "moe_router_collapse")
    assert found["where"] == {"module": "router", "step": 150}
    assert found["playbook"] == "router-collapse" and report["headline"] == found["summary"]
    assert found["evidence"][0]["line"] == 150 and found["evidence"][0]["path"] == str(path / "metrics.jsonl")
    suspects = {row["suspect"]: row["verdict"] for row in found["numbers"]["suspects"]}
    assert list(suspects) == ["router precision", "balancing", "learning rate", "expert initialisation", "data"]
    assert suspects["router precision"] == suspects["balancing"] == "likely"
    assert suspects["learning rate"] == "unlikely" and suspects["data"] == "unknown"
    assert "FP32" in found["fix"][0] and "load-balance" in found["fix"][1]


def test_without_a_configuration_no_suspect_is_accused(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", lambda s: HOT if s >= 150 else None)
    found = root(pdtrain("diag", "router", path / "metrics.jsonl", "--json").json())
    assert found["cause"] == "moe_router_collapse"
    assert not any(row["verdict"] == "likely" for row in found["numbers"]["suspects"])


def test_imbalance_explains_the_drops_it_causes(tmp_path: Path) -> None:
    def slope(step: int):  # the load tilts slowly, and drops begin before the imbalance passes its threshold
        return [min(max(step - 100, 0) / 50, 1) * x for x in SLOPE]

    path = run_dir(tmp_path / "run", slope, drop=lambda s: 0.2 if s > 125 else 0.0, capacity=1.25)
    report = pdtrain("diag", "router", path, "--json").json()
    assert root(report)["cause"] == "moe_expert_imbalance" and root(report)["explains"] == [1]
    assert [(f["cause"], f["role"]) for f in report["findings"][1:2]] == [("moe_token_drop", "victim")]


def test_drops_alone_are_a_root(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", drop=lambda s: 0.2, capacity=1.0)
    found = root(pdtrain("diag", "router", path, "--json").json())
    assert (found["cause"], found["severity"]) == ("moe_token_drop", "error")
    assert "capacity factor 1.0" in found["summary"]


def test_a_dense_model_was_not_checked_and_is_not_called_healthy(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", ({"step": s, "loss": 1.0, "lr": 0.1} for s in range(5)))
    done = pdtrain("diag", "router", path, "--json")
    report = done.json()
    assert (done.status, report["verdict"], report["findings"]) == (1, "unknown", [])
    assert any(note.startswith("router: no router values") for note in report["not_checked"])


def test_a_torn_last_line_is_a_problem_and_no_warning(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 301, "rou')
    done = pdtrain("diag", "router", path, "--json")
    assert done.status == 0 and done.json()["verdict"] == "healthy"
    assert [i.get("problem") for i in done.json()["inputs"] if i["format"] == "metrics"] == ["line 301 is cut off"]


def test_a_damaged_config_is_a_finding_and_the_run_is_judged_all_the_same(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", lambda s: HOT if s >= 150 else None)
    (path / "config.toml").write_text(config()[:-10] + "\nlr = = 3\n")
    report = pdtrain("diag", "router", path, "--json").json()
    assert root(report)["cause"] == "moe_router_collapse"
    damage = [f for f in report["findings"] if f["cause"] == "input_unreadable"]
    assert [(f["role"], f["severity"]) for f in damage] == [("context", "warning")]


def test_standard_input_and_compressed_metrics(tmp_path: Path) -> None:
    import gzip

    path = run_dir(tmp_path / "run", lambda s: HOT if s >= 150 else None)
    data = (path / "metrics.jsonl").read_bytes()
    done = subprocess.run([sys.executable, "-m", "pdtrain.cli", "diag", "router", "-", "--json"],
                          input=gzip.compress(data), capture_output=True)
    assert done.returncode == 1 and json.loads(done.stdout)["findings"][0]["evidence"][0]["path"] == "<stdin>"


def test_the_terminal_shows_a_table_per_layer(tmp_path: Path) -> None:
    done = pdtrain("diag", "router", run_dir(tmp_path / "run", lambda s: HOT if s >= 150 else None))
    assert done.status == 1 and done.out.startswith("DEGRADED  The router of layer 1 has collapsed since step 150")
    assert "collapsed" in done.out and "excess" in done.out and "do this" in done.out
