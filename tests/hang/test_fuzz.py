"""Dumps whose fields were changed at random are read or refused; the analysis of what is left never fails."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from diag.diagnose import diagnose
from tests.hang import scenarios
from tests.hang.simulate import raw_dump

SETS = int(os.environ.get("PDTRAIN_FUZZ", "150"))
ODD = (None, -1, 0, 2**63 - 1, -(2**70), 1.5, "", "x" * 2000, "send 0->1", "nccl:send 9->9", "gloo:", [], [[]], [[-3]],
       {}, True, "[0, 1]", "[1, 0, 0]", "[99999999]", b"\xff", ("a", "b"), [1, [2]], "default_pg", "\x1b]0;x\x07")


def mutate(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """`value` with one of its parts, chosen at random, replaced, dropped or doubled."""
    if isinstance(value, dict) and value and (depth < 1 or draw.random() < 0.9):
        key = draw.choice(list(value))
        how = draw.random()
        changed = dict(value)
        if how < 0.15:
            del changed[key]
        elif how < 0.2:
            changed[draw.choice(("zzz", "", "7"))] = changed.pop(key)
        else:
            changed[key] = mutate(value[key], draw, depth + 1)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        how = draw.random()
        if how < 0.1:
            return value[:place]
        if how < 0.2:
            return value + [value[place]]
        return [*value[:place], mutate(value[place], draw, depth + 1), *value[place + 1 :]]
    return draw.choice(ODD)


def test_odd_fields_never_break_the_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTRAIN_STRICT", "1")  # our own mistakes surface
    draw = random.Random(11)
    verdicts = set()
    for number in range(SETS):
        scenario = scenarios.generated(draw.randrange(200))
        if scenario.world.size > 8:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank in range(scenario.world.size):
            raw: Any = raw_dump(scenario.world, rank, backend=draw.choice(("nccl", "nccl", "gloo")),
                                version=draw.choice(("2.10", "2.4", "1.4")))
            for _ in range(draw.choice((0, 1, 1, 3, 10))):
                raw = mutate(raw, draw)
            form = draw.random() < 0.2
            try:
                data = json.dumps(raw, default=str).encode() if form else pickle.dumps(raw, 2)
            except (TypeError, ValueError):  # nothing JSON could hold
                data = pickle.dumps(raw, 4)
            (folder / f"rank_{rank}").write_bytes(data)
        report = diagnose([folder], only="hang")
        verdicts.add(report.verdict)
        for finding in report.findings:
            assert all(isinstance(rank, int) for rank in finding.where.ranks)
            assert len(finding.summary) < 3000
    assert {"failed", "unknown"} <= verdicts
