from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from diag.commands.loss import loss
from diag.report.plot import terminal_plot


def write(path, values, key="loss"):
    path.write_text("step," + key + ",x\n" + "".join(f"{i},{v},1\n" for i, v in enumerate(values, 1)))
    return str(path)


def run(*args):
    return CliRunner().invoke(loss, list(args), catch_exceptions=False, standalone_mode=False)


def spiky():
    values = [3 - i / 500 for i in range(200)]
    values[150:153] = [5.0, 4.5, 3.5]
    return values


def test_the_json_contract(tmp_path) -> None:
    done = run(write(tmp_path / "run.csv", spiky()), "--json")
    (finding,) = [f for f in json.loads(done.stdout)["findings"] if f["role"] == "root"]
    assert finding["cause"] == "loss_spike" and finding["where"]["step"] == 151 and done.return_value == 1
    assert finding["numbers"]["last_step"] == 200 and finding["numbers"]["height"] == pytest.approx(2.3, abs=0.1)
    assert finding["evidence"][0]["line"] == 152 and finding["playbook"] == "loss-spike"


def test_the_plot_marks_the_anomaly(tmp_path) -> None:
    text = run(write(tmp_path / "run.csv", spiky()), "--plot").stdout
    caret = next(line for line in text.splitlines() if line.strip() == "^")
    assert 0.7 < (caret.index("^") - 12) / 88 < 0.8  # step 151 of 200


def test_a_column_of_the_users(tmp_path) -> None:
    path = write(tmp_path / "run.csv", spiky(), key="objective")
    assert run(path).return_value == 1 and "--column" in run(path).stdout
    assert "jumped" in run(path, "--column", "loss=objective").stdout


@pytest.mark.parametrize("values", [[2.5], [2.5] * 100])
def test_one_point_or_a_constant_is_said_in_words(tmp_path, values) -> None:
    text = run(write(tmp_path / "run.csv", values)).stdout
    assert ("Too few points" in text) if len(values) == 1 else ("really logged" in text)


def test_a_picture_needs_its_extra(tmp_path, monkeypatch) -> None:
    import sys

    from diag.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match="pdtrain\\[plot\\]"):
        run(write(tmp_path / "run.csv", spiky()), "--png", str(tmp_path / "x.png"))


def test_a_plot_of_nothing_is_nothing() -> None:
    import numpy as np

    assert terminal_plot(np.array([1]), np.array([2.0]), []) == ""
    assert terminal_plot(np.array([1, 2]), np.array([np.nan, np.nan]), []) == ""
    assert "2.5" in terminal_plot(np.array([1, 2, 3]), np.array([2.5, 2.5, 2.5]), [2])
