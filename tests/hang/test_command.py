"""`pdtrain diag hang` as its user runs it: exit status, JSON, terminal text, bad input in one line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.diag.helpers import pdtrain
from tests.hang import scenarios, special
from tests.hang.scenarios import only_world
from tests.hang.simulate import World, raw_dump


def dumps(name: str, folder: Path) -> Path:
    everything = {s.name: s for s in [*scenarios.named(), *special.special(), *special.healthy()]}
    everything[name].write(folder)
    return folder


def test_a_hang_exits_1_and_names_the_rank_first(tmp_path: Path) -> None:
    result = pdtrain("diag", "hang", dumps("A", tmp_path))
    assert result.status == 1
    assert " ".join(result.out.split()).startswith("FAILED Rank 3 never came to all_reduce #9 of default_pg")
    assert "/job/model.py:27" in result.out
    assert "hang-missing-rank" in result.out
    assert result.err == ""


def test_json_is_the_report_and_nothing_else(tmp_path: Path) -> None:
    result = pdtrain("diag", "hang", "--json", dumps("B", tmp_path))
    report = result.json()
    assert result.status == 1 and report["verdict"] == "failed"
    root, victim = report["findings"]
    assert (root["cause"], root["role"], root["where"]["ranks"]) == ("collective_mismatch", "root", [0])
    assert root["explains"] == [1] and victim["role"] == "victim"
    assert root["playbook"] == "collective-mismatch" and root["fix"]
    assert len(report["inputs"]) == 8 and report["inputs"][3]["ranks"] == [3]


@pytest.mark.parametrize("name, status", [("healthy-0", 0), ("healthy-1", 0), ("half-and-half", 1)])
def test_exit_status_follows_the_verdict(name: str, status: int, tmp_path: Path) -> None:
    assert pdtrain("diag", "hang", dumps(name, tmp_path)).status == status


def test_bad_input_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(b"\x80\x02}q\x00X\x07\x00\x00\x00versionX\x09\x00\x00\x00pg_config")
    for path in (tmp_path / "nowhere", tmp_path / "rank_0"):
        result = pdtrain("diag", "hang", path)
        assert result.status == 2 and result.out == ""
        assert result.err.count("\n") == 1 and str(path) in result.err


def test_logs_are_not_its_business(tmp_path: Path) -> None:
    """A folder of logs and dumps: the dumps are read, the logs counted."""
    (tmp_path / "train.log").write_text("step 1 loss 2.0\n" * 20)
    result = pdtrain("diag", "hang", "--json", dumps("A", tmp_path))
    assert result.json()["findings"][0]["where"]["ranks"] == [3]
    assert any("train.log" in note for note in result.json()["not_checked"])


def test_text_from_a_dump_cannot_steer_the_terminal(tmp_path: Path) -> None:
    groups, programs = only_world(2, 3)
    del programs[1][2:]
    groups["w"].desc = "\x1b[31m[bold]evil[/bold]\nFAILED"
    world = World(2, groups, programs).run()
    for rank in range(2):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(raw_dump(world, rank)))
    result = pdtrain("diag", "hang", tmp_path)
    assert "\x1b" not in result.out
    assert "[bold]evil[/bold]" in result.out
    assert not any(line.startswith("FAILED") for line in result.out.splitlines()[1:])


def test_neither_torch_nor_numpy_is_imported(tmp_path: Path) -> None:
    code = ("import sys; from diag.diagnose import diagnose; r = diagnose([sys.argv[1]], only='hang'); "
            "print(r.verdict, [m for m in ('torch', 'numpy') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code, str(dumps("A", tmp_path))], capture_output=True, text=True,
                         check=True).stdout
    assert out == "failed []\n"


def test_a_post_mortem_uses_dumps_too(tmp_path: Path) -> None:
    """Log: every watchdog barks. Dumps: rank 5 called something else. The dumps settle who is guilty."""
    folder = dumps("B2", tmp_path / "dumps")
    lines = [f"[rank{r}]:[E905 15:33:22.00000000{r} ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective "
             f"operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=80, NumelOut=80, Timeout(ms)=600000) "
             f"ran for 600020 milliseconds before timing out." for r in range(8) if r != 5]
    (tmp_path / "console.log").write_text("\n".join(lines) + "\n")
    report = json.loads(pdtrain("diag", "postmortem", "--json", folder, tmp_path / "console.log").out)
    root = report["findings"][0]
    assert (root["cause"], root["where"]["ranks"]) == ("collective_mismatch", [5])
    assert all(f["role"] != "root" for f in report["findings"][1:])
