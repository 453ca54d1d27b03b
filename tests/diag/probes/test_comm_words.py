"""What `diag comm` concludes and shows, without ranks: heartbeats, findings, tables, options, damaged files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from diag.commands.output import Output
from diag.detectors import NotChecked
from diag.errors import UsageError
from diag.probes.comm.ask import Ask
from diag.probes.comm.control import Control, Identity, Lost, Verdict, _Seen, judge, speaker
from diag.probes.comm.judge import judge as findings_of
from diag.probes.comm.operations import splits
from diag.probes.comm.overlap import hidden
from diag.probes.comm.picture import matrix, terminal
from diag.probes.comm.rank import Shown
from diag.probes.comm.records import Link, Probe, Row, bus_factor, decode, encode, rates_of
from diag.probes.comm.report import emit_live, save
from diag.probes.comm.table import text
from diag.probes.comm.work import _per_node, host_names
from diag.schema import Finding, Where
from tests.diag.helpers import pdtrain

ME = Identity(host="n0", pid=100, started="7", space="here", node="n0")


def who(rank: int, node: str = "n0", space: str = "here") -> Identity:
    return Identity(host=node, pid=100 + rank, started="7", space=space, node=node)


def verdict(quiet: dict[int, float], people: dict[int, Identity], states: dict[int, tuple[str, str]] | None = None,
            *, still: float = 0.0, failures: dict[int, str] | None = None, rank: int = 0) -> Verdict | None:
    """What rank 0 decides at time 1000 with a timeout of 20 s; `quiet` seconds since each rank's last beat."""
    seen = {}
    for other, seconds in quiet.items():
        item = seen[other] = _Seen(1000 - seconds)
        item.raw, item.label, item.moved = b"x", "all_reduce 1 MiB", 1000 - max(still, seconds)
        item.failure = (failures or {}).get(other, "")
    return judge(seen, people, rank, ME, now=1000, begun=0, timeout=20,
                 state=lambda pid: (states or {}).get(pid - 100, ("S", "7")))


def test_beats_that_come_late_are_no_verdict() -> None:
    people = {rank: who(rank) for rank in range(3)}
    assert verdict({0: 0, 1: 9, 2: 3}, people) is None
    assert verdict({0: 0, 1: 0, 2: 0}, people, still=19) is None
    assert verdict({0: 0, 1: 8, 2: 0}, people, {1: ("T", "7")}) is None, "a debugger may stop it for a moment"


@pytest.mark.parametrize("quiet, state, how", [(1, ("", ""), "gone"), (1, ("Z", "7"), "gone"), (1, ("S", "8"), "gone"),
                                               (11, ("T", "7"), "stopped"), (11, ("S", "7"), "silent")])
def test_what_became_of_a_rank(quiet: float, state: tuple[str, str], how: str) -> None:
    found = verdict({0: 0, 1: quiet, 2: 0}, {rank: who(rank) for rank in range(3)}, {1: state})
    assert found is not None and [(item.rank, item.how) for item in found.lost] == [(1, how)]
    assert found.lost[0].at == "all_reduce 1 MiB" and speaker(3, found) == 0


def test_a_process_of_another_host_is_only_known_by_its_beats() -> None:
    people = {0: who(0), 1: who(1, "n1", "there")}
    assert verdict({0: 0, 1: 1}, people, {1: ("", "")}) is None
    found = verdict({0: 0, 1: 11}, people, {1: ("", "")})
    assert found is not None and found.lost[0].how == "silent" and found.lost[0].host == "n1"


def test_who_hears_nobody_is_cut_off_itself() -> None:
    people = {0: who(0), 1: who(1), 2: who(2, "n1", "x"), 3: who(3, "n2", "y")}
    found = verdict({0: 0, 1: 0, 2: 12, 3: 12}, people)
    assert found is not None and [item.rank for item in found.lost] == [0, 1] and found.lost[0].host == "n0"
    one = verdict({0: 0, 1: 0, 2: 12, 3: 1}, people)
    assert one is not None and [item.rank for item in one.lost] == [2]


