"""Two or four real ranks over Gloo: save a model with FSDP2, tensor parallelism or both as DCP, plain or asynchronous.

    python save_dcp.py OUT fsdp|tp|both|async|hf
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path


def work(rank: int, world: int, out: str, mode: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(17, 36), torch.nn.Linear(36, 17))
                                  for _ in range(3)))
    if mode in ("tp", "both"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        if mode == "both":
            for block in model:
                fully_shard(block, mesh=mesh["dp"])
    else:
        for block in model:
            fully_shard(block)
    adam = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 17)).square().mean().backward()
        adam.step()
        adam.zero_grad()
    weights, state = get_state_dict(model, adam, options=StateDictOptions(flatten_optimizer_state_dict=True))
    everything = {"model": weights, "optimizer": state, "train_state": {"step": 2},
                  "dataloader": {f"dp_rank_{rank}": torch.tensor([rank, 7])}}
    if mode == "hf":
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        dcp.save(weights, storage_writer=HuggingFaceStorageWriter(out, save_distributed=True))
    elif mode == "async":
        dcp.async_save(everything, checkpoint_id=out).result()
    else:
        dcp.save(everything, checkpoint_id=out)
    dist.barrier()
    del model, adam, weights, state, everything
    gc.collect()
    os._exit(0)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    target, how = sys.argv[1], sys.argv[2]
    ranks = 4 if how == "both" else 2
    handle, path = tempfile.mkstemp()
    os.close(handle)
    Path(path).unlink()
    mp.start_processes(work, (ranks, target, how, path), nprocs=ranks, start_method="spawn")
