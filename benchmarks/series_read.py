"""How fast `diag loss` reads a Megatron-LM console log, against `rg` on the iteration pattern, and a million points.

    python benchmarks/series_read.py [--mib 500]

The log is written first (iteration lines of Megatron-LM core, memory lines, timer blocks; seeded). Times are CPU
seconds of one process: on a busy machine wall time says little. `rg` prints only the count.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from diag.artefacts import Artefacts
from diag.artefacts.metric_lines import read_table
from diag.artefacts.metric_table import MetricTable
from diag.discover import open_file
from diag.loss.findings import findings_of
from diag.series import runs

LINE = (" iteration {i:8d}/ 2000000 | consumed samples: {s:12d} | elapsed time per iteration (ms): {t:.1f} | "
        "throughput per GPU (TFLOP/s/GPU): {f:.1f} | learning rate: 3.000000E-04 | global batch size:  1024 | "
        "lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {g:.3f} | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\n")
TIMERS = ("(min, max) time across ranks (ms):\n    forward-backward ...............: (9001.12, 9911.12)\n"
          "    optimizer ......................: (12.10, 13.20)\n") * 8


def write(path: Path, size: int) -> None:
    """A log of about `size` bytes."""
    rng = random.Random(0)
    with path.open("w") as out:
        written, i = 0, 0
        while written < size:
            i += 1
            loss = (2 + 9 * math.exp(-i / 20_000)) * math.exp(rng.gauss(0, 0.01))
            text = LINE.format(i=i, s=i * 1024, t=rng.gauss(12_000, 30), f=rng.gauss(400, 2), loss=loss,
                               g=abs(rng.gauss(0.2, 0.02)))
            if i % 7 == 0:
                text += f"[Rank {i % 512}] (after {i} iterations) memory (MB) | allocated: 12345.6 | reserved: 5000.0\n"
            if i % 100 == 0:
                text += TIMERS
            written += out.write(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "megatron.log")
        write(path, args.mib << 20)
        megabytes = path.stat().st_size / 1e6
        source = open_file(str(path))
        assert not hasattr(source, "problem") or source.problem is None
        began = time.process_time()
        table = read_table(source)  # type: ignore[arg-type]
        seconds = time.process_time() - began
        points = len(table.series["loss"].steps)
        print(f"read_table: {megabytes:.0f} MB, {points:,} iterations, {seconds:.2f} s, {megabytes / seconds:.0f} MB/s")
        if shutil.which("rg"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            count = subprocess.run(["rg", "-c", r"iteration +\d+/", str(path)], capture_output=True, text=True).stdout
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"rg -c:      {int(count):,} lines, {used:.2f} s, {megabytes / max(used, 1e-3):.0f} MB/s")
    rng = np.random.default_rng(0)
    n = 1_000_000
    loss = (2 + 9 * (1 + np.arange(n) / 300) ** -0.4) * np.exp(rng.normal(0, 0.01, n))
    loss[700_000:700_030] *= 1.5
    whole = MetricTable(path="metrics.jsonl", format="metrics")
    for key, values in (("loss", loss), ("grad_norm", np.exp(rng.normal(0, 0.1, n)))):
        whole.column(key).extend(np.arange(1, n + 1), np.arange(1, n + 1), values)
    began = time.process_time()
    found = findings_of(runs(Artefacts([whole]))[0])
    print(f"analysis:   {n:,} points of two columns, {time.process_time() - began:.2f} s, "
          f"found {[(f.cause, f.where.step) for f in found]}; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
