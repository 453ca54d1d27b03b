"""Waits that name who is absent."""

from __future__ import annotations

from pathlib import Path

from diag.diagnose import diagnose


def test_the_name_of_an_operation_is_kept_whole_however_long(tmp_path: Path) -> None:
    name = "DistributedAdam_Allreduce/" + "layer." * 50 + "grad"
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 2.5\n[1,0]<stderr>:Stalled ops:\n" f"[1,0]<stderr>:{name} [missing ranks: 2]\n")
    report = diagnose([log])
    assert report.findings[0].cause == "collective_missing_rank" and report.findings[0].where.ranks == [2]
    assert name in report.headline
