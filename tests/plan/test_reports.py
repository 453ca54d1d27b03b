"""Published results: the table of docs/plan.md is what the plan says now, and no row is missing from it."""

from __future__ import annotations

from pathlib import Path

from pdtrain.plan.reports import median_error, rows, table

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_docs_show_every_row_as_predicted_now():
    page = PAGE.read_text(encoding="utf-8")
    missing = [line for line in table(rows()) if line and line not in page]
    assert not missing, f"run `python -m pdtrain.plan.reports` and put its output into {PAGE.name}"


def test_error_is_what_it_was_when_the_constants_were_set():
    found = rows()
    assert len(found) >= 12
    assert all(row.source for row in found)
    assert median_error(found) < 0.10
    assert max(abs(row.error) for row in found) < 0.30
