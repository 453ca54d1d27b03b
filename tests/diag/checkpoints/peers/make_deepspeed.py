"""Run by tests under a Python that has deepspeed: save small checkpoints of every ZeRO stage, on CPU over Gloo.

    python make_deepspeed.py OUT STAGE WORLD [moe|frozen|fp32]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def work(rank: int, world: int, stage: int, out: str, extra: str, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world),
                      DS_ACCELERATOR="cpu",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("PEER_PORT", "29555"), CROSS_RANK="0",
                      CROSS_SIZE="1")
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 17)
            if extra == "moe":
                from deepspeed.moe.layer import MoE

                expert = torch.nn.Sequential(torch.nn.Linear(17, 9), torch.nn.Linear(9, 17))
                self.moe = MoE(hidden_size=17, expert=expert, num_experts=4, ep_size=world, k=1, min_capacity=4)
            self.b = torch.nn.Linear(17, 3)
            self.register_buffer("table", torch.arange(5.0))
            if extra == "frozen":
                self.a.bias.requires_grad_(False)

        def forward(self, x):
            x = self.a(x)
            if extra == "moe":
                x = self.moe(x)[0]
            return self.b(x).float().pow(2).sum()

    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage},
        "bf16": {"enabled": extra != "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    parameters = model.parameters()
    if extra == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    dtype = torch.float32 if extra == "fp32" else torch.bfloat16
    for step in range(2):
        torch.manual_seed(step * world + rank)
        loss = engine(torch.randn(8, 8, dtype=dtype))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(out, client_state={"data_position": 4 * world})
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    target, stage, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    flavour = sys.argv[4] if len(sys.argv) > 4 else ""
    handle, path = tempfile.mkstemp()
    os.close(handle)
    Path(path).unlink()
    mp.start_processes(work, (world, stage, target, flavour, path), nprocs=world, start_method="spawn")
