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
