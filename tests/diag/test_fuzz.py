"""Thousands of damaged and hostile inputs through the whole diagnosis: no traceback, no hang, no escape into a page.

Seeded, so that a failure can be repeated. PDTRAIN_STRICT makes every reader and detector show its bugs instead of
reporting itself as failed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from diag.artefacts import memory_source, readers, recognise
from diag.diagnose import diagnose
from diag.errors import UsageError
from diag.report import html, markdown, terminal
from diag.schema import to_json
from tests.diag.fuzz_seeds import seeds

SEEDS = {name: data for name, (_, data) in seeds().items()}
#: Half of the rounds take what a post-mortem takes, the others a command that reads with other options.
TOPICS = (None, None, None, "loss", "router", "steps", "memory", "env")
TOKENS = [b"[red]", b"\x1b[31m", b"<script>alert(1)</script>", b"NaN", b"-1", b"1e999", b"\0", b"\xff\xfe", b"[" * 2000,
          b'{"a":' * 2000, b"x" * 70_000, b"\n" * 100, b"cos\nsystem\n(S'true'\ntR.", b"\x80\x02cos\nsystem\n", b"null",
          b'"' * 50, b"\xe2\x80\xae", b"\r", b"99999999999999999999"]
LIMIT_S = 10


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
    began = time.monotonic()
    try:
        report = diagnose(files if rng.random() < 0.5 else [folder], only=rng.choice(TOPICS))
    except UsageError:
        report = None  # a folder in which nothing is left to read
    assert time.monotonic() - began < LIMIT_S
    if report is not None:
        json.loads(to_json(report))
        page = html.render(report)
        assert "<script" not in page and not re.search(r"[\x00-\x08\x1b]", page)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", terminal.render(report, wrap=True))
        markdown.render(report).encode()
    for path in files:
        path.unlink()


def test_every_reader_has_a_seed_that_it_takes() -> None:
    for name, (reader, data) in seeds().items():
        found = recognise(memory_source(data, name))
        assert found is not None and reader == found.NAME, name
    assert {reader for reader, _ in seeds().values()} == {reader.NAME for reader in readers()}


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
