"""Each sample run is diagnosed as its report says, and nothing of the machine that made it is left in it.

After a deliberate change: python sample_logs/regenerate.py --reports, then read the diff.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.diag.helpers import pdtrain

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_logs"
NAMES = sorted(path.parent.name for path in SAMPLES.glob("*/report.json"))
#: What each sample is there to show; the reports say more, and may change more easily.
LABELS: dict[str, tuple[str | None, list[int]]] = {
    "healthy-console": (None, []), "healthy-log-tree": (None, []), "healthy-run-directory": (None, []),
    "healthy-resumed": (None, []), "exception-one-rank": ("peer_exception", [3]),
    "killed-rank": ("killed_unconfirmed", [3]), "stopped-rank": ("collective_mismatch", [3]),
    "slow-rank": ("collective_missing_rank", [3]), "size-mismatch": ("collective_mismatch", [3]),
    "wrong-collective": ("collective_mismatch", [3]), "group-order": ("group_order_deadlock", [3]),
    "leaves-loop-early": ("uneven_batches", [3]), "out-of-memory": ("host_oom", [3]), "segfault": ("segfault", [3]),
    "truncated-checkpoint": ("ckpt_corrupt", []), "port-in-use": ("port_in_use", []),
    "node-never-joins": ("rendezvous_timeout", []), "router-collapse": ("moe_router_collapse", []),
    "trainer-killed": ("killed_unconfirmed", [1]),
}


def stable(report: dict[str, Any]) -> dict[str, Any]:
    """What a change of the doctor must not change unnoticed: the verdict, and who and what stands behind it."""
    findings = report["findings"]
    root = next((f for f in findings if f["role"] == "root"), None)
    return {
        "verdict": report["verdict"],
        "headline": report["headline"].split(". ")[0],  # detectors add sentences about what else they can tell
        "root": root and {
            "cause": root["cause"], "ranks": root["where"].get("ranks", []), "hosts": root["where"].get("hosts", []),
            "evidence": [(e["path"], e.get("line"), e["text"]) for e in root["evidence"]],
            "playbook": root["playbook"]},
        "others": sorted((f["cause"], f["role"], f["where"].get("ranks", [])) for f in findings
                         if f is not root and f["severity"] != "info"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_gives_its_report(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = pdtrain("diag", "postmortem", f"sample_logs/{name}", "--json")
    expected = json.loads((SAMPLES / name / "report.json").read_text())
    assert stable(done.json()) == stable(expected)
    assert done.status == (0 if expected["verdict"] == "healthy" else 1)


def test_the_reports_say_what_happened() -> None:
    found = {}
    for name in NAMES:
        root = stable(json.loads((SAMPLES / name / "report.json").read_text()))["root"]
        found[name] = (root["cause"], root["ranks"]) if root else (None, [])
    assert found == LABELS


def test_every_sample_is_described_and_nothing_else_is() -> None:
    assert re.findall(r"^\| `([\w-]+)` ", (SAMPLES / "README.md").read_text(), re.M) == list(LABELS)


def test_samples_are_small_and_name_nobody() -> None:
    """Sizes in bytes; addresses other than loopback and 10.0.0.11 would be this machine's."""
    sizes = {name: sum(p.stat().st_size for p in (SAMPLES / name).rglob("*") if p.is_file()) for name in NAMES}
    assert max(sizes.values()) < 120_000 and sum(sizes.values()) < 1_000_000
    for path in SAMPLES.glob("*/**/*"):
        if path.is_file():
            text = path.read_bytes().decode("latin-1")
            assert not re.search(r"/(?:tmp|work|root|Users)/(?!torchelastic_k3x9q2ab|torchinductor_ada)", text), path
            assert set(re.findall(r"/home/(\w+)", text)) <= {"ada"}, path
            assert set(re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", text)) <= {"127.0.0.1", "10.0.0.11", "0.0.0.0"}, path
