"""What scanning costs: the lines that a run prints by the million must not be proposed to any rule in vain."""

from __future__ import annotations

import pytest

from diag.signatures import load_catalogue, verify

ORDINARY = {
    "Megatron-LM": "[default3]: iteration     3400/  500000 | consumed samples:      6963200 | elapsed time per "
                   "iteration (ms): 10500.2 | learning rate: 4.475E-05 | global batch size:  2048 | "
                   "lm loss: 2.307547E+00 | loss scale: 1.0 | grad norm: 0.152 | num zeros: 0.0 | "
                   "number of skipped iterations:   0 | number of nan iterations:   0 | "
                   "samples per second: 194.020 | TFLOPs: 150.30 |",
    "DeepSpeed": "[2026-08-10 02:56:40,441] [INFO] [timer.py:260:stop] epoch=0/micro_step=3400/global_step=3400, "
                 "RunningAvgSamplesPerSec=58.73, CurrSamplesPerSec=61.35, MemAllocated=6.01GB, MaxMemAllocated=9.2GB",
    "torchtitan": "[rank0]:2026-08-10 02:56:40,441 - root - INFO - step: 340  loss:  4.8417  grad_norm:  0.9113  "
                  "memory: 47.32GiB(59.80%)  tps: 7,241  tflops: 421.10  mfu: 42.58%",
    "HF Trainer": "{'loss': 2.1173, 'grad_norm': 0.8137, 'learning_rate': 4.1e-05, 'epoch': 0.34}",
    "OLMo": "2026-08-10 02:56:40.441 node-1:0 olmo.train:967 INFO [step=340/1000,epoch=0] optim/total_grad_norm=0.3421",
    "tqdm": " 34%|███▍      | 3400/10000 [1:12:09<2:20:01,  1.27s/it, loss=2.31, lr=4.1e-5]",
    "Lightning": "Epoch 3:  57%|█████▋    | 812/1424 [03:41<02:46,  3.67it/s, v_num=7, train_loss=0.412]",
}


@pytest.mark.parametrize("framework", ORDINARY)
def test_no_rule_looks_at_ordinary_progress_in_vain(framework: str) -> None:
    """One careless word in a pattern ("norm", "loss") made the scan of a gigabyte four times slower."""
    catalogue = load_catalogue(None)
    line = ORDINARY[framework].encode()
    vain = sorted({catalogue.rules[index].id for _, index in catalogue.matcher.propose(line + b"\n")
                   if verify(catalogue.rules[index], line) is None})
    assert not vain, f"give these rules rarer words (`anchors`): {vain}"
