"""The predicted peak of a step against the peak that torch's MemTracker sees, on this CPU."""

from __future__ import annotations

import pytest

from pdtrain.config import load_run
from pdtrain.plan import memory, states
from pdtrain.plan.setup import Setup, stages

BASE = [
    "model.layers=4", "train.sequence_length=128", "train.micro_batch=4", "model.vocab_size=2048",
    "model.moe.shared_experts=1", "train.train_batch=none",
]  # fmt: skip
MLA = ("model.attention=mla model.mla.q_lora_rank=96 model.mla.kv_lora_rank=64 model.mla.qk_nope_head_dim=16 "
       "model.mla.qk_rope_head_dim=16 model.mla.v_head_dim=32")  # fmt: skip
FULL = " ".join(f"modules.{row}.recompute=full" for row in ("attention", "experts", "dense_ffn", "shared_expert"))
LAYOUTS = {
    "one rank": "1 1 1",
    "one rank, MLA": f"1 1 1 {MLA}",
    "one rank, recompute": f"1 1 1 {FULL}",
    "DP4": "4 1 1",
    "DP4 replicated": "4 1 1 parallel.fsdp=false",
    "DP4, two micro-batches": "4 1 1 train.accumulation=2",
    "EP4": "4 1 4",
    "EP8, long": "8 1 8 train.sequence_length=512 train.micro_batch=2",
    "TP2": "2 2 1",
    "TP2 EP4 on 8": "8 2 4",
    "TP2 EP2 on 8, MLA": f"8 2 2 {MLA}",
    "TP4 EP8, recompute": "8 4 8 modules.attention.recompute=full modules.experts.recompute=full "
                          "train.sequence_length=256",
    "DP8 EP2, small batch": "8 1 2 train.micro_batch=1 train.sequence_length=64",
}  # fmt: skip


def run_of(layout: str):
    ranks, tensor, expert, *more = LAYOUTS[layout].split()
    degrees = [f"parallel.ranks={ranks}", f"modules.attention.tensor={tensor}", f"modules.experts.expert={expert}"]
    return load_run(preset="tiny", overrides=[*BASE, *degrees, *more])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicted_peak_is_the_measured_one(layout):
    """Within 5 %; states within 0.1 %."""
    pytest.importorskip("torch")
    from pdtrain.plan.measured import measure

    run = run_of(layout)
    found, setup = measure(run), Setup(run)
    _, predicted = memory.peak(setup, device="cpu")
    held = states.of_rank(setup, stages(setup)[0])
    assert held.parameters == pytest.approx(found.parameters, rel=1e-3)
    assert held.gradients == pytest.approx(found.gradients, rel=1e-3)
    assert held.optimizer == pytest.approx(found.optimizer, rel=1e-3)
    assert predicted.total == pytest.approx(found.total, rel=0.05)
