"""The arithmetic behind the figures of benchmarks/pool_overlap.py: what counts as exposed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def timeline() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "pool_timeline.py"
    spec = importlib.util.spec_from_file_location("pool_timeline", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["pool_timeline"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_time_in_which_the_update_computes_is_not_exposed(timeline: ModuleType) -> None:
    steps = range(1, 8)
    spans = {name: [(10.0 * s + a, 10.0 * s + b, s) for s in steps] for name, (a, b) in {
        "data": (0.0, 0.1), "forward": (0.1, 3.0), "backward": (3.0, 6.0), "pool_send": (5.5, 7.0),
        "pool_wait_weights": (7.0, 9.5)}.items()}
    compute = timeline.Rank(spans, {})
    update = timeline.Rank({"optimizer": [(10.0 * s + 7.2, 10.0 * s + 8.2, s) for s in steps]}, {})
    found = timeline.per_step(compute, update)
    assert found["step"] == pytest.approx(10.0) and found["optimizer"] == pytest.approx(1.0)
    assert found["exposed"] == pytest.approx(4.0 - 1.0)  # sending and waiting, without the optimizer
    assert found["compute"] == pytest.approx(5.9 - 0.5)  # what is handed over inside backward is not backward
    drawn = timeline.lanes(compute, update, [(12.0, 13.0, 0.9, 0.0)], (10.0, 20.0))
    text = timeline.as_text(drawn, (10.0, 20.0), width=20)
    assert [line.split()[-1] for line in text.splitlines()][:2] == ["FFFFFFBBBBB########.", "....gg.............."]
    assert timeline.as_svg([("one", drawn, (10.0, 20.0))]).count("<rect") > 8
