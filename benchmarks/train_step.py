"""Tokens per second of one training step against the same shape in Hugging Face `transformers`, in the same run.

    pip install -c constraints.txt -e '.[train,bench]'
    python benchmarks/train_step.py [--dtype bf16 fp32] [--rounds 20] [--budget 120] [--threads 2]

The shape: vocabulary 512, hidden 256, 4 layers all MoE, 8 query / 4 key-value heads of 32, 16 experts of 256, top-2,
batch 8 x 512, balance loss 0.01, AdamW, gradient clipping. Ours is the trainer's own step with FP32 weights and FP32
optimizer states and, for BF16, BF16 compute. The peer is Qwen3MoeForCausalLM wholly in the dtype named: in BF16 its
weights, gradients and optimizer states are BF16 too, which is less work than ours does. It gets its fastest expert
implementation, found by trial, and `scaled_dot_product_attention`. Both train on the same batches of real text.

On a CPU without BF16 instructions the BF16 peer crawls, as PyTorch's BF16 GEMM is a plain loop there; the FP32 row is
then the fair one. Standard output is one JSON line per dtype; the table goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
import transformers
from alternate import NoSpans, Step, alternate, commit, machine, paired_ratio

from pdtrain.config import resolve
from pdtrain.config.schema import Data as DataSection
from pdtrain.config.schema import Model, Moe, Optimizer, Precision, Run, Train
from pdtrain.data import Data, open_data
from pdtrain.model import build_model
from pdtrain.optim import build_optimizer
from pdtrain.parallel.gradients import rows_of
from pdtrain.step import TrainStep

BATCH, LENGTH = 8, 512
LR = 3e-4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXPERTS = ("grouped_mm", "eager")  # batched_mm copies every token's expert: more memory than this step is worth


def configuration(dtype: str, threads: int) -> Run:
    """The benchmark's shape as a run configuration."""
    return Run(
        model=Model(
            vocab_size=512, hidden=256, layers=4, dense_layers=0, heads=8, kv_heads=4, head_dim=32,
            moe=Moe(experts=16, top_k=2, expert_hidden=256, aux_loss=0.01),
        ),
        train=Train(sequence_length=LENGTH, micro_batch=BATCH, steps=1000, threads=threads, val_sequences=0),
        optimizer=Optimizer(lr=LR, warmup_steps=0, schedule="constant"),
        precision=Precision(all=dtype),  # type: ignore[arg-type]
        data=DataSection(),
    )  # fmt: skip


def our_step(run: Run, data: Data) -> tuple[Step, int]:
    """The trainer's step, and how many parameters it trains."""
    model = build_model(run)
    model.train()
    rows = rows_of(model, None)
    step = TrainStep(resolve(run), model, build_optimizer(run, rows), rows, data, None, torch.device("cpu"), NoSpans())
    done = 0

    def once() -> float:
        nonlocal done
        result = step(done * BATCH, LR, False)
        done += 1
        return result.loss.item()

    return once, sum(p.numel() for p in model.parameters())


def peer_model(run: Run, experts: str) -> torch.nn.Module:
    """Qwen3MoeForCausalLM of the same shape, FP32, with random weights."""
    model, moe = run.model, run.model.moe
    config = transformers.Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        num_experts=moe.experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.expert_hidden,
        intermediate_size=model.ffn_hidden,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=moe.aux_loss,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation=experts,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


def peer_step(run: Run, data: Data, dtype: torch.dtype, experts: str, batch: int = BATCH) -> tuple[Step, int]:
    """The peer's step over the same batches, and how many parameters it trains."""
    model = peer_model(run, experts).to(dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    done = 0

    def once() -> float:
        nonlocal done
        tokens = torch.from_numpy(data.sequences(done * BATCH, batch))
        done += 1
        optimizer.zero_grad()
        out = model(input_ids=tokens[:, :-1], shift_labels=tokens[:, 1:].contiguous(), labels=tokens[:, 1:])
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return out.loss.item()

    return once, sum(p.numel() for p in model.parameters())


def fastest_experts(run: Run, data: Data, dtype: torch.dtype) -> str:
    """The expert implementation with which the peer is fastest here, by one short step each after a warm-up."""
    seconds = {}
    for experts in EXPERTS:
        step, _ = peer_step(run, data, dtype, experts, batch=1)
        step()
        seconds[experts] = min(_seconds(step) for _ in range(2))
    return min(seconds, key=lambda experts: seconds[experts])


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def compare(dtype: str, *, rounds: int, budget: float, threads: int) -> dict[str, object]:
    """Measure one dtype; the row of the table and of the JSON output."""
    run = configuration(dtype, threads)
    data = open_data(run)
    experts = fastest_experts(run, data, DTYPES[dtype])
    ours, our_parameters = our_step(run, data)
    peer, peer_parameters = peer_step(run, data, DTYPES[dtype], experts)
    if abs(our_parameters / peer_parameters - 1) > 0.001:
        raise SystemExit(f"not the same shape: {our_parameters:,} parameters against {peer_parameters:,}")
    mine, theirs = alternate(ours, peer, rounds=rounds, warm_up=1, budget=budget)
    tokens = BATCH * LENGTH
    return {
        "dtype": dtype,
        "ours": round(tokens / mine.seconds, 1),
        "peer": round(tokens / theirs.seconds, 1),
        "ratio": round(paired_ratio(mine.wall, theirs.wall), 3),
        "cpu_ratio": round(paired_ratio(mine.cpu, theirs.cpu), 3),
        "peer_version": f"transformers {transformers.__version__}",
        "peer_experts": experts,
        "parameters": our_parameters,
        "rounds": len(mine.wall),
        "losses": {"ours": [mine.losses[0], mine.losses[-1]], "peer": [theirs.losses[0], theirs.losses[-1]]},
        "machine": machine(),
        "commit": commit(),
    }


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=20, help="most rounds per dtype")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds per dtype after which no round begins")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    print(f"{'dtype':6}{'ours tok/s':>12}{'peer tok/s':>12}{'ratio':>8}{'CPU ratio':>11}{'rounds':>8}  peer experts",
          file=sys.stderr)  # fmt: skip
    for dtype in arguments.dtype:
        row = compare(dtype, rounds=arguments.rounds, budget=arguments.budget, threads=arguments.threads)
        print(
            f"{dtype:6}{row['ours']:12,.0f}{row['peer']:12,.0f}{row['ratio']:8.2f}{row['cpu_ratio']:11.2f}"
            f"{row['rounds']:8}  {row['peer_experts']}",
            file=sys.stderr,
        )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
