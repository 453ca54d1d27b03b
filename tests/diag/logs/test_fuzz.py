"""Damaged, glued and hostile logs through the whole post-mortem: no traceback, no hang, no escape into a report.

Seeded, so that a failure can be repeated. The seeds are the labelled incidents, so that every signature, reader of
tracebacks and reader of counters gets its share of the injuries.
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

from diag.artefacts.log_lines import style_of
from diag.diagnose import diagnose
from diag.errors import UsageError
from diag.report import html, markdown, terminal
from diag.schema import to_json
from diag.signatures import all_signatures
from diag.signatures.loader import to_rule, verify
from tests.diag.incident_files import incidents

TEXTS = [incident.text.encode() for incident in incidents()]
LINES = [line for text in TEXTS for line in text.split(b"\n")]
#: What a number of a log line is replaced with.
NUMBERS = [b"0", b"-1", b"9" * 30, b"9" * 5000, b"1e999", b"nan", b"-inf", b"1" * 400 + b".5", b"0x" + b"f" * 40, b"",
           b"4294967296", b"18446744073709551615", "\u0663\u0662".encode(), b"\xc2\xb2"]
TOKENS = [b"[red]", b"[/]", b"[link=x]", b"\x1b[31m", b"\x1b]8;;x\x07", b"\x1b[2J", b"<script>alert(1)</script>",
          b"</code></pre><img src=x onerror=alert(1)>", b"\0", b"\xff\xfe", b"\r", b"\r\n", b"\xe2\x80\xae",
          b"\xe2\x80\xa8", b"\x85", b"\v", b"\f", b"[" * 3000, b"{" * 3000, b'{"a":' * 2000, b"x" * 70_000,
          b" " * 70_000, b"\n" * 500, b"(" * 5000, b"rank" * 3000, b"[rank0]: " * 3000,
          b"Traceback (most recent call last):\n" * 300,
          b'  File "x", line 1, in f\n' * 500, b"1:" * 5000,
          b"=" * 20_000, b"\n| " * 2000, b"a.b" * 5000,
          b"During handling of the above exception, another exception occurred:\n", b"\xef\xbb\xbf"]
LIMIT_S = 10
LARGEST = 2 << 20


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to five random injuries."""
    def at(d: bytes) -> int:
        return rng.randrange(len(d) + 1)

    def cut(d: bytes) -> bytes:
        start, end = sorted((at(d), at(d)))
        return rng.choice((d[:end], d[start:], d[start:end]))

    def flip(d: bytes) -> bytes:
        out = bytearray(d)
        for _ in range(rng.choice((1, 5, 60)) if d else 0):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out)

    def insert(d: bytes) -> bytes:
        place = at(d)
        return d[:place] + rng.choice(TOKENS) + d[place:]

    def number(d: bytes) -> bytes:
        return re.sub(rb"\d+", lambda m: rng.choice(NUMBERS) if rng.random() < 0.1 else m[0], d)

    def lines(d: bytes) -> bytes:
        rows = d.split(b"\n")
        for _ in range(rng.randrange(1, 8)):
            i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
            kind = rng.randrange(5)
            if kind == 0:
                rows[i], rows[j] = rows[j], rows[i]
            elif kind == 1:
                rows[i] = rows[i] + rows[j]
            elif kind == 2:
                half = rng.randrange(len(rows[i]) + 1)
                rows[i] = rows[i][:half] + rows[j] + rows[i][half:]
            elif kind == 3:
                rows.insert(i, rng.choice(LINES))
            else:
                rows[i:i] = rows[j : j + 20] * rng.randrange(1, 20)
        return b"\n".join(rows)

    def splice(d: bytes) -> bytes:
        return cut(d) + cut(rng.choice(TEXTS))

    def recode(d: bytes) -> bytes:
        return d.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-16-be")))

    steps: list[Callable[[bytes], bytes]] = [cut, flip, insert, number, number, lines, lines, splice]
    for _ in range(rng.randrange(1, 6)):
        data = rng.choice(steps)(data)[:LARGEST]
    return recode(data) if rng.random() < 0.02 else data


def one_round(folder: Path, rng: random.Random) -> None:
    """Write one to three damaged logs, diagnose them, render the report in every form."""
    files = []
    for n in range(rng.choice((1, 1, 1, 2, 3))):
        data = mutate(rng.choice(TEXTS), rng)
        name = rng.choice((f"rank_{n}.log", f"node-{n}.err", "dmesg", f"slurm-{n}.out", f"{n}.txt", "error.json"))
        if rng.random() < 0.05:
            name, data = f"{name}.gz", mutate(gzip.compress(data), rng)
        files.append(folder / name)
        files[-1].write_bytes(data)
    began = time.monotonic()
    try:
        report = diagnose(files)
    except UsageError:
        return  # nothing is left to read
    assert time.monotonic() - began < LIMIT_S
    json.loads(to_json(report))
    page = html.render(report)
    assert not re.search(r"<script|<img|onerror=[^&<]*>|[\x00-\x08\x1b]", page)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", terminal.render(report, wrap=True))
    markdown.render(report).encode()


@pytest.mark.parametrize("seed", range(6))
def test_damaged_logs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTRAIN_STRICT", "1")
    rng = random.Random(seed)
    for _ in range(20):
        one_round(tmp_path, rng)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_many_damaged_logs(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDTRAIN_STRICT", "1")
    rng = random.Random(seed)
    for _ in range(100):
        one_round(tmp_path, rng)


def long_forms(line: bytes, size: int = 4000) -> list[bytes]:
    """`line` with each of its words, numbers and gaps in turn drawn out: what makes a careless pattern go quadratic."""
    forms = [re.sub(rb"\d+", b"9" * 300, line)]
    for word in list(re.finditer(rb"\w+", line))[:30]:
        before, after = line[: word.end()], line[word.end() :]
        again = (b" " + word[0]) * (size // (len(word[0]) + 1))
        forms += [before + fill + after for fill in ((word[0] * size)[:size], again, word[0][-1:] * size, b" " * size)]
    return forms


@pytest.mark.slow
def test_no_pattern_gets_lost_in_a_long_line() -> None:
    slow = []
    for signature in all_signatures():
        rule = to_rule(signature)
        for example in [*signature.match[:1], *signature.near_miss[:1]]:
            for line in long_forms(example.encode()):
                began = time.process_time()
                verify(rule, line[:8192])
                if time.process_time() - began > 0.5:  # at most 0.07 on a slow core; a lost one needs seconds
                    slow.append((signature.id, line[:60]))
    assert slow == []


@pytest.mark.slow
def test_long_words_at_the_front_of_lines_are_no_host_names() -> None:
    began = time.process_time()
    assert not style_of((b"a1." * 5000 + b"\n") * 4).pdsh
    assert time.process_time() - began < 2  # milliseconds; 10 s where each digit is tried as a host's number
