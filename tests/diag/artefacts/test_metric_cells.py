"""Cells of metric files that are no plain numbers: null for NaN, 1e400, decimal commas, a header in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diag.artefacts import Artefact, Artefacts, Source, recognise
from diag.diagnose import diagnose
from diag.discover import discover
from diag.schema import Finding
from diag.series import runs


def root(path: Path) -> Finding | None:
    findings = diagnose([path]).findings
    return findings[0] if findings and findings[0].role == "root" else None


def loss(path: Path) -> np.ndarray:
    found = runs(Artefacts(list(_read(path))))[0].get("loss")
    assert found is not None
    return found.values


def _read(path: Path) -> Iterator[Artefact]:
    for source in discover([str(path)]):
        assert isinstance(source, Source)
        reader = recognise(source)
        assert reader is not None
        yield reader.read(source)


def records(*losses: object, **others: object) -> list[dict[str, object]]:
    return [{"step": i, "loss": value, "lr": 1e-4, **others} for i, value in enumerate(losses, 1)]


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_null_loss_among_losses_is_nan(tmp_path: Path) -> None:
    path = lines(tmp_path / "metrics.jsonl", records(2.4, 2.3, 2.2, 2.1, None, None, None))
    finding = root(path)
    assert finding is not None and finding.cause == "loss_nan" and finding.where.step == 5
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": records(2.4, 2.3, 2.2, 2.1, None, None, None, epoch=1), "max_steps": 9}))
    finding = root(path)
    assert finding is not None and finding.cause == "loss_nan" and finding.where.step == 5


def test_the_empty_cells_of_a_table_are_no_nan(tmp_path: Path) -> None:
    rows = records(2.4, 2.3, 2.2, 2.1, 2.0, val_loss=None)
    rows += [{"step": i, "loss": None, "lr": None, "val_loss": 2.2} for i in (6, 7)]
    assert np.isfinite(loss(lines(tmp_path / "metrics.jsonl", rows))).all()


def test_a_number_beyond_all_doubles_is_infinite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}, "loss": {value}, "lr": 0.1}}\n'
                            for i, value in enumerate(("2.4", "2.3", "2.2", "1e400", "1E+999", "1e400"), 1)))
    assert loss(path).tolist() == [2.4, 2.3, 2.2, np.inf, np.inf, np.inf]
    finding = root(path)
    assert finding is not None and finding.cause == "loss_nan" and finding.where.step == 4


@pytest.mark.parametrize("separator", [";", "\t"])
def test_decimal_commas(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "log.csv"
    rows = [("step", "Train Loss", "lr"), *((str(i), f"2,{i:02}", "1,5e-4") for i in range(9))]
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    assert loss(path).tolist() == [float(f"2.{i:02}") for i in range(9)]


def test_a_table_that_was_appended_with_its_header(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{i},{5 - i / 100:.2f},1e-4" for i in range(150)]
    path.write_text("\n".join(["step,loss,lr", *rows, "step,loss,lr", *rows[:-1], rows[-1] + "step,loss,lr"]) + "\n")
    report = diagnose([path])
    assert report.verdict == "healthy" and loss(path)[-1] == pytest.approx(3.52)


def test_dictionaries_behind_the_name_of_a_split(tmp_path: Path) -> None:
    path = tmp_path / "logging.log"
    path.write_text("".join(
        f"train: {{'epoch': {i}, 'loss': {1 / (i + 1):.4f}, 'lr': 0.001}}\n"
        f"val: {{'epoch': {i}, 'loss': 0.9, 'lr': 0}}\n"
        f"test: {{'epoch': {i}, 'loss': 0.8, 'lr': 0}}\n" for i in range(60)))
    assert diagnose([path]).verdict == "healthy"
    assert loss(path).tolist() == [float(f"{1 / (i + 1):.4f}") for i in range(60)]


def test_a_likelihood_is_a_loss(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"step": i, "train_mean_nll": 2.0 - i / 100, "test/nll": 3.0, "num_tokens": 7}
                                     for i in range(9)]
    assert loss(lines(tmp_path / "metrics.jsonl", rows))[0] == 2.0


def test_losses_below_the_line_of_their_epoch(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("lr: 0.0001\nlabel loss: 3\n" + "".join(
        f"Epoch: {i}/30\nTime Taken: 30.1s - LR: 9.9e-05\nTrain Loss: {5 - i / 10:.4f} - Train Perplexity: 8.1\n"
        f"Valid Loss: 6.5378 - Valid Perplexity: 690.77\n" for i in range(1, 20)))
    assert diagnose([path]).verdict == "healthy" and len(loss(path)) == 19
    path.write_text(path.read_text() + "Epoch: 20/30\nTrain Loss: nan - Train Perplexity: nan\n" * 3)
    finding = root(path)
    assert finding is not None and finding.cause == "loss_nan"


@pytest.mark.parametrize("name, text", [
    ("energies.csv", "epoch,hamiltonian,kinetic\n" + "".join(f"{i},{1 / i:.4f},{2 / i:.4f}\n" for i in range(1, 20))),
    ("energies.jsonl", "".join(json.dumps({"epoch": i, "hamiltonian": 1 / i}) + "\n" for i in range(1, 20))),
])
def test_a_named_column_makes_a_table_readable(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    report = diagnose([path], only="loss", columns=(("loss", "hamiltonian"),))
    assert report.verdict == "healthy" and "hamiltonian 1 to 0.05" in report.findings[0].summary
    assert not any("hamiltonian" in f.summary for f in diagnose([path]).findings)
