"""One job at a time writes to a run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diag.errors import UsageError
from pdtrain import in_use


def test_a_rank_that_still_lives_keeps_the_next_job_out(tmp_path: Path) -> None:
    launcher = in_use.take(tmp_path)
    code = "import sys; from pathlib import Path; from pdtrain.in_use import share; " \
           "print(share(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    rank = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None and int(rank.stdout.readline()) >= 0, "the ranks share it with their launcher"
        with pytest.raises(UsageError, match="is in use: a job is still writing there"):
            in_use.take(tmp_path)
        os.close(launcher)  # killed
        with pytest.raises(UsageError, match="is in use"):
            in_use.take(tmp_path)
    finally:
        rank.kill()
        rank.communicate()
    os.close(in_use.take(tmp_path))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_directory_that_cannot_be_locked_is_used_all_the_same(tmp_path: Path) -> None:
    assert in_use.take(tmp_path / "missing") == in_use.share(tmp_path / "missing") == -1
