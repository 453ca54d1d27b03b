"""File systems, asked from a subprocess: a mount that hangs must not hang the one who asks.

The worker says on its standard output what it is about to do before it does it; when it does not come back, the last
word is the call that hangs, and the process (which may be in uninterruptible sleep) is left to the kernel.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diag.probes.host_facts import Mount, Storage

#: Seconds that one size enquiry may take; a local file system answers in microseconds.
STATVFS_SECONDS = 1.0
#: Seconds that the write probe may take, after which the path counts as hanging.
WRITE_SECONDS = 5.0
#: What the probe writes, and after how long it is content with less. A checkpoint is much larger; caches of the storage
#: may make the figure too good, never too bad.
WRITE_BYTES = 32 << 20
WRITE_ENOUGH = 0.4

_WORKER = r"""
import json, os, sys, time
def say(**k):
    sys.stdout.write(json.dumps(k) + "\n"); sys.stdout.flush()
task = json.loads(sys.argv[1])
for path in task.get("sizes", ()):
    say(path=path, stage="statvfs")
    try:
        s = os.statvfs(path)
        say(path=path, total=s.f_blocks * s.f_frsize, free=s.f_bavail * s.f_frsize, inodes=s.f_files,
            inodes_free=s.f_favail, read_only=bool(s.f_flag & 1))
    except OSError as error:
        say(path=path, problem=error.strerror or str(error))
if "write" in task:
    name = os.path.join(task["write"], ".pdtrain-probe-%d" % os.getpid())
    block = os.urandom(1 << 20)
    done, begun, stage = 0, time.monotonic(), "open"
    try:
        say(stage=stage)
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        stage = "unlink"; say(stage=stage)
        os.unlink(name)
        stage = "write"; say(stage=stage)
        begun = time.monotonic()
        while done < task["bytes"] and time.monotonic() - begun < task["enough"]:
            done += os.write(fd, block)
        stage = "fsync"; say(stage=stage, bytes=done)
        before = time.monotonic()
        os.fsync(fd)
        end = time.monotonic()
        stage = "close"; say(stage=stage)
        os.close(fd)
        say(stage="done", bytes=done, fsync=end - before, seconds=end - begun)
    except OSError as error:
        say(stage=stage, bytes=done, problem=error.strerror or str(error), errno=error.errno)
"""

#: Replaces the worker's program in tests: a storage that hangs.
Words = list[dict[str, Any]]


def ask(task: dict[str, Any], limit: float, *, program: str = _WORKER) -> tuple[Words, bool]:
    """What the worker said of `task`, and whether it went silent for `limit` seconds (then it is killed)."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", program, json.dumps(task)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    fd = process.stdout.fileno()
    words: Words = []
    rest = b""
    hung = False
    while True:
        ready, _, _ = select.select([fd], [], [], limit)
        if not ready:
            hung = True
            break
        block = os.read(fd, 65_536)
        if not block:
            break
        *lines, rest = (rest + block).split(b"\n")
        words += [json.loads(line) for line in lines]
    if hung:
        process.kill()  # has no effect on a process in uninterruptible sleep, and nobody waits for it
    process.stdout.close()
    if not hung:
        process.wait()
    return words, hung


def sizes(paths: Sequence[tuple[str, str]], *, limit: float = STATVFS_SECONDS, program: str = _WORKER) -> list[Mount]:
    """Free space and inodes of (path, why it matters); a path that hangs is marked and the others still answered."""
    found = {path: Mount(path=path, why=why) for path, why in paths}
    todo = list(found)
    while todo:
        words, hung = ask({"sizes": todo}, limit, program=program)
        for word in words:
            mount = found.get(word.get("path", ""))
            if mount is not None and "stage" not in word:
                for key in ("total", "free", "inodes", "inodes_free", "read_only", "problem"):
                    if key in word:
                        setattr(mount, key, word[key])
        if not hung or not words:
            break
        stuck = words[-1].get("path", todo[0])
        found[stuck].hung = True
        todo = todo[todo.index(stuck) + 1:] if stuck in todo else []
    return list(found.values())


def write(path: str, *, amount: int = WRITE_BYTES, limit: float = WRITE_SECONDS, program: str = _WORKER,
          clock: Callable[[], float] = time.monotonic) -> Storage:
    """Write and fsync a file in the directory `path`, which is unlinked before the first byte is written."""
    begun = clock()
    result = Storage(path=path)
    words, hung = ask({"write": path, "bytes": amount, "enough": WRITE_ENOUGH}, limit, program=program)
    last = words[-1] if words else {}
    result.stage, result.hung = last.get("stage", "start"), hung
    result.bytes, result.problem = last.get("bytes", 0), last.get("problem", "")
    if last.get("stage") == "done":
        result.stage = ""
        result.fsync_seconds, result.seconds = last["fsync"], last["seconds"]
        if last["seconds"] > 0:
            result.write_rate = last["bytes"] / last["seconds"]
    elif hung:
        result.seconds = clock() - begun
    return result


def describe(mounts: list[Mount], root: Path = Path("/")) -> None:
    """Fill device and kind of each of `mounts` from /proc/mounts: the longest mount point above it."""
    table = table_of(root)
    for mount in mounts:
        place = os.path.abspath(mount.path)  # noqa: PTH100 - resolving links would touch a mount that may hang
        best = ""
        for point, (device, kind) in table.items():
            if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                best, mount.device, mount.kind = point, device, kind


def table_of(root: Path = Path("/")) -> dict[str, tuple[str, str]]:
    """Mount point -> (device, type); later mounts cover earlier ones."""
    try:
        text = (root / "proc/mounts").read_text("utf-8", "replace")
    except OSError:
        return {}
    rows = (line.split(" ") for line in text.splitlines())
    return {row[1].replace("\\040", " "): (row[0], row[2]) for row in rows if len(row) >= 3}
