"""The router's signals: names, units, and the doctor's own formulas."""

from __future__ import annotations

import json
import math

import pytest

from diag import balance
from pdtrain.recorder.routing import router_values


def test_every_documented_key():
    counts = [64, 0, 128, 64]
    got = router_values(3, counts, top_k=2, token_entropy=math.log(2), drop_rate=0.25, aux_loss=1.5, z_loss=0.5,
                        bias_range=0.01)
    assert got == {
        "router/3/counts": counts, "router/3/gini": balance.gini(counts), "router/3/cv": balance.cv(counts),
        "router/3/max_vio": 1.0, "router/3/load_entropy": balance.load_entropy(counts), "router/3/dead_experts": 1,
        "router/3/gini_floor": balance.gini_floor(4, 2, 64.0), "router/3/token_entropy": 0.5,
        "router/3/drop_rate": 0.25, "router/3/aux_loss": 1.5, "router/3/z_loss": 0.5, "router/3/bias_range": 0.01,
    }
    json.dumps(got)


@pytest.mark.parametrize("counts, expected", [
    ([5, 5, 5, 5], {"gini": 0.0, "cv": 0.0, "max_vio": 0.0, "load_entropy": 1.0, "dead_experts": 0}),
    ([20, 0, 0, 0], {"gini": 0.75, "cv": math.sqrt(3), "max_vio": 3.0, "load_entropy": 0.0, "dead_experts": 3}),
])
def test_even_and_collapsed(counts, expected):
    got = router_values(0, counts, top_k=1, with_counts=False)
    values = {name.rpartition("/")[2]: value for name, value in got.items() if "floor" not in name}
    assert values == pytest.approx(expected)


def test_what_was_not_measured_is_absent():
    assert router_values(0, [0, 0], top_k=1) == {"router/0/counts": [0, 0]}
    assert "router/0/token_entropy" not in router_values(0, [3, 4], top_k=1)
