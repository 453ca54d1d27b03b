"""`pdtrain diag postmortem` as its user runs it: every kind of PATH, every form, exit statuses, pipes and colour."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from tests.diag.helpers import pdtrain

STEPS = "".join(f"step {n} | loss {3 - n / 100:.4f} | tok/s 51200\n" for n in range(10, 40))
BAD = STEPS + ("[rank3]: Traceback (most recent call last):\n"
               '[rank3]:   File "/w/train.py", line 88, in step\n[rank3]:     loss.backward()\n'
               "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total "
               "capacity of 79.33 GiB of which 1.00 MiB is free. Including non-PyTorch memory, this process has 79.30 "
               "GiB memory in use. Of the allocated memory 77.10 GiB is allocated by PyTorch, and 90.00 MiB is "
               "reserved by PyTorch but unallocated.\n")


def root(document: dict) -> tuple[str, list[int]]:
    first = document["findings"][0]
    assert first["role"] == "root"
    return first["cause"], first["where"].get("ranks", [])


def postmortem(*arguments: str | Path, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return subprocess.run([sys.executable, "-m", "pdtrain.cli", "diag", "postmortem", *map(str, arguments)],
                          input=stdin, capture_output=True, env=environment | variables, timeout=120)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "job.out").write_text(BAD)
    (folder / "old.log.gz").write_bytes(gzip.compress(STEPS.encode()))
    return folder


@pytest.mark.parametrize("name, data", [
    ("job.log", BAD.encode()), ("job", BAD.encode()), ("job.log.gz", gzip.compress(BAD.encode())),
    ("job.log.zst", zstandard.compress(BAD.encode())), ("misnamed.log", gzip.compress(BAD.encode())),
    ("windows.txt", BAD.replace("\n", "\r\n").encode())])
def test_one_file_of_any_kind(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    done = pdtrain("diag", "postmortem", path, "--json")
    assert (done.status, root(done.json())) == (1, ("cuda_oom", [3]))
    assert done.json()["findings"][0]["evidence"][0]["path"] == str(path)
    assert done.json()["findings"][0]["evidence"][0]["line"] == 34


@pytest.mark.parametrize("path", [".", "*.out", "job.out", "**/*.[ol]*"])
def test_folders_and_quoted_globs(logs: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(logs)
    done = pdtrain("diag", "postmortem", path, "--json")
    assert (done.status, root(done.json())) == (1, ("cuda_oom", [3]))


def test_several_paths_are_one_run(logs: Path) -> None:
    document = pdtrain("diag", "postmortem", logs / "old.log.gz", logs / "job.out", "--json").json()
    assert len(document["inputs"]) == 2 and root(document) == ("cuda_oom", [3])


@pytest.mark.parametrize("data", [BAD.encode(), gzip.compress(BAD.encode())])
def test_standard_input(data: bytes) -> None:
    done = postmortem("-", "--json", stdin=data)
    document = json.loads(done.stdout)
    assert done.returncode == 1 and root(document) == ("cuda_oom", [3])
    assert document["findings"][0]["evidence"][0]["path"] == "<stdin>"


@pytest.mark.parametrize("make, words", [
    (lambda p: None, "no such file or directory"),
    (lambda p: p.write_bytes(b""), "is empty"),
    (lambda p: p.mkdir(), "nothing to read"),
    (lambda p: p.write_bytes(os.urandom(5000)), "in no format that is known here"),
    (lambda p: p.write_bytes(b"\x1f\x8b\x08\0broken"), "compressed data"),
])
def test_what_cannot_be_read_is_one_line_and_status_2(tmp_path: Path, make, words: str) -> None:
    path = tmp_path / "logs"
    make(path)
    done = pdtrain("diag", "postmortem", path)
    assert (done.status, done.out) == (2, "")
    assert words in done.err and len(done.err.splitlines()) == 1 and str(path) in done.err
    as_json = pdtrain("diag", "postmortem", path, "--json")
    assert as_json.status == 2 and as_json.json()["verdict"] == "unknown" and words in as_json.json()["headline"]


def test_one_damaged_file_among_others_costs_only_itself(logs: Path) -> None:
    (logs / "cut.log.gz").write_bytes(gzip.compress(os.urandom(9000))[:4000])
    (logs / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(300))
    done = pdtrain("diag", "postmortem", logs, "--json")
    assert done.status == 1 and root(done.json()) == ("cuda_oom", [3])


@pytest.mark.parametrize("text, status, verdict", [
    (STEPS, 0, "healthy"), (BAD, 1, "failed"), (STEPS + "fatal: out of luck\n", 1, "unknown"),
    (STEPS.replace("loss 2.6", "loss nan #"), 1, "degraded")])
def test_the_exit_status_follows_the_verdict(tmp_path: Path, text: str, status: int, verdict: str) -> None:
    (tmp_path / "job.log").write_text(text)
    done = pdtrain("diag", "postmortem", tmp_path, "--json")
    assert (done.status, done.json()["verdict"]) == (status, verdict)
    assert pdtrain("diag", "postmortem", tmp_path).out.startswith(verdict.upper())


def test_all_forms_at_once_agree(logs: Path, tmp_path: Path) -> None:
    done = pdtrain("diag", "postmortem", logs, "--json", "--md", tmp_path / "r.md", "--html", tmp_path / "r.html")
    headline = done.json()["headline"]
    assert "Rank 3" in headline
    page, text = (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()
    assert headline in page and headline.split(":")[0] in text and "job.out:34" in page and "job.out:34" in text
    again = pdtrain("diag", "postmortem", logs, "--html", tmp_path / "r.html")
    assert again.status == 2 and "--force" in again.err


def test_a_closed_pipe_is_no_error(logs: Path) -> None:
    command = f"{sys.executable} -m pdtrain.cli diag postmortem {logs} --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.stdout == b'{\n  "schem' and b"Traceback" not in done.stderr and b"Error" not in done.stderr


def test_no_colour_in_a_pipe_or_against_the_users_will(logs: Path) -> None:
    assert b"\x1b" not in postmortem(logs).stdout
    assert b"\x1b[" in postmortem(logs, FORCE_COLOR="1").stdout
    assert b"\x1b" not in postmortem(logs, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_a_log_cannot_colour_or_mark_up_the_report(tmp_path: Path) -> None:
    text = BAD.replace("CUDA out of memory.", "CUDA out of memory. \x1b[31m[red]x[/red]\x07<script>alert(1)</script>")
    (tmp_path / "job.log").write_text(text)
    done = pdtrain("diag", "postmortem", tmp_path, "--html", tmp_path / "r.html")
    assert "\x1b" not in done.out and "\x07" not in done.out and "[red]x[/red]" in done.out
    assert "<script>" not in (tmp_path / "r.html").read_text()


def test_torch_is_never_imported(logs: Path) -> None:
    code = (f"import sys\nfrom diag.diagnose import diagnose\ndiagnose([{str(logs)!r}])\n"
            "print('torch' in sys.modules, 'pdtrain' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr
