from __future__ import annotations

import json

import numpy as np
import pytest

from diag import series
from diag.artefacts import Artefacts, ReadOptions, csv_table, log, memory_source, metrics
from diag.artefacts.metric_table import MetricTable
from diag.series import runs
from diag.series_names import meaning_of

MEGATRON = (" iteration {i:8d}/    1000 | consumed samples: {s:12d} | elapsed time per iteration (ms): 12000.5 | "
            "learning rate: 3.000E-04 | global batch size:    64 |{loss} loss scale: 65536.0 | grad norm: 0.512 | "
            "number of skipped iterations: {skip:3d} | number of nan iterations:   0 |\n")


def lines(text: str, *, series: bool):
    return Artefacts([log.read(memory_source(text.encode(), "run.log", options=ReadOptions(series=series)))])


@pytest.mark.parametrize(("key", "name"), [
    ("lm loss", "loss"), ("train/CrossEntropyLoss", "loss"), ("loss_metrics/global_avg_loss", "loss"),
    ("lm-loss-training/lm loss", "loss"), ("eval_loss", "val_loss"),
    ("lm-loss-validation/lm loss validation", "val_loss"),
    ("learning-rate", "lr"), ("optim/learning_rate_group0", "lr"), ("optim/total_grad_norm", "grad_norm"),
    ("optim/grad/experts.norm", "grad_norm/experts"), ("loss-scale/loss-scale", "loss_scale"),
    ("elapsed time per iteration (ms)", "step_seconds"), ("throughput/device/tokens_per_second", "tokens_per_second"),
    ("load_balancing_loss", "aux_loss"), ("z_loss", "z_loss"), ("router/3/gini", "router/3/gini"),
    ("train/critic_loss", "loss/train/critic_loss"), ("my own number", "my_own_number"),
])
def test_names_of_many_programs_mean_the_same(key, name) -> None:
    assert meaning_of(key).name == name


def test_units_and_conventions_are_kept() -> None:
    assert meaning_of("elapsed time per iteration (ms)").scale == pytest.approx(1e-3)
    assert meaning_of("tps", "torchtitan").convention == "per device"
    assert meaning_of("tokens_per_second", "pdtrain").convention == "over all ranks"
    assert meaning_of("mfu", "torchtitan").convention == "non-causal attention"
    assert meaning_of("grad-norm vs samples") is None


@pytest.mark.parametrize("series", [False, True])
def test_a_megatron_line_without_its_loss_is_nan_unless_its_steps_were_skipped(series) -> None:
    printed = {i: "" if i in (1, 3, 6) else f" lm loss: {5 - i / 10:.6E} |" for i in range(1, 8)}
    text = "".join(MEGATRON.format(i=i, s=64 * i, skip=int(i == 3), loss=loss) for i, loss in printed.items())
    run = runs(lines(text, series=series))[0]
    loss = run.get("loss")
    assert loss.steps.tolist() == [2, 4, 5, 6, 7] and np.isnan(loss.values[3]) and run.total_steps == 1000
    assert run.evidence(loss, 0).line == 2 and run.get("grad_norm").convention == "before clipping"
    assert run.get("step_seconds").values[0] == pytest.approx(12.0005)


def test_a_run_that_went_back_is_stitched_and_the_place_is_kept() -> None:
    records = [{"step": s, "loss": 5.0 - s / 100} for s in range(1, 51)]
    records += [{"step": s, "loss": 4.0 - s / 100} for s in range(41, 61)]
    artefact = metrics.read(memory_source("\n".join(map(json.dumps, records)).encode(), "metrics.jsonl"))
    run = runs(Artefacts([artefact]))[0]
    loss = run.get("loss")
    assert loss.steps.tolist() == list(range(1, 61)) and loss.values[45] == pytest.approx(4.0 - 0.46)
    assert [(r.step, r.replayed, r.told) for r in run.resumes] == [(40, 10, False)]
    assert run.replaced[0].steps.tolist() == list(range(41, 51))


