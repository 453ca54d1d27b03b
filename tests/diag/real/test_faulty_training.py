"""Real runs of this trainer with a fault put in, and their healthy twins: the cause, the rank and the step are found.

Runs are counted in steps; no verdict depends on how fast the machine is. A slow rank is slow by much more than the
machine's noise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from diag.diagnose import diagnose
from diag.schema import SEVERITY_ORDER, Finding, Report

pytest.importorskip("torch", reason="the extra 'train' is not installed")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("faulty_run.py")
ROOT = Path(__file__).parents[3]
ONSET = 101  # the first step of a fault that begins within the run
STEPS, STEPS_OF_TWO = 160, 60
DEADLINE = 280


@cache
def base() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="pdtrain-faulty-"))


@pytest.fixture(scope="module", autouse=True)
def _clean():
    import shutil

    yield
    shutil.rmtree(base(), ignore_errors=True)
    base.cache_clear()


@cache
def report(fault: str, ranks: int = 1) -> Report:
    """The post-mortem of a run with `fault`; every process of it is gone."""
    folder = base() / f"{fault}-{ranks}"
    steps = STEPS if ranks == 1 else STEPS_OF_TWO
    command = [str(SCRIPT), fault, str(folder), "--steps", str(steps), "--ranks", str(ranks)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen([*(start if ranks > 1 else [sys.executable]), *command], cwd=ROOT,
                               env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, out[-3000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return diagnose([folder])


def warned(found: Report) -> list[Finding]:
    return [f for f in found.findings if SEVERITY_ORDER[f.severity] >= SEVERITY_ORDER["warning"]]


def root(found: Report) -> Finding:
    assert found.findings and found.findings[0].role == "root", found.headline
    return found.findings[0]


def suspects(finding: Finding) -> dict[str, str]:
    return {row["suspect"]: row["verdict"] for row in finding.numbers["suspects"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_healthy_twin_is_silent(ranks: int) -> None:
    found = report("none", ranks)
    assert [f.summary for f in warned(found)] == [] and found.verdict == "healthy"


def test_a_learning_rate_thirty_times_too_high() -> None:
    found = warned(report("lr"))
    numeric = [f for f in found if f.cause in ("loss_spike", "loss_divergence", "grad_explosion")]
    router = [f for f in found if f.cause in ("moe_expert_imbalance", "moe_router_collapse")]
    assert numeric or router
    for finding in router:
        assert suspects(finding)["learning rate"] == "likely" and "learning rate" in finding.fix[0]
    assert all(abs((f.where.step or 0) - ONSET) <= 20 for f in numeric + router)


def test_a_bf16_router_with_a_runaway_bias() -> None:
    finding = root(report("router-bf16"))
    assert finding.cause == "moe_router_collapse" and abs((finding.where.step or 0) - ONSET) <= 10
    verdicts = suspects(finding)
    assert verdicts["router precision"] == verdicts["balancing"] == "likely" and "FP32" in finding.fix[0]
    assert verdicts["learning rate"] != "likely" and verdicts["expert initialisation"] == "unlikely"


def test_no_balancing_at_all() -> None:
    finding = root(report("no-aux"))
    assert finding.cause in ("moe_router_collapse", "moe_expert_imbalance")
    assert [name for name, verdict in suspects(finding).items() if verdict == "likely"] == ["balancing"]
    assert "load-balance" in finding.fix[0]


def test_experts_that_began_as_copies() -> None:
    finding = root(report("same-init"))
    assert finding.cause == "moe_identical_experts" and finding.where.module == "experts"


def test_the_same_documents_again_and_again() -> None:
    finding = root(report("repeats"))
    assert finding.cause == "data_repeated" and abs((finding.where.step or 0) - ONSET) <= 3


@pytest.mark.parametrize("fault, module, words", [
    ("slow", "attention", "computing attention"), ("slow-data", None, "waiting for data"), ("nice", None, ""),
])
def test_one_slow_rank(fault: str, module: str | None, words: str) -> None:
    found = [f for f in warned(report(fault, 2)) if f.cause == "straggler"]
    assert [f.where.ranks for f in found] == [[1]]
    assert words in found[0].summary and (module is None or found[0].where.module == module)
