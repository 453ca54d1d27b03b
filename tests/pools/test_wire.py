"""What crosses between the pools, counted by the network interface, is what the plan and the records say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.netns.hosts import Network, missing
from tests.netns.training import account, crossed, train_across

CONFIG = """
[model]
hidden = 256
layers = 2
dense_layers = 2
ffn_hidden = 1024
[train]
steps = 6
sequence_length = 32
micro_batch = 2
train_batch = 2
val_sequences = 0
[optimizer]
warmup_steps = 1
[recorder]
tensorboard = false
[pools]
mode = "stream"
update_ranks = 1
payload = "{payload}"
bucket_mb = 1.0
timeout_seconds = 30
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("payload, width", [("fp32", 4), ("bf16", 2)])
def test_bytes_on_the_wire_are_those_of_the_plan(tmp_path: Path, payload: str, width: int) -> None:
    if why := missing():
        pytest.skip(why)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(payload=payload))
    with Network(2, 1000.0) as network:
        train_across(network, config, tmp_path / "run", timeout=100)
        carried = crossed(network, 0)
    found = account(tmp_path / "run", carried)
    plan = json.loads((tmp_path / "run" / "environment.json").read_text())["pools"]
    parameters = sum(owner["parameters"] for owner in plan["owners"].values())
    assert plan["bytes_up"] == plan["bytes_down"] == width * parameters
    assert found["payload_up"] == found["payload_down"] == found["steps"] * width * parameters
    assert abs(found["recorded_off_percent"]) < 1 and abs(found["off_percent"]) < 1, found
