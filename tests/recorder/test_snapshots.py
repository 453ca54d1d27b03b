"""Memory snapshots by the recorder: module peaks on CPU; on CUDA the calls that torch documents, torch replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed")

from pdtrain.recorder.snapshots import MemoryCapture  # noqa: E402
from tests.diag.helpers import pdtrain  # noqa: E402


def one_step(capture: MemoryCapture, step: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with capture.step(step, model, optimizer):
        model(torch.ones(32, 64)).sum().backward()
        optimizer.step()


def test_module_peaks_of_the_chosen_step(tmp_path: Path) -> None:
    said: list[str] = []
    capture = MemoryCapture(tmp_path / "dumps", 3, torch.device("cpu"), entries=10, steps=[2], complain=said.append)
    for step in (1, 2):
        one_step(capture, step)
    (path,) = (tmp_path / "dumps").iterdir()
    assert path.name == "memory_rank3_step2.json" and not said
    found = json.loads(path.read_text())
    parameters = 4 * (64 * 256 + 256 + 256 * 8 + 8)
    assert found["by_kind"]["Parameter"] == parameters and found["peak_bytes"] > 3 * parameters
    assert {m["module"].split(".")[-1] for m in found["modules"]} >= {"0", "1", "2"}

    done = pdtrain("diag", "memory", "--json", str(tmp_path))
    (finding,) = done.json()["findings"]
    assert done.status == 0 and finding["numbers"]["device"] == "cpu"
    assert finding["numbers"]["peak_requested_bytes"] == found["peak_bytes"] and finding["where"]["ranks"] == [3]
    assert "Parameter" in pdtrain("diag", "memory", str(tmp_path)).out


def test_a_step_of_several_micro_batches_is_watched_whole(tmp_path: Path) -> None:
    """torch's MemTracker gives up at the second forward pass. The peak of a module is that of the fullest pass."""
    said: list[str] = []
    capture = MemoryCapture(tmp_path, 0, torch.device("cpu"), entries=0, steps=[1], complain=said.append)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters())
    with capture.step(1, model, optimizer):
        for rows in (512, 32):
            model(torch.ones(rows, 64)).sum().backward()
        optimizer.step()
    found = json.loads((tmp_path / "memory_rank0_step1.json").read_text())
    assert not said and len({m["module"] for m in found["modules"]}) == len(found["modules"]) == 4
    assert min(m["peak_bytes"] for m in found["modules"]) > 4 * 512 * 256  # what the first layer of the large pass gave


def test_a_damaged_module_file_is_an_input_with_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"schema": "pdtrain.memory/1", "peak_bytes": "many"}')
    done = pdtrain("diag", "memory", str(path))
    assert done.status == 2 and "peak_bytes" in done.err and done.err.count("\n") == 1


def test_what_fails_inside_the_step_comes_out_and_leaves_no_file(tmp_path: Path) -> None:
    capture = MemoryCapture(tmp_path, 0, torch.device("cpu"), entries=0, steps=[1], complain=print)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), capture.step(1, model, torch.optim.SGD(model.parameters())):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_complaint(tmp_path: Path) -> None:
    (tmp_path / "dumps").write_text("a file")
    said: list[str] = []
    one_step(MemoryCapture(tmp_path / "dumps", 0, torch.device("cpu"), entries=0, steps=[1], complain=said.append), 1)
    assert len(said) == 1 and "step 1" in said[0]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch's calls, recorded. What they do on a GPU is torch's business."""
    calls: dict[str, Any] = {"dumps": 0}

    def dump(path: str) -> None:
        calls["dumps"] += 1
        Path(path).write_bytes(b"x")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kwargs: calls.update(history=kwargs))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer",
                        lambda observer: calls.update(observer=observer), raising=False)
    return calls


def test_the_first_failure_and_chosen_steps_on_cuda(tmp_path: Path, cuda: dict[str, Any]) -> None:
    capture = MemoryCapture(tmp_path, 1, torch.device("cuda", 0), entries=500, steps=[4], complain=print)
    assert cuda["history"]["max_entries"] == 500 and cuda["history"]["stacks"] == "python"
    for step in (3, 4):
        with capture.step(step, torch.nn.Linear(1, 1), None):  # type: ignore[arg-type]
            pass
    for _ in range(3):
        cuda["observer"](0, 10, 20, 30)
    assert {p.name for p in tmp_path.iterdir()} == {"memory_rank1_step4.pickle", "memory_rank1_oom.pickle"}
    assert cuda["dumps"] == 2


def test_no_history_when_it_is_off(tmp_path: Path, cuda: dict[str, Any]) -> None:
    capture = MemoryCapture(tmp_path, 0, torch.device("cuda", 0), entries=0, steps=[1], complain=print)
    with capture.step(1, torch.nn.Linear(1, 1), None):  # type: ignore[arg-type]
        pass
    assert "history" not in cuda and not list(tmp_path.iterdir())
