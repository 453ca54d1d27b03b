"""NaN that is shown by something else than the loss, and what only looks like it."""

from __future__ import annotations

import numpy as np

from diag.diagnose import diagnose
from diag.loss.findings import findings_of

from .curves import healthy, run_of

LINE = (" iteration {i}/ 900 | elapsed time per iteration (ms): 900.0 | lm loss: {loss:.6E} | loss scale: 1.0 | "
        "grad norm: 0.8 |")


def test_norms_that_are_nan_to_the_end_count_and_one_that_overflowed_does_not() -> None:
    norm = np.ones(8)
    norm[6:] = np.nan
    found = findings_of(run_of(loss=np.full(8, 2.0), grad_norm=norm))
    assert [f.cause for f in found] == ["loss_nan"] and found[0].confidence <= 0.6 and found[0].where.step == 7
    norm[6] = 1.0
    assert findings_of(run_of(loss=np.full(8, 2.0), grad_norm=norm)) == []  # mixed precision overflows once
    long = np.ones(600)
    long[598:] = np.nan
    assert findings_of(run_of(loss=healthy(), grad_norm=long)) == []
    assert findings_of(run_of(loss=np.full(8, 2.0), grad_norm=np.append(norm[:7], np.nan),
                              loss_scale=np.full(8, 65536.0))) == []


def report_of(tmp_path, after: int):
    lines = [LINE.format(i=i, loss=2.0) for i in range(100, 105)]
    lines.append("***WARNING*** Bad grad_norm detected (grad_norm=nan)")
    lines += [LINE.format(i=i, loss=2.0) for i in range(106, 106 + after)]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    return [f for f in diagnose([str(path)]).findings if f.cause == "loss_nan"]


def test_a_bad_norm_after_which_training_went_on_is_only_told(tmp_path) -> None:
    assert [f.severity for f in report_of(tmp_path, 40)] == ["info"]
    ended = report_of(tmp_path, 1)
    assert [f.severity for f in ended] == ["error"] and ended[0].confidence <= 0.6


def test_a_cut_line_without_its_loss_is_nan_only_where_nothing_can_be_skipped(tmp_path) -> None:
    lines = [LINE.format(i=i, loss=2.0) for i in range(100, 104)]
    cut = " iteration 104/ 900 | elapsed time per iteration (ms): 900.0 | loss scale: {} | gr"
    path = tmp_path / "log.txt"
    path.write_text("\n".join([*lines, cut.format("1.0")]) + "\n")
    assert [f.cause for f in diagnose([str(path)]).findings if f.severity == "error"] == ["loss_nan"]
    path.write_text("\n".join([*lines, cut.format("65536.0")]) + "\n")
    assert not [f for f in diagnose([str(path)]).findings if f.severity == "error"]
