"""A run that changed the split of its pools is one run: the change is a fact, and nothing of it looks like a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diag.artefacts import memory_source
from diag.artefacts.run_events import EventLog, read
from diag.starts import last_starts
from tests.diag.helpers import pdtrain
from tests.diag.pools.made import BEGAN, Run, trouble

STEPS = 30


def regrouped(folder: Path, *, events: dict[int, list[dict[str, Any]]] | None = None, again: bool = True,
              end: str = "regrouping") -> Path:
    """2 + 2 ranks for 30 steps, then 3 + 1 for 60; without `again` nobody started them. `end`: how the first did."""
    look = {"event": "pool_rebalance", "time": BEGAN + STEPS, "step": STEPS, "action": "regroup", "why": "because",
            "split": [2, 2], "proposed": [3, 1]}
    made = {"event": "pool_regrouped", "time": BEGAN + 1000, "step": STEPS, "before": [2, 2], "after": [3, 1],
            "why": "because", "seconds": 12.5, "failed": False}
    more = {rank: [*(events or {}).get(rank, []), *([look] if rank == 0 else [])] for rank in range(4)}
    first = Run(compute=2, update=2, steps=STEPS, compute_seconds=0.3, update_seconds=0.1, events=more,
                ends=dict.fromkeys(range(4), ""))
    path = first.write(folder / "run")
    second = Run(compute=3, update=1, steps=60, compute_seconds=0.2, update_seconds=0.2).write(folder / "second")
    for rank in range(4):
        name = f"events/rank_{rank}.jsonl"
        rows = [json.loads(line) for line in (path / name).read_text().splitlines()]
        rows += [{"event": end, "time": BEGAN + 40, "step": STEPS}, {"event": "end", "time": BEGAN + 41, "ok": True}]
        if again:
            later = [json.loads(line) for line in (second / name).read_text().splitlines()]
            for row in later:
                row |= {key: row[key] + 1000 for key in ("time", "start") if key in row}
                row |= {"step": row["step"] + STEPS} if "step" in row else {}
            rows += later[:2] + ([made] if rank == 0 else []) + later[2:]
        (path / name).write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    if again:
        for name in ("config.toml", "environment.json", "metrics.jsonl"):
            (path / name).write_bytes((second / name).read_bytes())
    return path


def judged(path: Path, command: str = "pools") -> dict[str, Any]:
    return pdtrain("diag", command, path, "--json").json()


def measured(found: dict[str, Any]) -> dict[str, Any]:
    return next(f for f in found["findings"] if f["cause"] == "pool_measured")


def test_the_change_is_a_fact_and_the_times_are_those_after_it(tmp_path: Path) -> None:
    found = judged(regrouped(tmp_path))
    assert found["verdict"] == "healthy", found["headline"]
    told = measured(found)
    assert "3 compute + 1 update ranks: compute 99% busy, update 99%" in told["summary"]
    assert "after step 30 it went from 2 + 2 to 3 + 1 ranks (12.5 s without training)" in told["summary"]
    assert told["numbers"]["regroupings"] == [
        {"after_step": 30, "from": "2 + 2", "to": "3 + 1", "seconds": 12.5, "failed": False, "why": "because"}]
    notes = " ".join(found["not_checked"])
    assert "changed the split of its pools 1 time, which is one run" in notes and "earlier starts" not in notes
    assert judged(tmp_path / "run", "postmortem")["verdict"] == "healthy"


def test_damage_before_the_change_is_not_forgotten(tmp_path: Path) -> None:
    damage = trouble("pool_checksum_error", 5, 1, direction="up", bucket=0, attempt=1)
    found = judged(regrouped(tmp_path, events={3: [damage, damage | {"peer": 0}]}))
    corrupt = next(f for f in found["findings"] if f["cause"] == "pool_payload_corrupt")
    assert corrupt["where"]["ranks"] == [3], "the receiver: messages of both senders were damaged at it"


def test_a_rank_that_was_in_both_pools_is_named_without_one(tmp_path: Path) -> None:
    damage = trouble("pool_checksum_error", 5, 0, direction="up", bucket=0, attempt=1)
    there = trouble("pool_checksum_error", 5, 2, direction="down", bucket=0, attempt=1)
    found = judged(regrouped(tmp_path, events={2: [damage], 0: [there]}))
    text = " ".join(f["summary"] for f in found["findings"] if f["cause"] == "pool_payload_corrupt")
    assert "compute rank 2" not in text and "update rank 2" not in text


def test_ranks_that_were_never_started_again(tmp_path: Path) -> None:
    found = judged(regrouped(tmp_path, again=False))
    assert "but was not started again: --resume goes on" in measured(found)["summary"]


@pytest.mark.parametrize("end, starts", [("regrouping", 1), ("exception", 2), ("finished", 2)])
def test_only_an_end_in_good_order_joins_two_starts(end: str, starts: int, tmp_path: Path) -> None:
    path = regrouped(tmp_path, end=end)
    name = path / "events" / "rank_0.jsonl"
    log = read(memory_source(name.read_bytes(), str(name)))
    assert isinstance(log, EventLog)
    (cut,), notes = last_starts([log])
    assert isinstance(cut, EventLog)
    names = [event.name for event in cut.events]
    assert names.count("start") == 1 and end not in names[:-1]
    assert any("earlier starts" in note for note in notes) == (starts == 2)
    assert any("regrouped" in note for note in notes) == (starts == 1)


@pytest.mark.parametrize("wrong", [{"before": "2 + 2"}, {"after": [3]}, {"step": None}, {"seconds": "x"},
                                   {"before": [1e99, -1]}, {"why": 7}])  # fmt: skip
def test_a_damaged_record_is_no_change(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = regrouped(tmp_path)
    name = path / "events" / "rank_0.jsonl"
    rows = [json.loads(line) for line in name.read_text().splitlines()]
    rows = [row | wrong if row.get("event") == "pool_regrouped" else row for row in rows]
    name.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    assert measured(judged(path))["numbers"]["regroupings"]
