"""Dumps of every version and form, recognised by content, with the right rank."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from diag.artefacts import Unreadable, flight_recorder, memory_source, recognise
from diag.artefacts.flight_recorder import FlightRecorderDump, rank_in_name
from diag.discover import discover
from tests.hang.scenarios import LAYOUTS, only_world
from tests.hang.simulate import Call, World, as_json, raw_dump, write


def world(size: int = 4, calls: int = 6) -> World:
    groups, programs = only_world(size, calls)
    del programs[1][4:]
    return World(size, groups, programs).run()


def read(raw: Any, name: str = "rank_0") -> FlightRecorderDump:
    data = raw if isinstance(raw, bytes) else pickle.dumps(raw, 2)
    source = memory_source(data, name)
    assert recognise(source) is flight_recorder
    result = flight_recorder.read(source)
    assert isinstance(result, FlightRecorderDump), result.problem
    return result


@pytest.mark.parametrize("version", ["1.4", "2.1", "2.4", "2.9", "2.10"])
def test_versions_tell_the_same(version: str) -> None:
    group = read(raw_dump(world(), 0, version=version)).dump.groups[0]
    assert (group.issued, group.done, group.pending) == (5, 4, 1)
    assert [entry.op.name for entry in group.entries] == ["all_reduce"] * 5


@pytest.mark.parametrize("protocol", range(6))
def test_any_pickle_protocol(protocol: int) -> None:
    assert read(pickle.dumps(raw_dump(world(), 0), protocol)).dump.groups[0].issued == 5


def test_json_tells_the_same_as_the_pickle() -> None:
    raw = raw_dump(world(), 0, frames=False)
    assert read(as_json(raw)).dump == read(raw).dump


def test_gloo_completes_by_retiring_and_names_no_members() -> None:
    group = read(raw_dump(world(), 0, backend="gloo")).dump.groups[0]
    assert (group.issued, group.done, group.pending, group.ranks) == (5, 4, 1, "")


def test_a_wrapped_ring_is_noticed() -> None:
    dump = read(raw_dump(world(), 0, ring=2)).dump
    assert dump.wrapped and dump.entries == 2
    assert not read(raw_dump(world(), 0)).dump.wrapped


def test_members_of_a_finished_batch_are_not_pending() -> None:
    """torch never updates them: only the entry that closes the batch is completed."""
    groups, programs = only_world(2, 0)
    parts = tuple(Call("w", "_all_gather_base", ((n,),), ((2 * n,),)) for n in (4, 8))
    for program in programs.values():
        program += [Call("w", "_all_gather_base", parts=parts), Call("w", "all_reduce")]
    raw = raw_dump(World(2, groups, programs).run(), 0)
    assert [e["state"] for e in raw["entries"]] == ["scheduled", "scheduled", "completed", "completed"]
    assert read(raw).dump.groups[0].pending == 0


def test_status_is_joined_to_groups_without_entries() -> None:
    """A rank that held the GIL dumps no entries; its pg_status still says how far each group came."""
    layout = LAYOUTS[0]
    groups = layout.groups()
    program = [Call("w", "all_reduce")] * 3 + [Call("tp0", "all_reduce")] * 2
    done = World(4, groups, {0: program, 1: program, 2: program[:3], 3: program[:3]}).run()
    raw = raw_dump(done, 0)
    raw["entries"] = []
    status = {group.desc: group.status_issued for group in read(raw).dump.groups}
    assert status["default_pg"] == 3
    assert status["TENSOR_MODEL_PARALLEL_GROUP"] == 2


@pytest.mark.parametrize(
    "name, rank",
    [("nccl_trace_rank_13", 13), ("comm_lib_trace_rank_0", 0), ("node17-rank3.pkl", 3), ("rank_7_gpu-node-12", 7),
     ("gpu-8-12_fr_5.json", 5), ("dump_21.pickle.gz", 21), ("trace.pt2", None), ("dump", None)],
)
def test_rank_in_name(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_the_groups_know_better_than_the_name() -> None:
    """Local ranks as names: every node has a dump_0; the groups that the rank is in say who it is."""
    layout = LAYOUTS[1]
    groups = layout.groups()
    job = World(layout.size, groups, {r: [Call("w", "all_reduce")] for r in range(layout.size)}).run()
    for rank in range(layout.size):
        assert read(raw_dump(job, rank), f"dump_{rank % 4 + 90}").rank == rank
    unknown = read(raw_dump(world(), 2), "dump_90")
    assert unknown.rank is None and unknown.problem


def test_archives_are_read_by_children_and_damage_costs_one_file(tmp_path: Path) -> None:
    groups, programs = only_world(3, 2000)
    job = World(3, groups, programs).run()
    write(job, tmp_path, name="t_{rank}")
    (tmp_path / "t_2.gz").write_bytes(gzip.compress((tmp_path / "t_2").read_bytes()))
    (tmp_path / "t_2").unlink()
    (tmp_path / "t_1").write_bytes((tmp_path / "t_1").read_bytes()[:300_000])
    seen: list[tuple[int, int]] = []
    sources = [s for s in discover([tmp_path]) if not isinstance(s, Unreadable)]
    found = flight_recorder.read_many(sources, lambda done, total: seen.append((done, total)))
    assert [item.ranks for item in found] == [[0], [1], [2]]
    assert [item.dump.entries if isinstance(item, FlightRecorderDump) else item.problem for item in found] == [
        2000, "is cut: the pickle ends early, after 300,000 bytes", 2000]
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize(
    "data, words",
    [(b"", "is empty"), (b'{"version": "2.4", "entries": [', "is cut or no JSON"),
     (b'{"entries": ' + b"[" * 100_000, "nested too deeply"),
     (pickle.dumps({"version": "2.4", "pg_config": {}, "entries": [1]}), "not its types"),
     (pickle.dumps({"version": "2.4", "entries": {"a": 1}}), "no list of entries"),
     (pickle.dumps(["pg_config", "entries"]), "not its types"),
     (json.dumps({"pg_config": 5, "entries": []}).encode(), "not its types"),
     (pickle.dumps({"pg_status": {"x": {}}, "entries": []}), "not its types")],
)
def test_what_is_no_dump_is_unreadable(data: bytes, words: str) -> None:
    result = flight_recorder.read(memory_source(data, "rank_4"))
    assert isinstance(result, Unreadable)
    assert words in str(result.problem)
    assert result.ranks == [4]


@pytest.mark.parametrize(
    "data", [b"step 1 loss 2.0\n", b'{"step": 1, "loss": 2.0}\n', b"\x80\x02}q\x00.", b"PK\x03\x04", b""])
def test_other_files_are_left_alone(data: bytes) -> None:
    assert flight_recorder.sniff(data, "rank_0") == 0.0
