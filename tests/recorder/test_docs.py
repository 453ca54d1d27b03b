"""The documentation's code runs and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pdtrain.recorder import Recorder, prepare_environment
from pdtrain.recorder.routing import router_values
from tests.recorder.helpers import rows

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "recorder.md").read_text(), re.DOTALL)


def loop():
    attention, experts = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(attention, experts)

    def train_one_step(batch=None):
        loss = model(torch.ones(2, 4, requires_grad=True) * 1).sum()
        loss.backward()
        return loss if batch is not None else (loss, loss * 2)

    return {
        "steps": 20, "lr": 0.1, "train_one_step": train_one_step, "batches": iter(range(100)), "model": model,
        "attention_layers": [attention], "expert_layers": [experts],
    }


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_every_code_block_runs(tmp_path, monkeypatch, index):
    monkeypatch.chdir(tmp_path)
    for name in prepare_environment(tmp_path, 1, {}):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a block sets
        monkeypatch.delenv(name)
    names = loop() | {"Recorder": Recorder}
    exec(BLOCKS[index], names)  # noqa: S102 - our own documentation
    if "recorder" in names:
        names["recorder"].close()
        logged = rows(tmp_path / "runs" / "mine" / "metrics.jsonl")
        assert [row["step"] for row in logged] == list(range(1, 21))
        assert ("time/experts/backward" in logged[-1]) == ("watch" in BLOCKS[index])


def test_every_method_is_documented():
    text = (DOCS / "recorder.md").read_text()
    internal = {"flush", "flush_events", "write_event", "last_beat", "spans_in_progress", "disown", "complain"}
    public = {name for name in vars(Recorder) if not name.startswith("_")} - internal
    assert {name for name in public if f"`{name}(" not in text} == set()


def documented(table):
    """The `code` words of the first column; `router/<layer>/gini`, `gini_floor` share their prefix."""
    keys = set()
    for first in re.findall(r"^\| ((?:`[^`]+`,? ?)+) \|", table, re.MULTILINE):
        words = re.findall(r"`([^`]+)`", first)
        prefix = words[0][: words[0].rfind("/") + 1] if words[0].startswith("router/") else ""
        keys |= {word if "/" in word else prefix + word for word in words}
    return keys


def test_every_router_key_and_event_is_documented():
    text = (DOCS / "run-directory.md").read_text()
    got = router_values(7, [1, 2], top_k=1, token_entropy=0.1, drop_rate=0.0, aux_loss=1.0, z_loss=0.0, bias_range=0.0)
    assert {key.replace("/7/", "/<layer>/") for key in got} <= documented(text.partition("## events")[0])
    source = "".join(path.read_text() for path in (DOCS.parent / "pdtrain" / "recorder").glob("*.py"))
    written = set(re.findall(r"event\(\s*\"([a-z_]+)\"", source))
    assert {"start", "end", "signal", "stalled", "recording_stopped"} <= written
    assert written <= documented(text.partition("## events")[2])
