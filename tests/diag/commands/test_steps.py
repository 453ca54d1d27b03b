"""`pdtrain diag steps` as its user types it, and the other detectors of curves, on made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.diag.helpers import config, pdtrain
from tests.diag.steps.test_ranks import events

GPU = {"time": 1.0, "versions": {"torch": "2.13.0"}, "host": {"name": "n1"}, "gpus": [{"name": "H100"}]}


def rows(steps: int = 300, **columns: Callable[[int], Any]) -> Iterator[dict[str, Any]]:
    """metrics.jsonl of a healthy run, with columns replaced or added."""
    rng = np.random.default_rng(5)
    for step in range(1, steps + 1):
        healthy = {"step": step, "time": 1.7e9 + step, "loss": 3.0 + 2 / step + float(rng.normal(0, 0.02)), "lr": 1e-3,
                   "step_seconds": 0.5 * float(np.exp(rng.normal(0, 0.02))), "data_seconds": 0.005,
                   "tokens_per_second": 8e4, "grad_norm": 1.0 + float(rng.normal(0, 0.05)), "data_repeated": 0.02,
                   "epoch": step / 1000}
        yield healthy | {key: value(step) for key, value in columns.items()}


def run_dir(path: Path, made: Iterator[dict[str, Any]], *, gpus: bool = True, extra: str = "") -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (path / "config.toml").write_text(config() + extra)
    (path / "environment.json").write_text(json.dumps(GPU if gpus else GPU | {"gpus": []}))
    return path


def steps(path: Path, *arguments: str) -> dict[str, Any]:
    done = pdtrain("diag", "steps", path, "--json", *arguments)
    assert done.status in (0, 1)
    return done.json()


def causes(report: dict[str, Any]) -> list[str]:
    return [f["cause"] for f in report["findings"] if f["severity"] != "info"]


def test_a_healthy_run_keeps_its_pace(tmp_path: Path) -> None:
    done = pdtrain("diag", "steps", run_dir(tmp_path / "run", rows()))
    assert done.status == 0 and done.out.startswith("HEALTHY") and "Steps keep their pace" in done.out


def test_a_slow_down_is_the_root_with_its_step(tmp_path: Path) -> None:
    report = steps(run_dir(tmp_path / "run", rows(step_seconds=lambda s: 0.5 + 0.001 * (s % 7) + 0.1 * (s >= 200))))
    finding = report["findings"][0]
    assert (finding["cause"], finding["role"], finding["where"]["step"]) == ("slow_node", "root", 200)
    assert finding["evidence"][0]["line"] == 200 and finding["playbook"] == "straggler"


def test_a_slow_down_on_cpus_is_information(tmp_path: Path) -> None:
    made = rows(step_seconds=lambda s: 0.5 + 0.001 * (s % 7) + 0.1 * (s >= 200))
    report = steps(run_dir(tmp_path / "run", made, gpus=False))
    assert report["verdict"] == "healthy" and any("On CPUs" in f["summary"] for f in report["findings"])


def test_a_slow_down_that_is_waiting_for_data_is_that(tmp_path: Path) -> None:
    made = rows(step_seconds=lambda s: 0.5 + 0.001 * (s % 7) + 0.2 * (s >= 200),
                data_seconds=lambda s: 0.005 + 0.19 * (s >= 200))
    assert causes(steps(run_dir(tmp_path / "run", made))) == ["slow_data_io"]


def test_a_larger_batch_is_no_slow_down(tmp_path: Path) -> None:
    made = rows(step_seconds=lambda s: (0.5 + 0.001 * (s % 7)) * (1 + (s >= 200)),
                batch_size=lambda s: 8 * (1 + (s >= 200)))
    assert causes(steps(run_dir(tmp_path / "run", made))) == []


def test_stalls_name_their_period_and_what_happens_then(tmp_path: Path) -> None:
    made = rows(step_seconds=lambda s: 0.5 + 0.001 * (s % 7) + 2.0 * (s % 20 == 0))
    report = steps(run_dir(tmp_path / "run", made, extra="[checkpoint]\nevery = 20\n"))
    finding = report["findings"][0]
    assert finding["cause"] == "periodic_stall" and finding["numbers"]["period"] == 20
    assert "saving a checkpoint" in finding["summary"]


def test_waiting_for_data_and_all_to_all(tmp_path: Path) -> None:
    report = steps(run_dir(tmp_path / "a", rows(data_seconds=lambda s: 0.5 if s % 3 == 0 else 0.0)))
    assert causes(report) == ["slow_data_io"]
    parts = {f"time/{name}/forward": (lambda s, t=t: t) for name, t in
             (("attention", 0.1), ("experts", 0.05), ("dispatch", 0.06), ("combine", 0.05))}
    report = steps(run_dir(tmp_path / "b", rows(**parts, all_to_all_bytes=lambda s: 1.6e6,
                                                 all_to_all_bytes_expected=lambda s: 1e6)))
    assert causes(report) == ["all_to_all_slow"] and "42%" in report["headline"] and "1.6 times" in report["headline"]


def test_low_utilisation_is_told_with_its_reason_and_its_convention(tmp_path: Path) -> None:
    extra = "[modules.experts]\nrecompute = 'full'\n"
    report = steps(run_dir(tmp_path / "run", rows(mfu=lambda s: 0.21), extra=extra))
    (finding,) = [f for f in report["findings"] if f["cause"] == "low_utilisation"]
    assert finding["severity"] == "info" and report["verdict"] == "healthy"
    assert "MFU is 21%, causal attention" in finding["summary"] and "recomputation of experts" in finding["summary"]


def test_the_slow_rank_leads_and_explains_the_slow_steps(tmp_path: Path) -> None:
    path = run_dir(tmp_path / "run", rows(step_seconds=lambda s: 0.5 + 0.001 * (s % 7) + 0.1 * (s >= 100)))
    (path / "events").mkdir()
    for rank in range(4):
        text = events(rank, 300, lambda r, s, p: 2.0 if r == 2 and s >= 100 else 1.0, 0.02, f"node{rank // 2}")
        (path / "events" / f"rank_{rank}.jsonl").write_text(text)
    report = steps(path)
    first, second = report["findings"][:2]
    assert (first["cause"], first["where"]["ranks"], first["where"]["hosts"]) == ("straggler", [2], ["node1"])
    assert abs(first["where"]["step"] - 100) <= 8 and second["cause"] == "slow_node" and second["role"] == "victim"


def test_a_slow_host_is_named_as_one(tmp_path: Path) -> None:
    for rank in range(6):
        text = events(rank, 100, lambda r, s, p: 1.6 if r in (2, 3) else 1.0, 0.02, f"node{rank // 2}")
        (tmp_path / f"rank_{rank}.jsonl").write_text(text)
    finding = steps(tmp_path)["findings"][0]
    assert finding["where"]["ranks"] == [2, 3] and finding["summary"].startswith("All ranks of host node1")


def test_hot_experts_are_not_a_slow_rank(tmp_path: Path) -> None:
    layout = "[parallel]\nranks = 2\n[modules.experts]\nexpert = 2\n"
    made = ({"step": s, "loss": 2.0, "router/1/counts": [10, 10, 10, 10, 30, 30, 30, 30]} for s in range(1, 200))
    path = run_dir(tmp_path / "run", made, extra=layout)
    (path / "events").mkdir()
    for rank in range(2):
        text = events(rank, 200, lambda r, s, p: 2.5 if r == 1 and p == "experts" else 1.0, 0.02, "n")
        (path / "events" / f"rank_{rank}.jsonl").write_text(text)
    (finding,) = [f for f in steps(path)["findings"] if f["severity"] != "info"]
    assert (finding["cause"], finding["where"]["ranks"]) == ("moe_expert_imbalance", [1])


@pytest.mark.parametrize("text", ["", "{", '{"step": 1, "step_seconds": 0.5}\n', "\x00" * 50,
                                  '{"step": 3, "step_seconds": "NaN", "loss": "NaN"}\n' * 40,
                                  "".join(f'{{"step": {9 - s % 9}, "step_seconds": 0, "loss": 1}}\n'
                                          for s in range(99))])
def test_damaged_empty_and_senseless_input_has_no_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    done = pdtrain("diag", "steps", path)
    assert done.status in (1, 2) and "Traceback" not in done.err + done.out and (done.out or done.err)


def postmortem(path: Path) -> dict[str, Any]:
    return pdtrain("diag", "postmortem", path, "--json").json()


def test_repeated_data_is_found_in_the_first_epoch_only(tmp_path: Path) -> None:
    def repeated(step: int) -> float:
        return 0.95 if step >= 150 else 0.02

    report = postmortem(run_dir(tmp_path / "a", rows(data_repeated=repeated)))
    assert report["findings"][0]["cause"] == "data_repeated" and report["findings"][0]["where"]["step"] == 150
    assert "data_repeated" not in causes(postmortem(run_dir(tmp_path / "b", rows(data_repeated=repeated,
                                                                               epoch=lambda s: s / 140))))
    once = rows(data_repeated=lambda s: 0.9 if s % 40 < 2 else 0.05)
    assert "data_repeated" not in causes(postmortem(run_dir(tmp_path / "c", once)))


@pytest.mark.parametrize("factor, said", [(40.0, True), (6.0, False)])
def test_one_module_that_dwarfs_the_others(tmp_path: Path, factor: float, said: bool) -> None:
    made = rows(**{"grad_norm/attention": lambda s: 0.3 + 0.01 * (s % 5), "grad_norm/router": lambda s: 0.01,
                   "grad_norm/experts": lambda s: 0.3 * factor})
    report = postmortem(run_dir(tmp_path / "run", made))
    found = [f for f in report["findings"] if f["cause"] == "grad_module_imbalance"]
    assert [f["where"]["module"] for f in found] == (["experts"] if said else [])


def test_a_norm_that_explodes_is_told_before_the_loss_moves(tmp_path: Path) -> None:
    made = rows(**{"grad_norm/attention": lambda s: 0.3 * (1 + 0.1 * (s % 3)),
                   "grad_norm/router": lambda s: 0.05 * float(np.exp(max(0, s - 240) / 12))})
    found = [f for f in postmortem(run_dir(tmp_path / "run", made))["findings"] if f["cause"] == "grad_explosion"]
    assert [f["where"]["module"] for f in found] == ["router"]
    assert causes(postmortem(run_dir(tmp_path / "healthy", rows()))) == []
