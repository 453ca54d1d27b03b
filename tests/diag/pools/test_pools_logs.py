"""What is left of a separated run when only its logs are: who was lost, from the last lines of those who say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diag.helpers import pdtrain

START = ("2026-11-30T00:10:00.100Z [rank{rank}] INFO pdtrain.recorder.recorder: rank {rank} of 3 on {host}, "
         "process 1129{rank}")
LOST = "pools: rank {rank} (compute) lost rank 2 (update): connection closed while waiting for weights of step 20"
SILENT = "pools: rank {rank} (compute) got no answer from rank 2 (update) in 60 s while waiting for weights of step 20"
KILLED = ("W1130 00:09:50.010000 11200 torch/distributed/elastic.py:83] pdtrain starts 3 ranks\n"
          "E1130 00:10:42.010000 11200 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: -9) "
          "local_rank: 2 (pid: 11292) of binary: /usr/bin/python3\n")


def logs(folder: Path, last: str, host: str = "vm") -> Path:
    for rank in (0, 1):
        lines = [START, "2026-11-30T00:10:41.100Z [rank{rank}] ERROR pdtrain.recorder.crash: PoolError: " + last,
                 "pdtrain: " + last]
        text = "".join(line.format(rank=rank, host=host) + "\n" for line in lines)
        (folder / f"rank_{rank}.log").write_text(text)
    return folder


@pytest.mark.parametrize("last", [LOST, SILENT])
def test_who_was_lost_and_not_who_says_it(tmp_path: Path, last: str) -> None:
    found = pdtrain("diag", "postmortem", logs(tmp_path, last, host="node-a"), "--json").json()
    root = found["findings"][0]
    assert (root["cause"], root["where"]["ranks"], root["playbook"]) == ("pool_member_lost", [2], "pool-member")
    assert root["where"].get("hosts", []) == []  # node-a is where they are who say it


def test_a_compute_rank_that_takes_another_along_is_the_one(tmp_path: Path) -> None:
    """Rank 1 dies, rank 0 ends because of it, and update rank 3 sees rank 0 go."""
    said = {0: "pools: rank 0 (compute) lost a rank of the compute pool (1): connection closed in step 7",
            2: "pools: rank 2 (update) lost rank 1 (compute): connection closed while waiting for the commit of step 7",
            3: "pools: rank 3 (update) lost rank 0 (compute): connection closed while waiting for the commit of step 7"}
    for rank, last in said.items():
        start = START.replace("of 3", "of 4").format(rank=rank, host="vm")
        (tmp_path / f"rank_{rank}.log").write_text(f"{start}\npdtrain: {last}\n")
    root = pdtrain("diag", "postmortem", tmp_path, "--json").json()["findings"][0]
    assert (root["cause"], root["where"]["ranks"]) == ("pool_member_lost", [1])


def test_a_kill_accounts_for_the_loss(tmp_path: Path) -> None:
    (logs(tmp_path, LOST) / "launcher.log").write_text(KILLED)
    found = pdtrain("diag", "postmortem", tmp_path, "--json").json()
    causes = {f["cause"]: f for f in found["findings"]}
    assert found["findings"][0]["cause"] == "killed_unconfirmed" and found["findings"][0]["where"]["ranks"] == [2]
    assert causes["pool_member_lost"]["role"] == "victim"


def test_damage_that_did_not_stop(tmp_path: Path) -> None:
    last = "pools: rank 2 (update) refused gradients of step 12, bucket 3 from rank 1 (compute): checksum wrong 4 times"
    (tmp_path / "rank_2.log").write_text(START.format(rank=2, host="vm") + f"\npdtrain: {last}\n")
    root = pdtrain("diag", "postmortem", tmp_path, "--json").json()["findings"][0]
    assert (root["cause"], root["severity"], root["where"]["ranks"]) == ("pool_payload_corrupt", "fatal", [1])


TOLD = "2026-11-30T00:10:41.200Z [rank{rank}] WARNING pdtrain.recorder.crash: received SIGTERM\n"
CLOSING = "".join(f"W1130 00:10:41.150000 11200 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process "
                  f"1129{rank} closing signal SIGTERM\n" for rank in (0, 1))


def test_the_launchers_own_signal_is_no_preemption(tmp_path: Path) -> None:
    """Compute ranks wait where a signal is heard, so that each says it before the kill is reported."""
    for rank in (0, 1):
        text = START.format(rank=rank, host="vm") + "\n" + TOLD.format(rank=rank)
        (tmp_path / f"rank_{rank}.log").write_text(text)
    (tmp_path / "launcher.log").write_text(KILLED.replace("\n", "\n" + CLOSING, 1))
    root = pdtrain("diag", "postmortem", tmp_path, "--json").json()["findings"][0]
    assert (root["cause"], root["where"]["ranks"]) == ("killed_unconfirmed", [2])


def test_a_signal_that_no_failure_precedes_is_one(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        text = START.format(rank=rank, host="vm") + "\n" + TOLD.format(rank=rank)
        (tmp_path / f"rank_{rank}.log").write_text(text)
    (tmp_path / "launcher.log").write_text(KILLED.splitlines()[0] + "\n" + CLOSING)
    assert pdtrain("diag", "postmortem", tmp_path, "--json").json()["findings"][0]["cause"] == "preempted"
