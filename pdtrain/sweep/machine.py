"""What this machine's devices reach at all: the peak of the MFU, and where the plan's constants start from.

On a GPU of the catalogue the catalogue speaks. Elsewhere (CPUs, unknown devices) as many processes as the trials will
have each multiply large FP32 matrices and copy a large array, all at once: cores that they share are counted as shared.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from diag.errors import UsageError
from pdtrain.plan.communication import LINK_EFFICIENCY
from pdtrain.plan.hardware import Hardware, named
from pdtrain.plan.timing import MEMORY_EFFICIENCY
from pdtrain.sweep.book import MACHINE

#: Edge of the matrices, entries of the copied array, seconds of each measurement.
EDGE, COPIED, SECONDS = 768, 1 << 24, 0.7
#: Links of processes on one host before anything is measured: byte/s that a rank's collectives move through Gloo.
GLOO_BYTES_PER_SECOND = 1e9
#: Start of a collective there, in seconds: an exchange over loopback sockets.
GLOO_LATENCY = 200e-6
#: Seconds that all measurements together may take.
LIMIT_SECONDS = 120


def machine(ranks: int, threads: int) -> dict[str, Any]:
    """The row about this machine for trials of `ranks` processes. Takes two to four seconds."""
    command = [sys.executable, "-P", "-m", "pdtrain.sweep.machine", str(threads)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        for _ in range(ranks)
    ]
    found = []
    try:
        for process in started:
            out, error = process.communicate(timeout=LIMIT_SECONDS)
            if process.returncode:
                said = error.decode(errors="replace").strip().splitlines()
                raise UsageError(f"the device cannot be measured: {said[-1] if said else process.returncode}")
            found.append(json.loads(out))
    except subprocess.TimeoutExpired:
        raise UsageError(f"the device cannot be measured: no answer within {LIMIT_SECONDS} s") from None
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    first = found[0]
    return {
        "schema": MACHINE, "ranks": ranks, "host": platform.node(), "device": first["device"], "name": first["name"],
        "memory_bytes": first["memory_bytes"],
        "flops": statistics.median(item["flops"] for item in found),
        "memory_bandwidth": statistics.median(item["memory_bandwidth"] for item in found),
        "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip


def hardware_of(row: dict[str, Any], asked: str | None) -> Hardware:
    """The plan's hardware for trials on the machine of `row`; `asked`: what --hardware says."""
    if asked is not None:
        return named(asked)
    if row["device"] == "cuda":
        try:
            return named(row["name"])
        except UsageError:
            pass
    return Hardware(
        key="here",
        name=f"{row['name']} ({row['ranks']} ranks on {row['cores']} cores)" if row["device"] == "cpu" else row["name"],
        # BF16 is computed in FP32 on CPUs by this trainer's kernels: the same rate
        flops={"bf16": row["flops"], "fp32": row["flops"]},
        memory_bytes=row["memory_bytes"] / (row["ranks"] if row["device"] == "cpu" else 1),
        memory_bandwidth=row["memory_bandwidth"] / MEMORY_EFFICIENCY,
        node_bandwidth=GLOO_BYTES_PER_SECOND / LINK_EFFICIENCY["node"],
        network_bandwidth=GLOO_BYTES_PER_SECOND / LINK_EFFICIENCY["network"],
        devices_per_node=max(8, row["ranks"]),
        gemm_efficiency=1.0,
        attention_efficiency=0.5,
        latency=GLOO_LATENCY if row["device"] == "cpu" else 25e-6,
        runtime_bytes=0.0 if row["device"] == "cpu" else 3e9,
        kind="cpu" if row["device"] == "cpu" else "gpu",
        source=f"measured by `pdtrain sweep` on {row['host']}: product of FP32 matrices of {EDGE} x {EDGE}, copy of "
        f"{COPIED * 4 >> 20} MiB; links not measured",
        date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip


def same_machine(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether results of both may stand in one table."""
    return all(row.get(key) == other.get(key) for key in ("host", "device", "name", "cores"))


def hardware_row(hardware: Hardware) -> dict[str, Any]:
    """`hardware` for the JSON of a sweep."""
    return {key: value for key, value in asdict(replace(hardware, match=())).items() if key != "match"}


def _measure(threads: int) -> dict[str, Any]:
    """In a process of its own: rates of this device."""
    import psutil
    import torch

    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    edge, entries = (8192, 1 << 28) if cuda else (EDGE, COPIED)
    left = torch.rand(edge, edge, device=device)
    array = torch.rand(entries, device=device)
    target = torch.empty_like(array)

    def rate(work: Any, amount: float) -> float:
        work()
        best, began = float("inf"), time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return amount / best

    flops = rate(lambda: torch.mm(left, left), 2.0 * edge**3)
    copied = rate(lambda: target.copy_(array), 2.0 * 4 * entries)
    name = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}"
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total
    return {"device": device.type, "name": name, "flops": flops, "memory_bandwidth": copied, "memory_bytes": memory}


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
