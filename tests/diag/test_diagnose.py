"""The pipeline itself: what is read, how verdicts follow, and that one failing part costs only itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from diag import diagnose as pipeline
from diag.artefacts import Artefact, Artefacts, Unreadable, memory_source
from diag.detectors import Detector, NotChecked
from diag.diagnose import build_report, detect, diagnose, verdict_of
from diag.errors import ArtefactError, UsageError
from diag.schema import Finding, Input, Report
from tests.diag.helpers import write

READ = [Input(path="a", format="log")]


def finding(cause: str, severity: str = "error", role: str = "symptom") -> Finding:
    return Finding(cause=cause, summary=cause, severity=severity, role=role)  # type: ignore[arg-type]


@pytest.mark.parametrize("findings, verdict, status", [
    ([], "healthy", 0),
    ([finding("healthy", "info", "context")], "healthy", 0),
    ([finding("host_oom", "fatal", "root")], "failed", 1),
    ([finding("preempted", "info", "root")], "failed", 0),
    ([finding("moe_router_collapse", "error", "root")], "degraded", 1),
    ([finding("moe_router_collapse", "fatal", "root")], "failed", 1),
    ([finding("hang_undetermined", "warning")], "unknown", 1),
    ([finding("host_oom", "error", "symptom")], "unknown", 1),
    ([finding("input_unreadable", "warning", "context")], "healthy", 1),
])
def test_verdict_and_status_follow_from_the_findings(findings: list[Finding], verdict: str, status: int) -> None:
    report = build_report(findings, inputs=READ)
    assert (report.verdict, report.exit_status()) == (verdict, status)


def test_nothing_readable_is_unknown_and_status_2() -> None:
    inputs = [Input(path="a", format="log", problem="is cut", readable=False)]
    assert verdict_of([], inputs) == "unknown"
    assert build_report([], inputs=inputs).exit_status() == 2
    assert Report(verdict="healthy", headline="a probe reads no file").exit_status() == 0


def test_what_was_not_checked_is_not_called_healthy() -> None:
    report = build_report([], inputs=READ, not_checked=["router: no metrics"], checked=False)
    assert report.verdict == "unknown" and "router: no metrics" in report.headline


def test_playbook_and_fix_are_filled_in_where_a_detector_gave_none() -> None:
    own = finding("host_oom", role="root")
    own.fix = ["mine"]
    other = finding("gpu_ecc")
    other.where.hosts = ["n7"]
    quiet = finding("healthy", "info")
    build_report([own, other, quiet], inputs=READ)
    assert (own.playbook, own.fix) == ("host-oom", ["mine"])
    assert other.fix and "Drain n7 at once" in other.fix[0] and quiet.fix == []


def test_only_what_a_topic_needs_is_read_and_listed(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", ({"step": s, "router/1/counts": [99, 101]} for s in range(1, 50)))
    (tmp_path / "train.log").write_text("2024-05-01 12:00:00 INFO hello\n" * 10)
    (tmp_path / "model.bin").write_bytes(bytes(range(256)))
    report = diagnose([tmp_path], only="router")
    assert [Path(i.path).name for i in report.inputs] == ["metrics.jsonl"]
    assert any("2 files not used" in note and "model.bin" in note for note in report.not_checked)
    named = diagnose([tmp_path / "metrics.jsonl", tmp_path / "train.log"], only="router")
    assert "which this command does not use" in str(named.inputs[1].problem)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, ({"step": s, "loss": 1.0, "lr": 0.1} for s in range(9)))
    diagnose([tmp_path], only="router", progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_a_folder_with_nothing_of_ours_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match=r"1 file not used: x\.bin"):
        diagnose([tmp_path])


class Reader:
    """A reader whose `read` raises `error`."""

    NAME, ARTEFACT = "broken", Artefact

    def __init__(self, error: Exception, many: bool = False) -> None:
        self.error = error
        if many:
            self.read_many = lambda sources, progress: self.read(sources[0])

    def read(self, source: object) -> Artefact:
        raise self.error


@pytest.mark.parametrize("many", [False, True])
def test_a_bug_of_a_reader_costs_one_input(many: bool, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.delenv("PDTRAIN_STRICT", raising=False)
    sources = [memory_source(b"x", "a"), memory_source(b"y", "b")]
    items = list(pipeline._read_batch(Reader(KeyError("x"), many), sources, lambda done, total: None))
    assert [type(i) for i in items] == [Unreadable, Unreadable]
    assert all("broken reader failed on it (KeyError)" in str(i.problem) for i in items)
    monkeypatch.setenv("PDTRAIN_STRICT", "1")
    with pytest.raises(KeyError):
        list(pipeline._read_batch(Reader(KeyError("x"), many), sources, lambda done, total: None))


def test_damage_raised_by_a_reader_is_the_inputs_problem() -> None:
    (item,) = pipeline._read_batch(Reader(ArtefactError("ends early")), [memory_source(b"x")], lambda d, t: None)
    assert (item.problem, item.problem_severity) == ("ends early", "warning")


def test_detectors_are_pure_parts_and_absent_needs_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDTRAIN_STRICT", raising=False)

    class Dump(Artefact):
        pass

    def found(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
        yield finding("host_oom")
        yield NotChecked("part of it")

    def breaks(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
        raise ZeroDivisionError
        yield

    def detector(name: str, needs: type[Artefact], run) -> Detector:
        return Detector(name, name, (needs,), (), "dumps", run)

    chosen = [detector("hang", Dump, found), detector("memory", Dump, found), detector("logs", Artefact, found),
              detector("loss", Artefact, breaks)]
    findings, notes, ran = detect(Artefacts([Artefact(path="a", format="x")]), chosen)
    assert ([f.cause for f in findings], ran) == (["host_oom"], 1)
    assert notes == ["hang, memory: no dumps among the inputs", "logs: part of it",
                     "loss: pdtrain's loss failed (ZeroDivisionError); please report this"]


def test_artefacts_of_one_folder_belong_together() -> None:
    class Config(Artefact):
        pass

    run_a, run_b = Artefact(path="a/metrics.jsonl", format="m"), Artefact(path="b/metrics.jsonl", format="m")
    config = Config(path="b/config.toml", format="c")
    everything = Artefacts([run_a, run_b, config])
    assert everything.beside(run_b, Config) is config and everything.beside(run_a, Config) is None
    assert everything.of(Config) == [config]


def test_a_hole_of_nul_bytes_does_not_hide_a_log(tmp_path: Path) -> None:
    """What a crashed host, or truncation under an open file, leaves in the middle of a log."""
    log = tmp_path / "rank_0.log"
    head = b"[rank0]: step 1 loss 2.5\n" * 4
    tail = b'Traceback (most recent call last):\n  File "t.py", line 8, in main\n    f()\nKeyError: \'labels\'\n'
    log.write_bytes(head + b"\0" * 100_000 + tail)
    report = diagnose([log])
    assert report.verdict == "failed" and "KeyError" in report.headline


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be-bom"])
def test_utf_16_is_read_as_text(tmp_path: Path, encoding: str) -> None:
    text = 'step 1 loss 2.5\nTraceback (most recent call last):\n  File "t.py", line 8, in main\n    f()\nKeyError: 4\n'
    data = text.encode("utf-16") if encoding == "utf-16" else b"\xfe\xff" + text.encode("utf-16-be")
    (tmp_path / "rank_3.log").write_bytes(data)
    report = diagnose([tmp_path])
    assert report.verdict == "failed" and "KeyError" in report.headline and report.findings[0].where.ranks == [3]
    assert report.findings[0].evidence[0].line == 5


def test_what_the_input_lacks_leads_the_headline(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "loss": 2.0}}\n' for s in range(60)))
    headline = diagnose([tmp_path], only="steps").headline
    assert "no step times" in headline and "events" not in headline
