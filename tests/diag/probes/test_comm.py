"""`pdtrain diag comm` among real ranks: right numbers, and the name of whoever dies or stops while it measures."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from diag.probes.comm.ask import OPERATIONS
from diag.probes.comm.records import bus_factor, decode
from tests.diag.helpers import pdtrain
from tests.diag.probes.comm_job import Job, roots

#: Sizes that are done one after the other for as long as a test needs to do some harm.
LONG: dict[str, Any] = {"iterations": 400, "max_bytes": 4 << 20, "budget": 600.0, "timeout": 6.0}


def test_every_operation_is_measured_checked_and_saved(tmp_path: Path) -> None:
    report, statuses = Job(3, tmp_path, max_bytes=4 << 10, budget=8.0).answer()
    assert report["verdict"] == "healthy" and statuses == [0, 0, 0]
    assert {row["operation"] for row in report["rows"]} == set(OPERATIONS)
    for row in report["rows"]:
        assert row.get("wrong", 0) == 0 and row["ranks"] == [0, 1, 2]
        assert 0 < row["min_seconds"] <= row["median_seconds"] <= row["p99_seconds"]
        assert row["busbw"] == pytest.approx(row["algbw"] * bus_factor(row["operation"], 3))
        assert row["algbw"] == pytest.approx(row["bytes"] / row["median_seconds"] / 1e9)
    assert any("floor unknown" in note for note in report["not_checked"])
    saved = decode((tmp_path / "probe.json").read_bytes())
    assert len(saved.rows) == len(report["rows"]) and saved.world == 3 and set(saved.rates) == {"node_bandwidth"}
    again = pdtrain("diag", "comm", tmp_path / "probe.json")
    assert again.status == 0 and "all_to_all_skewed, world (3 ranks)" in again.out
    planned = pdtrain("plan", "--preset", "tiny", "--gpus", "2", "--memory", "80GB", "--probe",
                      tmp_path / "probe.json", "--json")
    assert planned.status == 0, planned.err


@pytest.mark.parametrize("rank, number, how", [(2, signal.SIGKILL, "gone"), (1, signal.SIGSTOP, "stopped")])
def test_a_rank_that_is_lost_is_named_and_the_others_report(rank: int, number: signal.Signals, how: str,
                                                            tmp_path: Path) -> None:
    job = Job(3, tmp_path, operations=("all_reduce",), **LONG)
    job.reached("all_reduce 4 KiB")
    job.signal(rank, number)
    report, statuses = job.answer(but=(rank,), patience=30)
    root, = roots(report)
    assert root["cause"] == "peer_unreachable" and root["where"]["ranks"] == [rank] and root["numbers"]["how"] == how
    assert report["verdict"] == "failed" and "all_reduce" in root["summary"] and root["playbook"] == "peer-unreachable"
    assert report["rows"][0]["bytes"] == 1 << 10, "what was measured before stands"
    assert statuses[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_rank_0_another_prints(number: signal.Signals, tmp_path: Path) -> None:
    job = Job(3, tmp_path, operations=("all_to_all",), **LONG)
    job.reached("all_to_all 4 KiB")
    job.signal(0, number)
    report, statuses = job.answer(but=(0,), patience=30)
    assert roots(report)[0]["where"]["ranks"] == [0] and statuses[1] == 1
    assert report["rows"][0]["bytes"] == 1020, "what rank 0 had measured outlives it"


@pytest.mark.slow
def test_an_interrupted_probe_shows_what_it_has(tmp_path: Path) -> None:
    job = Job(2, tmp_path, operations=("all_reduce",), **LONG)
    job.reached("all_reduce 4 KiB")
    job.signal(0, signal.SIGINT)
    report, _ = job.answer(patience=30)
    assert roots(report)[0]["cause"] == "preempted" and report["rows"][0]["bytes"] == 1 << 10


@pytest.mark.slow
def test_groups_of_a_run(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[parallel]\nranks = 4\n[modules.attention]\ntensor = 2\n[modules.experts]\nexpert = 4\n")
    report, statuses = Job(4, tmp_path, config=str(config), max_bytes=1 << 10).answer(patience=90)
    assert statuses[0] == 0, report["headline"]
    groups = {row["group"]: row["ranks"] for row in report["rows"]}
    assert groups["tp[0,1]"] == [0, 1] and groups["tp[2,3]"] == [2, 3] and groups["dp[1,3]"] == [1, 3]
    assert groups["ep[0-3]"] == [0, 1, 2, 3] and not any(name.startswith("edp") for name in groups)
    dispatch = next(extra for extra in report["extras"] if extra["kind"] == "dispatch")
    assert dispatch["numbers"]["bytes_per_peer"] * 4 == dispatch["numbers"]["bytes_per_rank"]
    at_once, _ = Job(4, tmp_path, config=str(config), max_bytes=1 << 10, concurrent=True).answer(patience=90)
    assert all(row["concurrent"] for row in at_once["rows"]) and len(at_once["rows"]) == len(report["rows"])


@pytest.mark.slow
def test_hierarchy_overlap_and_payload(tmp_path: Path) -> None:
    report, _ = Job(4, tmp_path, operations=("all_reduce",), extras=True, ranks_per_node=2).answer(patience=90)
    extras = {(extra["kind"], extra["name"]): extra["numbers"] for extra in report["extras"]}
    assert extras["hierarchy", "2 nodes of 2"]["wrong"] == 0
    assert {name for kind, name in extras if kind == "overlap"} == {"all_reduce", "all_to_all"}
    whole, half, quarter = (extras["payload", name] for name in ("fp32", "bf16", "fp8"))
    assert half["bytes"] * 2 == whole["bytes"] and quarter["bytes"] < 0.27 * whole["bytes"]
    assert whole["largest_error"] == 0 < half["largest_error"] < quarter["largest_error"] < 0.08
