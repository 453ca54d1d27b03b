"""The shared options: forms, files, the overwrite guard, errors and exit statuses."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.diag.helpers import pdtrain, write


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    rows = ({"step": s, "router/1/counts": [250 + s % 5, 250, 250, 250]} for s in range(1, 200))
    return write(tmp_path / "metrics.jsonl", rows)


def test_every_form_at_once(metrics: Path, tmp_path: Path) -> None:
    done = pdtrain("diag", "router", metrics, "--json", "--md", tmp_path / "r.md", "--html", tmp_path / "r.html")
    assert done.json()["verdict"] == "healthy"
    assert (tmp_path / "r.md").read_text().startswith("# HEALTHY")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob(".*"))  # no scratch file stays
    assert stat.S_IMODE((tmp_path / "r.md").stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("option", ["--md", "--html", "-o"])
def test_existing_files_are_kept_unless_forced(metrics: Path, tmp_path: Path, option: str) -> None:
    target = tmp_path / "report"
    target.write_text("precious")
    done = pdtrain("diag", "router", metrics, option, target)
    assert done.status == 2 and "--force" in done.err and done.out == "" and target.read_text() == "precious"
    assert pdtrain("diag", "router", metrics, option, target, "--force").status == 0
    assert target.read_text() != "precious"


def test_json_to_a_file_and_markdown_to_stdout(metrics: Path, tmp_path: Path) -> None:
    done = pdtrain("diag", "router", metrics, "--json", "-o", tmp_path / "r.json", "--md", "-")
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "healthy"
    assert done.out.startswith("# HEALTHY")


@pytest.mark.parametrize("arguments, words", [
    (["--md", "-", "--html", "-"], "only one of"), (["--json", "--md", "-"], "only one of"),
    (["--md", "nowhere/r.md"], "no directory"), (["--html", "."], "is a directory"),
    (["--md", "same", "--html", "same"], "same file name"), (["--signatures", "nowhere"], "does not exist"),
    (["--no-such-option"], "No such option"),
])
def test_wrong_usage_is_one_line_and_status_2(metrics: Path, tmp_path: Path, monkeypatch, arguments, words) -> None:
    monkeypatch.chdir(tmp_path)
    done = pdtrain("diag", "router", metrics, *arguments)
    assert done.status == 2 and words in done.err
    assert len(done.err.splitlines()) == 1 and "Traceback" not in done.err


@pytest.mark.parametrize("name, data, words", [
    ("missing", None, "no such file or directory"), ("empty", b"", "is empty"),
    ("noise", bytes(range(256)) * 10, "in no format that is known here"),
    ("metrics.jsonl.gz", b"\x1f\x8b\x08\0broken", "compressed data"),
])
def test_no_readable_input_is_status_2_and_still_a_report_under_json(
    tmp_path: Path, name: str, data: bytes | None, words: str
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    plain = pdtrain("diag", "router", path)
    assert (plain.status, plain.out) == (2, "") and words in plain.err and len(plain.err.splitlines()) == 1
    done = pdtrain("diag", "router", path, "--json")
    report = done.json()
    assert (done.status, report["schema"], report["verdict"]) == (2, "pdtrain.report/1", "unknown")
    assert words in report["headline"]


@pytest.mark.parametrize("arguments", [
    ["router", "--json"], ["router", "--json", "--no-such", "x"], ["nothing", "--json"]])
def test_wrong_usage_under_json_prints_a_report_too(arguments: list[str]) -> None:
    done = pdtrain("diag", *arguments)
    assert done.status == 2 and done.json()["verdict"] == "unknown" and done.json()["headline"] in done.err


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    done = pdtrain("diag", "router", tmp_path / "run")
    assert done.status == 2 and "nothing to read" in done.err


def test_colour_follows_the_environment(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in pdtrain("diag", "router", metrics).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in pdtrain("diag", "router", metrics).out
