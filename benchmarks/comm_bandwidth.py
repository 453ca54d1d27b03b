"""Bus bandwidths of `pdtrain diag comm` against plain sockets that do the same exchange through the same shapers.

    python benchmarks/comm_bandwidth.py [--hosts 4] [--rate 40] [--repeats 5] [--bytes 1M]

Both in turn, on hosts made of network namespaces whose links `tc tbf` shapes. One line per operation and turn on
stderr, one line of JSON on stdout: the ratio of the bandwidths of every turn. Needs root, iproute2 and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from diag.probes.comm.ask import parse_size
from tests.diag.probes.comm_hosts import ended, probe, ring
from tests.diag.probes.comm_ring import NAMES
from tests.netns.hosts import Network, missing

#: Seconds of traffic that a shaper keeps: a fabric without losses, as InfiniBand is one.
QUEUE = 1.0


def turn(network: Network, text: str) -> dict[str, tuple[float, float]]:
    """(GB/s by the probe, GB/s by the sockets) of the bus for each operation."""
    with tempfile.TemporaryDirectory(prefix="pdtrain-") as name:
        folder = Path(name)
        wanted = [word for operation in NAMES for word in ("--op", operation)]
        statuses = ended(probe(network, folder, *wanted, "--min", text, "--max", text, "--iterations", "15", "--budget",
                               "100"), 240)
        if any(statuses):
            sys.exit(f"comm_bandwidth: the probe ended with {statuses}: {(folder / 'err.0').read_text()[-500:]}")
        rows = {row["operation"]: row for row in json.loads((folder / "out.0").read_text())["rows"]}
    sockets = ring(network, parse_size(text, "--bytes"))
    return {name: (rows[name]["busbw"], rows[name]["busbw"] * rows[name]["median_seconds"] / sockets[name])
            for name in NAMES}


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """All turns; the table."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    with Network(arguments.hosts, arguments.rate, queue=QUEUE) as network:
        for number in range(arguments.repeats):
            for name, (ours, sockets) in turn(network, arguments.bytes).items():
                found[name].append(round(ours / sockets, 4))
                print(f"{number} {name}: busbw {ours * 1e3:.3f} MB/s, sockets {sockets * 1e3:.3f} MB/s, ratio "
                      f"{ours / sockets:.3f}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    worst = max(abs(1 - ratio) for ratios in found.values() for ratio in ratios)
    return {"hosts": arguments.hosts, "rate_mbit": arguments.rate, "bytes": arguments.bytes, "ratios": found,
            "worst_difference": round(worst, 4), "load": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=float, default=40.0, help="Mbit/s of every link")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytes", default="1M")
    arguments = parser.parse_args()
    reason = missing()
    if reason:
        sys.exit(f"comm_bandwidth: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down all the same
    print(json.dumps(run(arguments)))


if __name__ == "__main__":
    main()