def test_nobody_gets_on_and_nobody_is_blamed() -> None:
    found = verdict({0: 0, 1: 0}, {0: who(0), 1: who(1)}, still=21)
    assert found is not None and found.kind == "stuck" and not found.lost
    report = [item for item in findings_of(Probe(world=2, stopped="stuck", position=found.position), "probe")
              if isinstance(item, Finding)]
    assert report[0].cause == "hang_all_waiting" and not report[0].where.ranks
    assert "ranks 0, 1: all_reduce 1 MiB" in report[0].summary


def test_an_exception_waits_for_its_cause() -> None:
    people = {0: who(0), 1: who(1), 2: who(2)}
    broken = {0: "RuntimeError: Connection closed by peer"}
    assert verdict({0: 0, 1: 0, 2: 0}, people, failures=broken) is None
    found = verdict({0: 0, 1: 0, 2: 0}, people, failures=broken, still=11)
    assert found is not None and found.kind == "failed" and "Connection closed" in found.text
    gone = verdict({0: 0, 1: 0, 2: 0}, people, {2: ("", "")}, failures=broken, still=11)
    assert gone is not None and [item.rank for item in gone.lost] == [2]


def test_an_interrupted_start_names_who_is_missing_and_somebody_present_prints() -> None:
    control = Control(lambda: None, 1, 4, 20.0, ME)
    control._seen = {rank: _Seen(1000.0) for rank in range(4)}
    control._seen[2].raw, control._seen[2].label = b"x", "connecting"
    found = control.interrupted("SIGTERM")
    assert found.absent == [0, 3] and speaker(4, found) == 1
    report = [item for item in findings_of(Probe(world=4, stopped=f"interrupted: {found.text}",
                                                 position=found.position), "probe") if isinstance(item, Finding)]
    assert "by SIGTERM before ranks 0, 3 had arrived" in report[0].summary
    assert report[0].evidence[0].text == "rank 2: connecting"


def test_overlap_is_told_where_the_times_are_steady_and_only_there() -> None:
    exchange, compute = [1.0, 1.02, 1.01, 0.99, 5.0], [1.0, 1.01, 1.0, 0.98, 1.1]
    assert hidden(exchange, compute, [1.2, 1.21, 1.19, 1.2, 4.0]) == pytest.approx(0.81)
    assert hidden(exchange, compute, [0.9] * 5) == 1.0, "no more than all of it"
    assert hidden(exchange, compute, [3.0] * 5) == pytest.approx(-0.99)
    assert hidden([0.004] * 5, [0.09, 0.1, 0.13, 0.08, 0.2], [0.14] * 5) is None


def row(operation: str = "all_reduce", bytes_: int = 1 << 30, ranks: int = 8, **more: object) -> Row:
    return Row(**{"operation": operation, "bytes": bytes_, "count": bytes_ // 4, "iterations": 5, "min_seconds": 91.5,
                  "median_seconds": 92.5, "p99_seconds": 312.25, "algbw": 123.456, "busbw": 1234.5,
                  "ranks": list(range(ranks)), **more})  # type: ignore[arg-type]


def test_tables_fit_80_columns_and_lose_no_digit_of_a_size() -> None:
    links = [Link(src=a, dst=b, bytes_per_second=1e9 * (0.3 if a == 5 else 1), src_host=f"h{a}", dst_host=f"h{b}")
             for a in range(40) for b in range(40) if a != b]
    probe = Probe(world=40, hosts=["a-host-with-a-rather-long-name.example.org"] * 40, links=links,
                  rows=[row(), row(bytes_=1024, median_seconds=1e-9, algbw=1e-6)], backend="gloo", torch="2.13")
    shown = (text(probe, 80) + terminal(probe, 80)).splitlines()
    assert max(map(len, shown)) <= 80
    assert any(line.startswith("1073741824 268435456 float") for line in shown)
    assert any(line.lstrip().startswith("h5 ") and "3 3" in line and "#" not in line for line in shown)


