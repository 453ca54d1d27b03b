"""Console lines that tell how long steps and the wait for data took, under the names of several programs."""

from __future__ import annotations

import pytest

from diag.artefacts.log_progress import parse_line
from diag.diagnose import diagnose

METERS = "Epoch: [3][{i}/2503]\tTime {t:.3f} (0.230)\tData {d:.3f} (0.040)\tLoss 1.2 (1.2)\tPrec@1 71.6 (71.6)"


def led(tmp_path, lines: list[str]):
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    return [f for f in diagnose([str(path)]).findings if f.severity != "info"]


def meters(waits: list[float]) -> list[str]:
    return [METERS.format(i=20 * i, t=0.18 + d, d=d) for i, d in enumerate(waits)]


def test_a_wait_for_data_that_jumps_in_an_excerpt_of_eight_lines(tmp_path) -> None:
    found = led(tmp_path, meters([0.002, 0.035, 0.035, 0.036, 0.036, 6.5, 6.7, 6.3]))
    assert [f.cause for f in found] == ["slow_data_io"] and found[0].where.step == 100
    assert led(tmp_path, meters([0.002, 0.035, 0.035, 0.036, 0.036, 0.05, 0.04, 0.05])) == []


def test_lines_with_durations_alone(tmp_path) -> None:
    took = [22.7, 22.4, 22.8, 21.7, 21.5, 22.5, 23.0, 21.1]
    took += [75.5, 72.5, 71.5, 72.8]
    lines = [f"2016-05-11 05:54:{i:02},834: Iteration took {t} s." for i, t in enumerate(took)]
    found = led(tmp_path, lines)
    assert [f.cause for f in found] == ["slow_node"] and found[0].evidence[0].line == 9
    assert led(tmp_path, lines[:8]) == []


@pytest.mark.parametrize("line, seconds", [
    ("Iteration took 31.0 s.", 31.0), ("step 12 took 310 ms", 0.31), ("Iteration #7 took: 2.5 seconds", 2.5)])
def test_a_duration_is_read_in_seconds(line, seconds) -> None:
    item = parse_line(line)
    assert item is not None and item.values == {"iter_time": pytest.approx(seconds)}


def test_a_checkpoint_that_took_long_is_no_step() -> None:
    item = parse_line("saving step checkpoint took 31.0 s")
    assert item is None or "iter_time" not in item.values
