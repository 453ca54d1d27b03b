"""`pdtrain diag memory`: verdicts, the JSON contract, forms of output, damaged and hostile files."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from diag.artefacts import memory_source
from diag.artefacts.memory_snapshot import MemorySnapshot, _ranks, parse, read, sniff
from diag.errors import ArtefactError
from tests.diag.helpers import pdtrain
from tests.diag.memory.allocator import MIB, Allocator, OutOfMemory, frames, pickled
from tests.diag.memory.runs import FORWARD, OPTIMIZER, fragmented, run_out, training


def written(folder: Path, device: Allocator, name: str = "snapshot.pickle") -> Path:
    path = folder / name
    path.write_bytes(pickled(device.snapshot()))
    return path


def report(*arguments: object) -> tuple[int, dict]:
    done = pdtrain("diag", "memory", "--json", *map(str, arguments))
    return done.status, json.loads(done.out)


def test_a_healthy_run_is_one_info_finding_per_device(tmp_path: Path) -> None:
    device = training(8)
    status, found = report(written(tmp_path, device))
    assert status == 0 and found["verdict"] == "healthy"
    (finding,) = found["findings"]
    numbers = finding["numbers"]
    assert finding["severity"] == "info" and numbers["device"] == 0
    assert numbers["peak_requested_bytes"] == device.peaks["requested"]
    assert numbers["peak_allocated_bytes"] == device.peaks["allocated"]
    assert numbers["peak_reserved_bytes"] == device.peaks["reserved"]
    assert numbers["fragmentation_bytes"] == device.reserved - device.allocated
    assert max(numbers["timeline"]["requested_bytes"]) == device.peaks["requested"]


def test_fragmentation_and_what_expandable_segments_would_give_back(tmp_path: Path) -> None:
    device = run_out(fragmented(), 200 * MIB)
    status, found = report(written(tmp_path, device))
    finding = found["findings"][0]
    assert status == 1 and found["verdict"] == "failed" and finding["role"] == "root"
    assert finding["cause"] == "cuda_oom_fragmentation" and finding["severity"] == "fatal"
    assert "expandable_segments:True" in finding["fix"][0] and "720 MiB" in finding["fix"][0]
    assert finding["numbers"]["fragmentation_bytes"] == device.reserved - device.allocated


def test_idle_memory_that_failed_nothing_is_a_note_where_part_of_it_is_stuck(tmp_path: Path) -> None:
    """Wholly free segments go back when memory runs short; what lies between live blocks does not."""
    device = Allocator()
    drop = [device.alloc(640 * MIB, FORWARD[0]) for _ in range(3)]
    for _ in range(40):  # 12 + 8 MiB share a segment of 20
        drop.append(device.alloc(8 * MIB, FORWARD[1]))
        device.alloc(9 * MIB, FORWARD[0])
    for address in drop:
        device.free(address)
    status, found = report(written(tmp_path, device))
    (finding,) = found["findings"]
    assert (status, found["verdict"], finding["severity"], finding["role"]) == (0, "healthy", "info", "context")
    assert finding["cause"] == "memory_fragmentation" and not finding.get("fix")
    assert "1.9 GiB in wholly free segments" in finding["summary"] and "no allocation failed" in finding["summary"]
    cached = Allocator()
    for address in [cached.alloc(640 * MIB, FORWARD[0]) for _ in range(4)]:
        cached.free(address)
    assert report(written(tmp_path, cached, "cached.pickle"))[1]["findings"][0]["cause"] == "healthy"


def test_demand_names_the_owner_and_what_recomputation_saves(tmp_path: Path) -> None:
    device = Allocator(1 << 30)
    for _ in range(30):
        device.alloc(30 * MIB, FORWARD[0])
    _, found = report(written(tmp_path, run_out(device, 300 * MIB)))
    finding = found["findings"][0]
    assert finding["cause"] == "cuda_oom" and "true demand" in found["headline"]
    assert "model/attention.py:57 forward holds 900 MiB (100 %)" in found["headline"]
    assert any("Recompute" in step and "900 MiB" in step for step in finding["fix"])
    assert any("micro-batch" in step and "450 MiB" in step for step in finding["fix"])


def test_optimizer_states_at_the_first_step(tmp_path: Path) -> None:
    device = Allocator(512 * MIB)
    with pytest.raises(OutOfMemory):
        for _ in range(99):
            device.alloc(30 * MIB, OPTIMIZER)
    _, found = report(written(tmp_path, device))
    assert found["findings"][0]["cause"] == "cuda_oom_optimizer"


def test_what_is_not_pytorchs_is_told_when_the_size_of_the_device_is(tmp_path: Path) -> None:
    device = Allocator(1 << 30, others=400 * MIB)
    device.alloc(100 * MIB, FORWARD[0])
    path = written(tmp_path, run_out(device, 700 * MIB))
    assert report(path)[1]["findings"][0]["cause"] == "cuda_oom"
    finding = report(path, "--device-memory", "1GiB")[1]["findings"][0]
    assert finding["cause"] == "cuda_oom_shared_gpu" and finding["numbers"]["not_pytorch_bytes"] == 400 * MIB
    assert pdtrain("diag", "memory", "--device-memory", "lots", str(path)).status == 2


def test_a_full_device_that_did_not_fail_is_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, training(5))
    assert report(path, "--device-memory", "10GiB")[1]["verdict"] == "healthy"
    status, found = report(path, "--device-memory", "390MiB")
    assert (status, found["findings"][0]["cause"]) == (1, "memory_pressure")


def test_a_leak_leads_and_explains_the_failure_it_ends_in(tmp_path: Path) -> None:
    _, found = report(written(tmp_path, training(14, leak=3 * MIB), "a.pickle"))
    assert (found["verdict"], found["findings"][0]["cause"]) == ("degraded", "memory_leak")
    assert found["findings"][0]["where"]["module"] == "job/metrics.py:44 remember"
    device = run_out(training(14, leak=3 * MIB, capacity=1 << 30), 900 * MIB)
    _, found = report(written(tmp_path, device, "b.pickle"))
    assert (found["verdict"], found["findings"][0]["cause"]) == ("failed", "memory_leak")
    assert [f["cause"] for f in found["findings"] if f["role"] == "victim"] == ["cuda_oom"]


def ranks(folder: Path, extra: dict[int, int], world: int = 8) -> Path:
    hot = frames("model/moe.py:140 experts_forward", "train.py:1 main")
    for rank in range(world):
        device = Allocator()
        for _ in range(20):
            device.alloc(60 * MIB, FORWARD[0])
        device.alloc(100 * MIB + extra.get(rank, 0), hot)
        written(folder, device, f"rank{rank}_memory_snapshot.pickle")
    return folder


def test_the_rank_that_differs_and_in_what(tmp_path: Path) -> None:
    _, found = report(ranks(tmp_path, {5: 900 * MIB}))
    finding = found["findings"][0]
    assert finding["cause"] == "memory_rank_differs" and finding["where"]["ranks"] == [5]
    assert finding["numbers"]["more_than_peers"][0]["bytes"] == 900 * MIB and "expert" in finding["summary"]
    assert len([f for f in found["findings"] if "device" in f["numbers"]]) == 8


@pytest.mark.parametrize("extra", [{}, {5: 100 * MIB}, dict.fromkeys(range(4), 900 * MIB)])
def test_alike_ranks_and_halves_are_a_layout(tmp_path: Path, extra: dict[int, int]) -> None:
    assert report(ranks(tmp_path, extra))[0] == 0


def test_a_failure_of_every_rank_names_none(tmp_path: Path) -> None:
    for rank in range(3):
        written(tmp_path, run_out(training(2, capacity=1 << 30), 900 * MIB), f"rank{rank}.pickle")
    _, found = report(tmp_path)
    assert found["findings"][0]["cause"] == "cuda_oom" and not found["findings"][0]["where"].get("ranks")
    written(tmp_path, training(2), "rank2.pickle").replace(tmp_path / "rank3.pickle")
    _, found = report(tmp_path)
    assert found["findings"][0]["where"]["ranks"] in ([0], [1])


def test_a_postmortem_joins_the_log_and_the_snapshot(tmp_path: Path) -> None:
    written(tmp_path, run_out(fragmented(), 200 * MIB), "rank0_oom.pickle")
    (tmp_path / "run.log").write_text(
        "step 1 loss 4.2\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 MiB. GPU 0 "
        "has a total capacity of 1.00 GiB of which 76.00 MiB is free. Of the allocated memory 228.00 MiB is allocated "
        "by PyTorch, and 720.00 MiB is reserved by PyTorch but unallocated.\n")
    done = pdtrain("diag", "postmortem", "--json", str(tmp_path))
    found = json.loads(done.out)["findings"]
    assert [f["cause"] for f in found if f["role"] == "root"] == ["cuda_oom_fragmentation"]
    assert any(f["role"] == "context" and f["numbers"].get("device") == 0 for f in found)


def test_names_of_files_and_ranks() -> None:
    assert _ranks(["rank3_memory_snapshot.pickle", "Rank-12.pkl"]) == [3, 12]
    assert _ranks(["mem_2.7b_forward.pickle"]) == [None] and _ranks(["snap_0.pkl", "snap_1.pkl"]) == [0, 1]
    assert _ranks(["run_1_step_2.pkl", "run_2_step_3.pkl"]) == [None, None]


def test_sniffing() -> None:
    data = pickled(training(1).snapshot())
    assert sniff(data[:65536], "x") > 0.9 and sniff(pickled(training(1).snapshot(version="list")), "x") > 0.9
    assert not sniff(pickle.dumps({"entries": [], "pg_config": {}}), "x") and not sniff(b"{}", "snapshot.pickle")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return print, ("owned",)


@pytest.mark.parametrize("item", [
    {"segments": Evil(), "device_traces": []}, {"segments": [], "device_traces": [[Evil()]]},
    {"segments": {}, "device_traces": 3}, {"segments": [], "device_traces": [[{"action": "alloc"}]]},
    {"segments": [], "device_traces": [[{"action": "alloc", "addr": -1, "size": 1}]]},
    {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 1 << 70}]]},
    {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "frames": [7]}]]},
    {"segments": [{"device": 0, "address": 0, "total_size": 1, "blocks": [{"size": 1, "state": "odd"}]}]},
    {"segments": [{"device": 1 << 40, "address": 0, "total_size": 1, "blocks": []}]},
    [1, 2], {"segments": [[]]}, {"nothing": 1},
])
def test_hostile_and_odd_files_are_refused_in_words(item: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArtefactError):
        parse(pickle.dumps(item))
    assert "owned" not in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(4))
def test_cut_and_flipped_files_never_raise_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    whole = pickled(run_out(fragmented(), 200 * MIB).snapshot(version=rng.choice(["2.0", "2.1", "2.5", "2.11"])))
    for _ in range(25):
        data = bytearray(whole)
        if rng.random() < 0.3:
            del data[rng.randrange(1, len(data)) :]
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        found = read(memory_source(bytes(data), "rank0.pickle"))
        assert found.problem or isinstance(found, MemorySnapshot)


def test_a_damaged_file_among_good_ones_costs_itself(tmp_path: Path) -> None:
    whole = written(tmp_path, training(3), "rank0.pickle").read_bytes()
    (tmp_path / "rank1.pickle").write_bytes(whole[: len(whole) // 2])
    status, found = report(tmp_path)
    assert status == 1 and [i.get("readable", True) for i in found["inputs"]] == [True, False]
    assert "cut" in found["inputs"][1]["problem"]
    done = pdtrain("diag", "memory", str(tmp_path / "rank1.pickle"))
    assert done.status == 2 and done.err.count("\n") == 1 and "cut" in done.err


def test_the_tree_on_a_terminal_shows_no_markup_of_the_file(tmp_path: Path) -> None:
    device = Allocator()
    device.alloc(9 * MIB, frames("x/[red]evil\x1b[31m.py:7 f", "train.py:1 main"))
    done = pdtrain("diag", "memory", str(written(tmp_path, device)))
    assert done.status == 0 and "\x1b" not in done.out and "[red]evil\\x1b[31m.py:7 f" in done.out
    assert "tree" in pdtrain("diag", "memory", "--help").out


def test_the_page_is_self_contained_and_escapes(tmp_path: Path) -> None:
    device = training(6)
    device.alloc(99 * MIB, frames("</script><script>alert(1)</script>.py:1 f"))
    page = tmp_path / "page.html"
    assert pdtrain("diag", "memory", str(written(tmp_path, device)), "--html", str(page)).status == 0
    text = page.read_text()
    assert "<script>alert" not in text and "http:" not in text and "https:" not in text
    assert "script-src 'sha256-" in text and 'id="memory-data"' in text


@pytest.mark.chromium
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_script_runs_under_its_own_policy(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    pdtrain("diag", "memory", str(written(tmp_path, training(6))), "--html", str(page))
    dom = subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
                         capture_output=True, text=True, timeout=60).stdout
    assert "model/attention.py:57 forward" in dom.split('class="legend"')[1].split("</figure>")[0]


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    target = tmp_path / "x.png"
    assert pdtrain("diag", "memory", str(written(tmp_path, training(4))), "--png", str(target)).status == 0
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sentence, cause, says, missing", [
    ("CUDA out of memory. Tried to allocate 6.00 GiB. GPU 2 has a total capacity of 79.11 GiB of which 1.50 GiB is "
     "free. Including non-PyTorch memory, this process has 77.60 GiB memory in use. Of the allocated memory "
     "75.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated.", "cuda_oom",
     "4.0 GiB too much for 79.1 GiB even with all that lies idle", 4 << 30),
    ("NPU out of memory. Tried to allocate 60.00 MiB (NPU 0; 60.96 GiB total capacity; 59.30 GiB already allocated; "
     "59.30 GiB current active; 30.00 MiB free; 59.33 GiB reserved in total by PyTorch)", "cuda_oom",
     "not in one piece", 0),
    ("HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which 7.12 GiB is "
     "free. Of the allocated memory 8.08 GiB is allocated by PyTorch, and 321.96 MiB is reserved by PyTorch "
     "but unallocated.", "cuda_oom", "yet 7.1 GiB were free on the device", None),
])  # fmt: skip
def test_the_sentence_of_a_log_is_reckoned_with(tmp_path: Path, sentence: str, cause: str, says: str,
                                                missing: int | None) -> None:
    path = tmp_path / "train.log"
    path.write_text("Traceback (most recent call last):\n  File \"train.py\", line 3, in main\n    y = model(x)\n"
                    f"torch.OutOfMemoryError: {sentence}\n")
    done = pdtrain("diag", "memory", "--json", str(path))
    finding = json.loads(done.out)["findings"][0]
    assert (done.status, finding["role"], finding["cause"]) == (1, "root", cause)
    assert says in finding["summary"] and finding["numbers"].get("missing_bytes") == missing
