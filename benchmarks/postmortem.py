"""How fast a post-mortem reads: 1 GB of multi-rank log against `rg` counting the same patterns, taking turns.

    python benchmarks/postmortem.py                     # 256 files, 1 GB, 3 turns each
    python benchmarks/postmortem.py --megabytes 100 --turns 1

The logs come from a seed: NCCL INFO chatter at the start and iteration lines after it on every rank, a few failures on
some (one rank raises, the others' watchdogs follow). `rg` gets one expression per signature (look-arounds, which it
lacks, left out) and counts matching lines with all cores; the peer is the fastest tool people use for this by hand.
Also measured: 10 MB including the start of the process, and the peak resident memory of either.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from diag.signatures import load_catalogue

SEED = 20260101
FILES = 256
BIN = Path(sys.executable).parent


def chatter(rank: int, host: str) -> list[str]:
    """What NCCL prints while it sets up on one rank."""
    dev, pid = rank % 8, 41_000 + rank
    head = f"{host}:{pid}:{pid + 311} [{dev}] NCCL INFO"
    lines = [f"{host}:{pid}:{pid} [{dev}] NCCL INFO Bootstrap : Using eth0:10.0.{rank // 8}.4<0>",
             f"{head} NET/Plugin: Failed to find ncclCollNetPlugin_v8 symbol.",
             f"{head} NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]mlx5_2:1/IB [RO]; OOB eth0:10.0.0.4<0>",
             f"{head} Using network IB",
             f"{head} ncclCommInitRank comm 0x55{rank:06x} rank {rank} nranks {FILES} cudaDev {dev} nvmlDev {dev} "
             f"busId {dev + 1}b000 commId 0x9a1c70e3ba1f2c3d - Init START"]
    for channel in range(16):
        for peer in range(12):
            lines.append(f"{head} Channel {channel:02d}/0 : {rank}[{dev}] -> {(rank + peer) % FILES}[{peer % 8}] via "
                         + ("P2P/CUMEM" if peer < 7 else "NET/IB/0/GDRDMA"))
    lines += [f"{head} Connected all rings", f"{head} Connected all trees",
              f"{head} ncclCommInitRank comm 0x55{rank:06x} rank {rank} nranks {FILES} cudaDev {dev} nvmlDev {dev} "
              f"busId {dev + 1}b000 commId 0x9a1c70e3ba1f2c3d - Init COMPLETE"]
    return lines


def iteration(step: int, rank: int, noise: random.Random) -> str:
    """One progress line as Megatron-LM prints it."""
    return (f"[default{rank % 8}]: iteration {step:8d}/  500000 | consumed samples: {step * 2048:12d} | "
            f"consumed tokens: "
            f"{step * 4194304:14d} | elapsed time per iteration (s): {noise.gauss(10.5, 0.05):.2f} | learning rate: "
            f"4.475E-05 | global batch size:  2048 | lm loss: {noise.gauss(2.3, 0.01):.6E} | grad norm: "
            f"{noise.gauss(0.15, 0.01):.3f} | num zeros: 0.0 | number of skipped iterations:   0 | number of nan "
            f"iterations:   0 | samples per second: {noise.gauss(195, 1):.3f} | TFLOPs: {noise.gauss(149, 1):.2f} |")


def failure(rank: int) -> list[str]:
    """How the run ends: rank 77 raises, sixteen watchdogs bark ten minutes later, the rest is silent."""
    if rank == 77:
        mark = f"[rank{rank}]: "
        return [mark + line for line in (
            "Traceback (most recent call last):", '  File "/w/train.py", line 211, in <module>', "    main()",
            '  File "/w/data.py", line 88, in __getitem__', "    return self.index[key]", "KeyError: 'doc-991182'")]
    if rank % 16 == 0:
        return [f"[rank{rank}]:[E810 03:04:10.85061786{rank % 10} ProcessGroupNCCL.cpp:683] [Rank {rank}] "
                f"Watchdog caught "
                "collective operation timeout: WorkNCCL(SeqNum=7811, OpType=ALLREDUCE, NumelIn=80, NumelOut=80, "
                "Timeout(ms)=600000) ran for 600003 milliseconds before timing out.",
                f"[rank{rank}]:[E810 03:05:11.145572903 ProcessGroupNCCL.cpp:758] [Rank {rank}] To avoid data "
                "inconsistency, we are taking the entire process down."]
    return []


def generate(folder: Path, megabytes: int, files: int) -> int:
    """Write the logs; returns their size in bytes."""
    total = 0
    for rank in range(files):
        noise = random.Random(SEED + rank)
        target = megabytes * 1_000_000 // files
        with (folder / f"rank_{rank}.log").open("w") as out:
            size = out.write("\n".join(chatter(rank, f"node-{rank // 8:02d}")) + "\n")
            step = 0
            while size < target:
                part = []
                for _ in range(200):
                    step += 1
                    part.append(iteration(step, rank, noise))
                    if step % 50 == 0:
                        part.append(f"[default{rank % 8}]:[2026-08-10 02:{step // 60 % 60:02d}:{step % 60:02d},441] "
                                    f"[INFO] "
                                    f"[timer.py:260:stop] epoch=0/micro_step={step}/global_step={step}, "
                                    "RunningAvgSamplesPerSec=58.73, CurrSamplesPerSec=61.35, MemAllocated=6.01GB")
                size += out.write("\n".join(part) + "\n")
            size += out.write("\n".join(failure(rank)) + "\n")
        total += size
    return total


def patterns(path: Path) -> int:
    """The signatures' expressions in the dialect of rg, one a line; how many."""
    found = []
    for rule in load_catalogue().rules:
        text = re.sub(r"\(\?P<\w+>", "(", rule.pattern).replace("[^\\n]", ".")
        text = _without_lookaround(re.sub(r"\(\?P=\w+\)", r"\\w+", text))
        found.append(text)
    path.write_text("\n".join(found) + "\n")
    return len(found)


