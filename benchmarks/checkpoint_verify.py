"""How fast a checkpoint is proven: structure and CRC32 of every byte, against isal's crc32 over the same files.

    python benchmarks/checkpoint_verify.py [--gb 2] [--shards 10000]

Both contestants alternate over the same files in the page cache, with the same number of threads; the scan for NaN and
infinities is timed apart. A second part reads the metadata of a checkpoint of many shards.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def write(folder: Path, gigabytes: float) -> int:
    """A DCP of two files with tensors of 64 MiB; the bytes of its files."""
    import torch
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    block = torch.randn(16 << 20)
    count = max(2, int(gigabytes * 1e9 / block.nbytes))
    state = {f"layers.{n}.weight": block.roll(n).view(4096, -1) for n in range(count)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2, sync_files=False), no_dist=True)
    return sum(f.stat().st_size for f in folder.iterdir())


def peer(folder: Path, threads: int) -> None:
    """isal's crc32 of every file, `threads` at a time, with the fastest plain reading there is: into one buffer."""
    from isal import isal_zlib

    def one(file: Path) -> int:
        value, buffer = 0, memoryview(bytearray(1 << 20))
        with file.open("rb", buffering=0) as stream:
            while got := stream.readinto(buffer):
                value = isal_zlib.crc32(buffer[:got], value)
        return value

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, sorted(folder.iterdir())))


def ours(folder: Path, threads: int) -> None:
    """Everything that `ckpt verify --deep` does but the values: structure, directories, CRC32 of every member."""
    from diag.checkpoints import open_checkpoint
    from diag.checkpoints.verify import Options, verify

    outcomes = verify(open_checkpoint(folder), Options(deep=True, finite=False, threads=threads))
    assert all(o.status != "FAIL" for o in outcomes), [o for o in outcomes if o.status == "FAIL"]


def scan(folder: Path, threads: int) -> None:
    """The NaN and infinity scan alone."""
    from diag.checkpoints import open_checkpoint
    from diag.checkpoints.verify import Options, values

    values.finite(open_checkpoint(folder), Options(deep=True, threads=threads), [])


def timed(work: object, *arguments: object) -> float:
    started = time.perf_counter()
    work(*arguments)  # type: ignore[operator]
    return time.perf_counter() - started


def many_shards(folder: Path, shards: int) -> tuple[float, float]:
    """(seconds, of which on the processor, children included) for the structure of a metadata with `shards` files of
    ten chunks each."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from diag.checkpoints.answer import verified

    tensors, places = {}, {}
    for n in range(10):
        chunks = [ChunkStorageMetadata(torch.Size((i * 8, 0)), torch.Size((8, 64))) for i in range(shards)]
        name = f"layers.{n}.weight"
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((shards * 8, 64)),
                                              chunks)
        places |= {MetadataIndex(name, c.offsets, i): _StorageInfo(f"__{i}_0.distcp", n * 4096, 4096)
                   for i, c in enumerate(chunks)}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, None, places)))
    before = os.times()
    seconds = timed(verified, str(folder))
    after = os.times()
    return seconds, sum(b - a for a, b in zip(before[:4], after[:4]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "step_1")
        total = write(folder, options.gb)
        peer(folder, options.threads)  # into the page cache
        times: dict[str, list[float]] = {"ours": [], "peer": [], "scan": []}
        for _ in range(options.rounds):
            times["peer"].append(timed(peer, folder, options.threads))
            times["ours"].append(timed(ours, folder, options.threads))
            times["scan"].append(timed(scan, folder, options.threads))
        many = Path(scratch, "many")
        many.mkdir()
        seconds, processor = many_shards(many, options.shards)
    rates = {name: total / statistics.median(found) / 1e9 for name, found in times.items()}
    print(f"{total / 1e9:.2f} GB in two files, {options.threads} threads, {os.cpu_count()} cores, from page cache")
    print(f"  verify (structure + CRC of every byte)   {rates['ours']:6.2f} GB/s")
    print(f"  isal crc32 of the same files             {rates['peer']:6.2f} GB/s")
    print(f"  ratio                                    {rates['ours'] / rates['peer']:6.2f}   (floor 0.5)")
    print(f"  NaN/Inf scan                             {rates['scan']:6.2f} GB/s")
    print(f"  structure of {options.shards:,} shards x 10 chunks    {seconds:6.2f} s    (limit 5 s)")
    print(f"    of which on the processor              {processor:6.2f} s    (load {os.getloadavg()[0]:.1f})")
    print(json.dumps({**rates, "peer_version": "isal", "ratio": rates["ours"] / rates["peer"],
                      "metadata_seconds": seconds, "metadata_cpu_seconds": processor, "load": os.getloadavg()[0],
                      "machine": platform.machine()}))


if __name__ == "__main__":
    main()
