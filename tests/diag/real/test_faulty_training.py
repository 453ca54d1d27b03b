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
def report(fault: str, ranks: int = 1, guilty: int = 1) -> Report:
    """The post-mortem of a run with `fault`, of the rank `guilty` if of one; every process of it is gone."""
    folder = base() / f"{fault}-{ranks}-{guilty}"
    steps = STEPS if ranks == 1 else STEPS_OF_TWO
    command = [str(SCRIPT), fault, str(folder), "--steps", str(steps), "--ranks", str(ranks),
               "--rank", str(guilty)]
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
    """The loss says first what the leap did to the run. Whether it comes back depends on how long the rate stays up;
    a router that became uneven with it is a victim, although its own window may begin a little earlier."""
    found = report("lr")
    first = root(found)
    assert first.cause in ("loss_spike", "loss_divergence") and first.numbers["lr_jump_step"] == ONSET
    assert first.where.step is not None and 0 <= first.where.step - ONSET <= 4
    assert "learning rate" in first.summary and "schedule" in first.fix[0]
    for finding in warned(found)[1:]:
        assert finding.role == "victim" and finding.cause in ("moe_expert_imbalance", "moe_router_collapse"), finding
        assert suspects(finding)["learning rate"] == "likely" and "schedule" in finding.fix[0]


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


@pytest.mark.parametrize("fault, guilty, module, words", [
    ("slow", 0, "attention", "computing attention"), ("slow-data", 1, None, "waiting for data"),
    ("nice", 1, None, ""), ("duty", 0, None, ""),
])
def test_one_slow_rank(fault: str, guilty: int, module: str | None, words: str) -> None:
    """Really slow: it sleeps, is less important than another process on its core, or is stopped most of the time."""
    found = [f for f in warned(report(fault, 2, guilty)) if f.cause == "straggler"]
    assert [f.where.ranks for f in found] == [[guilty]]
    assert words in found[0].summary and (module is None or found[0].where.module == module)
