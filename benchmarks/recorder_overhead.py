"""What the black box costs: the trainer's step with everything recorded against the same step without a recorder.

    pip install -c constraints.txt -e '.[train]'
    python benchmarks/recorder_overhead.py [--rounds 60] [--log-every 1] [--threads 2] [--run-dir DIR]

Two copies of the preset `tiny` (on one rank) take turns: one bare, one with what `pdtrain train` records by default –
metrics and routing statistics at every step, module times from hooks in every fifth, spans, TensorBoard files. A
smaller step makes the share larger: this one has 2,048 tokens. `CPU` is the time of the process on all its threads,
which other work on the machine disturbs less than the wall clock. Standard output is one JSON line; the table goes to
standard error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from alternate import NoSpans, Step, alternate, commit, machine

from pdtrain.config import load_run, resolve
from pdtrain.config.schema import Run
from pdtrain.data import Data, open_data
from pdtrain.instruments import Instruments
from pdtrain.model import build_model
from pdtrain.optim import build_optimizer, learning_rate
from pdtrain.parallel.gradients import rows_of
from pdtrain.process import Place
from pdtrain.recorder import Recorder
from pdtrain.step import TrainStep

WARM_UP = 5
BLOCK = 5  #: steps from one measurement of module times to the next
LIMIT = 0.01  #: share of the step that recording may cost


def step_of(run: Run, data: Data, recorder: Recorder | None, spent: list[float]) -> Step:
    """One training step, recorded where there is a recorder, of a model of its own.

    `spent` receives the CPU seconds of each call that records a step: the larger part of the cost, free of noise.
    """
    cpu = torch.device("cpu")
    resolved = resolve(run)
    model = build_model(run)
    rows = rows_of(model, None)
    place = Place(rank=0, world=1, device=cpu)
    instruments = Instruments(resolved, model, list(rows), recorder, None, place) if recorder else None
    train = TrainStep(resolved, model, build_optimizer(run, rows), rows, data, None, cpu, recorder or NoSpans())
    done = 0

    def once() -> float:
        nonlocal done
        began = time.perf_counter()
        lr = learning_rate(run.optimizer, done, run.train.steps)
        result = train(done * resolved.train_batch, lr, False)
        done += 1
        if instruments:
            cpu_began = time.process_time()
            instruments.after_step(done, result, lr, time.perf_counter() - began, train.data_seconds,
                                   {"data_repeated": train.repeats.take(), "epoch": 0.0})
            spent.append(time.process_time() - cpu_began)
        return result.loss.item()

    return once


def share(bare: list[float], recorded: list[float]) -> tuple[float, float, float]:
    """Median over blocks of rounds of recorded / bare - 1, with its 95 % bootstrap interval.

    A block sums BLOCK rounds, because module times are measured in every BLOCK-th step only.
    """
    sums = [
        (sum(bare[start : start + BLOCK]), sum(recorded[start : start + BLOCK]))
        for start in range(0, max(1, len(bare) - BLOCK + 1), BLOCK)
    ]
    ratios = [b / a - 1 for a, b in sums]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[-51]


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no round begins")
    parser.add_argument("--log-every", type=int, default=1, help="train.log_every")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--run-dir", type=Path, help="where to record; absent: a temporary directory")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = load_run(
        preset="tiny",
        overrides=[
            "parallel.ranks=1", "modules.attention.tensor=1", "modules.experts.expert=1",
            f"train.log_every={arguments.log_every}", "train.steps=100000",
        ],
    )  # fmt: skip
    data = open_data(run)
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Recorder(arguments.run_dir or scratch, log_every=arguments.log_every, guard=False)
        bare, recorded = alternate(
            step_of(run, data, None, []),
            step_of(run, data, recorder, spent),
            rounds=arguments.rounds,
            warm_up=WARM_UP,
            budget=arguments.budget,
        )
        recorder.close()
    if bare.losses != recorded.losses:
        raise SystemExit("recording changed the losses: it must only watch")
    wall, cpu = share(bare.wall, recorded.wall), share(bare.cpu, recorded.cpu)
    for name, (median, low, high) in (("wall", wall), ("CPU", cpu)):
        verdict = "within" if median <= LIMIT else "above"
        print(
            f"{name:5} {median:+8.2%}   95 % interval {low:+.2%} … {high:+.2%}   {verdict} the limit of {LIMIT:.0%}",
            file=sys.stderr,
        )
    call = statistics.median(spent[WARM_UP:])
    part = call / statistics.median(bare.cpu)
    print(f"call  {call * 1e3:8.2f} ms of CPU to record a step, {part:.2%} of it", file=sys.stderr)
    print(f"step  {bare.seconds * 1e3:8.1f} ms bare, {len(bare.wall)} rounds", file=sys.stderr)
    result = {
        "overhead_wall": wall, "overhead_cpu": cpu, "call_cpu_seconds": call,
        "step_cpu_seconds": statistics.median(bare.cpu), "step_seconds": bare.seconds, "rounds": len(bare.wall),
        "log_every": arguments.log_every, "machine": machine(), "commit": commit(),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
