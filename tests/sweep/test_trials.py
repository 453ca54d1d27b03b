"""What a sweep tries, keeps and fits, without running anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diag.errors import UsageError
from pdtrain.config import load_run
from pdtrain.config.load import Loaded
from pdtrain.plan.hardware import Hardware, catalogue, named, read_hardware, write_hardware
from pdtrain.plan.timing import times
from pdtrain.sweep import calibrate, outcome, report, run
from pdtrain.sweep.book import TRIAL, Book
from pdtrain.sweep.execute import Ended
from pdtrain.sweep.trials import WARM_UP, Trial, from_grid, from_layouts, parse_grid, setup_of

HERE = Hardware(
    key="here", name="two cores", flops={"bf16": 8e10, "fp32": 8e10}, memory_bytes=8e9, memory_bandwidth=2e10,
    node_bandwidth=1e9, network_bandwidth=1e9, devices_per_node=8, gemm_efficiency=1.0, attention_efficiency=0.5,
    source="a test", date="2026-01",
)  # fmt: skip
SHORT = {"steps": 8, "timeout": 60.0, "cpu": True}


def layouts(most: int = 40) -> list[Trial]:
    loaded = Loaded(load_run(preset="tiny", world=4, overrides=["train.train_batch=16"]), "tiny", ())
    return from_layouts(loaded, HERE, memory=None, most=most, **SHORT)[0]


@pytest.mark.parametrize("grid, says", [
    (["train.micro_batch"], "KEY=a,b,c"), (["=1,2"], "KEY=a,b,c"), (["train.seed="], "KEY=a,b,c"),
    (["a=1", "a=2"], "given twice"), (["a=" + ",".join(map(str, range(1001)))], "1,001 combinations"),
])  # fmt: skip
def test_a_grid_that_is_none_is_refused(grid, says):
    with pytest.raises(UsageError, match=says):
        parse_grid(grid)


def test_grid_tries_every_combination_and_says_why_one_cannot_be():
    grid = parse_grid(["modules.attention.tensor=1,2", "train.micro_batch=4,8"])
    found = from_grid(None, "tiny", (), grid, ranks=2, **SHORT)
    assert len(found) == 4 and len({trial.key for trial in found}) == 4
    (refused,) = [trial for trial in found if trial.run is None]  # DP2 x micro-batch 8 is more than the batch of 8
    assert refused.changes == {"modules.attention.tensor": "1", "train.micro_batch": "8"}
    assert "train_batch" in refused.refused
    trial = found[0].run
    assert (trial.train.steps, trial.train.val_sequences, trial.recorder.memory_snapshot_steps) == (8, 0, (2,))
    assert trial.train.timeout_seconds == 30  # collectives give up before the trial does
    with pytest.raises(UsageError, match="micro_batch"):
        from_grid(None, "tiny", (), {"train.mikro_batch": ["1"]}, ranks=2, **SHORT)


def test_layouts_hold_the_best_and_the_worst_prediction():
    every, some = layouts(), layouts(3)
    assert len(some) == 3 and (some[0].key, some[-1].key) == (every[0].key, every[-1].key)
    seconds = [times(setup_of(trial), HERE)[0].step for trial in every]
    assert seconds == sorted(seconds)
    assert {trial.run.parallel.fsdp for trial in every} == {True, False}


def test_book_survives_a_cut_line_and_keeps_others_out(tmp_path: Path, capsys):
    book = Book(tmp_path)
    book.add({"schema": TRIAL, "trial": "a", "status": "ok"})
    with pytest.raises(UsageError, match="another `pdtrain sweep` works"):
        Book(tmp_path)
    book.close()
    path = tmp_path / "trials.jsonl"
    path.write_bytes(b"not JSON\n" + path.read_bytes() + b'{"schema": "pdtrain.trial/1", "tri')
    again = Book(tmp_path)
    again.add({"schema": TRIAL, "trial": "b", "status": "failed"})
    again.close()
    assert set(again.rows) == {"a", "b"}
    assert [line[:8] for line in path.read_bytes().splitlines()] == [b"not JSON", b'{"schema', b'{"schema']
    assert "trials.jsonl:1 is no row" in capsys.readouterr().err


def finished(folder: Path, losses: list[float], seconds: float = 0.5) -> None:
    rows = [{"step": i + 1, "step_seconds": seconds, "loss": loss} for i, loss in enumerate(losses)]
    (folder / "run" / "dumps").mkdir(parents=True, exist_ok=True)
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rank, peak in enumerate((3_000_000, 5_000_000)):
        (folder / "run" / "dumps" / f"memory_rank{rank}_step2.json").write_text(
            json.dumps({"rank": rank, "peak_bytes": peak, "by_kind": {"Parameter": 900_000, "Optstate": 800_000},
                        "modules": [{"module": "Model", "parameter_bytes": 400_000}, {"module": "Model.blocks"}]})
        )


def test_nothing_is_measured_twice_and_an_interruption_leaves_no_row(tmp_path: Path, monkeypatch):
    trials, ran = layouts(4), []

    def execute(command, folder, *, timeout, tick):
        ran.append(folder.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        finished(folder, [5.0] * 8)
        return Ended(0, 1.0, "")

    monkeypatch.setattr(run, "execute", execute)
    book = Book(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.measure(book, trials, HERE, timeout=60, again=False, keep=False)
    book.close()
    assert not (tmp_path / "trials" / trials[1].key).exists()
    book = Book(tmp_path)
    rows = run.measure(book, trials, HERE, timeout=60, again=False, keep=False)
    book.close()
    assert ran == [trials[0].key, trials[1].key, *(trial.key for trial in trials[1:])]
    assert [row["trial"] for row in rows] == [trial.key for trial in trials]
    row = rows[0]
    assert (row["steps"], row["step_seconds"], row["peak_bytes"]) == (8 - WARM_UP, 0.5, 5_000_000)
    assert row["states_bytes"] == 1_200_000  # the rank's own shards and moments, not what is gathered at the peak
    assert f"{row['predicted_states_bytes'] / 1.2e6 - 1:+.3%}" in "\n".join(report.text(rows, None, ""))
    assert row["tokens_per_second"] == 16 * 256 / 0.5 and 0 < row["mfu"] < 1


def test_peak_is_also_planned_for_the_routing_that_was(tmp_path: Path):
    """Two expert ranks; over two layers the second one gets 60 % and 70 % of the tokens: 1.3 times its share."""
    trial = next(trial for trial in layouts() if trial.run and trial.run.modules.experts.expert == 2)
    finished(tmp_path, [5.0] * 8)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {"router/1/counts": [10, 10, 10, 10, 50, 0, 5, 5], "router/2/counts": [30, 0, 0, 0, 10, 60, 0, 0]}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = outcome.outcome(trial, Ended(0, 9.0, ""), tmp_path / "run", HERE)
    assert row["overload"] == pytest.approx(1.3)
    assert row["predicted_peak_at_overload_bytes"] > row["predicted_peak_bytes"]


def test_failures_are_rows_with_reasons(tmp_path: Path):
    trial = layouts(1)[0]
    finished(tmp_path, [5.0, 5.0])
    for status, said, kind in ((1, "rank 1 failed first", "failed"), (None, "", "timeout"),
                               (1, "DefaultCPUAllocator: can't allocate memory", "oom")):  # fmt: skip
        row = outcome.outcome(trial, Ended(status, 61.0, said), tmp_path / "run", HERE)
        assert row["status"] == kind and row["reason"]
    assert "2 steps" in outcome.outcome(trial, Ended(0, 9.0, ""), tmp_path / "run", HERE)["reason"]


def test_wrong_losses_and_too_much_memory_come_last():
    rows = [{"trial": str(i), "status": "ok", "loss": "ok", "loss_first": loss, "peak_bytes": peak, "label": str(i),
             "tokens_per_second": speed, "step_seconds": 1.0, "step_seconds_most": 1.0, "mfu": 0.1}
            for i, (loss, peak, speed) in enumerate([(5.0, 1e9, 10), (5.01, 1e9, 20), (4.0, 1e9, 40), (5.0, 3e9, 30)])]
    outcome.compare_losses(rows, dict.fromkeys("0123", "same"))
    assert [row["trial"] for row in report.ranked(rows, 3e9)] == ["1", "0", "2", "3"]
    text = "\n".join(report.text(rows, 3e9, "the convention"))
    assert "the others at 5.0" in text and "above 90% of --memory" in text and "the convention" in text


def test_calibration_finds_the_machine_that_made_the_times():
    truth = replace(HERE, gemm_efficiency=0.4, attention_efficiency=0.2, memory_bandwidth=7e9, node_bandwidth=3e8,
                    latency=4e-4, block_overhead=8e-3, step_overhead=0.02)  # fmt: skip
    measured = [(trial.key, trial.label, setup, times(setup, truth)[0].step)
                for trial in layouts(16) if (setup := setup_of(trial))]  # fmt: skip
    found = calibrate.calibrate(HERE, calibrate.split(measured))
    assert found.error(found.before) > 0.3
    assert found.error(found.after) < 0.05 and found.error(found.fitted) < 0.05
    assert {case.fold for case in found.cases} == set(range(calibrate.FOLDS))
    assert found.after != found.fitted
    assert f"{len(measured)} trials" in "\n".join(calibrate.text(found))


def test_a_hardware_file_says_the_same_again(tmp_path: Path):
    path = tmp_path / "here.toml"
    write_hardware(replace(HERE, block_overhead=2e-3), path)
    found = named(str(path))
    assert replace(found, measured=()) == replace(HERE, block_overhead=2e-3)
    assert read_hardware(path).latency == catalogue()["h100-sxm"].latency


@pytest.mark.parametrize("text, says", [
    ("", "no table"), ("x = 1", "no table"), ("[a", "not valid TOML"), ("[a]\nspeed = 1", "unknown key 'speed'"),
    ("[a]\nflops = 3", "flops must be"), ("[a]\nflops = {bf16 = 1, fp32 = 1}\nmemory_bytes = -1", "memory_bytes = -1"),
    ("[a]\nflops = {bf16 = 1, fp32 = 1}\nmemory_bytes = nan", "memory_bytes = nan"),
])  # fmt: skip
def test_a_hardware_file_that_is_none_is_refused(tmp_path: Path, text, says):
    path = tmp_path / "here.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        named(str(path))
