"""Pickles made to do harm never run, never hang, never take the process down: they are refused in one line."""

from __future__ import annotations

import os
import pickle
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diag.artefacts import flight_recorder, guarded, memory_source
from diag.artefacts.restricted_pickle import Limits, load, scan
from diag.errors import ArtefactError
from tests.hang.scenarios import only_world
from tests.hang.simulate import World, raw_dump


class Evil:
    """Pickles to a call of os.system."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def dump() -> dict[str, Any]:
    groups, programs = only_world(2, 5)
    return raw_dump(World(2, groups, programs).run(), 0)


def hostile(mark: Path) -> Iterator[tuple[str, bytes]]:
    """(what it tries, pickle)."""
    good = dump()
    for protocol in range(6):
        yield f"call, protocol {protocol}", pickle.dumps({**good, "entries": [Evil(mark)]}, protocol)
    command = f"touch {mark}".encode()
    yield "INST", b"(S'" + command + b"'\nios\nsystem\n."
    yield "OBJ", b"(cos\nsystem\nS'" + command + b"'\no."
    yield "extension registry", b"\x80\x02\x82\x01."
    yield "persistent id", b"\x80\x02X\x01\x00\x00\x00aQ."
    yield "NEWOBJ", b"\x80\x02cbuiltins\nobject\n)\x81."
    yield "BUILD on a dict", b"\x80\x02}}b."
    yield "huge memo index", b"\x80\x02]r\xff\xff\xff\xff."
    yield "huge memo index in text", b"]p4294967295\n."
    yield "huge string", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a."
    yield "huge bytearray", b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."
    yield "huge frame", b"\x80\x04\x95" + struct.pack("<Q", 1 << 50) + b"N."
    yield "huge number", b"\x80\x02\x8b" + struct.pack("<i", 3000) + b"\x01" * 3000 + b"."
    yield "long digits", b"L" + b"9" * 100_000 + b"L\n."
    yield "deep lists", b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    yield "deep tuple as a key", b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns."
    yield "shared tuples as a key", b"\x80\x02})" + b"2\x86" * 60 + b"Ns."
    yield "laughs", b"\x80\x02]" + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(60)) + b"."
    yield "marks without end", b"\x80\x02" + b"(" * 100_000
    yield "empty stack", b"\x80\x02."
    yield "a later protocol", b"\x80\x09N."


def test_nothing_hostile_runs_or_hangs(tmp_path: Path) -> None:
    for what, data in hostile(tmp_path / "ran"):
        began = time.monotonic()
        with pytest.raises(ArtefactError) as refused:
            load(data)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300, what
        assert time.monotonic() - began < 10, what
    assert not (tmp_path / "ran").exists()


def test_children_survive_what_is_not_scanned(tmp_path: Path) -> None:
    """Large files skip the opcode walk; the child's limits do its work, and the other files are read all the same."""
    files = []
    for number, (_, data) in enumerate(hostile(tmp_path / "ran")):
        path = tmp_path / f"rank_{number}"
        path.write_bytes(data)
        files.append(guarded.File(str(path)))
    good = tmp_path / "good"
    good.write_bytes(pickle.dumps(dump()))
    files.append(guarded.File(str(good)))
    limits = guarded.Limits(seconds=3, memory=1 << 30)
    answers = dict(guarded.run("diag.artefacts.fr_digest:digest_bytes", files, limits=limits))
    assert sorted(answers) == list(range(len(files)))
    assert isinstance(answers[len(files) - 1], bytes)
    assert all(isinstance(answers[n], guarded.Failed) for n in range(len(files) - 1))
    assert not (tmp_path / "ran").exists()


def test_the_scan_accepts_what_is_plain() -> None:
    value = {"a": [1, -5, 2**40, 1.5, None, True], "b": {"c": ("x", b"y", {"z", 1}, frozenset([2]))}, (1, 2): "é" * 300}
    value["again"] = value["b"]
    for protocol in range(2, 6):
        data = pickle.dumps(value, protocol)
        if protocol >= 4:  # sets are calls before
            assert scan(data) > 20
            assert load(data) == value
    assert load(pickle.dumps(dump(), 0)) == dump()


def test_listed_names_get_their_stand_ins_and_no_others() -> None:
    class Stub:
        def __init__(self, *args: Any) -> None:
            self.args = args

    data = pickle.dumps({"p": Path("/a/b")})
    with pytest.raises(ArtefactError, match="nothing was run"):
        load(data)
    allowed = {("pathlib", "PosixPath"): Stub, ("pathlib", "Path"): Stub}
    assert load(data, allow=allowed)["p"].args[-1] == "b"
    with pytest.raises(ArtefactError, match=r"asks for posix\.system"):
        load(pickle.dumps(Evil(Path("x"))), allow=allowed)


def test_limits_can_be_set() -> None:
    data = pickle.dumps([[[[1]]]])
    assert load(data, limits=Limits(depth=4)) == [[[[1]]]]
    with pytest.raises(ArtefactError, match="nested more than 3 deep"):
        load(data, limits=Limits(depth=3))
    with pytest.raises(ArtefactError, match="more than 10 are not read"):
        load(data, limits=Limits(bytes=10))


def test_cut_and_flipped_dumps_are_values_not_exceptions() -> None:
    """Every way to damage a dump ends as a dump, or as Unreadable with a reason; the same bytes always alike."""
    data = pickle.dumps(dump(), 2)
    draw = random.Random(7)
    readable = 0
    for number in range(600):
        if number % 2:
            broken = data[: draw.randrange(len(data))]
        else:
            flipped = bytearray(data)
            for _ in range(draw.randrange(1, 4)):
                flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            broken = bytes(flipped)
        result = flight_recorder.read(memory_source(broken, "rank_1"))
        if isinstance(result, flight_recorder.FlightRecorderDump):
            readable += 1
        else:
            assert result.problem and "\n" not in result.problem
    assert 0 < readable < 300
