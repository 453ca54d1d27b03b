"""Run by tests under a Python that has megatron-core: load a converted torch_dist into a GPT, write the sums.

    python load_megatron.py CHECKPOINT WORLD TP EP OUT.json

megatron-core calls torch.cuda where no GPU is needed; those calls are stubbed here. OUT.json: rank 0's name -> sum.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path


def work(rank: int, world: int, tp: int, ep: int, root: str, out: str, store: str) -> None:
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
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=4, ffn_hidden_size=32,
        use_cpu_initialization=True, tensor_model_parallel_size=tp, expert_model_parallel_size=ep, num_moe_experts=4,
        moe_router_topk=2, gated_linear_unit=True, add_bias_linear=False, sequence_parallel=tp > 1,
        moe_ffn_hidden_size=8, pipeline_dtype=torch.float32,
    )
    model = GPTModel(config=config, vocab_size=32, max_sequence_length=32, position_embedding_type="rope",
                     transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False),
                     share_embeddings_and_output_weights=False)
    # LayerNorm without Transformer Engine has biases, which RMSNorm's checkpoint has not
    wanted = {k: v for k, v in model.sharded_state_dict(prefix="").items()
              if "bias" not in k and "_extra_state" not in k}
    model.load_state_dict(dist_checkpointing.load(wanted, root), strict=False)
    if rank == 0:
        sums = {name: value.double().sum().item() for name, value in model.state_dict().items()
                if hasattr(value, "shape") and "bias" not in name}
        Path(out).write_text(json.dumps(sums))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    root, world, tp, ep, target = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    handle, path = tempfile.mkstemp()
    os.close(handle)
    Path(path).unlink()
    mp.start_processes(work, (world, tp, ep, root, target, path), nprocs=world, start_method="spawn")
