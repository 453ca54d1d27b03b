"""Thousands of damaged and hostile inputs through the whole diagnosis: no traceback, no hang, no escape into a page.

Seeded, so that a failure can be repeated. PDTRAIN_STRICT makes every reader and detector show its bugs instead of
reporting itself as failed.
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from diag.diagnose import diagnose
from diag.errors import UsageError
from diag.report import html, markdown, terminal
from diag.schema import to_json
from tests.diag.helpers import config

LOG = b"""\
2024-05-01 12:00:00,123 [rank0]: INFO step 10 loss 2.5 grad_norm 1.0
node1:1234:1300 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 busId 1b000 - Init COMPLETE
[rank1]: Traceback (most recent call last):
[rank1]:   File "/src/train.py", line 88, in main
[rank1]:     loss.backward()
[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB
[rank0]:[E501 12:10:00.1 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=104, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds
[Wed May  1 12:00:01 2024] Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB
E0501 12:10:05 77 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 4242)
"""


def dump() -> dict:
    """A small flight-recorder dump."""
    entry = {"record_id": 1, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 5, "p2p_seq_id": 0,
             "op_id": 5, "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "duration_ms": None,
             "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
             "state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
             "retired": False, "timeout_ms": 600000, "is_p2p": False,
             "frames": [{"name": "main", "filename": "train.py", "line": 88}]}
    return {"version": "2.10", "entries": [entry, entry | {"record_id": 2, "collective_seq_id": 6}],
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
            "pg_status": {"0": {"last_enqueued_collective": 6, "last_started_collective": -1,
                                "last_completed_collective": 4}}}


METRICS = b"".join(json.dumps({"step": s, "loss": 2.0, "tokens": 256 * s, "router/1/counts": [64, 70, 61, 61],
                               "router/1/drop_rate": 0.01}).encode() + b"\n" for s in range(1, 60))
SEEDS: dict[str, bytes] = {
    "metrics.jsonl": METRICS,
    "config.toml": config(capacity=1.25).encode(),
    "environment.json": b'{"versions": {"torch": "2.13.0"}, "host": {"name": "n1"}}',
    "rank_3.jsonl": b'{"event":"start","time":1.0}\n{"span":"forward","step":1,"start":1.0,"seconds":0.1}\n' * 5,
    "rank_0.log": LOG,
    "flight_recorder_1": pickle.dumps(dump(), protocol=2),
    "flight_recorder_0.json": json.dumps(dump()).encode(),
}
TOKENS = [b"[red]", b"\x1b[31m", b"<script>alert(1)</script>", b"NaN", b"-1", b"1e999", b"\0", b"\xff\xfe", b"[" * 2000,
          b'{"a":' * 2000, b"x" * 70_000, b"\n" * 100, b"cos\nsystem\n(S'true'\ntR.", b"\x80\x02cos\nsystem\n", b"null",
          b'"' * 50, b"\xe2\x80\xae", b"\r", b"99999999999999999999"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four random injuries."""
    def cut(d: bytes) -> bytes:
        return d[: rng.randrange(len(d) + 1)]

    def flip(d: bytes) -> bytes:
        out = bytearray(d)
        for _ in range(rng.choice((1, 3, 30))):
            if out:
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out)

    def insert(d: bytes) -> bytes:
        at = rng.randrange(len(d) + 1)
        return d[:at] + rng.choice(TOKENS) + d[at:]

    def repeat(d: bytes) -> bytes:
        at = rng.randrange(len(d) + 1)
        return d[:at] + d[at : at + 200] * rng.randrange(2, 50) + d[at:]

    def drop(d: bytes) -> bytes:
        at = rng.randrange(len(d) + 1)
        return d[:at] + d[at + rng.randrange(1, 400) :]

    def splice(d: bytes) -> bytes:
        return cut(d) + cut(rng.choice(list(SEEDS.values())))

    steps: list[Callable[[bytes], bytes]] = [cut, flip, insert, repeat, drop, splice]
    for _ in range(rng.randrange(1, 5)):
        data = rng.choice(steps)(data)
    return data


def one_round(folder: Path, rng: random.Random) -> None:
    """Write a folder of damaged files, diagnose it, render the report in every form."""
    files = []
    for name in rng.sample(sorted(SEEDS), rng.randrange(1, 4)):
        data = mutate(SEEDS[name], rng)
        packed = rng.random()
        if packed < 0.1:
            name, data = f"{name}.gz", mutate(gzip.compress(data), rng) if packed < 0.05 else gzip.compress(data)
        elif packed < 0.15:
            name, data = f"{name}.zst", zstandard.compress(data)
        files.append(folder / name)
        files[-1].write_bytes(data)
    try:
        report = diagnose(files if rng.random() < 0.5 else [folder])
    except UsageError:
        report = None  # a folder in which nothing is left to read
    if report is not None:
        json.loads(to_json(report))
        page = html.render(report)
        assert "<script" not in page and not re.search(r"[\x00-\x08\x1b]", page)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", terminal.render(report, wrap=True))
        markdown.render(report).encode()
    for path in files:
        path.unlink()


@pytest.mark.parametrize("seed", range(10))
def test_damaged_inputs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTRAIN_STRICT", "1")
    rng = random.Random(seed)
    for _ in range(15):
        one_round(tmp_path, rng)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_many_damaged_inputs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTRAIN_STRICT", "1")
    rng = random.Random(seed)
    for _ in range(100):
        one_round(tmp_path, rng)
