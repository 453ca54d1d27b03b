"""Simulated jobs of up to 1,024 hosts: rounds, recall and false alarms of the link localiser under noise.

    python benchmarks/link_simulation.py [--sizes 2,3,...] [--trials 40] [--seed 0] [--noise 0.03] [--outliers 0.01]

A flow runs at min(sender, receiver, link) times lognormal noise; some flows are hit by an outlier (0.3-0.8). One line
of JSON per size on stdout.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from diag.probes.localise import Measured, Outcome, Place, localise

SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, 100, 256, 512, 1024)
FACTORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
RATE = 12.5e6


@dataclass
class Fabric:
    """Measures pairs of ranks in a model. `send`, `receive`, `pairs` hold factors, in force `at_times` of the time."""

    seed: int
    noise: float = 0.03
    outliers: float = 0.01
    send: dict[int, float] = field(default_factory=dict)
    receive: dict[int, float] = field(default_factory=dict)
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)
    at_times: float = 1.0
    dead: frozenset[int] = frozenset()
    messages: int = 1

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.rounds: list[list[tuple[int, int]]] = []

    def slow(self, rank: int, direction: str, factor: float) -> None:
        """Slow a host."""
        if direction != "receive":
            self.send[rank] = factor
        if direction != "send":
            self.receive[rank] = factor

    def measure(self, pairs: Iterable[tuple[int, int]], _: int) -> Measured:
        """One round."""
        pairs = list(pairs)
        self.rounds.append(pairs)
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs), "a rank has two partners in one round"
        found = Measured(lost={rank: "did not answer" for pair in pairs for rank in pair if rank in self.dead})
        for pair in pairs:
            for a, b in (pair, pair[::-1]):
                if {a, b} & self.dead:
                    continue
                messages = tuple(RATE * self._factor(a, b) for _ in range(self.messages))
                found.rates[a, b], found.messages[a, b] = max(messages), messages
        return found

    def _factor(self, a: int, b: int) -> float:
        """What one message from `a` to `b` makes of the rate."""
        factor = 1.0
        for one in (self.send.get(a), self.receive.get(b), self.pairs.get((a, b))):
            if one is not None and (self.at_times == 1.0 or self.rng.random() < self.at_times):
                factor = min(factor, one)
        factor *= self.rng.lognormvariate(0, self.noise)
        if self.rng.random() < self.outliers:
            factor *= self.rng.uniform(0.3, 0.8)
        return factor

    def locate(self, n: int, mode: str = "quick", passes: int = 1) -> Outcome:
        """Localise among `n` hosts of one rank each."""
        places = [Place(i, f"n{i}") for i in range(n)]
        return localise(self.measure, places, mode=mode, passes=passes)  # type: ignore[arg-type]


def named(outcome: Outcome) -> set[tuple[object, ...]]:
    """What was blamed: (host, direction), or ("pair", a, b)."""
    return {(fault.ends[0], fault.direction) if fault.kind == "host" else (fault.kind, *fault.ends)
            for fault in outcome.faults}


def row(n: int, trials: int, seed: int, noise: float, outliers: float, mode: str) -> dict[str, object]:
    """The figures of one size: per factor right answers, false alarms, rounds."""
    begun = time.process_time()
    rounds = {"healthy": 0, "host": 0, "pair": 0}
    false_alarms, pairs_right, pairs_met = 0, 0, 0
    right = dict.fromkeys(FACTORS, 0)
    done = dict.fromkeys(FACTORS, 0)
    for trial in range(trials):
        rng = random.Random(f"{seed}/{n}/{trial}")
        healthy = Fabric(rng.getrandbits(32), noise, outliers).locate(n, mode)
        false_alarms += bool(healthy.faults)
        rounds["healthy"] = max(rounds["healthy"], healthy.rounds)
        factor, host = FACTORS[trial % len(FACTORS)], rng.randrange(n)
        direction = rng.choice(("send", "receive", "both"))
        fabric = Fabric(rng.getrandbits(32), noise, outliers)
        fabric.slow(host, direction, factor)
        outcome = fabric.locate(n, mode)
        done[factor] += 1
        right[factor] += named(outcome) == {(host, direction)}
        rounds["host"] = max(rounds["host"], outcome.rounds)
        if n > 2:
            a, b = rng.sample(range(n), 2)
            broken = Fabric(rng.getrandbits(32), noise, outliers, pairs={(a, b): 0.5})
            outcome = broken.locate(n, mode)
            met = any({a, b} == set(pair) for pairs in broken.rounds[1:-1] for pair in pairs)
            pairs_met += met
            pairs_right += met and named(outcome) == {("pair", a, b)}
            rounds["pair"] = max(rounds["pair"], outcome.rounds)
    share = {str(factor): f"{right[factor]}/{done[factor]}" for factor in FACTORS if done[factor]}
    return {"hosts": n, "bound": 2 * (n - 1).bit_length(), "rounds": rounds, "host_right": share,
            "pair_right_of_met": f"{pairs_right}/{pairs_met}", "pairs": trials if n > 2 else 0,
            "false_alarms": f"{false_alarms}/{trials}", "cpu_seconds": round(time.process_time() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--trials", type=int, default=42)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.03, help="sigma of the lognormal noise of one flow")
    parser.add_argument("--outliers", type=float, default=0.01, help="share of flows that are slow by accident")
    parser.add_argument("--mode", choices=("quick", "thorough"), default="quick")
    given = parser.parse_args()
    for size in map(int, given.sizes.split(",")):
        trials = given.trials if size <= 128 else max(given.trials // 3, 1)
        print(json.dumps(row(size, trials, given.seed, given.noise, given.outliers, given.mode)), flush=True)


if __name__ == "__main__":
    main()
