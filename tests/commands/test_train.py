"""`pdtrain train` as its user meets it: what it prints, where, and with which exit status. No job is started here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdtrain.commands import train as module

OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def pdtrain(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pdtrain.cli", *arguments],
        cwd=folder, env=OUTSIDE | variables, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_dry_run_json_is_the_documented_object_and_nothing_else():
    done = pdtrain("train", "--preset", "sparrow", "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["schema"] == "pdtrain.dryrun/1"
    assert (found["world"], found["ranks"], found["update_ranks"]) == (8, 8, 0)
    assert found["groups"]["dp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert found["groups"]["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["axes"] == {"pp": 1, "dp": 4, "tp": 2, "edp": 2, "ep": 4, "router": 8, "update": 0}
    assert found["modules"]["experts"]["expert"] == 4
    assert found["batch"]["train_batch"] == 8


def test_dry_run_for_another_world():
    done = pdtrain("train", "--preset", "sparrow", "--dry-run", "--json", "--world", "64")
    found = json.loads(done.stdout)
    assert (found["world"], found["axes"]["dp"], found["axes"]["edp"]) == (64, 32, 16)
    assert found["batch"]["train_batch"] == 32
    assert "train.train_batch = 8 does not fit DP 32: shown with 32" in done.stderr
    done = pdtrain("train", "--preset", "sparrow", "--dry-run", "--json", "--world", "6")
    assert (done.returncode, done.stdout) == (2, "")
    assert "parallel.ranks = 6 is not EDP x expert 4" in done.stderr


def test_dry_run_prints_golden_counts_in_full_digits():
    done = pdtrain("train", "--preset", "deepseek-v3", "--dry-run")
    assert done.returncode == 0
    assert "671,026,419,200" in done.stdout
    assert "36,625,618,432" in done.stdout
    found = json.loads(pdtrain("train", "--preset", "deepseek-v3", "--dry-run", "--json").stdout)["parameters"]
    assert (found["total"], found["activated"]) == (671_026_419_200, 36_625_618_432)
    assert "embedding lookup excluded" in found["activated_convention"]


def test_dry_run_of_pools_counts_update_ranks_apart_and_warns_on_stderr():
    """Of stale weights; pools are no group family of the layout, which has three."""
    pools = ["--set", "pools.mode=async", "--set", "pools.update_ranks=2"]
    done = pdtrain("train", "--preset", "sparrow", "--dry-run", "--json", *pools)
    found = json.loads(done.stdout)
    assert (found["world"], found["ranks"], found["groups"]["update"]) == (10, 8, [[8, 9]])
    assert "1 step old" in done.stderr and "group families" not in done.stderr
    assert len(found["warnings"]) == 1


def test_print_config_is_a_configuration(tmp_path: Path):
    first = pdtrain("train", "--preset", "tiny", "--set", "train.steps=170", "--print-config")
    assert (first.returncode, first.stderr) == (0, "")
    assert "steps = 170" in first.stdout
    (tmp_path / "again.toml").write_text(first.stdout)
    again = pdtrain("train", "again.toml", "--print-config", folder=tmp_path)
    assert again.stdout == first.stdout


def test_nothing_heavy_is_imported_before_a_job_starts():
    code = (
        "import sys\n"
        "from pdtrain.cli import cli\n"
        "for arguments in (['train', '--help'], ['train', '--preset', 'sparrow', '--dry-run', '--json']):\n"
        "    try: cli.main(args=arguments, standalone_mode=False)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'rich', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=OUTSIDE, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "tiny", "--json"], "--json goes with --dry-run"),
        (["--preset", "tiny", "--world", "4"], "--world goes with --dry-run"),
        (["--preset", "tiny", "--dry-run", "--world", "4", "--nproc", "2"], "--world 4 and --nproc 2 differ"),
        (["--preset", "nano"], 'no preset "nano"; presets are deepseek-v3, moe-small, sparrow, tiny'),
        (["absent.toml"], 'no such configuration file: "absent.toml"'),
        (["--preset", "tiny", "--nproc", "3"], "parallel.ranks = 3 is not DP x tensor 2"),
        (["--preset", "deepseek-v3"], "parallel.pipeline = 16 cannot be trained yet, only planned"),
        (["--preset", "tiny", "--set", "pools.mode=sync"], "needs an update pool, but pools.update_ranks = 0"),
        (["--preset", "tiny", "--set", "data.path=/nowhere/*.txt"], "/nowhere/*.txt"),
        (["--preset", "tiny", "--resume"], "give --run-dir, or a checkpoint's path"),
        (["--preset", "tiny", "--resume", "--run-dir", "missing"], "nothing to resume from: no directory missing"),
        (["--preset", "tiny", "--run-dir", "old"], "old already holds a run; --resume continues it"),
        (["--preset", "tiny", "--run-dir", "file"], "--run-dir file is a file"),
        (["--set", "parallel.ranks=128"], "parallel.ranks = 128 on one machine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_status_2(arguments: list[str], words: str, tmp_path: Path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "file").write_text("")
    done = pdtrain("train", *arguments, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing is left behind by a run that did not start"


def test_resume_that_swallowed_the_configuration_says_so(tmp_path: Path):
    (tmp_path / "run.toml").write_text("")
    done = pdtrain("train", "--resume", "run.toml", folder=tmp_path)
    assert done.returncode == 2
    assert "--resume took run.toml as its PATH" in done.stderr


def test_resume_reads_the_configuration_of_the_run_directory(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("[train]\nsteps = 12345\n")
    done = pdtrain("train", "--run-dir", "run", "--resume", "--print-config", folder=tmp_path)
    assert "steps = 12345" in done.stdout


def test_a_rank_of_a_torchrun_job_needs_a_common_directory():
    done = pdtrain("train", "--preset", "tiny", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode == 2
    assert "under torchrun give --run-dir" in done.stderr
    done = pdtrain("train", "--preset", "tiny", RANK="0", WORLD_SIZE="3", LOCAL_RANK="0")
    assert "a job of 3 ranks: parallel.ranks = 3 is not DP x tensor 2" in done.stderr


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    from click.testing import CliRunner

    from diag.errors import MissingExtra

    result = CliRunner().invoke(module.train, ["--preset", "tiny", "--run-dir", str(tmp_path / "run")])
    assert isinstance(result.exception, MissingExtra)
    assert "pip install 'pdtrain[train]'" in str(result.exception)


def test_default_run_directories_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first = module._run_directory(None, "tiny", None)
    first.mkdir(parents=True)
    second = module._run_directory(None, "tiny", None)
    assert first != second
    assert first.name.startswith("tiny-")


def test_every_key_of_the_json_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    found = json.loads(pdtrain("train", "--preset", "tiny", "--dry-run", "--json").stdout)
    named = {*found, *found["axes"], *found["batch"], *found["parameters"], *found["modules"]["experts"]}
    assert [key for key in sorted(named) if f"`{key}`" not in page] == []
