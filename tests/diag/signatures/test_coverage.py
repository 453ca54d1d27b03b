"""docs/coverage.md names what exists, and each signature it names has the cause of its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diag.causes import CAUSES
from diag.signatures import all_signatures

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "coverage.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines()
        if re.match(r"\| [A-Z]+\d*(?:[/-]\d+)? \|", line)]
SIGNATURES = {s.id: s for s in all_signatures()}


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_kind_has_its_row_once() -> None:
    count = {"X": 17, "SX": 1, "H": 9, "F": 5, "D": 5, "C": 12, "N": 20, "R": 4, "K": 6, "L": 6, "M": 6, "S": 2, "A": 9}
    found = [re.match(r"[A-Z]+", row[0])[0] for row in ROWS]  # type: ignore[index]
    assert {family: found.count(family) for family in count} == count
    assert len({row[0] for row in ROWS}) == len(ROWS) == 102


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_exists_and_fits(row: list[str]) -> None:
    _, _, causes, by = row
    assert set(names(causes)) <= CAUSES.keys()
    for name in names(by):
        if name.startswith("logs/"):
            assert (ROOT / "diag" / f"{name}.py").is_file(), name
        elif (signature := SIGNATURES.get(name)) is not None:
            said = re.search(rf"`{name}` \((\w+)\)", by)
            if signature.role in ("victim", "context", "confirming"):
                assert said and said[1] == signature.role, name
            elif signature.cause and "logs/" not in by and causes not in ("–", "as the first failure"):
                assert signature.cause in names(causes), name
        else:
            assert (ROOT / "diag" / "detectors" / f"{name}.py").is_file(), name
