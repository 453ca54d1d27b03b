"""Throttled links between hosts made of network namespaces: is the right one named?

    python benchmarks/link_trials.py [--hosts 8] [--trials 60] [--healthy 20] [--seed 0] [--rate 100] [--mode quick]
    python benchmarks/link_trials.py --hosts 5 --mode thorough --passes 4 --blink 0.7,0.9 --factor 0.25 --trials 20

Each trial slows one direction (or both) of one random host with `tc tbf`, to a factor between 0.3 and 0.8 of the common
rate; every tenth trial slows two hosts. `--blink ON,OFF`: the fault comes for ON seconds and goes for OFF, again and
again, in one host and direction. The processes stay, only the shapers change. One line per trial on stderr, one
line of JSON with the table on stdout. Needs root, iproute2 and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from diag.probes.localise import Outcome
from tests.netns.hosts import Network, missing
from tests.netns.links import LinkJob

FACTORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
Planted = list[tuple[int, str, float]]


def plan(trials: int, healthy: int, hosts: int, seed: int) -> list[Planted]:
    """Trials in random order: what is slowed in each; nothing in the healthy ones."""
    rng = random.Random(seed)
    found: list[Planted] = [[] for _ in range(healthy)]
    for index in range(trials):
        factor = FACTORS[index % len(FACTORS)]
        chosen = rng.sample(range(hosts), 2 if index % 10 == 9 else 1)
        found.append([(host, rng.choice(("send", "receive", "both")), factor) for host in chosen])
    rng.shuffle(found)
    return found


def named(outcome: Outcome) -> set[tuple[int, str]]:
    """(host, direction) of what was blamed; a pair or a group counts as a wrong answer of its own."""
    return {(end, fault.direction if fault.kind == "host" else fault.kind)
            for fault in outcome.faults for end in fault.ends[:1]}


@contextmanager
def blinking(network: Network, planted: Planted, seconds: str) -> Iterator[None]:
    """The fault comes and goes, `seconds` "ON,OFF"."""
    on, off = (float(word) for word in seconds.split(","))
    over = threading.Event()

    def blink() -> None:
        while not over.is_set():
            for factor, wait in ((0.0, on), (1.0, off)):
                for host, direction, slow in planted:
                    network.shape(host, direction, factor or slow)  # type: ignore[arg-type]
                over.wait(wait)

    thread = threading.Thread(target=blink)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """All trials; the table."""
    done: Counter[str] = Counter()
    right: Counter[str] = Counter()
    rounds: list[int] = []
    seconds: list[float] = []
    with Network(arguments.hosts, arguments.rate) as network, LinkJob(network, timeout=10.0) as job:
        for index, planted in enumerate(plan(arguments.trials, arguments.healthy, arguments.hosts, arguments.seed)):
            if arguments.blink:
                planted = [(host, "send" if way == "both" else way, arguments.factor or factor)
                           for host, way, factor in planted[:1]]
                with blinking(network, planted, arguments.blink):
                    outcome = job.locate(arguments.mode, arguments.passes)
            else:
                for host, direction, factor in planted:
                    network.shape(host, direction, factor)  # type: ignore[arg-type]
                outcome = job.locate(arguments.mode, arguments.passes)
            for host, _, _ in planted:
                network.shape(host, "both", 1.0)
            key = str(planted[0][2]) if planted else "healthy"
            correct = named(outcome) == {(host, direction) for host, direction, _ in planted} and not outcome.silent
            done[key] += 1
            right[key] += correct
            rounds.append(outcome.rounds)
            seconds.append(job.seconds)
            print(f"{index} {'right' if correct else 'WRONG'} planted {planted} named {sorted(named(outcome))} "
                  f"ratios {[round(f.ratio, 2) for f in outcome.faults]} rounds {outcome.rounds} {job.seconds:.1f} s "
                  f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    keys = ["healthy", *sorted(set(done) - {"healthy"})]
    return {"hosts": arguments.hosts, "rate_mbit": arguments.rate, "mode": arguments.mode, "seed": arguments.seed,
            "right": {key: f"{right[key]}/{done[key]}" for key in keys if done[key]}, "rounds_most": max(rounds),
            "rounds_mean": round(sum(rounds) / len(rounds), 2),
            "seconds_median": round(sorted(seconds)[len(rounds) // 2], 2),
            "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s of a healthy link")
    parser.add_argument("--mode", choices=("quick", "thorough"), default="quick")
    parser.add_argument("--passes", type=int, default=1, help="with --mode thorough")
    parser.add_argument("--blink", metavar="ON,OFF", help="seconds that the fault is there, and not")
    parser.add_argument("--factor", type=float, help="with --blink: of every trial")
    reason = missing()
    if reason:
        sys.exit(f"link_trials: {reason}")
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
