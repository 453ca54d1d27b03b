"""One small run of this trainer with one fault, as a rank of a job or alone; the faults are put in from outside.

    python faulty_run.py FAULT RUN_DIR [--steps N] [--ranks N] [--rank R]      (several ranks: under torchrun)

The trainer knows none of them: a setting is what a user could have written, everything else is patched in here.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

import pdtrain.model.build
import pdtrain.parallel.parallelize
import pdtrain.trainer
from pdtrain.config.schema import Checkpoint, Model, ModulePolicy, Modules, Moe, Optimizer, Parallel, Run, Train
from pdtrain.data.corpus import Data
from pdtrain.model.attention import GroupedQueryAttention
from pdtrain.model.initialise import initial_value
from pdtrain.model.router import Router
from pdtrain.trainer import train

LENGTH = 128
#: Step at which a fault begins that does not begin with the run.
ONSET = 100


def settings(fault: str, steps: int, ranks: int) -> Run:
    """The healthy configuration, or with the one wrong setting that `fault` names."""
    moe: dict[str, Any] = {"experts": 8, "top_k": 2, "expert_hidden": 64, "aux_loss": 0.03, "z_loss": 0.001}
    router = ModulePolicy()
    if fault == "no-aux":
        moe["aux_loss"] = 0.0
    if fault == "router-bf16":
        moe["bias_update_speed"] = 0.001
        router = ModulePolicy(dtype="bf16")
    return Run(
        model=Model(vocab_size=256, hidden=64, layers=3, dense_layers=1, heads=4, kv_heads=2, head_dim=16,
                    ffn_hidden=128, moe=Moe(**moe)),
        parallel=Parallel(ranks=ranks),
        modules=Modules(experts=ModulePolicy(expert=2 if ranks % 2 == 0 else 1), router=router),
        train=Train(steps=steps, sequence_length=LENGTH, micro_batch=8, val_sequences=0),
        optimizer=Optimizer(lr=1e-2, warmup_steps=10),
        checkpoint=Checkpoint(every=40, keep=0),
    )


def same_experts(name: str, shape: torch.Size, **options: Any) -> torch.Tensor:
    """Every expert gets the values of the first one: one seed for all."""
    value = initial_value(name, shape, **options)
    return value[:1].repeat(value.shape[0], 1, 1) if ".experts." in name and value.ndim == 3 else value


def pushed_bias(self: Router, counts: torch.Tensor, honest: Any = Router.update_bias) -> None:
    """The bias update of two experts runs away."""
    honest(self, counts)
    self.pushed = getattr(self, "pushed", 0) + 1
    if self.bias is not None and self.pushed >= ONSET:
        self.bias[:2] += 0.02


def one_page(self: Data, start: int, count: int, honest: Any = Data.sequences) -> Any:
    """From some step on the same few sequences again and again."""
    rows = honest(self, start, count)
    if start < ONSET * 8:
        return rows
    return honest(self, 0, count)


def thirty_times(optimizer: Optimizer, step: int, total: int, honest: Any = pdtrain.trainer.learning_rate) -> float:
    """A schedule that forgets its scale from some step on."""
    return honest(optimizer, step, total) * (30 if step >= ONSET else 1)


def put_in(fault: str, guilty: bool) -> None:
    """Patch the fault into this process."""
    if fault == "lr":
        pdtrain.trainer.learning_rate = thirty_times
    if fault == "same-init":
        pdtrain.model.build.initial_value = same_experts
        pdtrain.parallel.parallelize.initial_value = same_experts
    if fault == "router-bf16":
        Router.update_bias = pushed_bias  # type: ignore[method-assign]
    if fault == "repeats":
        Data.sequences = one_page  # type: ignore[method-assign]
    if fault.startswith("slow") and guilty:
        keep_pace()
    if fault == "slow" and guilty:
        slowly(GroupedQueryAttention, "forward", 0.2)
    if fault == "slow-data" and guilty:
        slowly(Data, "sequences", 0.6)
    if fault == "nice" and guilty:
        share_a_core()
    if fault == "duty" and guilty:
        a_quarter_of_the_time()


def share_a_core() -> None:
    """Stay on one core together with a busy process that is more important."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:  # ends with the rank
            for _ in range(100_000):
                pass
        os._exit(0)
    os.nice(6)


def a_quarter_of_the_time() -> None:
    """Be stopped by another process for three quarters of the time: on a loaded machine half of it hardly shows."""
    parent = os.getpid()
    if os.fork() == 0:
        try:
            while os.getppid() == parent:  # ends with the rank
                os.kill(parent, signal.SIGSTOP)
                time.sleep(0.09)
                os.kill(parent, signal.SIGCONT)
                time.sleep(0.03)
        except ProcessLookupError:
            pass
        os._exit(0)


class Pace:
    """What a step takes on this machine at this moment, without the sleep that was put in."""

    step, slept, last = 0.0, 0.0, 0.0


def keep_pace() -> None:
    """Measure the steps of this rank: one begins where its sequences are asked for."""
    honest = Data.sequences

    def call(self: Data, *arguments: Any, **keywords: Any) -> Any:
        now = time.perf_counter()
        Pace.step, Pace.slept, Pace.last = now - Pace.last - Pace.slept if Pace.last else 0.0, 0.0, now
        return honest(self, *arguments, **keywords)

    Data.sequences = call  # type: ignore[method-assign]


def slowly(owner: type, name: str, share: float) -> None:
    """`owner.name` takes longer by so much of a step: on a loaded machine everything takes longer."""
    honest = getattr(owner, name)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        seconds = min(share * Pace.step, 1.0)
        time.sleep(seconds)
        Pace.slept += seconds
        return honest(self, *arguments, **keywords)

    setattr(owner, name, call)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=1)
    options = parser.parse_args()
    put_in(options.fault, guilty=int(os.environ.get("RANK", 0)) == options.rank)
    run = settings(options.fault, options.steps, options.ranks)
    train(msgspec.structs.replace(run, recorder=msgspec.structs.replace(run.recorder, tensorboard=False)),
          options.folder)


if __name__ == "__main__":
    main()
