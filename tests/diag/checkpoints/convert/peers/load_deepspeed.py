"""Run by tests under a Python that has deepspeed: load a converted checkpoint, take one step, write what was there.

    python load_deepspeed.py ROOT TAG STAGE WORLD OUT.json [universal]

OUT.json: the FP32 masters and moments of all parameters as flat lists (after loading), the step count, and the loss
after one more step on fixed data.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path


def work(rank: int, world: int, root: str, tag: str, stage: int, out: str, universal: bool, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world),
                      DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("PEER_PORT", "29557"),
                      CROSS_RANK="0", CROSS_SIZE="1")
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(99)  # other weights than the ones that were saved

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 17)
            self.b = torch.nn.Linear(17, 3)
            self.register_buffer("table", torch.arange(5.0))

        def forward(self, x):
            return self.b(self.a(x)).float().pow(2).sum()

    config = {
        "train_batch_size": 8, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "checkpoint": {"load_universal": universal},
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    path, _ = engine.load_checkpoint(root, tag=tag)
    assert path, "nothing was loaded"
    inner = engine.optimizer.optimizer
    (flat,) = (group["params"][0] for group in inner.param_groups)
    found = {}
    count = sum(p.numel() for p in model.parameters())
    for key, own in (("fp32", flat.data), *((k, inner.state[flat][k]) for k in ("exp_avg", "exp_avg_sq"))):
        pieces = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(pieces, own.contiguous())
        found[key] = torch.cat(pieces)[:count].tolist()
    steps = {float(s["step"]) for s in engine.optimizer.optimizer.state.values() if "step" in s}
    torch.manual_seed(5)
    data = torch.randn(8, 8, dtype=torch.bfloat16)
    mine = data[rank * (8 // world) : (rank + 1) * (8 // world)]
    engine.backward(engine(mine))
    engine.step()
    after = torch.tensor([engine(mine).item()])
    dist.all_reduce(after)
    if rank == 0:
        Path(out).write_text(json.dumps({"flat": found, "steps": sorted(steps), "global_steps": engine.global_steps,
                                         "after": after.item()}))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    root, tag, stage, world, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    handle, path = tempfile.mkstemp()
    os.close(handle)
    Path(path).unlink()
    mp.start_processes(work, (world, root, tag, stage, out, "universal" in sys.argv[6:], path), nprocs=world,
                       start_method="spawn")
