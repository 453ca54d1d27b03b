"""Lines that say NaN in layouts of their own: broken lines, bars with dictionaries, bars without a total."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.artefacts.log_lines import Style
from diag.artefacts.log_progress import find_progress
from diag.diagnose import diagnose

BROKEN = """iteration {i}/50 | elapsed time per iteration: 21392.5 ms |
learning rate: 1.350000E-04 | global batch size: 4096 |
{loss}loss scale: 1.0 | grad norm: {norm} |
number of skipped iterations: 0 | number of nan iterations: 0
"""


def errors(path: Path, only: str | None = None) -> list[tuple[str, int | None]]:
    return [(f.cause, f.where.step) for f in diagnose([str(path)], only=only).findings
            if f.severity in ("error", "fatal", "warning")]


@pytest.mark.parametrize("only", [None, "loss"])
def test_a_megatron_line_broken_over_several_is_one_record(tmp_path: Path, only: str | None) -> None:
    path = tmp_path / "log.txt"
    path.write_text(BROKEN.format(i=5, loss="", norm="nan"))
    assert errors(path, only) == [("loss_nan", 5)]
    path.write_text("".join(BROKEN.format(i=i, loss="lm loss: 2.1 | ", norm=0.5) for i in range(5, 25)))
    assert errors(path, only) == []
    found = find_progress(path.read_bytes(), Style())
    assert len(found) == 20 and found[3].values["lm_loss"] == 2.1 and found[3].values["grad_norm"] == 0.5


def test_what_follows_a_whole_line_is_not_added_to_it() -> None:
    text = (" iteration 1/ 9 | lm loss: 2.0 | grad norm: 0.5 |\n    forward-backward: 99.0 |\n"
            "saving grad norm: high\n")
    (item,) = find_progress(text.encode(), Style())
    assert set(item.values) == {"lm_loss", "grad_norm"}


def test_a_norm_that_is_nan_once_at_the_end_is_told_only_where_no_step_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(BROKEN.format(i=5, loss="", norm="nan").replace("loss scale: 1.0", "loss scale: 65536.0"))
    assert errors(path) == []


@pytest.mark.parametrize("only", [None, "loss"])
def test_a_bar_whose_dictionary_holds_other_metrics(tmp_path: Path, only: str | None) -> None:
    path = tmp_path / "log.txt"
    line = "epoch {e}: 100%|##########| 4/4 [00:00<00:00,  9.40it/s, loss={loss}, metrics={{'acc': 0.18}}]\n"
    path.write_text("".join(line.format(e=e, loss="nan") for e in range(1, 6)))
    assert [cause for cause, _ in errors(path, only)] == ["loss_nan"]
    path.write_text("".join(line.format(e=e, loss=0.7 / e) for e in range(1, 6)))
    assert errors(path, only) == []


@pytest.mark.parametrize("only", [None, "loss"])
def test_a_bar_without_a_total(tmp_path: Path, only: str | None) -> None:
    path = tmp_path / "log.txt"
    line = "{i}step [00:{s:02}, 19.40s/step, batch_size=1, loss={loss}, lr_group0=1e-7]   \n"
    path.write_text("".join(line.format(i=i, s=i + 15, loss="nan" if i else 0.388) for i in range(4)))
    assert errors(path, only) == [("loss_nan", 1)]
    path.write_text("".join(line.format(i=i, s=i + 15, loss=0.388 - i / 100) for i in range(9)))
    assert errors(path, only) == []
    assert find_progress(b"12it [00:03, 3.9it/s, size=7]\nresult [1, 3 it/s, loss=nan]\n", Style()) == []


@pytest.mark.parametrize("only", [None, "loss"])
def test_lines_at_the_end_of_each_epoch_are_points_of_one_run(tmp_path: Path, only: str | None) -> None:
    path = tmp_path / "log.txt"
    line = "Epoch {e}\n61878/61878 [==============================] - 5s - loss: {loss:.4f}     \n"
    good = [1.2 * 0.95**e for e in range(15)]
    path.write_text("".join(line.format(e=e, loss=loss) for e, loss in enumerate(good)))
    assert errors(path, only) == []
    path.write_text("".join(line.format(e=e, loss=loss) for e, loss in enumerate(good[:10] + [13.4] + [26.6] * 4)))
    assert [cause for cause, _ in errors(path, only)] == ["loss_divergence"]


def test_a_loss_next_to_nothing_that_becomes_thousands_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for after, causes in ([25237.0, 75835.0, 28575.0, 134869.0, 437442.0], ["loss_divergence"]), \
            ([0.9, 25.0, 0.1, 7.0, 0.2], []), ([25237.0, 0.2, 0.1, 0.3, 0.2], []):
        losses = enumerate([0.21, 0.14, *after], 408)
        path.write_text("".join(f"global step {i}: loss = {loss:.4f} (0.302 sec/step)\n" for i, loss in losses))
        assert [cause for cause, _ in errors(path)] == causes


def test_the_lines_of_llama2c(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    line = "{i} | loss {loss} | lr 5.000000e-04 | 206.12ms | mfu 1.68%\n"
    path.write_text("".join(line.format(i=i, loss="3.1234" if i < 5 else "nan") for i in range(8)))
    assert errors(path) == [("loss_nan", 5)]
    path.write_text("".join(line.format(i=i, loss=3.1 - i / 50) for i in range(8)))
    assert errors(path) == []
