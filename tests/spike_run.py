"""One small run of this trainer in which a batch goes wrong, as a rank of a job or alone; for tests/test_spikes.py.

    python spike_run.py RUN_DIR ACTION FAULT AT [MOST [EVERY]]

FAULT "data": every sequence read from step AT on, for `LASTS` steps' worth of data, is noise. "nan": the loss of one
rank alone is NaN in the AT-th step. "none": nothing. The trainer knows none of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import pdtrain.step
from pdtrain.config.schema import (
    Checkpoint,
    Model,
    ModulePolicy,
    Modules,
    Moe,
    Optimizer,
    Parallel,
    Recorder,
    Run,
    Train,
)
from pdtrain.data.corpus import Data
from pdtrain.trainer import train

STEPS, BATCH, LENGTH, LASTS = 56, 8, 64, 1


def main() -> None:
    folder, action, fault, at = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    most, every = map(int, [*sys.argv[5:], *("10", "20")[len(sys.argv) - 5 :]])
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    honest_data, honest_loss, calls = Data.sequences, pdtrain.step.cross_entropy, [0]

    def noise(self: Data, start: int, count: int) -> Any:
        rows = honest_data(self, start, count)
        if (at - 1) * BATCH <= start < (at - 1 + LASTS) * BATCH:
            rows = np.random.default_rng(start).integers(0, 256, rows.shape)
        return rows

    def nothing(logits: Any, targets: Any) -> Any:
        calls[0] += 1
        loss = honest_loss(logits, targets)
        return loss * float("nan") if calls[0] == at and int(os.environ.get("RANK", 0)) == ranks - 1 else loss

    if fault == "data":
        Data.sequences = noise  # type: ignore[method-assign]
    if fault == "nan":
        pdtrain.step.cross_entropy = nothing
    train(Run(
        model=Model(vocab_size=256, hidden=32, layers=2, dense_layers=1, heads=4, kv_heads=2, head_dim=8,
                    ffn_hidden=64, moe=Moe(experts=4, top_k=2, expert_hidden=32, bias_update_speed=0.001, aux_loss=0)),
        parallel=Parallel(ranks=ranks),
        modules=Modules(experts=ModulePolicy(expert=ranks)),
        train=Train(steps=STEPS, sequence_length=LENGTH, micro_batch=BATCH // ranks, train_batch=BATCH,
                    val_sequences=0, on_spike=action, on_spike_max=most, timeout_seconds=60),  # type: ignore[arg-type]
        optimizer=Optimizer(lr=1e-2, warmup_steps=5, schedule="constant"),
        checkpoint=Checkpoint(every=every),
        recorder=Recorder(tensorboard=False, spans=False, module_times_every=1000),
    ), folder)


if __name__ == "__main__":
    main()
