"""Who printed a line and when, in every dress that launchers and libraries put on it."""

from __future__ import annotations

import pytest

from diag.artefacts.log_lines import Style, clean, speaker_of, style_of, time_of


@pytest.mark.parametrize("text, rank, local, host, pid", [
    ("[rank3]: Traceback (most recent call last):", 3, None, None, None),
    ("[default1]: iteration 7", None, 1, None, None),
    ("[default1]:[rank9]: boom", 9, None, None, None),
    ("[1,12]<stderr>:boom", 12, None, None, None),
    ("(Actor pid=81, ip=10.0.0.5) boom", None, None, "10.0.0.5", 81),
    ("node-a:61203:61334 [2] NCCL INFO x", None, None, "node-a", 61203),
    ("[node-1] rank 8: checkpoint begin", 8, None, "node-1", None),
    ("[E ProcessGroupNCCL.cpp:475] [Rank 2] Watchdog caught", 2, None, None, None),
    ("Aug 12 08:13:55 node-9 kernel: NVRM: Xid", None, None, "node-9", None),
    ("[rank: 2] Child process", 2, None, None, None),
    ("loss went up, see rank 3 for details", None, None, None, None),
    ("[step 12] loss 3.1", None, None, None, None),
    ("[cuda:0] hello", None, None, None, None),
])
def test_marks(text, rank, local, host, pid):
    speaker = speaker_of(text)
    assert (speaker.rank, speaker.local_rank, speaker.host, speaker.pid) == (rank, local, host, pid)


def test_two_ranks_on_one_line_are_told_apart():
    text = "[rank0]: step 4 loss 2.0[rank5]:[E810 x] [Rank 5] Watchdog caught"
    assert speaker_of(text, text.index("step")).rank == 0
    assert speaker_of(text, text.index("Watchdog")).rank == 5


def test_a_leading_number_is_a_task_only_where_most_lines_have_one():
    srun = b"".join(b"%d: step 1 loss 2.0\n" % n for n in range(20))
    assert style_of(srun).srun
    assert speaker_of("7: boom", 0, style_of(srun)).rank == 7
    assert not style_of(b"INFO hello\n" * 20 + b"7: boom\n").srun
    assert speaker_of("7: boom").rank is None


def test_pdsh_prefixes_name_hosts():
    style = style_of(b"worker-1: a\nworker-2: b\nworker-1: c\n")
    assert speaker_of("worker-2: ssh exited", 0, style).host == "worker-2"


@pytest.mark.parametrize("text, seconds", [
    ("[2026-08-10 02:50:27] x", 1786330227.0),
    ("2024-05-01T10:00:00.250Z x", 1714557600.25),
    ("[2021-08-12 08:19:28,225] [INFO] x", 1628756368.225),
    ("[04/11/23 10:21:33] INFO x", 1681208493.0),
    ("[rank7]:[E810 03:04:10.850617863 F.cpp:683] x", 83991850.850617863 + 0),
    ("E0810 03:04:10.85 1 f.py:1] x", None),
    ("Aug 12 08:13:55 node-9 kernel: x", None),
    ("no stamp here", None),
    ("took 03:04:10 in all", None),
    ("[2026-13-40 02:50:27] x", None),
])
def test_times(text, seconds):
    found = time_of(text)
    if seconds is None and ("E0810" in text or "Aug" in text):
        assert found is not None and found < 2**28  # no year: comparable within the file only
    elif seconds is not None and seconds < 2**28:
        assert found is not None
    else:
        assert found == seconds


def test_stamps_without_a_year_take_the_files_year():
    year = style_of(b"[2026-08-10 02:50:27] start\n").year
    assert time_of("[E810 02:50:27.0 x", year) == time_of("2026-08-10 02:50:27")


def test_escape_sequences_are_no_text():
    assert clean("\x1b[31mboom\x1b[0m\x1b]0;title\x07 \r") == "boom"


def test_style_of_nothing():
    assert style_of(b"") == Style()
