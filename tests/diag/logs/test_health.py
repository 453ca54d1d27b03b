"""Silence is health only where something was understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.diagnose import diagnose
from diag.schema import SEVERITY_ORDER

STEPS = "".join(f"step {n} loss {3 - n / 100:.3f} tok/s 5100\n" for n in range(30))


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (STEPS, "healthy"),
        ("loading the tokenizer\nTraining completed in 20 s\n", "healthy"),
        ("the quick brown fox\njumps over the lazy dog\n", "unknown"),
        (STEPS + "n1:1:2 [0] transport/net.cc:12 NCCL WARN something nobody has ever seen\n", "unknown"),
        ("n1:1:2 [0] transport/net.cc:12 NCCL WARN something nobody has ever seen\n" + STEPS, "healthy"),
        (STEPS + "wrapper: job returncode = 3\n", "unknown"),
        ("timing the model\n[INFO] Local worker group finished (WorkerState.SUCCEEDED). Waiting\n", "healthy"),
    ],
)
def test_healthy_needs_positive_evidence(tmp_path: Path, text: str, verdict: str) -> None:
    path = tmp_path / "job.log"
    path.write_text(text)
    report = diagnose([path])
    assert report.verdict == verdict
    assert all(SEVERITY_ORDER[f.severity] == 0 for f in report.findings)
    assert ("Nothing wrong" in report.headline) == (verdict == "healthy")


def test_json_printed_to_a_console_log_is_progress(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("".join(f'{{"step": {n}, "loss": {"NaN" if n > 25 else 3 - n / 100}}}\n' for n in range(30)))
    report = diagnose([path])
    assert report.verdict == "degraded" and report.findings[0].cause == "loss_nan"


@pytest.mark.parametrize(
    ("last", "frame", "first"),
    [
        ("ModuleNotFoundError: No module named 'apex'", "import apex", "Import it by hand"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 31.73 "
         "GiB of which 41.00 MiB is free.", 'state["exp_avg"] = torch.zeros_like(p)', "Shard the optimizer states"),
    ],
    ids=["import", "optimizer states"],
)
def test_the_first_thing_to_do_fits_the_fault(tmp_path: Path, last: str, frame: str, first: str) -> None:
    """Not the general advice on bugs, or on batches, that stands in the playbook."""
    path = tmp_path / "job.log"
    path.write_text("Traceback (most recent call last):\n"
                    f'  File "/job/adam.py", line 3, in step\n    {frame}\n{last}\n')
    assert diagnose([path]).findings[0].fix[0].startswith(first)
