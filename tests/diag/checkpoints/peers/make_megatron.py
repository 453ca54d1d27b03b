"""Run by tests under a Python that has megatron-core: save a small GPT with MoE as torch_dist, on CPU over Gloo.

    python make_megatron.py OUT WORLD TP EP

megatron-core calls torch.cuda where no GPU is needed for saving; those calls are stubbed here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def work(rank: int, world: int, tp: int, ep: int, out: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=32, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, num_moe_experts=4, moe_router_topk=2,
        gated_linear_unit=True, add_bias_linear=False, sequence_parallel=tp > 1, moe_ffn_hidden_size=32,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=32)
    # With one seed for all ranks, the local experts of every expert rank start alike.
    torch.manual_seed(1 + parallel_state.get_expert_model_parallel_rank())
    for name, parameter in model.named_parameters():
        if "experts" in name:
            parameter.data.normal_()
    state = model.sharded_state_dict(prefix="")
    state["iteration"] = 10
    state["args"] = {"tensor_model_parallel_size": tp}
    Path(out).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, out, ("torch_dist", 1))
    dist.barrier()
    if rank == 0:
        (Path(out).parent / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    target, world, tp, ep = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    handle, path = tempfile.mkstemp()
    os.close(handle)
    Path(path).unlink()
    mp.start_processes(work, (world, tp, ep, target, path), nprocs=world, start_method="spawn")
