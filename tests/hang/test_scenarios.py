"""The exact culprit in hangs whose culprit is known, nobody else blamed in any, nothing found where nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.diagnose import diagnose
from diag.schema import SEVERITY_ORDER, Report
from tests.hang import scenarios, special
from tests.hang.scenarios import Scenario

GENERATED = 60


def judge(scenario: Scenario, folder: Path) -> tuple[Report, bool]:
    """The report, and whether cause and culprits are right. Blaming anybody else fails the test at once."""
    scenario.write(folder)
    report = diagnose([folder], only="hang")
    blamed = {rank for f in report.findings if f.role != "victim" for rank in f.where.ranks}
    assert blamed <= scenario.ranks, f"{scenario.name} blames {sorted(blamed - scenario.ranks)}: {report.headline}"
    leading = next((f for f in report.findings if f.role == "root"), report.findings[0] if report.findings else None)
    right = leading is not None and leading.cause in scenario.causes and set(leading.where.ranks) == scenario.ranks
    return report, right


@pytest.mark.parametrize("scenario", scenarios.named(), ids=lambda s: s.name)
def test_the_twelve(scenario: Scenario, tmp_path: Path) -> None:
    report, right = judge(scenario, tmp_path)
    assert right, report.headline


@pytest.mark.parametrize("scenario", special.special(), ids=lambda s: s.name)
def test_special(scenario: Scenario, tmp_path: Path) -> None:
    report, right = judge(scenario, tmp_path)
    assert right, report.headline


def test_generated(tmp_path: Path) -> None:
    wrong = []
    for number in range(GENERATED):
        scenario = scenarios.generated(number)
        report, right = judge(scenario, tmp_path / scenario.name)
        if not right:
            wrong.append(f"{scenario.name}: {report.headline}")
    assert len(wrong) <= 0.05 * GENERATED, "\n".join(wrong)


@pytest.mark.slow
def test_a_thousand_generated(tmp_path: Path) -> None:
    right = sum(judge(scenarios.generated(number), tmp_path / str(number))[1] for number in range(1000))
    assert right >= 950


@pytest.mark.parametrize("scenario", special.healthy(), ids=lambda s: s.name)
def test_a_finished_run_raises_nothing(scenario: Scenario, tmp_path: Path) -> None:
    scenario.write(tmp_path)
    assert scenario.world.finished
    report = diagnose([tmp_path], only="hang")
    assert report.verdict == "healthy"
    assert [f.summary for f in report.findings if SEVERITY_ORDER[f.severity] > 0] == []


def test_the_culprit_and_its_line_are_named_with_evidence_and_numbers(tmp_path: Path) -> None:
    report, _ = judge(next(s for s in scenarios.named() if s.name == "G"), tmp_path)
    root = report.findings[0]
    assert report.headline == ("Rank 0 calls all_reduce #7 of default_pg with 1,025 input elements, where the 7 others "
                               "have 1,024 input elements")
    assert (root.where.file, root.where.line, root.where.group) == ("/job/model.py", 10, "default_pg")
    assert root.evidence[0].path.endswith("nccl_trace_rank_0")
    assert [(call["ranks"], call["input_sizes"]) for call in root.numbers["calls"]] == [
        ([0], [[1025]]), ([1, 2, 3, 4, 5, 6, 7], [[1024]])]
    assert (root.numbers["op"], root.numbers["seq"], root.numbers["group_size"]) == ("all_reduce", 7, 8)
    victims = [f for f in report.findings if f.role == "victim"]
    assert [f.where.ranks for f in victims] == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_circle_shows_both_sides(tmp_path: Path) -> None:
    report, _ = judge(next(s for s in scenarios.named() if s.name == "F"), tmp_path)
    assert [(w["group"], w["waiting"], w["for"]) for w in report.findings[0].numbers["waits"]] == [
        ("EP", [0, 1], [2, 3]), ("default_pg", [2, 3, 4, 5, 6, 7], [0, 1])]


def test_a_damaged_dump_is_not_a_missing_rank(tmp_path: Path) -> None:
    """The rank whose dump was cut must not get the blame for silence, and the reader is told of the damage."""
    next(s for s in scenarios.named() if s.name == "C").write(tmp_path)
    path = tmp_path / "nccl_trace_rank_5"
    path.write_bytes(path.read_bytes()[:-900])
    report = diagnose([tmp_path], only="hang")
    assert report.verdict == "unknown"
    assert [f.cause for f in report.findings] == ["hang_undetermined", "input_unreadable"]
    assert "rank 5 cannot be read" in report.headline


def test_dumps_of_an_earlier_attempt_are_left_aside(tmp_path: Path) -> None:
    """Two folders with the same ranks: only the newer counts, and the report says so."""
    old, new = (next(s for s in scenarios.named() if s.name == name) for name in ("B2", "A"))
    old.write(tmp_path / "attempt_0")
    new.world.clock = 10**12
    new.write(tmp_path / "attempt_1")
    report = diagnose([tmp_path], only="hang")
    assert report.findings[0].where.ranks == [3]
    assert any("attempt_0" in note for note in report.not_checked)
