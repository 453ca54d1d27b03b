"""How soon a failing router is alarmed, and how often a healthy one is: seeded, labelled streams of expert counts.

    python benchmarks/router_alarms.py [--streams 200] [--seed 0] [-v]

Each stream is what metrics.jsonl would hold: tokens per expert at every step, drawn token by token (each token takes
the K experts with the largest logit plus Gumbel noise; logits all equal: uniform routing). Labels come from how a
stream was made:

    uniform    nothing is wrong: 2 to 256 experts, 1 to 8 per token, 1 to 1,024 tokens per step, 20 to 600 steps
    benign     nothing is wrong: a mild lasting slope, swings in warm-up, single steps of disorder, drifting favourites
    cliff      within 5 steps all tokens go to the same K experts, or one expert becomes hot
    ramp       the same over 50 to 300 steps
    early      the same, beginning in warm-up

The detector sees a stream as it grows, at every second step. `deadline` is the step at which some expert's *expected*
share has been above four times an even share for 50 steps; where no expert can get there (K / E of a quarter or more),
at which the K hottest have been more than 70 % of the way to taking everything for 50 steps. An alarm is a state that
`pdtrain diag router` warns of. Standard output is one JSON line; the table goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from diag.artefacts.metrics import MetricsLog, RouterLog, RouterWindow
from diag.artefacts.run_config import RunConfig
from diag.routing import judge

KINDS = ("uniform", "benign", "cliff", "ramp", "early")
HEALTHY = frozenset({"uniform", "benign"})
ALARMS = frozenset({"imbalanced", "collapsed"})
#: The promise of the issue: an alarm before an expert has had more than TIMES its share for STEPS steps.
TIMES, STEPS = 4.0, 50
CHECK_EVERY = 2


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream: `push(step)` are the experts' logits; `onset` is when the fault begins, None in a healthy one."""

    kind: str
    experts: int
    top_k: int
    tokens: int
    steps: int
    onset: int | None
    push: Callable[[int], np.ndarray]


def made(kind: str, rng: np.random.Generator) -> Stream:
    """A random stream of this kind."""
    experts = int(rng.choice([4, 8, 16, 32, 64, 128, 256]))
    top_k = int(rng.choice([k for k in (1, 2, 4, 8) if k <= experts // 4]))
    tokens = int(2 ** rng.uniform(0, 10)) if kind == "uniform" else int(2 ** rng.uniform(5, 10))
    tokens = max(1, min(tokens, 60_000 // experts))
    flat = np.zeros(experts)
    if kind == "uniform":
        return Stream(kind, experts, top_k, tokens, int(rng.integers(20, 600)), None, lambda step: flat)
    if kind == "benign":
        return Stream(kind, experts, top_k, tokens, 400, None, _benign(int(rng.integers(4)), experts, rng))
    onset = int(rng.integers(5, 25)) if kind == "early" else int(rng.integers(80, 200))
    length = int(rng.integers(1, 6)) if kind == "cliff" else int(rng.integers(50, 300)) if kind == "ramp" else \
        int(rng.integers(1, 100))
    target = flat.copy()
    hot = rng.permutation(experts)
    if rng.random() < 0.5:
        target[hot[:top_k]] = rng.uniform(6, 10)  # all tokens to the same K
    else:
        target[hot[0]] = rng.uniform(4, 8)  # one hot expert
    return Stream(kind, experts, top_k, tokens, onset + length + 160, onset,
                  lambda step: target * min(max((step - onset) / length, 0.0), 1.0))


def _benign(which: int, experts: int, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    flat = np.zeros(experts)
    slope = rng.permutation(np.linspace(0, 0.9, experts))
    wild = rng.normal(0, 2.5, experts)
    if which == 0:
        return lambda step: slope
    if which == 1:
        return lambda step: wild * max(0.0, 1 - step / 35)
    if which == 2:
        return lambda step: np.roll(wild, step) if step % 23 == 0 else flat
    return lambda step: 0.6 * np.sin(np.arange(experts) + step / 40)


def counts_of(stream: Stream, step: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens per expert [experts] of one step."""
    scores = rng.gumbel(size=(stream.tokens, stream.experts)) + stream.push(step)
    chosen = np.argpartition(-scores, stream.top_k - 1, axis=1)[:, : stream.top_k]
    return np.bincount(chosen.ravel(), minlength=stream.experts)


def deadline_of(stream: Stream) -> int | None:
    """The step by which an alarm was promised; None when the stream does not get that far."""
    experts, top_k = stream.experts, stream.top_k

    @lru_cache(maxsize=64)
    def far(level: bytes) -> bool:
        rng = np.random.default_rng(0)
        scores = rng.gumbel(size=(2048, experts)) + np.frombuffer(level)
        chosen = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        shares = np.sort(np.bincount(chosen.ravel(), minlength=experts) / chosen.size)[::-1]
        if top_k / experts >= 1 / TIMES:
            return bool((shares[:top_k].sum() - top_k / experts) / (1 - top_k / experts) > 0.7)
        return bool(shares[0] > TIMES / experts)

    beyond = 0
    for step in range(1, stream.steps + 1):
        beyond = beyond + 1 if far(np.round(stream.push(step), 1).tobytes()) else 0
        if beyond >= STEPS:
            return step
    return None


def alarm_of(stream: Stream, rng: np.random.Generator) -> int | None:
    """The first checked step at which the detector alarms."""
    config = RunConfig(path="config.toml", format="run-config", values={
        "model": {"moe": {"experts": stream.experts, "top_k": stream.top_k}},
        "train": {"steps": 400}, "optimizer": {"warmup_steps": 20}})
    router = RouterLog()
    log = MetricsLog(path="metrics.jsonl", format="metrics", routers={1: router}, first_step=1)
    for step in range(1, stream.steps + 1):
        router.append(RouterWindow(step, step, step, step, 1, counts_of(stream, step, rng)))
        log.last_step = step
        if step % CHECK_EVERY == 0 or step == stream.steps:
            layers = judge(log, config)
            if layers and layers[0].state in ALARMS:
                return step
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    rows = []
    for number in range(options.streams):
        rng = np.random.default_rng([options.seed, number])
        kind = KINDS[number % len(KINDS)]
        stream = made(kind, rng)
        alarm = alarm_of(stream, rng)
        deadline = None if kind in HEALTHY else deadline_of(stream)
        good = alarm is None if kind in HEALTHY else alarm is not None and (deadline is None or alarm < deadline)
        rows.append((kind, good, alarm, deadline, stream))
        if options.verbose or not good:
            print(f"{number:4} {kind:8} {'ok ' if good else 'BAD'} E {stream.experts} K {stream.top_k} "
                  f"T {stream.tokens} steps {stream.steps} onset {stream.onset} alarm {alarm} deadline {deadline}",
                  file=sys.stderr)
    result: dict[str, object] = {"streams": len(rows), "seed": options.seed}
    for kind in KINDS:
        mine = [row for row in rows if row[0] == kind]
        result[kind] = f"{sum(row[1] for row in mine)}/{len(mine)}"
        late = [row[2] - row[4].onset for row in mine if row[2] is not None and row[4].onset is not None]
        spare = [row[3] - row[2] for row in mine if row[2] is not None and row[3] is not None]
        if late:
            result[f"{kind}_delay_median"] = float(np.median(late))
        if spare:
            result[f"{kind}_ahead_of_deadline_median"] = float(np.median(spare))
            result[f"{kind}_ahead_of_deadline_least"] = float(min(spare))
    result["seconds"] = round(time.perf_counter() - began, 1)
    print("\n".join(f"{key:32} {value}" for key, value in result.items()), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
