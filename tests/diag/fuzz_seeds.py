"""One small sound file for every reader of the registry: what the fuzz cuts, flips and splices.

`tests/diag/test_fuzz.py` compares this table with the registry, so that a new reader comes with a seed.
"""

from __future__ import annotations

import json
import pickle
import struct
from functools import cache
from typing import Any

from diag.probes.comm.records import Link, Probe
from diag.probes.comm.records import encode as encode_probe
from diag.probes.host_facts import encode
from tests.diag.artefacts.test_metric_readers import EVENTS, LINES, framed, wandb_file
from tests.diag.artefacts.test_saved_outputs import TABLE, port, query, ras, table, topo
from tests.diag.helpers import config
from tests.diag.memory.allocator import pickled
from tests.diag.memory.runs import training
from tests.diag.probes.hosts import host

LOG = b"""\
2024-05-01 12:00:00,123 [rank0]: INFO step 10 loss 2.5 grad_norm 1.0
node1:1234:1300 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 busId 1b000 - Init COMPLETE
[rank1]: Traceback (most recent call last):
[rank1]:   File "/src/train.py", line 88, in main
[rank1]:     loss.backward()
[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB
[rank0]:[E501 12:10:00.1 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=104, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds
[Wed May  1 12:00:01 2024] Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB
E0501 12:10:05 77 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 4242)
"""
METRICS = b"".join(json.dumps({"step": s, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-4, "step_seconds": 0.5,
                               "tokens": 256 * s, "router/1/counts": [64, 70, 61, 61],
                               "router/1/drop_rate": 0.01}).encode() + b"\n" for s in range(1, 60))


def dump() -> dict[str, Any]:
    """A small flight-recorder dump."""
    entry = {"record_id": 1, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 5, "p2p_seq_id": 0,
             "op_id": 5, "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "duration_ms": None,
             "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
             "state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
             "retired": False, "timeout_ms": 600000, "is_p2p": False,
             "frames": [{"name": "main", "filename": "train.py", "line": 88}]}
    return {"version": "2.10", "entries": [entry, entry | {"record_id": 2, "collective_seq_id": 6}],
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
            "pg_status": {"0": {"last_enqueued_collective": 6, "last_started_collective": -1,
                                "last_completed_collective": 4}}}


def _safetensors() -> bytes:
    """Two layers of four experts of 64 numbers."""
    header: dict[str, Any] = {}
    for i in range(8):
        name = f"model.layers.{i // 4}.block_sparse_moe.experts.{i % 4}.w1.weight"
        header[name] = {"dtype": "F32", "shape": [8, 8], "data_offsets": [i * 256, i * 256 + 256]}
    text = json.dumps(header).encode()
    numbers = struct.pack("<512f", *((i * 2654435761 % 1009) / 1009 - 0.5 for i in range(512)))
    return struct.pack("<Q", len(text)) + text + numbers


def _trainer_state() -> bytes:
    history = [{"epoch": s / 10, "loss": 3 - s / 100, "grad_norm": 1.0, "learning_rate": 1e-4, "step": s}
               for s in range(1, 51)]
    return json.dumps({"global_step": 50, "max_steps": 80, "log_history": history}, indent=2).encode()


def _console() -> bytes:
    return "".join(f" iteration {i:8}/ 500 | consumed samples: {i * 8} | elapsed time per iteration (ms): 512.3 | "
                   f"learning rate: 1.500E-04 | global batch size: 8 | lm loss: {5 - i / 90:.6E} | "
                   f"loss scale: 65536.0 | grad norm: 1.234 | number of skipped iterations: 0 | "
                   f"number of nan iterations: 0 |\n"
                   for i in range(1, 61)).encode()


def _lines() -> bytes:
    return "".join(line.format(i=i % 10, loss=3 - i / 90) + "\n" for line in LINES.values() for i in range(12)).encode()


@cache
def seeds() -> dict[str, tuple[str, bytes]]:
    """file name -> (NAME of the reader that takes it, its bytes)."""
    exception = {"message": {"message": "ValueError: no", "extraInfo": {
        "py_callstack": 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: no',
        "timestamp": "1714564800"}}}
    modules = {"schema": "pdtrain.memory/1", "peak_bytes": 900, "device": "cuda:0", "rank": 0, "step": 3,
               "by_kind": {"parameter": 400}, "modules": [{"module": "m", "peak_bytes": 5, "parameter_bytes": 4}]}
    return {
        "metrics.jsonl": ("metrics", METRICS),
        "config.toml": ("run-config", config(capacity=1.25).encode()),
        "environment.json": ("run-environment", b'{"versions": {"torch": "2.13.0"}, "host": {"name": "n1"}}'),
        "rank_3.jsonl": ("run-events", b'{"event":"start","time":1.0}\n'
                         b'{"span":"forward","step":1,"start":1.0,"seconds":0.1}\n' * 5),
        "rank_0.log": ("log", LOG),
        "megatron.log": ("log", _console()),
        "loops.log": ("log", _lines()),
        "flight_recorder_1": ("flight-recorder", pickle.dumps(dump(), protocol=2)),
        "flight_recorder_0.json": ("flight-recorder", json.dumps(dump()).encode()),
        "events.out.tfevents.1.h": ("tensorboard", framed(*EVENTS)),
        "trainer_state.json": ("trainer-state", _trainer_state()),
        "metrics.csv": ("csv", b"epoch,step,train_loss,lr\n" + b"".join(b"0,%d,%f,0.001\n" % (s, 3 - s / 90)
                                                                        for s in range(1, 60))),
        "run-1.wandb": ("wandb", wandb_file([{"train/loss": 5 - s / 90, "lr": 1e-4} for s in range(60)])),
        "snapshot.pickle": ("memory-snapshot", pickled(training(2, layers=1).snapshot())),
        "memory_rank_0.json": ("module-memory", json.dumps(modules).encode()),
        "error.json": ("torchelastic-error", json.dumps(exception).encode()),
        "probe.json": ("comm-probe", encode_probe(Probe(
            world=2, hosts=["n1", "n2"], backend="gloo", mode="quick", rounds=2,
            links=[Link(src=0, dst=1, bytes_per_second=9e9), Link(src=1, dst=0, bytes_per_second=9e9)]))),
        "host_n1.json": ("host-facts", encode(host())),
        "model.safetensors": ("expert-weights", _safetensors()),
        "smi_q.txt": ("nvidia-smi", query(2, volatile="1").encode()),
        "smi.txt": ("nvidia-smi", TABLE.format(ecc=0).encode()),
        "topo.txt": ("nvidia-smi", topo(4).encode()),
        "ibstat.txt": ("ibstat", (port("mlx5_0") + port("mlx5_1", "Down", "Polling")).encode()),
        "all_reduce.txt": ("nccl-tests", table(210.0).encode()),
        "ras.json": ("nccl-ras", json.dumps(ras(unresponsive=True)).encode()),
    }