def test_a_resume_marker_of_the_trainer_is_told() -> None:
    rows = [{"step": s, "loss": 3.0} for s in range(1, 21)] + [{"event": "resume", "step": 20}]
    rows += [{"step": s, "loss": 3.0} for s in range(21, 31)]
    artefact = metrics.read(memory_source("\n".join(map(json.dumps, rows)).encode(), "metrics.jsonl"))
    run = runs(Artefacts([artefact]))[0]
    assert [(r.step, r.told) for r in run.resumes] == [(20, True)] and len(run.get("loss")) == 30


def test_ranks_that_share_a_file_are_no_restarts() -> None:
    rows = [{"step": s + d, "loss": 3.0 + s / 100} for s in range(1, 200, 2) for d in (1, 0)]
    artefact = metrics.read(memory_source("\n".join(map(json.dumps, rows)).encode(), "metrics.jsonl"))
    run = runs(Artefacts([artefact]))[0]
    assert run.resumes == [] and (np.diff(run.get("loss").steps) > 0).all() and len(run.get("loss")) == 200


def test_event_files_of_one_folder_are_one_run() -> None:
    parts = []
    for number, (first, last) in enumerate(((1, 50), (41, 90))):
        table = MetricTable(path=f"tb/events.{number}", format="tensorboard", created=float(number), joins="tb",
                            lines_known=False)
        for step in range(first, last + 1):
            table.column("loss").add(step, step - first + 1, 3.0 + number)
        parts.append(table)
    (run,) = runs(Artefacts(parts[::-1]))
    loss = run.get("loss")
    assert len(loss) == 90 and loss.values[39] == 3.0 and loss.values[40] == 4.0 and run.resumes[0].step == 40
    assert run.evidence(loss, 60).path == "tb/events.1" and run.evidence(loss, 60).line is None


def test_the_same_run_seen_twice_counts_once() -> None:
    rows = [{"step": s, "loss": round(5 - s / 30, 4), "lr": 1e-3} for s in range(1, 41)]
    first = metrics.read(memory_source("\n".join(map(json.dumps, rows)).encode(), "metrics.jsonl"))
    table = MetricTable(path="other.csv", format="csv")
    for row in rows:
        table.column("loss").add(row["step"], row["step"], row["loss"] + 0.001)
    other = MetricTable(path="third.csv", format="csv")
    for row in rows:
        other.column("loss").add(row["step"], row["step"], row["loss"] * 1.3)
    found = runs(Artefacts([table, first, other]))
    assert [run.path for run in found] == ["metrics.jsonl", "third.csv"]


def test_the_user_says_which_column_is_the_loss() -> None:
    text = "step,my_loss,other\n" + "".join(f"{i},{3 - i / 100},1\n" for i in range(1, 30))
    artefacts = Artefacts([csv_table.read(memory_source(text.encode(), "own.csv"))])
    artefacts.columns = (("loss", "other"),)
    (run,) = runs(artefacts)
    assert run.get("loss").key == "other"


def test_batches_counted_anew_in_each_epoch_are_numbered_through() -> None:
    text = "".join(f"Epoch: [{e}]  [{b:>3}/100]  lr: 0.1  loss: {3 - e + b / 1000:.4f}\n"
                   for e in range(3) for b in range(0, 100, 10))
    (run,) = runs(lines(text, series=True))
    assert len(run.get("loss")) == 30 and run.resumes == []


def rank_logs(count: int, loss) -> Artefacts:
    texts = ["".join(f"step {s}/100 loss {loss(rank, s):.4f}\n" for s in range(1, 21)) for rank in range(count)]
    return Artefacts([log.read(memory_source(text.encode(), f"run/job-{rank}.log")) for rank, text in enumerate(texts)])


def test_the_logs_of_all_ranks_with_one_loss_are_one_run() -> None:
    found = runs(rank_logs(80, lambda rank, step: 3 - step / 30))
    assert len(found) == 1 and len(found[0].artefacts) == 80


def test_a_loss_per_rank_does_not_compare_each_rank_with_each(monkeypatch) -> None:
    compared = []
    same = series._same
    monkeypatch.setattr(series, "_same", lambda a, b: compared.append(1) or same(a, b))
    assert len(runs(rank_logs(160, lambda rank, step: 2 + rank / 10 + step % 3 / 30))) == 160
    assert len(compared) <= 160 * series.MOST_COMPARED
