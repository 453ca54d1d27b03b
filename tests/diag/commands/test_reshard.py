"""`pdtrain diag reshard` as its user meets it: one line and status 2 for what cannot be, a report for what was."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diag.checkpoints.convert.targets import TARGETS
from diag.commands.reshard import FORMATS
from pdtrain.cli import main
from tests.diag.checkpoints.convert.samples import mixtral, read_all, write_hf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "hf", mixtral())


def reshard(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["diag", "reshard", *map(str, arguments)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_help_lists_what_there_is() -> None:
    assert tuple(TARGETS) == FORMATS


def test_a_conversion_is_reported(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = reshard(capsys, source, tmp_path / "out", "--to", "megatron-legacy", "--tp", 2, "--json")
    report = json.loads(out)
    assert (status, err, report["verdict"]) == (0, "", "healthy")
    numbers = report["findings"][0]["numbers"]
    assert numbers["written"] > 0 and numbers["names"] == "megatron-legacy"
    assert numbers["bytes"] == sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert any("optimizer's states" in text for text in numbers["not_carried"])
    assert any("optimizer's states" in text for text in report["not_checked"])
    status, out, _ = reshard(capsys, source, tmp_path / "dry", "--to", "dcp", "--dry-run")
    assert status == 0 and "would become" in out and not (tmp_path / "dry").exists()


def test_a_step_count_that_the_source_lost_is_a_warning(source: Path, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    states = load_file(source / "optimizer" / "optimizer.safetensors")
    del states["optimizer.state.model.norm.weight.step"]
    save_file(states, source / "optimizer" / "optimizer.safetensors")
    status, out, _ = reshard(capsys, source, tmp_path / "out", "--to", "dcp", "--json")
    report = json.loads(out)
    assert status == 1 and report["verdict"] == "degraded"
    warnings = [f["summary"] for f in report["findings"] if f["severity"] == "warning"]
    assert len(warnings) == 1 and "model.norm.weight has no step" in warnings[0]


@pytest.mark.parametrize("arguments, complaint", [
    (["nowhere", "out", "--to", "dcp"], "no such file"),
    (["hf", "out", "--to", "dcp", "--tp", "2"], "--tp means nothing to --to dcp; it takes --ranks"),
    (["hf", "out", "--to", "onnx"], "'onnx' is not one of"),
    (["hf", "out", "--to", "dcp", "--ranks", "0"], "0 is not in the range"),
    (["hf", "out", "--to", "hf", "--max-shard-size", "big"], "'big' is no size"),
    (["hf", "out", "--to", "dcp", "--fact", "heads"], "give name=number"),
    (["hf", "out", "--to", "dcp", "--names", "gpt5"], "the family 'gpt5' is not known"),
    (["hf", "hf", "--to", "dcp"], "exists; nothing is overwritten"),
    (["hf", "out", "--to", "dcp", "--from", "tape"], "--from 'tape': choose one of"),
    (["hf", "x" * 300, "--to", "dcp"], "File name too long"),
    (["hf", "pipe", "--to", "dcp"], "exists; nothing is overwritten"),
    (["hf", "linked", "--to", "dcp"], "is a link, and nothing is written through it"),
    (["hf", "mine", "--to", "dcp"], "holds files that are not of a conversion"),
    (["empty", "out", "--to", "dcp"], "no checkpoint that is known"),
    (["cut", "out", "--to", "dcp"], "is damaged"),
])
def test_what_cannot_be_is_one_line(arguments: list[str], complaint: str, source: Path, tmp_path: Path,
                                    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "linked.reshard.tmp").symlink_to("empty")
    (tmp_path / "mine.reshard.tmp").mkdir()
    (tmp_path / "mine.reshard.tmp" / "model-00099.safetensors").write_text("not to be committed")
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-400])
    status, out, err = reshard(capsys, *arguments)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and complaint in err, err
    assert sorted(p for p in tmp_path.rglob("*") if p.parts[len(tmp_path.parts)] != "cut") == before


class Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return os.system, (f"touch {self.mark}",)


def test_a_hostile_pickle_never_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps({"model": {"w": Harmful(mark)}})
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    (tmp_path / "plain.pt").write_bytes(held.getvalue())
    for folder, name in (("dcp", ".metadata"), ("mega", "mp_rank_00/model_optim_rng.pt"),
                         ("zero", "mp_rank_00_model_states.pt"), ("uni", "zero/w/fp32.pt")):
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(data if name == ".metadata" else held.getvalue())
    for number, name in enumerate(("plain.pt", "dcp", "mega", "zero", "uni")):
        status, _, err = reshard(capsys, tmp_path / name, tmp_path / f"out{number}", "--to", "dcp")
        assert status == 2 and "hostile" in err, (name, err)
    assert not mark.exists() and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["../../escaped", "..", ".", "", "/etc/x", "a/b", "a\nb", "a\x1b[31mb", "n" * 256])
def test_a_name_that_no_folder_can_have_is_refused_where_one_is_needed(
        name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").mkdir()
    save_file({name: np.ones(4, np.float32)}, tmp_path / "hf" / "model.safetensors")
    status, _, err = reshard(capsys, tmp_path / "hf", tmp_path / "out", "--to", "universal")
    assert status == 2 and "no folder can have this one" in err and "\x1b" not in err and err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["hf", "model.safetensors"]
    assert reshard(capsys, tmp_path / "hf", tmp_path / "out", "--to", "dcp")[0] == 0
    assert list(read_all(tmp_path / "out")) == [name]
