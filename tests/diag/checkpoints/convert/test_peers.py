"""The real deepspeed and megatron-core load what was converted. Seen with deepspeed 0.19.8, megatron-core 0.16.1.

They are heavy and pin their own versions, so they live in another environment: PDTRAIN_PEERS_PYTHON names its Python.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from diag.checkpoints.convert.reshard import Options, Wish, reshard
from tests.diag.checkpoints.convert.samples import mixtral, write_hf
from tests.diag.checkpoints.peer import run_peer

HERE = Path(__file__).parent
PYTHON = os.environ.get("PDTRAIN_PEERS_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="PDTRAIN_PEERS_PYTHON names no Python with deepspeed and megatron-core"),
]


def peer(script: Path, *arguments: object, port: int) -> None:
    run_peer(PYTHON, script, *arguments, seconds=280, PEER_PORT=str(port))


@pytest.mark.parametrize("to, layout, stage, world", [
    ("zero1", {"dp": 1}, 1, 1), ("zero2", {"dp": 4}, 2, 4), ("universal", {}, 1, 2),
])
def test_deepspeed_resumes(to: str, layout: dict[str, int], stage: int, world: int, tmp_path: Path) -> None:
    port = 29700 + stage * 10 + world
    peer(HERE.parent / "peers" / "make_deepspeed.py", tmp_path / "src", 2, 2, port=port)
    tag = (tmp_path / "src" / "latest").read_text()
    load = HERE / "peers" / "load_deepspeed.py"
    peer(load, tmp_path / "src", tag, 2, 2, tmp_path / "before.json", port=port + 1)
    reshard(Wish(source=tmp_path / "src", destination=tmp_path / "out", options=Options(to=to, **layout)))
    more = [f"{tag}_universal", stage, world, tmp_path / "after.json", "universal"]
    peer(load, tmp_path / "out", *(more if to == "universal" else [tag, *more[1:4]]), port=port + 2)
    before, after = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("before", "after"))
    for key in ("flat", "steps", "global_steps"):
        assert after[key] == before[key], key
    if world == 2:  # on other ranks the micro-batches and so the gradients are others
        assert after["after"] == before["after"]


@pytest.mark.parametrize("tp, ep, world", [(1, 1, 1), (1, 2, 2)])
def test_megatron_core_loads_torch_dist(tp: int, ep: int, world: int, tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", mixtral())
    reshard(Wish(source=source, destination=tmp_path / "out", options=Options(to="megatron", tp=2, ep=2),
                 names="megatron-local"))
    load = HERE / "peers" / "load_megatron.py"
    peer(load, tmp_path / "out" / "iter_0000000", world, tp, ep, tmp_path / "sums.json", port=29750)
    sums, weights = json.loads((tmp_path / "sums.json").read_text()), mixtral()

    def total(*names: str) -> float:
        return sum(weights[f"model.layers.1.{name}.weight"].astype(np.float64).sum() for name in names)

    layer = "decoder.layers.1."
    for name, wanted in {
        f"{layer}self_attention.linear_qkv.weight": total(*(f"self_attn.{x}_proj" for x in "qkv")),
        f"{layer}self_attention.linear_proj.weight": total("self_attn.o_proj"),
        f"{layer}pre_mlp_layernorm.weight": total("post_attention_layernorm"),
        f"{layer}mlp.experts.local_experts.1.linear_fc1.weight": total(
            *(f"block_sparse_moe.experts.1.{w}" for w in ("w1", "w3"))),
        f"{layer}mlp.experts.local_experts.1.linear_fc2.weight": total("block_sparse_moe.experts.1.w2"),
    }.items():
        assert sums[name] == pytest.approx(wanted, abs=1e-9), name
