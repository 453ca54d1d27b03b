"""The recorder as a training loop uses it."""

from __future__ import annotations

import logging
import math
import sys

import pytest
import torch

from pdtrain.recorder import Recorder
from tests.recorder.helpers import events, rows, run


def recorder(folder, **options):
    return Recorder(folder, rank=0, world=1, tensorboard=False, guard=False, **options)


class Counting(torch.Tensor):
    """A tensor that notes every call made with it."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_three_lines_in_a_plain_loop(tmp_path):
    done = run("""
        import sys
        import torch
        from pdtrain.recorder import Recorder
        recorder = Recorder(sys.argv[1])
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 6):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recorder.log(step, loss=loss, lr=0.1, grad_norm=norm)
        """, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    logged = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5]
    assert all(isinstance(row[key], float) for row in logged for key in ("loss", "lr", "grad_norm", "time"))
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert events(tmp_path)["end"]["ok"] is True
    assert (tmp_path / "environment.json").exists()
    assert not (tmp_path / "dumps").exists(), "a healthy run leaves no dumps"


def test_values_are_those_of_their_step_and_are_not_read_before_the_interval_ends(tmp_path):
    reads = {"item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__", "__index__", "to"}
    running = torch.zeros(()).as_subclass(Counting)
    with recorder(tmp_path, log_every=4) as black_box:
        Counting.calls.clear()
        for step in range(1, 4):
            running += step
            black_box.log(step, loss=running, counts=torch.full((3,), step).as_subclass(Counting))
        assert not reads & set(Counting.calls)
        assert not (tmp_path / "metrics.jsonl").exists()
        running += 4
        black_box.log(4, loss=running)
        assert 1 <= len([call for call in Counting.calls if call in reads]) <= 2, "one read per dtype, not per value"
        assert [row["loss"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 3, 6, 10]
    assert rows(tmp_path / "metrics.jsonl")[1]["counts"] == [2, 2, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_host_sync_on_a_gpu_between_intervals(tmp_path):
    model = torch.nn.Linear(64, 64, device="cuda")
    with recorder(tmp_path, log_every=5) as black_box:
        black_box.watch(model, {"linear": [model]})
        loss = model(torch.ones(8, 64, device="cuda")).square().mean()
        loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, 5):
                model(torch.empty(8, 64, device="cuda")).square().mean().backward()
                black_box.log(step, loss=loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert black_box.module_seconds()["linear/backward"] > 0
        black_box.log(5, loss=loss)
    assert len(rows(tmp_path / "metrics.jsonl")) == 5


def test_every_kind_of_value(tmp_path):
    with recorder(tmp_path) as black_box:
        black_box.log(
            1, nan=math.nan, up=torch.tensor(math.inf), down=-math.inf, tenth=0.1, single=torch.tensor([0.5]),
            bf16=torch.tensor(0.5, dtype=torch.bfloat16), matrix=torch.arange(4).view(2, 2), flag=True, text="é\n",
            nested={"router": 1.5, "deep": {"er": 2}}, missing=None, empty=torch.zeros(0),
            graph=torch.ones((), requires_grad=True) * 2, values=[1, math.nan],
        )
    (row,) = rows(tmp_path / "metrics.jsonl")
    row.pop("time")
    assert row == {
        "step": 1, "nan": "NaN", "up": "Infinity", "down": "-Infinity", "tenth": 0.1, "single": 0.5, "bf16": 0.5,
        "matrix": [[0, 1], [2, 3]], "flag": True, "text": "é\n", "nested/router": 1.5, "nested/deep/er": 2, "empty": [],
        "graph": 2.0, "values": [1, "NaN"],
    }


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1.0, 1e22])
def test_floats_round_trip(tmp_path, value):
    with recorder(tmp_path) as black_box:
        black_box.log(1, value=value)
    assert rows(tmp_path / "metrics.jsonl")[0]["value"] == value


def test_more_of_a_step_goes_into_the_same_line(tmp_path):
    with recorder(tmp_path) as black_box:
        black_box.log(1, more=True, loss=1.0)
        assert not (tmp_path / "metrics.jsonl").exists()
        black_box.log(1, val_loss=2.0)
        assert [(row["loss"], row["val_loss"]) for row in rows(tmp_path / "metrics.jsonl")] == [(1.0, 2.0)]
        black_box.log(2, more=True, loss=0.5)
        black_box.log(3, loss=0.4)  # the promised values never came
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_intervals_are_seen_although_steps_are_skipped(tmp_path):
    with recorder(tmp_path, log_every=10) as black_box:
        due = []
        for step in (5, 8, 12, 20, 25, 45):
            due.append(black_box.due(step))
            black_box.log(step, loss=1.0)
    assert due == [False, False, True, True, False, True]


def test_a_second_process_appends_and_marks_what_it_supersedes(tmp_path):
    with recorder(tmp_path) as first:
        for step in (1, 2, 3):
            first.log(step, loss=1.0)
    with (tmp_path / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step":4,"lo')  # what kill -9 can leave of a long line
    with recorder(tmp_path) as second:
        second.resume(2)
        second.log(3, loss=0.5)
    with recorder(tmp_path) as third:
        third.log(4, loss=0.25)
    got = [(row.get("event"), row["step"], row.get("loss")) for row in rows(tmp_path / "metrics.jsonl")]
    assert got == [(None, 1, 1.0), (None, 2, 1.0), (None, 3, 1.0), ("resume", 2, None), (None, 3, 0.5),
                   ("resume", 3, None), (None, 4, 0.25)]
    assert [row["event"] for row in rows(tmp_path / "events" / "rank_0.jsonl")] == [
        "start", "end", "start", "resume", "end", "start", "end"]


def test_only_rank_0_writes_metrics_and_each_rank_its_own_events(tmp_path):
    for rank in (0, 1):
        with Recorder(tmp_path, rank=rank, world=2, tensorboard=False, guard=False) as black_box:
            with black_box.span("forward"):
                pass
            black_box.log(1, loss=float(rank))
    assert [row["loss"] for row in rows(tmp_path / "metrics.jsonl")] == [0.0]
    for rank in (0, 1):
        spans = [row for row in rows(tmp_path / "events" / f"rank_{rank}.jsonl") if "span" in row]
        assert [(row["span"], row["step"]) for row in spans] == [("forward", 1)]
    assert events(tmp_path, 1)["start"]["rank"] == 1


def test_spans_belong_to_the_step_that_is_logged_next(tmp_path):
    with recorder(tmp_path, log_every=2) as black_box:
        for step in (1, 2):
            with black_box.span("forward"):
                pass
            if step == 2:
                black_box.event("checkpoint_saved", step=1)  # an event in mid-step must not orphan the step's spans
            with black_box.span('odd "name"\n'):
                pass
            black_box.log(step)
            with black_box.span("validation", step):
                pass
        with black_box.span("after"):
            pass
    spans = [(row["span"], row.get("step")) for row in rows(tmp_path / "events" / "rank_0.jsonl") if "span" in row]
    odd = 'odd "name"\n'
    assert spans == [("forward", 1), (odd, 1), ("validation", 1), ("forward", 2), (odd, 2), ("validation", 2),
                     ("after", None)]


def test_spans_can_be_switched_off(tmp_path):
    with recorder(tmp_path, spans=False) as black_box:
        with black_box.span("forward"):
            pass
        black_box.log(1)
    assert all("span" not in row for row in rows(tmp_path / "events" / "rank_0.jsonl"))


def test_log_lines_of_every_logger_reach_the_rank_log(tmp_path):
    with recorder(tmp_path) as black_box:
        logging.getLogger("somebody.else").warning("careful")
        logging.getLogger("pdtrain.trainer").info("ready")
        black_box.log(1)
    logging.getLogger("somebody.else").warning("after the end")
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "[rank0] WARNING somebody.else: careful\n" in text
    assert "[rank0] INFO pdtrain.trainer: ready\n" in text
    assert "after the end" not in text


def test_a_value_that_breaks_costs_one_warning_and_nothing_else(tmp_path, capsys):
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("no such device")

    with recorder(tmp_path) as black_box:
        for step in (1, 2):
            black_box.log(step, bad=torch.ones(()).as_subclass(Broken))
        black_box.log("three")
        black_box.log(4, loss=1.0)
    assert rows(tmp_path / "metrics.jsonl")[-1]["loss"] == 1.0
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 2, complaints


def test_importing_the_recorder_imports_no_torch():
    done = run("""
        import sys
        from pdtrain.recorder import Recorder, prepare_environment
        assert "torch" not in sys.modules and "numpy" not in sys.modules and "rich" not in sys.modules
        """)
    assert done.returncode == 0, done.stderr


def test_usable_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with recorder(tmp_path) as black_box:
        black_box.log(1, loss=0.5)
    assert rows(tmp_path / "metrics.jsonl")[0]["loss"] == 0.5
