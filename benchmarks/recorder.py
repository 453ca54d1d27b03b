"""What the black box costs: the trainer's step with everything recorded, against the same step alone.

    pip install -c constraints.txt -e '.[train,dev]'
    python benchmarks/recorder.py [--rounds 100] [--budget 120] [--threads 1] [--log-every 1] [--batch 16]

The shape is preset `tiny` in one process. "With" does what `pdtrain train` does after each step: spans, module times
by hooks, gradient norms, router statistics, one line of metrics.jsonl and TensorBoard per step, the progress line. Both
take turns in one process. On a shared machine read `cpu_*`: the processor time of all threads, which a neighbour cannot
take away. The cost does not depend on the number of tokens: `--batch 1` shows its seconds most sharply.
Standard output is one JSON line; the table goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from alternate import Step, alternate, commit, machine

from pdtrain.config import load_run, resolve
from pdtrain.config.schema import Modules, Parallel, Run
from pdtrain.data import Data, open_data
from pdtrain.instruments import Instruments
from pdtrain.model import build_model
from pdtrain.optim import build_optimizer
from pdtrain.parallel.gradients import rows_of
from pdtrain.process import Place
from pdtrain.recorder import Recorder
from pdtrain.step import TrainStep

LR = 1e-3


class NoSpans:
    """Times nothing."""

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield


def configuration(threads: int, log_every: int, batch: int) -> Run:
    """Preset tiny on one rank."""
    run = load_run(preset="tiny")
    train = msgspec.structs.replace(
        run.train, threads=threads, log_every=log_every, micro_batch=batch, train_batch=batch, accumulation=None
    )
    return msgspec.structs.replace(run, parallel=Parallel(), modules=Modules(), train=train)


def bare(run: Run, data: Data) -> Step:
    """The step alone; its loss is read, as any loop would."""
    resolved, model, cpu = resolve(run), build_model(run), torch.device("cpu")
    rows = rows_of(model, None)
    step = TrainStep(resolved, model, build_optimizer(run, rows), rows, data, None, cpu, NoSpans())
    done = 0

    def once() -> float:
        nonlocal done
        result = step(done * run.train.micro_batch, LR, False)
        done += 1
        return result.loss.item()

    return once


def recorded(run: Run, data: Data, recorder: Recorder) -> Step:
    """The step with everything that the trainer records."""
    resolved, model, cpu = resolve(run), build_model(run), torch.device("cpu")
    rows = rows_of(model, None)
    instruments = Instruments(resolved, model, list(rows), recorder, None, Place(0, 1, cpu))
    step = TrainStep(resolved, model, build_optimizer(run, rows), rows, data, None, cpu, recorder)
    done = 0

    def once() -> float:
        nonlocal done
        began = time.perf_counter()
        result = step(done * run.train.micro_batch, LR, False)
        done += 1
        instruments.after_step(done, result, LR, time.perf_counter() - began, {})
        return result.loss.item()

    return once


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    for name, default in (("rounds", 100), ("budget", 120), ("threads", 1), ("log-every", 1), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = configuration(options.threads, options.log_every, options.batch)
    data = open_data(run)
    with tempfile.TemporaryDirectory() as folder, Recorder(folder, log_every=options.log_every) as recorder:
        without, with_all = alternate(
            bare(run, data), recorded(run, data, recorder), rounds=options.rounds, warm_up=3, budget=options.budget
        )
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    assert without.losses == with_all.losses, "recording must not change the training"
    result: dict[str, object] = {"benchmark": "recorder", "rounds": len(without.wall)}
    for kind in ("wall", "cpu"):
        alone, both = getattr(without, kind), getattr(with_all, kind)
        differences = [b - a for a, b in zip(alone, both, strict=True)]
        extra = statistics.median(differences)
        # of a median, from the quartiles: contention makes outliers that a standard deviation would follow
        low, _, high = statistics.quantiles(differences, n=4)
        error = 1.2533 * (high - low) / 1.349 / len(differences) ** 0.5
        result |= {f"{kind}_step_seconds": statistics.median(alone), f"{kind}_extra_seconds": extra,
                   f"{kind}_extra_standard_error": error,
                   f"{kind}_overhead": extra / statistics.median(alone)}
        print(f"{kind:>5}: step {statistics.median(alone) * 1e3:8.2f} ms, recorded {extra * 1e3:+7.2f} ± "
              f"{error * 1e3:.2f} ms, {extra / statistics.median(alone):+.2%}", file=sys.stderr)
    result |= {"options": vars(options), "written_bytes": written, "commit": commit(), "machine": machine()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