def _without_lookaround(pattern: str) -> str:
    """The pattern without its look-ahead and look-behind groups, which rg's engine does not know."""
    kept, at = "", 0
    while found := re.search(r"(?<!\\)\(\?<?[=!]", pattern[at:]):
        start = at + found.start()
        end, depth, in_class = start + 1, 1, False
        while depth:
            if pattern[end] == "\\":
                end += 1
            elif pattern[end] in "[]":
                in_class = pattern[end] == "["
            elif not in_class and pattern[end] in "()":
                depth += 1 if pattern[end] == "(" else -1
            end += 1
        kept += pattern[at:start]
        at = end
    return kept + pattern[at:]


def timed(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, float, str]:
    """Wall seconds, peak resident MB of the largest process of the tree, and stdout of one run."""
    wrapped = ["/usr/bin/time", "-f", "%M", *command] if Path("/usr/bin/time").exists() else command
    start = time.perf_counter()
    done = subprocess.run(wrapped, capture_output=True, text=True, env=environment or dict(os.environ))
    seconds = time.perf_counter() - start
    last = done.stderr.strip().split("\n")[-1]
    return seconds, int(last) / 1024 if last.isdigit() else float("nan"), done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the generated logs here")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="postmortem-"))
    try:
        run(options, folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


def run(options: argparse.Namespace, folder: Path) -> None:
    """Both contestants in turns, then the small log; prints a table and one JSON line."""
    logs = folder / "logs"
    if not logs.exists():
        logs.mkdir(parents=True)
        generate(logs, options.megabytes, options.files)
    small = folder / "small"
    if not small.exists():
        small.mkdir()
        generate(small, 10, 8)
    size = sum(path.stat().st_size for path in logs.iterdir())
    count = patterns(folder / "patterns.txt")
    ours = [str(BIN / "pdtrain"), "diag", "postmortem", "--json"]
    timed([*ours, str(small)])  # fills the signature cache
    have_rg = shutil.which("rg") is not None
    result: dict[str, list[float]] = {"ours": [], "rg": [], "ours_mb": [], "rg_mb": [], "small": []}
    said = ""
    for _ in range(options.turns):
        seconds, memory, said = timed([*ours, str(logs)])
        result["ours"].append(seconds)
        result["ours_mb"].append(memory)
        if have_rg:
            seconds, memory, _ = timed(["rg", "--no-config", "--no-unicode", "-c", "-f",
                                        str(folder / "patterns.txt"), str(logs)])
            result["rg"].append(seconds)
            result["rg_mb"].append(memory)
        result["small"].append(timed([*ours, str(small)])[0])
    report = json.loads(said)
    best = {key: min(values) for key, values in result.items() if values}
    root = report["findings"][0]
    print(f"{size / 1e9:.2f} GB in {options.files} files, {count} signatures, best of {options.turns}")
    print(f"  pdtrain diag postmortem  {best['ours']:6.2f} s  {size / best['ours'] / 1e6:7.0f} MB/s  peak "
          f"{best['ours_mb']:.0f} MB (largest process)")
    if have_rg:
        print(f"  rg -c -f patterns        {best['rg']:6.2f} s  {size / best['rg'] / 1e6:7.0f} MB/s  peak "
              f"{best['rg_mb']:.0f} MB   ratio {best['ours'] / best['rg']:.2f}")
    print(f"  10 MB, process start included: {best['small']:.2f} s")
    print(f"  said: {root['cause']} on ranks {root['where'].get('ranks')}, confidence {root['confidence']}")
    print(json.dumps({"ours": best["ours"], "peer": best.get("rg"), "peer_version": _rg_version(),
                      "ratio": best["ours"] / best["rg"] if have_rg else None, "peak_mb": best["ours_mb"],
                      "small_seconds": best["small"], "bytes": size, "machine": platform.node(),
                      "cores": os.cpu_count(), "commit": _commit()}))


def _rg_version() -> str | None:
    if shutil.which("rg") is None:
        return None
    return subprocess.run(["rg", "--version"], capture_output=True, text=True).stdout.split("\n")[0]


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          cwd=Path(__file__).parent)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
