"""NCCL RAS reports as the text that `ncclras` prints by itself."""

from __future__ import annotations

import pytest

from diag.artefacts import Artefacts
from diag.artefacts.nccl_ras import NcclRas
from diag.detectors.env_ras import env_nccl_ras
from diag.schema import Finding
from tests.diag.artefacts.test_saved_outputs import alarms, read

RAS_TEXT = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {status}

Errors
======
{errors}
Warnings
========
{warnings}
"""


def test_ras_as_text() -> None:
    sound = read(RAS_TEXT.format(status="OK", errors="", warnings=""), "ras.txt")
    assert isinstance(sound, NcclRas) and sound.version == "2.26.2" and sound.size == 32 and alarms(sound) == []
    lost = read(RAS_TEXT.format(status="INCOMPLETE", warnings="", errors="""
INCOMPLETE
  Missing communicator data from 1 job process
  Process 60004 on node 10.4.0.13 managing GPU 0

#0-0 (b3398875b8b2a063) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 9 -- GPU 0 managed by process 60004 on node 10.4.0.13
"""), "ras.txt")
    found = alarms(lost)
    assert [f.cause for f in found] == ["collective_missing_rank"] * 2 and found[1].where.ranks == [9]
    assert all(f.where.hosts == ["10.4.0.13"] for f in found) and found[0].evidence[0].line == 23
    dead = alarms(read(RAS_TEXT.format(status="INCOMPLETE", warnings="", errors="""
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21
"""), "ras.txt"))
    assert [(f.severity, f.where.hosts, f.where.ranks) for f in dead] == [
        ("error", ["172.16.64.213"], []), ("warning", [], [21])]


@pytest.mark.parametrize("counts, words", [((30, 640, 2, 641), "ahead: rank 12 (10.1.0.4 pid 32), rank 13"),
                                           ((30, 640, 2, 17), "behind: rank 12 (10.1.0.4 pid 32), rank 13")])
def test_counts_of_a_ras_text_are_a_remark(counts: tuple[int, ...], words: str) -> None:
    item = read(RAS_TEXT.format(status="MISMATCH", errors="", warnings=f"""
#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  {counts[0]} ranks have launched up to operation {counts[1]}
  {counts[2]} ranks have launched up to operation {counts[3]}
  Rank 12 -- GPU 4 managed by process 32 on node 10.1.0.4
  Rank 13 -- GPU 5 managed by process 33 on node 10.1.0.4
"""), "ras.txt")
    assert alarms(item) == []
    (said,) = (f for f in env_nccl_ras(Artefacts([item])) if isinstance(f, Finding) and "behind" in f.numbers)
    assert words in said.summary and "AllGather" in said.summary