def test_findings_of_a_probe() -> None:
    h100 = ["NVIDIA H100 80GB HBM3"] * 8
    probe = Probe(world=8, hosts=["n1"] * 8, devices=h100, backend="nccl",
                  rows=[row(bytes_=16 << 30, busbw=310.0), row("send_recv", wrong=3, group="tp[0,1]", ranks=2)])
    said = list(findings_of(probe, "probe.json"))
    causes = {item.cause: item for item in said if isinstance(item, Finding) and item.severity != "info"}
    assert set(causes) == {"bandwidth_low", "collective_wrong_result"}
    assert causes["bandwidth_low"].numbers["floor"] == 460 and causes["bandwidth_low"].numbers["source"]
    assert causes["collective_wrong_result"].where.group == "tp[0,1]"
    assert all(item.role == "context" for item in causes.values()), "a probe never leads over a run's own artefacts"
    unknown = list(findings_of(Probe(world=8, hosts=["n1"] * 8, devices=["Some GPU"] * 8, rows=[row()]), "p"))
    assert any(isinstance(item, NotChecked) and "floor unknown for Some GPU" in item.reason for item in unknown)


def test_copies_in_memory_are_no_slow_links() -> None:
    slow = Finding(cause="link_slow", severity="warning", summary="rank 1 on a", where=Where(ranks=[1], hosts=["a"]),
                   fix=["Look at {hosts}."], numbers={"ratio": 0.6})
    silent = Finding(cause="peer_unreachable", severity="error", summary="rank 1", where=Where(ranks=[1]))
    links = [Link(src=0, dst=1, bytes_per_second=5.0)]

    def said(hosts: list[str], backend: str = "gloo", lost: tuple[Lost, ...] = ()) -> list[str]:
        probe = Probe(world=2, hosts=hosts, backend=backend, links=links, link_findings=[slow, silent], lost=[*lost])
        return [item.cause for item in findings_of(probe, "p") if isinstance(item, Finding) and item.severity != "info"]

    assert said(["a", "a"]) == ["peer_unreachable"] and said(["a", "b"]) == ["link_slow", "peer_unreachable"]
    assert said(["a", "a"], "nccl") == ["link_slow", "peer_unreachable"] and slow.fix == ["Look at a."]
    once = said(["a", "b"], lost=(Lost(rank=1, how="gone"),))
    assert once == ["peer_unreachable", "link_slow"], "named once, by the heartbeats"


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == 1.75 and bus_factor("broadcast", 8) == bus_factor("send_recv", 8) == 1
    assert {bus_factor(name, 8) for name in ("all_gather", "reduce_scatter", "all_to_all")} == {0.875}


def test_splits_of_a_hot_expert() -> None:
    assert splits(4, 1200) == [600, 200, 200, 200] and sum(splits(7, 1001)) == 1001 and splits(2, 8) == [6, 2]


def test_hosts_of_one_name_stay_apart() -> None:
    people = [who(0, "a"), who(1, "a"), Identity(host="a", pid=1, started="1", space="", node="other")]
    assert host_names(people) == ["a", "a", "a#2"]
    assert _per_node(["a", "a", "b", "b"]) == 2 and _per_node(["a", "b", "a", "b"]) == 0 == _per_node(["a", "a", "b"])


def test_a_plan_takes_what_the_ring_carries() -> None:
    ring = [row("send_recv", busbw=2.0), row("send_recv", busbw=3.0), row("all_reduce", busbw=9.0)]
    assert rates_of(ring, ["a", "a"]) == {"node_bandwidth": 3e9}
    assert rates_of(ring, ["a", "b"]) == {"network_bandwidth": 3e9} and rates_of(ring[2:], ["a"]) == {}


def test_many_ranks_are_shown_by_host() -> None:
    links = [Link(src=a, dst=b, bytes_per_second=1.0 + b, src_host=f"h{a // 8}", dst_host=f"h{b // 8}")
             for a in range(0, 80, 4) for b in range(0, 80, 4) if a != b]
    labels, cells = matrix(links, 10)
    assert labels == [f"h{i}" for i in range(10)] and cells[0][1] == 9.0 and cells[0][0] is None


def test_sizes_end_with_the_largest() -> None:
    assert Ask(min_bytes=1024, max_bytes=5000).sizes == [1024, 4096, 5000] and Ask(max_bytes=1024).sizes == [1024]


