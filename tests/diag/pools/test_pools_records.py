"""Reading of pool records: restarts, rewinds, long runs, damage; and what a live screen makes of them."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diag.artefacts import memory_source
from diag.artefacts.run_events import EventLog, read
from diag.artefacts.step_times import MAX_BINS
from diag.watch.live import Watch
from diag.watch.screen import screen
from tests.diag.helpers import pdtrain
from tests.diag.pools.made import Run, trouble


def log_of(path: Path, rank: int) -> EventLog:
    found = read(memory_source((path / "events" / f"rank_{rank}.jsonl").read_bytes(), f"run/events/rank_{rank}.jsonl"))
    assert isinstance(found, EventLog)
    return found


def test_long_runs_are_folded_and_later_events_are_kept() -> None:
    """One record per step must not crowd out the event that says how the run ended."""
    rows = ['{"event":"start","time":1.0,"rank":2,"host":"n"}\n',
            *(f'{{"event":"pool_step","time":1.0,"step":{step},"role":"update","step_seconds":0.5,"busy_seconds":0.1}}\n'
              for step in range(1, 12_001)), '{"event":"exception","time":9.0,"type":"OSError"}\n']
    log = read(memory_source("".join(rows).encode(), "run/events/rank_2.jsonl"))
    assert isinstance(log, EventLog) and log.pool is not None and log.pool.records == 12_000
    assert log.pool.role == "update" and all(len(column.bins) <= MAX_BINS for column in log.pool.times.values())
    assert [event.name for event in log.events] == ["start", "exception"]


def test_only_the_last_start_counts(tmp_path: Path) -> None:
    path = Run(steps=30).write(tmp_path / "run")
    file = path / "events" / "rank_2.jsonl"
    bad = json.dumps(trouble("pool_checksum_error", 3, 0, direction="up"), separators=(",", ":")) + "\n"
    file.write_text(bad + file.read_text())
    log = log_of(path, 2)
    assert log.pool is not None and log.pool.trouble("pool_checksum_error") == [] and log.pool.records == 30
    assert pdtrain("diag", "pools", path).status == 0


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    path = Run(steps=40).write(tmp_path / "run")
    file = path / "events" / "rank_0.jsonl"
    file.write_text(file.read_text() + '{"event":"resume","time":1.0,"step":20}\n')
    pool = log_of(path, 0).pool
    assert pool is not None and max(n * pool.times["step"].width for n in pool.times["step"].bins) <= 20


@pytest.mark.parametrize("bad", [
    '{"event":"pool_step","step":"x","role":"update"}', '{"event":"pool_step","step":9,"role":"update"}',
    '{"event":"pool_step","step":9,"role":"cook","step_seconds":1}', '{"event":"pool_step","step":9,"rol',
    '{"event":"pool_step","step":9,"role":"update","step_seconds":"NaN"}', '{"event":"pool","role":7}',
    '{"event":"pool_staleness","histogram":{"x":1}}',
    '{"event":"pool_step","step":true,"role":"update","step_seconds":1}',
])  # fmt: skip
def test_a_damaged_record_is_said_and_costs_nothing_else(tmp_path: Path, bad: str) -> None:
    path = Run().write(tmp_path / "run")
    file = path / "events" / "rank_1.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:40], bad, *lines[40:]]) + "\n")
    done = pdtrain("diag", "pools", path, "--json")
    found = done.json()
    assert found["verdict"] == "healthy" and any("line 41" in (i.get("problem") or "") for i in found["inputs"])
    assert any(f["cause"] == "pool_measured" and len(f["numbers"]["ranks"]) == 4 for f in found["findings"])


WRONG: list[Any] = [None, True, -1, 1e300, float("nan"), "12", [], {}, [{}], {"peer": 1}, 1 << 80]


@pytest.mark.parametrize("seed", range(6))
def test_any_value_may_be_anything(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback, whatever the records hold: PDTRAIN_STRICT shows what would be caught."""
    monkeypatch.setenv("PDTRAIN_STRICT", "1")
    chance = random.Random(seed)
    events = {2: [trouble(name, 5, 0, direction="up", version=3, expected=4, action="drop", reason="x")
                  for name in ("pool_checksum_error", "pool_version_mismatch", "pool_peer_lost", "pool_timeout")]}
    path = Run(steps=20, events=events).write(tmp_path / "run")
    for file in sorted((path / "events").iterdir()):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            if chance.random() < 0.3:
                row[chance.choice([key for key in row if key not in ("event", "span")])] = chance.choice(WRONG)
        file.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    facts = json.loads((path / "environment.json").read_text())
    facts["pools"][chance.choice(list(facts["pools"]))] = chance.choice(WRONG)
    (path / "environment.json").write_text(json.dumps(facts))
    done = pdtrain("diag", "pools", path, "--json")
    assert done.status in (0, 1) and done.json()["schema"] == "pdtrain.report/1"


