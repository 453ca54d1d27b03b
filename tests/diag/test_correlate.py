"""The first failure that explains the rest: order, hosts, time and kind, as seen in whole reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.artefacts import Artefacts
from diag.correlate import correlate
from diag.diagnose import build_report, diagnose
from diag.schema import Evidence, Finding, Input, Report, Where

STEPS = "".join(f"step {n} | loss {3 - n / 100:.4f}\n" for n in range(10, 20))
ECC = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
GONE = ("[rank{}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[10.0.0.3]:4121\n")
WATCHDOG = ("[rank{0}]:[E914 09:2{0}:10.1 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=99, OpType=ALLREDUCE, NumelIn=100, NumelOut=100, Timeout(ms)=600000) ran for "
            "600000 milliseconds before timing out.\n")
BUG = ("[rank5]: Traceback (most recent call last):\n[rank5]:   File \"/w/train.py\", line 61, in <module>\n"
       "[rank5]:     x = batch['labels']\n[rank5]: KeyError: 'labels'\n")


def of(folder: Path, text: str) -> Report:
    (folder / "job.log").write_text(STEPS + text)
    return diagnose([folder / "job.log"])


def parts(report: Report) -> tuple[str, list[int], list[tuple[str, str]]]:
    """Cause and ranks of the root, and (cause, role) of the rest."""
    root = report.findings[0]
    assert root.role == "root"
    return root.cause, root.where.ranks, [(f.cause, f.role) for f in report.findings[1:]]


def test_waiting_is_explained_by_a_fault(tmp_path: Path) -> None:
    cause, ranks, rest = parts(of(tmp_path, ECC + WATCHDOG.format(0) + WATCHDOG.format(1)))
    assert (cause, ranks) == ("gpu_ecc", [3])
    assert not any(role == "root" for _, role in rest)


def test_the_root_says_which_findings_it_explains(tmp_path: Path) -> None:
    report = of(tmp_path, BUG + GONE.format(2) + GONE.format(4))
    root = report.findings[0]
    assert root.cause in ("peer_exception", "exception_unknown") and root.where.ranks == [5]
    explained = [report.findings[i] for i in root.explains]
    assert explained and {r for f in explained for r in f.where.ranks} == {2, 4}


def test_the_loudest_is_not_the_first(tmp_path: Path) -> None:
    """Many complaints of many ranks, one early line of one."""
    loud = "".join(GONE.format(rank) for rank in (0, 1, 2, 4, 6, 7)) * 5
    assert of(tmp_path, BUG + loud).findings[0].where.ranks == [5]


def test_of_two_independent_faults_the_earlier_leads(tmp_path: Path) -> None:
    full = "[rank1]: OSError: [Errno 28] No space left on device: '/ckpt/x.pt'\n"
    nic = "[rank6]: RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    assert parts(of(tmp_path, full + nic))[0] == "disk_full"
    assert parts(of(tmp_path, nic + full))[0] == "no_kernel_image"


def finding(cause: str, line: int, severity: str = "error", **where: object) -> Finding:
    return Finding(cause=cause, summary=f"{cause} happened", severity=severity,  # type: ignore[arg-type]
                   where=Where(**where), confidence=0.8,  # type: ignore[arg-type]
                   evidence=[Evidence(path=str(where.get("file", "a.log")), line=line, text=cause)])


def report(*findings: Finding) -> Report:
    return build_report(correlate(list(findings), Artefacts([])), inputs=[Input(path="a.log", format="log")])


def test_there_is_one_root_and_it_stands_first() -> None:
    done = report(finding("hang_undetermined", 9), finding("host_oom", 5), finding("killed_unconfirmed", 4))
    assert [f.role for f in done.findings].count("root") == 1
    assert (done.findings[0].cause, done.findings[0].role, done.verdict) == ("host_oom", "root", "failed")
    assert {done.findings[i].cause for i in done.findings[0].explains} == {"hang_undetermined", "killed_unconfirmed"}


@pytest.mark.parametrize("severity, verdict", [("info", "healthy"), ("warning", "failed")])
def test_notices_never_lead(severity: str, verdict: str) -> None:
    assert report(finding("gpu_ecc", 3, severity)).verdict == verdict


def test_what_only_says_that_something_hangs_is_unknown() -> None:
    done = report(finding("hang_undetermined", 3))
    assert done.verdict == "unknown" and not any(f.role == "root" for f in done.findings)


def test_an_error_leads_before_an_earlier_warning() -> None:
    done = report(finding("loss_spike", 1, "warning"), finding("disk_full", 9))
    assert done.findings[0].cause == "disk_full"


def test_the_order_of_findings_given_does_not_matter() -> None:
    def some() -> list[Finding]:
        return [finding("store_lost", 7), finding("port_in_use", 2), finding("exception_unknown", 3, ranks=[2]),
                finding("loss_spike", 1, "warning")]

    first, second = report(*some()), report(*reversed(some()))
    assert first.headline == second.headline and first.findings[0].cause == "port_in_use"
    assert sorted((f.cause, f.role) for f in first.findings) == sorted((f.cause, f.role) for f in second.findings)


def test_nothing_found_is_healthy() -> None:
    assert report().verdict == "healthy"
