"""No alarm on sound checkpoints that the real libraries wrote: torch with real ranks here, DeepSpeed and megatron-core
where PDTRAIN_PEERS_PYTHON names a Python that has them (they never are in this project's own environment)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from diag.checkpoints import open_checkpoint
from diag.checkpoints.answer import verified
from pdtrain.drill import content, layout  # noqa: F401 - they register their kinds
from pdtrain.drill.corrupt import corrupt
from tests.diag.checkpoints.peer import run_peer

HERE = Path(__file__).parent / "peers"
PEERS = os.environ.get("PDTRAIN_PEERS_PYTHON", "")
needs_peers = pytest.mark.skipif(not PEERS, reason="PDTRAIN_PEERS_PYTHON names no Python with deepspeed, megatron-core")
DEEPSPEED = [("0", ""), ("1", ""), ("2", ""), ("3", ""), ("1", "frozen"), ("3", "frozen"), ("1", "fp32"), ("2", "moe")]


def silent(path: Path) -> None:
    """Deep or not: healthy, and nothing above info."""
    for deep in (False, True):
        report = verified(str(path), deep=deep)
        assert [f.summary for f in report.findings if f.severity != "info"] == []
        assert report.verdict == "healthy"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "tp", "both", "async", "hf"])
def test_torch_with_real_ranks(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "step-2"
    run_peer(sys.executable, HERE / "save_dcp.py", path, mode)
    if mode == "hf":
        path = path / "sharded" if (path / "sharded").is_dir() else path
    silent(path)
    checkpoint = open_checkpoint(path)
    assert any(len(t.chunks) > 1 for t in checkpoint.tensors.values())
    # Without an index nothing tells that the last of torch's safetensors shards ever was; a DCP knows its files.
    for kind in ("cut-tail",) if mode == "hf" else ("cut-tail", "missing-shard", "flip-payload", "lost-step"):
        copy, damage = corrupt(path, kind, tmp_path / kind)
        report = verified(str(copy), deep=True)
        assert report.exit_status() == 1, kind
        assert any(damage.file in str(f.where.file) for f in report.findings), kind


@pytest.mark.slow
@needs_peers
@pytest.mark.parametrize(("stage", "flavour"), DEEPSPEED)
def test_deepspeed(stage: str, flavour: str, tmp_path: Path) -> None:
    run_peer(PEERS, HERE / "make_deepspeed.py", tmp_path / "run", stage, 2, flavour)
    silent(tmp_path / "run")
    if flavour == "" and stage in "123":
        step = next((tmp_path / "run").glob("global_step*"))
        run_peer(PEERS, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", step, "--output_folder",
                 tmp_path / "uni" / "global_step2_universal", "--inject_missing_state")
        silent(tmp_path / "uni")


@pytest.mark.slow
@needs_peers
@pytest.mark.parametrize(("world", "tp", "ep"), [(1, 1, 1), (2, 1, 2)])
def test_megatron_core(world: int, tp: int, ep: int, tmp_path: Path) -> None:
    run_peer(PEERS, HERE / "make_megatron.py", tmp_path / "run" / "iter_0000010", world, tp, ep)
    silent(tmp_path / "run")
    copy, damage = corrupt(tmp_path / "run", "cloned-expert", tmp_path / "copy")
    assert any(f.numbers.get("tensor") == damage.tensor for f in verified(str(copy)).findings)
