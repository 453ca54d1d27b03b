"""One link under faults: what arrives is what was sent, once, or the link ends with one line that names the rank."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pdtrain.pools.links import End
from pdtrain.pools.message import Damaged, Header, Kind, PoolError, Status
from pdtrain.pools.receiving import Receiver
from tests.distributed import run_distributed


def test_a_header_survives_the_way_and_a_damaged_one_is_not_believed():
    header = Header(Kind.GRADIENTS, 12, 11, 3, 1, 2, 7, Status.OK, 99, 1 << 33, (1 << 64) - 1)
    packed = header.pack()
    assert packed.numel() == 64
    assert Header.unpack(packed) == header
    packed[20] ^= 1
    with pytest.raises(Damaged):
        Header.unpack(packed)


def _link(
    rank: int, faults: list[dict[str, Any]], messages: int, timeout: float = 20.0, resend_limit: int = 3
) -> dict[str, Any]:
    """Rank 0 sends `messages` buckets to rank 1 through one link; what each end saw."""
    import torch
    import torch.distributed as dist

    from pdtrain.pools.faults import Fault
    from pdtrain.pools.links import End
    from pdtrain.pools.message import PoolError
    from pdtrain.pools.receiving import Receiver
    from pdtrain.pools.sending import Sender

    notes: list[str] = []
    group = dist.new_group([0, 1], timeout=timedelta(minutes=5))
    end = End(group, rank, 1 - rank, "up", 1, timeout, resend_limit, 4, lambda name, **_: notes.append(name),
              lambda number: f"rank {number} ({'compute' if number == 0 else 'update'})")
    said: dict[str, Any] = {"notes": notes, "error": "", "values": []}

    def judge(peer: int, header: Header) -> Status:
        return Status.OK if header.version >= 0 else Status.VERSION

    try:
        if rank == 0:
            sender = Sender(end, [Fault(**fault) for fault in faults])
            for number in range(messages):
                payload = torch.full((1000,), float(number)).view(torch.uint8)
                sender.put(Header(Kind.GRADIENTS, 1, 0, number), payload)
            said["refused"] = [header.bucket for header in sender.drain()]
            said["counters"] = sender.take_counters()
            sender.close()
        else:
            receiver = Receiver(end, judge)
            refused = {fault["bucket"] for fault in faults if fault["kind"] == "version"}
            for number in range(messages):
                if number not in refused:
                    taken = receiver.take(Kind.GRADIENTS, 1, number)
                    assert taken is not None
                    said["values"].append(sorted(set(taken.view(torch.float32).tolist())))
            receiver.close()
            said["counters"] = receiver.take_counters()
    except PoolError as error:
        said["error"] = str(error)
        time.sleep(1)  # the other end finds out by itself, not from our end of the connection
    return said


def _links(rank: int, cases: list[tuple[list[dict[str, Any]], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [_link(rank, faults, 6, **settings) for faults, settings in cases]


def test_faults_on_a_link(tmp_path: Path):
    up = {"rank": 0, "direction": "up", "step": 1}
    cases: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        ([], {}),
        ([{"kind": "corrupt", "bucket": 2, **up}], {}),
        ([{"kind": "duplicate", "bucket": 1, **up}, {"kind": "duplicate", "bucket": 5, **up}], {}),
        ([{"kind": "reorder", "bucket": 0, **up}, {"kind": "reorder", "bucket": 5, **up}], {}),
        ([{"kind": "delay", "bucket": 3, "seconds": 0.3, **up}], {}),
        ([{"kind": "version", "bucket": 4, "version": -5, **up}], {}),
    ]  # fmt: skip
    sent, received = run_distributed(_links, 2, tmp_path, cases, timeout=60)
    whole, corrupt, duplicate, reorder, delay, version = received
    for case in (whole, corrupt, duplicate, reorder, delay):
        assert case["values"] == [[float(number)] for number in range(6)]
        assert case["error"] == ""
    assert whole["notes"] == [] and sent[0]["notes"] == []
    assert (corrupt["notes"], sent[1]["notes"]) == (["pool_checksum_error"], ["pool_resend"])
    assert (corrupt["counters"].checksum_errors, sent[1]["counters"].resends) == (1, 1)
    assert duplicate["notes"] == ["pool_duplicate", "pool_duplicate"] and duplicate["counters"].duplicates == 2
    assert sent[5]["refused"] == [4] and version["values"] == [[float(n)] for n in (0, 1, 2, 3, 5)]


def test_a_message_that_stays_damaged_ends_the_link_with_both_names(tmp_path: Path):
    fault = {"kind": "corrupt", "rank": 0, "bucket": 2, "times": 9, "every_try": True}
    sent, received = run_distributed(_links, 2, tmp_path, [([fault], {"resend_limit": 2})], timeout=60)
    line = (
        "pools: rank 1 (update) refused gradients of step 1, bucket 2 from rank 0 (compute): "
        "checksum wrong 3 times in a row"
    )
    assert sent[0]["error"] == line
    assert received[0]["error"] == line


def test_a_silent_peer_is_named_in_bounded_time(tmp_path: Path):
    fault = {"kind": "delay", "rank": 0, "bucket": 2, "seconds": 9.0}
    began = time.monotonic()
    sent, received = run_distributed(_links, 2, tmp_path, [([fault], {"timeout": 1.0})], timeout=60)
    assert time.monotonic() - began < 40
    assert received[0]["error"] == (
        "pools: rank 1 (update) got no answer from rank 0 (compute) in 1 s while waiting for gradients of step 1, "
        "bucket 2"
    )
    assert received[0]["values"] == [[0.0], [1.0]], "nothing is taken for what did not come"
    assert "got no answer from rank 1 (update) in 1 s" in sent[0]["error"]


class _Idle(Receiver):
    """A receiving end to which nothing comes."""

    def _run(self) -> None:
        return


@pytest.mark.parametrize("answers, named", [(True, "for rank 1 (compute), which answers but has not sent"),
                                            (False, "got no answer from rank 0 (compute)")])
def test_a_peer_that_waits_for_a_silent_one_is_not_blamed(answers: bool, named: str):
    """Rank 1 lives and has sent nothing, because rank 0 does not come to their collective."""
    notes: list[dict[str, Any]] = []

    def names(rank: int) -> str:
        return f"rank {rank} ({'compute' if rank < 2 else 'update'})"

    def idle(peer: int) -> _Idle:
        group: Any = None
        end = End(group, 2, peer, "up", 1, 0.2, 3, 4, lambda name, **fields: notes.append(fields), names)
        return _Idle(end, lambda peer, header: Status.OK)

    one, other = idle(1), idle(0)
    one.alive, other.alive, one.others = lambda seconds: True, lambda seconds: answers, [other]
    with pytest.raises(PoolError) as error:
        one.take(Kind.GRADIENTS, 9, 3)
    assert named in str(error.value) and "gradients of step 9, bucket 3" in str(error.value)
    assert [note["peer"] for note in notes] == [1 if answers else 0]