def test_half_a_run_is_not_checked_and_says_what_lacks(tmp_path: Path) -> None:
    path = Run().write(tmp_path / "run")
    for rank in (2, 3):
        (path / "events" / f"rank_{rank}.jsonl").unlink()
    found = pdtrain("diag", "pools", path, "--json").json()
    assert [f["cause"] for f in found["findings"] if f["severity"] != "info"] == []
    assert any("no update rank left pool records" in note for note in found["not_checked"])
    short = pdtrain("diag", "pools", Run(steps=6).write(tmp_path / "short"), "--json").json()
    assert any("3 measured steps of the compute pool, 8 are needed" in note for note in short["not_checked"])


def test_no_records_of_a_separated_run(tmp_path: Path) -> None:
    path = Run().write(tmp_path / "run")
    for file in (path / "events").iterdir():
        file.write_text('{"event":"start","time":1.0,"rank":0,"host":"n"}\n')
    done = pdtrain("diag", "pools", path)
    assert done.status == 1 and "recorded no pool events" in done.out and "Traceback" not in done.out + done.err


def test_the_live_screen_shows_both_pools(tmp_path: Path) -> None:
    watch = Watch([str(Run().write(tmp_path / "run"))])
    for second in range(3):
        watch.tick(1e9 + second)
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(screen(watch, 1e9 + 3, 100, "run"))
    shown = console.export_text()
    assert "compute pool" in shown and "99% busy" in shown and "update pool" in shown
    assert "8" in shown.split("update pool")[1].split("% busy")[0]
    assert "pools' link" in shown and "queue 5" in shown


def restart(**fields: Any) -> dict[str, Any]:
    """Rank 0's event of a start that followed the death of update rank 3."""
    failures = [{"start": 1, "rank": 3, "how": "was killed by SIGKILL"}]
    return {"event": "pool_restart", "time": 1_700_000_000.0, "start": 2, "failures": failures, "step": 20,
            "reached": 21, "lost_steps": 1, "source": "kept", "lacking": [], "seconds": 11.7} | fields  # fmt: skip


def test_a_run_that_was_started_again_is_not_a_failed_one(tmp_path: Path) -> None:
    found = pdtrain("diag", "pools", Run(events={0: [restart()]}).write(tmp_path / "run"), "--json").json()
    (one,) = [f for f in found["findings"] if f["severity"] == "warning"]
    assert (one["cause"], one["where"]["ranks"], one["playbook"]) == ("pool_restarted", [3], "pool-member")
    assert "was killed by SIGKILL" in one["summary"]
    assert "after step 20, which the update pool had kept" in one["summary"]
    assert "1 step had to be computed again, 12 s passed" in one["summary"] and found["verdict"] == "degraded"


@pytest.mark.parametrize("fields", [
    {"failures": 7}, {"failures": [{"rank": "x"}]}, {"step": True, "start": [], "seconds": "now", "lost_steps": -1},
    {"source": ["kept"], "failures": [{"start": 1, "rank": 1 << 70, "how": 3}]},
])  # fmt: skip
def test_a_restart_may_say_anything(tmp_path: Path, fields: dict[str, Any]) -> None:
    found = pdtrain("diag", "pools", Run(events={0: [restart(**fields)]}).write(tmp_path / "run"), "--json").json()
    assert "pool_restarted" in {f["cause"] for f in found["findings"]}


def test_odd_delivery_is_named_and_no_alarm(tmp_path: Path) -> None:
    events = {2: [trouble("pool_duplicate", 9, 1, direction="up", bucket=0),
                  trouble("pool_reordered", 12, 1, direction="up", bucket=1)],
              1: [trouble("pool_late", 30, 2, direction="up", bucket=0, seconds=3.21)]}  # fmt: skip
    found = pdtrain("diag", "pools", Run(update=1, events=events).write(tmp_path / "run"), "--json").json()
    (one,) = [f for f in found["findings"] if f["cause"] == "pool_delivery"]
    assert (one["severity"], one["where"]["ranks"], one["playbook"]) == ("info", [1], "pool-delivery")
    assert all(words in one["summary"] for words in ("1 twice", "1 after a later one", "1 late", "3.21 s"))
    assert found["verdict"] != "failed" and not [f for f in found["findings"] if f["severity"] == "error"]