def test_a_saved_probe_round_trips_and_a_hostile_one_is_refused(tmp_path: Path) -> None:
    probe = Probe(world=2, hosts=["\x1b[31mevil", "<b>n</b>"], backend="gloo\x1b]0;x\x07", rows=[row(ranks=2)],
                  lost=[Lost(rank=1, how="gone", host="<b>n</b>", at="send_recv")], stopped="lost",
                  links=[Link(src=0, dst=1, bytes_per_second=5.0, src_host="a", dst_host="b")])
    assert decode(encode(probe)) == probe
    (tmp_path / "probe.json").write_bytes(encode(probe))
    shown = pdtrain("diag", "comm", tmp_path / "probe.json", "--html", tmp_path / "page.html")
    assert shown.status == 1 and "\x1b" not in shown.out and "\x07" not in shown.out
    assert "rank 1 on <b>n</b> died" in shown.out
    page = (tmp_path / "page.html").read_text()
    assert "<b>n</b>" not in page and "&lt;b&gt;n" in page
    for damage in (b'{"schema": "pdtrain.probe/1", "world": -3}', encode(probe)[:300], b'{"schema": "pdtrain.probe/9"}',
                   encode(probe).replace(b'"gone"', b"NaN")):
        (tmp_path / "bad.json").write_bytes(damage)
        refused = pdtrain("diag", "comm", tmp_path / "bad.json")
        assert refused.status == 2 and "is not a probe" in refused.err and "Traceback" not in refused.err


@pytest.mark.parametrize("option", ["save", "html"])
def test_what_cannot_be_written_costs_the_file_and_not_the_report(option: str, tmp_path: Path,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    probe = Probe(world=2, hosts=["a", "a"], backend="gloo", rows=[row(ranks=2)])
    target = str(tmp_path / "gone" / "file")  # its folder vanished, or is full, after minutes of measuring
    shown = Shown(Output(html=target if option == "html" else None), save=target if option == "save" else None)
    with pytest.raises(UsageError, match="file"):
        emit_live(probe, shown)
    assert "all_reduce of 1 GiB among 2 ranks" in capsys.readouterr().out


def test_a_save_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    """A real write that fails after its first bytes: beyond the size that the system allows for a file."""
    target = tmp_path / "probe.json"
    target.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(UsageError, match="File too large"):
            save(Probe(world=2), str(target), force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert target.read_text() == "old" and [item.name for item in tmp_path.iterdir()] == ["probe.json"]


@pytest.mark.parametrize("arguments, words", [
    ([], "say among whom"), (["--nproc", "2", "--op", "all_recude"], "use all_reduce"),
    (["--nproc", "2", "--min", "huge"], "--min 'huge' is no size"), (["--nproc", "2", "--min", "2M", "--max", "1M"],
                                                                     "is larger than"),
    (["--nproc", "2", "--quick", "--passes", "3"], "repeats the rounds of --thorough"),
    (["--nproc", "2", "--baseline", "x"], "add --quick or --thorough"), (["--nproc", "2", "--config", "none.toml"],
                                                                         "no such file"),
    (["--nproc", "2", "--concurrent"], "belong to --config"), (["--nproc", "2", "--save", "/nowhere/x"],
                                                               "its directory does not exist"),
    (["missing.json"], "missing.json"), (["--nproc", "2", "p.json"], "leave out the PATHs"),
    (["--nproc", "1"], "1 is not in the range"), (["--nproc", "2", "--timeout", "0"], "timeout"),
    (["--nproc", "2", "--timeout", "nan"], "--timeout nan"), (["--nproc", "2", "--budget", "nan"], "--budget nan"),
    (["--nproc", "4", "--ranks-per-node", "3"], "no whole number"), (["--nproc", "2", "--min", "٣K"], "is no size"),
    (["--nproc", "2", "--save", "x1", "--html", "./x1"], "the same file"), (["--op", "broadcast", "p.json"],
                                                                         "leave out the PATHs")])
def test_wrong_use_is_told_before_a_rank_starts(arguments: list[str], words: str) -> None:
    result = pdtrain("diag", "comm", *arguments)
    assert result.status == 2 and words in result.err and result.out == ""


@pytest.mark.parametrize("command", ["comm", "env"])
@pytest.mark.parametrize("rank, port, words", [
    ("5", "29500", "RANK=5 and WORLD_SIZE=4"), ("0", "abc", "MASTER_PORT=abc"), ("0", "99999", "MASTER_PORT=99999"),
    ("0", "", "start it with torchrun")])
def test_half_a_job_is_told_at_once(command: str, rank: str, port: str, words: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    result = pdtrain("diag", command)
    assert result.status == 2 and words in result.err and result.out == "" and result.err.count("\n") == 1
