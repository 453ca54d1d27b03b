"""A small model and a few steps of training without the command line, for tests of the engine."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pdtrain.config import resolve
from pdtrain.config.schema import (
    Checkpoint,
    Data,
    Mla,
    Model,
    ModulePolicy,
    Modules,
    Moe,
    Optimizer,
    Parallel,
    Precision,
    Run,
    Train,
)

TRAIN_BATCH = 16
LENGTH = 64
VOCABULARY = 64


def small_run(*, ranks: int = 1, tensor: int = 1, expert: int = 1, dtype: str = "fp32", **changes: Any) -> Run:
    """A 3-layer MoE with dense layer, shared expert and z-loss. `changes` replace sections' fields: `model={...}`."""
    model = {
        "vocab_size": VOCABULARY, "hidden": 64, "layers": 3, "dense_layers": 1, "ffn_hidden": 128,
        "heads": 4, "kv_heads": 2, "head_dim": 16,
        "mla": Mla(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
        "moe": Moe(experts=8, top_k=2, expert_hidden=32, shared_experts=1, z_loss=1e-3, aux_loss=0.01),
    }
    dp = ranks // tensor
    run = Run(
        model=Model(**(model | changes.pop("model", {}))),
        parallel=Parallel(ranks=ranks, **changes.pop("parallel", {})),
        modules=Modules(attention=ModulePolicy(tensor=tensor), experts=ModulePolicy(expert=expert)),
        train=Train(
            **(
                {"steps": 20, "sequence_length": LENGTH, "val_sequences": 0,
                 "micro_batch": TRAIN_BATCH // (2 * dp), "accumulation": 2, "train_batch": TRAIN_BATCH}
                | changes.pop("train", {})
            )
        ),
        optimizer=Optimizer(lr=1e-3, warmup_steps=5),
        precision=Precision(all=dtype),
        checkpoint=Checkpoint(**changes.pop("checkpoint", {})),
        data=Data(),
    )
    assert not changes, changes
    return run


class NumberedSequences:
    """Learnable made-up data: sequence n is a noisy counting pattern that depends on n alone."""

    fingerprint = "numbered"

    def sequences(self, start: int, count: int) -> np.ndarray:
        out = np.empty((count, LENGTH + 1), dtype=np.int64)
        for row, number in zip(out, range(start, start + count), strict=True):
            random = np.random.default_rng(number)
            row[:] = (random.integers(VOCABULARY) + np.arange(LENGTH + 1) * random.integers(1, 4)) % VOCABULARY
            row[random.random(LENGTH + 1) < 0.1] = random.integers(VOCABULARY)
        return out


class NoSpans:
    def span(self, name: str) -> nullcontext[None]:
        return nullcontext()


@dataclass
class Trained:
    """losses per step; gradients of the first step by name (rank 0); norms per row and step; weights at the end."""

    losses: list[float]
    gradients: dict[str, Any] | None
    norms: list[dict[str, float]]
    weights: dict[str, Any] | None
    restored: Any = None


def train_steps(
    rank: int,
    run: Run,
    steps: int,
    checkpoint_root: Path | None = None,
    resume: bool = False,
    save: bool = False,
    save_rows: dict[int, list[str]] | None = None,
) -> Trained:
    """`steps` optimizer steps of `run` on this rank of an initialised job (or on one process)."""
    import torch
    import torch.distributed as dist

    from pdtrain.checkpoint import Checkpointer
    from pdtrain.optim import build_optimizer, learning_rate
    from pdtrain.parallel.gradients import rows_of
    from pdtrain.parallel.layout import Layout
    from pdtrain.parallel.meshes import create_meshes
    from pdtrain.parallel.parallelize import build_parallel_model
    from pdtrain.step import TrainStep

    torch.manual_seed(1234 + rank)  # anything that silently draws from the global generator would show
    device = torch.device("cpu")
    meshes = create_meshes(Layout.from_run(run), "cpu") if dist.is_initialized() and dist.get_world_size() > 1 else None
    model = build_parallel_model(run, meshes, device)
    rows = rows_of(model, meshes)
    optimizer = build_optimizer(run, rows)
    step_once = TrainStep(resolve(run), model, optimizer, rows, NumberedSequences(), meshes, device, NoSpans())  # type: ignore[arg-type]
    begin = consumed = 0
    restored = None
    checkpointer = None
    if checkpoint_root is not None:
        checkpointer = Checkpointer(checkpoint_root, run, model, optimizer, rows, NumberedSequences.fingerprint)
        restored = checkpointer.restore("latest" if resume else None)
        begin, consumed = restored.step, restored.consumed
        checkpointer.tidy(begin)
    losses, norms, gradients = [], [], None
    for step in range(begin, begin + steps):
        result = step_once(consumed, learning_rate(run.optimizer, step, run.train.steps), False)
        consumed += TRAIN_BATCH
        losses.append(result.loss.item())
        norms.append(dict(zip(rows, result.norms.tolist(), strict=True)))
        if step == begin:
            gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
        if checkpointer is not None and save_rows and step + 1 in save_rows:
            checkpointer.save(step + 1, consumed, save_rows[step + 1])
    if checkpointer is not None and save:
        assert checkpointer.save(begin + steps, consumed)
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    keep = rank == 0
    return Trained(losses, gradients if keep else None, norms, weights if keep else None, restored)


def whole(tensor: Any) -> Any:
    """A DTensor gathered, a tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def changed(run: Run, section: str, **fields: Any) -> Run:
    """`run` with fields of one section replaced."""
    return msgspec.structs.replace(run, **{section: msgspec.structs.replace(getattr(run, section), **fields)})
