"""Which finding leads, and what it accounts for: the order that a report shows."""

from __future__ import annotations

import pytest

from diag.artefacts import Artefacts
from diag.correlate import correlate
from diag.schema import Evidence, Finding, Where


def finding(cause: str, line: int | None = None, *, path: str = "a.log", confidence: float = 0.8,
            severity: str = "error", **where: object) -> Finding:
    evidence = [] if line is None else [Evidence(path=path, line=line, text=cause)]
    return Finding(cause=cause, summary=cause, severity=severity, confidence=confidence,  # type: ignore[arg-type]
                   where=Where(**where), evidence=evidence)  # type: ignore[arg-type]


def roles(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.cause, f.role) for f in correlate(findings, Artefacts())]


def test_the_cause_leads_and_what_it_explains_stands_beneath_as_victims() -> None:
    timeout, oom = finding("collective_missing_rank", 9, ranks=[3]), finding("host_oom", 7)
    found = correlate([timeout, oom], Artefacts())
    assert [(f.cause, f.role) for f in found] == [("host_oom", "root"), ("collective_missing_rank", "victim")]
    assert found[0].explains == [1]


def test_of_two_unexplained_failures_the_earlier_leads_with_less_confidence() -> None:
    later, earlier = finding("disk_full", 90), finding("cuda_oom", 10)
    found = correlate([later, earlier], Artefacts())
    assert [f.cause for f in found] == ["cuda_oom", "disk_full"]
    assert found[0].confidence == 0.8
    unordered = correlate([finding("disk_full", 90, path="b.log"), finding("cuda_oom", 10)], Artefacts())
    assert unordered[0].confidence < 0.8


def test_an_effect_printed_before_its_cause_on_the_same_log_is_not_explained_by_it() -> None:
    assert roles([finding("exception_unknown", 3), finding("disk_full", 50)])[0] == ("exception_unknown", "root")


def test_a_kernel_line_printed_late_still_explains_the_kill_above_it() -> None:
    assert roles([finding("killed_unconfirmed", 3), finding("host_oom", 50)]) == [
        ("host_oom", "root"), ("killed_unconfirmed", "victim")]


@pytest.mark.parametrize("killed, hosts, ranks", [
    ([[4]], [], [4]),
    ([[4], [5]], [], []),
    ([[4, 5]], [], []),
    ([[4]], ["n9"], []),
])
def test_the_host_killer_s_victim_is_the_one_rank_known_to_be_killed(
    killed: list[list[int]], hosts: list[str], ranks: list[int]
) -> None:
    kills = [finding("killed_unconfirmed", 3 + n, ranks=r, hosts=["n1"]) for n, r in enumerate(killed)]
    found = correlate([*kills, finding("host_oom", 1, hosts=hosts)], Artefacts())
    assert found[0].cause == "host_oom" and found[0].where.ranks == ranks


def test_one_mismatch_seen_in_dumps_and_on_the_console_is_one_failure() -> None:
    console = finding("collective_mismatch", 3, ranks=[0, 1])
    dumps = finding("collective_mismatch", group="tp", ranks=[1], confidence=0.9)
    assert roles([console, dumps]) == [("collective_mismatch", "root"), ("collective_mismatch", "victim")]
    assert correlate([console, dumps], Artefacts())[0].where.group == "tp"


def test_warnings_do_not_lead_over_errors_and_context_never_leads() -> None:
    assert roles([finding("loss_spike", 1, severity="warning"), finding("disk_full", 9)])[0] == ("disk_full", "root")
    noise = finding("input_unreadable", 1, severity="warning")
    noise.role = "context"
    assert roles([noise]) == [("input_unreadable", "context")]
