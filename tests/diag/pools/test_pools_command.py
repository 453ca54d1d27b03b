"""`pdtrain diag pools` on made-up runs, each with one thing wrong with it, as its user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.diag.helpers import config, pdtrain
from tests.diag.pools.made import Run, trouble


def report(path: Path, run: Run) -> dict[str, Any]:
    done = pdtrain("diag", "pools", run.write(path / "run"), "--json")
    assert done.status in (0, 1), done.err
    return done.json()


def causes(found: dict[str, Any]) -> list[str]:
    return [f["cause"] for f in found["findings"] if f["severity"] != "info"]


def finding(found: dict[str, Any], cause: str) -> dict[str, Any]:
    (one,) = [f for f in found["findings"] if f["cause"] == cause and f["severity"] != "info"]
    return one


@pytest.mark.parametrize("run", [
    Run(), Run(mode="sync", compute_seconds=0.3, update_seconds=0.28), Run(compute=4, update=4),
    Run(mode="async", staleness=1, lag=lambda step: 1), Run(noise=0.3, update_seconds=0.22),
], ids=["stream", "sync", "four", "async", "noisy"])
def test_healthy_runs_are_silent_and_measured(tmp_path: Path, run: Run) -> None:
    found = report(tmp_path, run)
    assert found["verdict"] == "healthy" and causes(found) == [] and found["not_checked"] == []
    measured = next(f for f in found["findings"] if f["cause"] == "pool_measured")
    rows = {row["pool"]: row for row in measured["numbers"]["pools"]}
    assert rows["compute"]["ranks"] == run.compute and rows["update"]["state"] != "0 B" == rows["compute"]["state"]
    assert {row["phase"] for row in measured["numbers"]["phases"]} >= {"forward", "optimizer", "pool_wait_weights"}
    assert len(measured["numbers"]["links"]) == 2 * run.compute
    assert measured["numbers"]["bytes_up"] == measured["numbers"]["bytes_up_expected"]


def test_side_by_side_on_a_terminal(tmp_path: Path) -> None:
    done = pdtrain("diag", "pools", Run().write(tmp_path / "run"))
    assert done.status == 0 and done.out.startswith("HEALTHY")
    assert re.search(r"compute +2 +99 ", done.out) and re.search(r"update +2 +86 ", done.out)


def test_an_idle_update_pool_is_told_the_ratio(tmp_path: Path) -> None:
    found = report(tmp_path, Run(compute=4, update=4, update_seconds=0.08))
    one = finding(found, "pool_imbalance")
    assert one["role"] == "root" and one["playbook"] == "pool-imbalance" and one["where"].get("ranks", []) == []
    numbers = one["numbers"]
    assert numbers["balances"] and (numbers["recommended_compute"], numbers["recommended_update"]) == (6, 2)
    assert numbers["compute_ranks_per_update_rank"] == pytest.approx(306 / 84, rel=0.02)
    assert "--set pools.update_ranks=2" in one["fix"][0] and "--nproc 8" in one["fix"][0]
    noted = {row["note"]: row for row in numbers["splits"]}
    assert noted["now"]["compute"] == 4 and any("recommended" in note for note in noted)


def test_the_recommended_split_is_balanced_when_it_runs(tmp_path: Path) -> None:
    """The work of each pool is constant: made anew with the ranks that were recommended, nothing is left to say."""
    one = finding(report(tmp_path, Run(compute=4, update=4, update_seconds=0.09)), "pool_imbalance")["numbers"]
    compute, update = one["recommended_compute"], one["recommended_update"]
    again = Run(compute=compute, update=update, compute_seconds=0.3 * 4 / compute, update_seconds=0.09 * 4 / update)
    assert causes(report(tmp_path / "again", again)) == []


def test_no_split_balances_and_it_says_so(tmp_path: Path) -> None:
    found = report(tmp_path, Run(compute=2, update=1, update_seconds=0.03))
    one = finding(found, "pool_imbalance")
    assert one["numbers"]["balances"] is False and "No split of 3 ranks" in one["summary"]
    assert any("not to separate" in step and "0.215 s" in step for step in one["fix"])


def test_layout_limits_what_is_recommended(tmp_path: Path) -> None:
    """TP 2 allows 6 + 2 of eight ranks, not 5 + 3, which would be even."""
    one = finding(report(tmp_path, Run(compute=4, update=4, update_seconds=0.13, tensor=2)), "pool_imbalance")
    assert all(row["compute"] % 2 == 0 for row in one["numbers"]["splits"])
    assert one["numbers"]["recommended_compute"] == 6


@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_a_slow_update_rank_is_named(tmp_path: Path, mode: str) -> None:
    run = Run(compute=4, update=2, mode=mode, update_seconds=0.2, change=lambda r, s: 5.0 if r == 5 else 1.0)
    found = report(tmp_path, run)
    one = finding(found, "pool_weights_late")
    assert one["role"] == "root" and one["where"]["ranks"] == [5] and one["where"]["hosts"] == ["node2"]
    assert causes(found) in (["pool_weights_late"], ["pool_weights_late", "pool_imbalance"])


def test_since_when_the_update_rank_is_slow(tmp_path: Path) -> None:
    run = Run(compute=4, update=2, steps=120, update_seconds=0.2, change=lambda r, s: 5.0 if r == 5 and s > 60 else 1.0)
    assert abs(finding(report(tmp_path, run), "pool_weights_late")["where"]["step"] - 61) <= 4


def test_a_lone_slow_update_rank_is_named_with_the_ratio(tmp_path: Path) -> None:
    found = report(tmp_path, Run(compute=2, update=1, update_seconds=1.3))
    assert finding(found, "pool_weights_late")["where"]["ranks"] == [2]
    assert causes(found) == ["pool_weights_late", "pool_imbalance"]


def test_more_state_is_no_slowness(tmp_path: Path) -> None:
    """An update rank that owns three times as much needs three times as long."""
    run = Run(compute=4, update=2, update_seconds=0.1, change=lambda r, s: 3.0 if r == 5 else 1.0,
              state=lambda r: 3_000_000 if r == 5 else 1_000_000)
    assert "pool_weights_late" not in causes(report(tmp_path, run))


def test_a_slow_compute_rank_is_why_gradients_are_late(tmp_path: Path) -> None:
    run = Run(compute=4, update=2, steps=100, change=lambda r, s: 2.5 if r == 1 else 1.0)
    found = report(tmp_path, run)
    assert finding(found, "pool_gradients_late")["where"]["ranks"] == [1]
    joined = pdtrain("diag", "postmortem", tmp_path / "run", "--json").json()
    assert joined["findings"][0]["cause"] == "straggler" and joined["findings"][0]["where"]["ranks"] == [1]
    victims = {f["cause"] for f in joined["findings"] if f["role"] == "victim"}
    assert {"pool_gradients_late", "pool_imbalance"} <= victims


def test_update_ranks_are_no_stragglers_of_the_compute_pool(tmp_path: Path) -> None:
    done = pdtrain("diag", "steps", Run().write(tmp_path / "run"), "--json").json()
    assert causes(done) == [] and any("2 ranks compared" in f["summary"] for f in done["findings"])


def test_the_exchange_takes_too_long(tmp_path: Path) -> None:
    found = report(tmp_path, Run(mode="sync", send_seconds=0.06, link_seconds=0.2, update_seconds=0.25))
    one = finding(found, "pool_communication")
    assert one["role"] == "root" and one["numbers"]["share"] > 0.25
    order = [step.split(":")[0].split(";")[0] for step in one["fix"]]
    assert order[:4] == ["Deeper buffers", "Compression", "Placement", "Priority"]
    assert "pools.mode=stream" in one["fix"][0] and "pools.payload=bf16" in one["fix"][1]


def test_waiting_for_the_link_is_exchange_and_not_work(tmp_path: Path) -> None:
    """A slow link must not look like a busy compute pool, nor be counted twice."""
    found = report(tmp_path, Run(mode="sync", send_seconds=0.3, blocked_seconds=0.29, update_seconds=0.25))
    step = 0.30 + 0.25 + 0.3 + 0.004
    assert abs(finding(found, "pool_communication")["numbers"]["share"] - 0.3 / step) < 0.01
    (shown,) = [item for item in found["findings"] if item["cause"] == "pool_measured"]
    assert abs(shown["numbers"]["pools"][0]["busy_%"] - 100 * (0.30 + 0.01) / step) < 1


def test_waiting_for_the_update_itself_is_no_communication(tmp_path: Path) -> None:
    assert "pool_communication" not in causes(report(tmp_path, Run(mode="sync", update_seconds=0.3)))


def test_damaged_messages_name_pair_and_direction(tmp_path: Path) -> None:
    events = {2: [trouble("pool_checksum_error", s, 0, direction="up", bucket=3, attempt=1) for s in (12, 30)]}
    one = finding(report(tmp_path, Run(events=events)), "pool_payload_corrupt")
    assert one["severity"] == "warning" and one["where"]["ranks"] == [0] and one["where"]["step"] == 12
    assert "2 messages" in one["summary"] and "gradients from rank 0 to rank 2" in one["summary"]
    assert one["evidence"][0]["line"] > 1 and one["evidence"][0]["path"].endswith("rank_2.jsonl")


def test_damage_from_everybody_is_the_receivers(tmp_path: Path) -> None:
    events = {4: [trouble("pool_checksum_error", 9, peer, direction="up", bucket=1) for peer in (0, 1)]}
    found = report(tmp_path, Run(compute=4, update=2, events=events))
    assert finding(found, "pool_payload_corrupt")["where"]["ranks"] == [4]


def test_refused_payload_ends_the_run(tmp_path: Path) -> None:
    said = "pools: rank 2 (update) refused gradients of step 12, bucket 3 from rank 1 (compute): checksum wrong 4 times"
    events = {2: [trouble("pool_checksum_error", 12, 1, direction="up", bucket=3, attempt=4),
                  {"event": "exception", "time": 1.8e9, "step": 61, "type": "PoolError", "message": said}]}
    found = report(tmp_path, Run(events=events, ends={2: ""}))
    assert found["verdict"] == "failed" and finding(found, "pool_payload_corrupt")["severity"] == "fatal"


@pytest.mark.parametrize("action, severity", [("recompute", "warning"), ("drop", "warning"), ("accept", "error")])
def test_a_wrong_version_names_who_sent_it(tmp_path: Path, action: str, severity: str) -> None:
    events = {2: [trouble("pool_version_mismatch", 12, 0, direction="up", bucket=3, version=9, expected=11,
                          incarnation=1, expected_incarnation=1, action=action)]}
    one = finding(report(tmp_path, Run(events=events)), "pool_version_mismatch")
    assert one["severity"] == severity and one["where"]["ranks"] == [0] and "version 9 came, 11" in one["summary"]
    assert ("Nothing of a wrong version was applied" in one["summary"]) is (action != "accept")


def test_versions_that_ended_the_run_are_no_warning(tmp_path: Path) -> None:
    said = "pools: gradients of step 12, bucket 3 were refused 4 times for their weight version; rank 0 gives up"
    events = {2: [trouble("pool_version_mismatch", 12, 0, direction="up", bucket=3, version=9, expected=11,
                          incarnation=1, expected_incarnation=1, action="recompute")],
              0: [{"event": "exception", "time": 1.8e9, "step": 61, "type": "PoolError", "message": said}]}
    found = report(tmp_path, Run(events=events, ends={0: ""}))
    one = finding(found, "pool_version_mismatch")
    assert found["verdict"] == "failed" and one["severity"] == "fatal" and "The run ended of it" in one["summary"]


def test_versions_accepted_within_the_bound_are_what_async_is(tmp_path: Path) -> None:
    events = {2: [trouble("pool_version_mismatch", 12, 0, direction="up", bucket=3, version=10, expected=11,
                          action="accept")]}
    run = Run(mode="async", staleness=1, lag=lambda step: 1, events=events)
    assert causes(report(tmp_path, run)) == []


def test_weights_too_old(tmp_path: Path) -> None:
    found = report(tmp_path, Run(mode="async", staleness=1, lag=lambda step: 4 if step in (30, 31) else 1))
    one = finding(found, "pool_staleness")
    assert one["severity"] == "error" and one["where"]["step"] == 30 and one["numbers"]["worst"] == 4
    assert one["numbers"]["allowed"] == 1 and "the run allows 1" in one["summary"]


def test_a_queue_that_grows(tmp_path: Path) -> None:
    found = report(tmp_path, Run(mode="async", staleness=1, lag=lambda s: 1,
                                 queue=lambda rank, step: 5 + step // 3 if rank < 2 else 5))
    one = finding(found, "pool_queue_growth")
    assert "compute ranks 0, 1" in one["summary"] and one["numbers"]["queue_last"] > 3 * 5


def test_a_lost_rank_is_named_and_not_those_that_say_it(tmp_path: Path) -> None:
    gone = {"direction": "down", "waiting_for": "weights of step 41, bucket 3", "reason": "connection closed",
            "seconds": 3.2}
    events = {0: [trouble("pool_peer_lost", 41, 2, **gone)], 1: [trouble("pool_peer_lost", 41, 2, **gone)],
              3: [trouble("pool_peer_lost", 42, 0, **gone)]}
    found = report(tmp_path, Run(steps=41, events=events, ends={0: "end", 1: "end", 2: "", 3: "end"}))
    one = finding(found, "pool_member_lost")
    assert found["verdict"] == "failed" and one["where"]["ranks"] == [2] and one["role"] == "root"
    assert "Update rank 2" in one["summary"] and "weights of step 41" in one["summary"]


def test_a_rank_that_recorded_nothing_is_not_said_to_be_killed(tmp_path: Path) -> None:
    """It went while it joined, before it could record: an error of its own as likely as a kill."""
    gone = {"direction": "down", "waiting_for": "weights of step 1, bucket 3", "reason": "connection closed"}
    path = Run(compute=2, update=1, events={0: [trouble("pool_peer_lost", 1, 2, **gone)]}, ends={0: "end"}).write(
        tmp_path / "run")
    (path / "events" / "rank_2.jsonl").unlink()
    one = finding(pdtrain("diag", "pools", path, "--json").json(), "pool_member_lost")
    assert one["where"]["ranks"] == [2] and "killed" not in one["summary"] and "its own log" in one["summary"]


def test_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    events = {2: [trouble("pool_timeout", 20, 0, direction="up", waiting_for="gradients of step 20, bucket 0",
                          reason="no answer in 60 s", seconds=60.0)]}
    one = finding(report(tmp_path, Run(steps=20, events=events, ends=dict.fromkeys(range(4), ""))), "pool_member_lost")
    assert one["where"]["ranks"] == [0] and "does not answer" in one["summary"]


def test_what_was_lost_and_left_out_is_told(tmp_path: Path) -> None:
    events = {2: [{"event": "pool_restored", "time": 1.0, "step": 10, "reached": 13, "lost_steps": 3},
                  {"event": "pool_skipped", "time": 2.0, "step": 20, "reason": "non-finite gradient"}]}
    found = report(tmp_path, Run(events=events))
    said = next(f["summary"] for f in found["findings"] if f["cause"] == "pool_measured")
    assert found["verdict"] == "healthy" and "3 steps that the update pool had reached" in said
    assert "1 update was left out" in said


def test_update_ranks_that_disagree(tmp_path: Path) -> None:
    path = Run(compute=2, update=3, update_seconds=0.2).write(tmp_path / "run")
    file = path / "events" / "rank_3.jsonl"
    file.write_text(re.sub(r'"step":(4\d),"role":"update","incarnation":1,"version":4\d',
                           r'"step":\1,"role":"update","incarnation":1,"version":39', file.read_text()))
    one = finding(pdtrain("diag", "pools", path, "--json").json(), "pool_version_mismatch")
    assert one["where"]["ranks"] == [3] and one["where"]["step"] == 40


def test_a_run_without_pools_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank_0.jsonl").write_text('{"event":"start","time":1.0,"rank":0,"host":"n"}\n')
    (tmp_path / "config.toml").write_text(config() + '[pools]\nmode = "off"\n')
    done = pdtrain("diag", "pools", tmp_path)
    line = 'HEALTHY  No pools here: pools.mode = "off", one pool does both phases.'
    assert done.status == 0 and done.out.splitlines()[0] == line
    assert "pools" not in pdtrain("diag", "postmortem", tmp_path).out.replace("config.toml", "")


def test_separation_beside_a_run_without(tmp_path: Path) -> None:
    separated = Run(compute=2, update=1, update_seconds=0.03).write(tmp_path / "with")
    alone = tmp_path / "alone"
    (alone / "events").mkdir(parents=True)
    text = (separated / "config.toml").read_text()
    (alone / "config.toml").write_text(re.sub(r"(?s)\[pools\].*", '[pools]\nmode = "off"\nupdate_ranks = 0\n', text))
    (alone / "metrics.jsonl").write_text("".join(
        json.dumps({"step": s, "loss": 3 + 1 / s, "step_seconds": 0.32, "tokens_per_second": 25_600}) + "\n"
        for s in range(1, 40)))
    found = pdtrain("diag", "pools", separated, alone, "--json").json()
    (one,) = [f for f in found["findings"] if "without" in f["numbers"]]
    assert one["numbers"]["pays"] is False and one["summary"].startswith(
        "Separation does not pay here: 0.308 s per step with pools (3 ranks) against 0.32 s without (2 ranks")
