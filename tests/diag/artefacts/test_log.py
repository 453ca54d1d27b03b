"""The log reader: true line numbers in any dress, bounded memory, pieces and processes that change nothing."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import msgspec
import pytest

from diag.artefacts import Unreadable, log_error_file, log_pool, log_scan, memory_source, recognise
from diag.artefacts import log as log_reader
from diag.artefacts.log_facts import Log
from diag.artefacts.log_lines import Style
from diag.artefacts.log_progress import loss_of, parse_line
from diag.diagnose import diagnose
from diag.discover import discover, open_file
from diag.signatures import load_catalogue

BOOM = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def read(data: bytes | str, name: str = "x.log") -> Log:
    log = log_reader.read(memory_source(data.encode() if isinstance(data, str) else data, name))
    assert isinstance(log, Log)
    return log


def lines_of(log: Log, rule: str) -> list[int]:
    return [event.line for event in log.events if event.rule == rule]


@pytest.mark.parametrize("before", [
    "a\n" * 99,
    "a\r\n" * 99,
    "bar  1%|\rbar  2%|\rbar  3%|\n" * 99,
    "a" * 200_000 + "\n" + "b\n" * 98,
    "\0" * 5000 + "\n" + "b\n" * 98,
    "\n" * 99,
])
def test_line_numbers_stay_true(before):
    assert lines_of(read(before + BOOM + "\nend"), "cuda-ecc") == [100]


def test_words_at_the_end_of_a_very_long_line_are_found():
    log = read("x" * 3_000_000 + " " + BOOM + "\n")
    assert lines_of(log, "cuda-ecc") == [1]
    assert len(log.events[0].text) <= 2000


def test_pieces_of_a_file_add_up_to_the_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.log"
    body = "".join(f"[rank{n % 8}]: step {n} loss {3 - n / 1e4:.4f}\n" + (BOOM + "\n" if n % 97 == 0 else "")
                   for n in range(4000))
    path.write_text(body)
    whole = log_reader.read(open_file(str(path)))
    monkeypatch.setattr(log_pool, "PIECE", 10_007)
    pieces = log_reader.read(open_file(str(path)))
    assert isinstance(whole, Log) and isinstance(pieces, Log)
    assert lines_of(pieces, "cuda-ecc") == lines_of(whole, "cuda-ecc")
    assert (pieces.lines, pieces.size, pieces.counts) == (whole.lines, whole.size, whole.counts)
    offsets = [e.offset for e in pieces.events]
    assert all(body.encode()[o:].startswith(BOOM.encode()) for o in offsets[:50])


def test_forked_workers_find_what_one_process_finds(tmp_path, monkeypatch):
    for n in range(6):
        (tmp_path / f"rank_{n}.log").write_text(f"[rank{n}]: step 1 loss 2.0\n" * 50 + f"[rank{n}]: {BOOM}\n")
    sources = [s for s in discover([str(tmp_path)]) if not isinstance(s, Unreadable)]
    catalogue = load_catalogue()
    alone = log_pool.run(sources, catalogue, lambda done, total: None, workers=1)
    monkeypatch.setattr(log_pool, "FORK_BYTES", 0)
    together = log_pool.run(sources, catalogue, lambda done, total: None, workers=3)
    assert [[msgspec.json.encode(f) for f in facts] for facts in together] == \
        [[msgspec.json.encode(f) for f in facts] for facts in alone]


def test_a_log_that_repeats_itself_is_kept_small():
    log = read((BOOM + "\n") * 30_000)
    assert log.counts["cuda-ecc"] == 30_000
    assert len(lines_of(log, "cuda-ecc")) < 400
    assert lines_of(log, "cuda-ecc")[-1] <= 30_000


def test_the_first_line_of_every_rank_is_kept():
    log = read("".join(f"[rank{n % 1000}]: {BOOM}\n" for n in range(5000)))
    assert len({e.speaker.rank for e in log.events}) == 1000


def test_a_cut_archive_tells_what_it_holds(tmp_path):
    noise = random.Random(1)
    data = gzip.compress((BOOM + "\n" + "".join(f"line {noise.random()}\n" for _ in range(60_000))).encode())
    path = tmp_path / "x.log.gz"
    path.write_bytes(data[: len(data) // 2])
    log = log_reader.read(open_file(str(path)))
    assert isinstance(log, Log)
    assert lines_of(log, "cuda-ecc") == [1]
    assert log.problem is not None and "ends early" in log.problem


@pytest.mark.parametrize("name, head, yes", [
    ("train.log", b"hello\nworld\n", True),
    ("slurm-123.out", b"step 1 loss 2\n", True),
    ("dmesg", b"[ 1.0] NVRM: Xid\n", True),
    ("notes.md", b"# Errors\nCUDA out of memory\n", False),
    ("train.py", b"import torch\nraise RuntimeError('x')\n", False),
    ("config.yaml", b"lr: 1e-4\n", False),
    ("model.bin", bytes(range(256)) * 40, False),
    ("empty.log", b"", False),
    ("latin.log", "Fehler: Gerät verloren\n".encode("latin-1") * 50, True),
])
def test_what_is_a_log(name, head, yes):
    assert (log_reader.sniff(head, name) > 0) is yes


@pytest.mark.parametrize("path, rank, local, attempt, host", [
    ("run/logs/rank_12.log", 12, None, None, None),
    ("run/none_x1/attempt_1/3/stderr.log", None, 3, 1, None),
    ("out/trace-node07.out", None, None, None, "node07"),
    ("out/slurm-4711.out", None, None, None, None),
    ("out/train.rank-7.node-2.log", 7, None, None, "node-2"),
])
def test_names_tell_who(path, rank, local, attempt, host):
    log = read("x\n", path)
    log_reader._name(log)
    assert (log.name_rank, log.name_local_rank, log.attempt, log.name_host) == (rank, local, attempt, host)


@pytest.mark.parametrize("line, step, loss", [
    (" iteration    43680/  311541 | consumed samples:     25709904 | lm loss: 2.635663E+00 | grad norm: 17224.7 |",
     43680, 2.635663),
    ("{'loss': 0.5338, 'grad_norm': 0.8, 'learning_rate': 1e-05, 'epoch': 0.41}", -1, 0.5338),
    ("[titan] 2025-05-30 18:01:41,221 - root - INFO - step: 100  loss:  7.9120  memory: 38.11GiB", 100, 7.9120),
    ("iter 83590: loss 1.9503, time: 6231.10ms, speed: 1772 toks/s/device", 83590, 1.9503),
    ("ep 272 train, step 176, ce 0.361, ctc_4 0.572, fer 0.058", 176, 0.361),
    ("Epoch: [41]  [ 480/1251]  eta: 0:06:41  lr: 0.000412  loss: 3.3817 (3.4021)  time: 0.5166", 480, 3.3817),
    ("step 41200 | loss 3.0127 | lr 2.1e-04 | tok/s 38110", 41200, 3.0127),
    ("Train Epoch [1/1]:  45%|████| 540/1203 [10:00<12:00,  1.1it/s, loss=nan]", 540, float("nan")),
])
def test_progress_lines_of_many_trainers(line, step, loss):
    item = parse_line(line, Style())
    assert item is not None
    assert item.step == step
    assert loss_of(item) == pytest.approx(loss, nan_ok=True)


@pytest.mark.parametrize("line", [
    "loading checkpoint from /ckpts at iteration 6000",
    "RuntimeError: step 3 failed, loss unknown",
    "number of parameters on model parallel rank 0: 335141888",
])
def test_other_lines_are_no_progress(line):
    assert parse_line(line, Style()) is None


def error_file(message: object) -> bytes:
    return json.dumps({"message": message}).encode()


def test_an_error_file_is_read_as_the_ranks_log(tmp_path):
    folder = tmp_path / "none_x1" / "attempt_0" / "3"
    folder.mkdir(parents=True)
    stack = 'Traceback (most recent call last):\n  File "/w/a.py", line 9, in f\n    x()\nKeyError: \'doc\'\n'
    (folder / "error.json").write_bytes(error_file({
        "message": "KeyError: 'doc'", "extraInfo": {"py_callstack": stack, "timestamp": "1700000000"}}))
    report = diagnose([str(tmp_path)])
    assert report.inputs[0].format == "torchelastic-error"
    assert report.findings[0].cause in ("exception_unknown", "peer_exception")
    assert "KeyError: 'doc' at /w/a.py:9" in report.findings[0].summary


@pytest.mark.parametrize("data, problem", [
    (error_file({"extraInfo": {}}), "holds no message"),
    (b'{"message": {"extraInfo": ', "is not whole JSON"),
])
def test_a_damaged_error_file_says_so(data, problem):
    source = memory_source(data, "error.json")
    reader = recognise(source)
    assert reader is log_error_file
    found = reader.read(source)
    assert isinstance(found, Unreadable) and problem in str(found.problem)


def test_blocks_with_a_limit_hold_the_lines_that_begin_before_it():
    text = b"aaaa\nbbbb\ncccc\ndddd\n"
    for limit in range(1, len(text) + 1):
        rest: list[bytes] = []
        got = b"".join(log_scan.blocks(io.BytesIO(text), limit, 3, rest))
        whole = [line for at, line in ((0, b"aaaa\n"), (5, b"bbbb\n"), (10, b"cccc\n"), (15, b"dddd\n")) if at < limit]
        assert got == b"".join(whole)


def test_standard_input_is_a_log(tmp_path):
    path = Path(tmp_path / "x")
    path.write_text(BOOM + "\n")
    sources = discover(["-"], stdin=path.open("rb"))
    log = log_reader.read(sources[0])
    assert isinstance(log, Log)
    assert lines_of(log, "cuda-ecc") == [1]
