"""TensorBoard and W&B beside metrics.jsonl."""

from __future__ import annotations

import math
import sys
import types

import pytest

from pdtrain.recorder import Recorder
from tests.recorder.helpers import rows


def test_tensorboard_holds_the_scalars_of_every_line(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Recorder(tmp_path, guard=False, log_every=2) as recorder:
        for step in (1, 2, 3):
            recorder.log(step, loss=1.0 / step, counts=[1, 2], text="x", **{"grad_norm/router": math.nan})
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert sorted(accumulator.Tags()["scalars"]) == ["grad_norm/router", "loss"]
    points = accumulator.Scalars("loss")
    assert [(point.step, pytest.approx(point.value)) for point in points] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert all(math.isnan(point.value) for point in accumulator.Scalars("grad_norm/router"))
    assert points[0].wall_time == pytest.approx(rows(tmp_path / "metrics.jsonl")[0]["time"])


def test_missing_libraries_are_one_note_each(tmp_path, monkeypatch, capsys):
    for name in ("tensorboard", "torch.utils.tensorboard", "tensorboard.compat.proto.event_pb2", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with Recorder(tmp_path, guard=False, wandb=True) as recorder:
        for step in (1, 2):
            recorder.log(step, loss=1.0)
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2 and "pip install tensorboard" in notes[0] and "pip install wandb" in notes[1]
    assert len(rows(tmp_path / "metrics.jsonl")) == 2


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], False

    def log(self, values, step):
        if step == 3:
            raise RuntimeError("network is down")
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_is_used_when_switched_on_and_its_failure_is_survived(tmp_path, monkeypatch, capsys):
    fake = FakeRun()
    module = types.ModuleType("wandb")
    module.init = lambda **options: fake
    monkeypatch.setitem(sys.modules, "wandb", module)
    with Recorder(tmp_path / "off", guard=False, tensorboard=False) as recorder:
        recorder.log(1, loss=1.0)
    assert fake.logged == []
    with Recorder(tmp_path / "on", guard=False, tensorboard=False, wandb=True) as recorder:
        for step in (1, 2, 3, 4):
            recorder.log(step, loss=1.0, counts=[1])
    assert fake.logged == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]
    assert "network is down" in capsys.readouterr().err
    assert len(rows(tmp_path / "on" / "metrics.jsonl")) == 4


def test_only_rank_0_opens_them(tmp_path):
    with Recorder(tmp_path, rank=1, world=2, guard=False) as recorder:
        recorder.log(1, loss=1.0)
    assert not (tmp_path / "tensorboard").exists()
