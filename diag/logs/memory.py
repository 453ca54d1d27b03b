"""Which kind of GPU out-of-memory it was, from the allocator's own sentence and the frame it was raised in.

The sentence (CUDACachingAllocator.cpp) changed over the years; the numbers read here exist in all its forms: request,
total, free, in use by this process, allocated, reserved (or "reserved but unallocated"). Its advice about
fragmentation is boilerplate and counts only when the reserved-but-unallocated memory exceeds the request.
"""

from __future__ import annotations

import re

from diag.logs.known import subject_of
from diag.logs.view import Item, View
from diag.report.model import size as in_words
from diag.schema import Finding

_SIZE = r"(\d{1,12}(?:\.\d{1,6})?) ?([KMGT]?i?B|bytes)"
_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "KB": 2**10, "MiB": 2**20, "MB": 2**20, "GiB": 2**30, "GB": 2**30,
          "TiB": 2**40, "TB": 2**40}
_FIELDS = {
    "request": rf"Tried to allocate {_SIZE}",
    "total": rf"(?:total capaci?ty of {_SIZE}|{_SIZE} total capacity|max allowed: {_SIZE})",
    "free": rf"(?:of which {_SIZE} is free|{_SIZE} free)",
    "allowed": rf"{_SIZE} allowed;",
    "process": rf"this process has {_SIZE} memory in use",
    "allocated": rf"(?:memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated|MPS allocated: {_SIZE})",
    "idle": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "reserved": rf"{_SIZE} (?:reserved in total|cached)",
}
_OTHER = re.compile(rf"[Pp]rocess \d+ has {_SIZE} memory in use")
#: Another process that holds this share of the GPU is the reason, not a by-stander.
SHARED = 0.15
#: What CUDA, NCCL and libraries of the process itself take beside PyTorch's memory stays below this.
FOREIGN_BYTES = 6 * 2**30
#: What is free beyond the request, as a share of the device, before it could not have been a matter of room: drivers
#: round up and keep some back.
MARGIN = 0.05
#: A request of so many bytes comes from the pool for small tensors, which idle memory of the large one cannot serve.
SMALL_SEGMENT_BYTES = 2 << 20
#: What helps when the optimizer's states do not fit; a smaller batch frees nothing of them.
STATES_FIX = (
    "Shard the optimizer states over the data-parallel ranks (ZeRO 1, FSDP, a distributed optimizer): with "
    "FP32 masters they are 12 of the 16 bytes per parameter.",
    "Is the sharding in effect? A pipeline or fp16 engine of some trainers keeps whole states on every rank.",
    "Else more tensor- or pipeline-parallel ranks, states in fewer bits, or states on the host.",
)
#: A frame that makes optimizer states, read without the folders above its file ("adam" is also a user's name).
_OPTIMIZER = re.compile(r"optim|adam|lamb(?!da)|sgd|exp_avg|_init_group|state\[|master|fp32_groups", re.I)
#: While optimizer states are made, more of them are to come: less idle memory than this share would not have saved it.
IDLE_SHARE = 0.1


def readable(value: float) -> str:
    """Bytes in words."""
    return in_words(int(value))


def numbers_of(text: str) -> dict[str, float]:
    """The sizes, in bytes, that an out-of-memory sentence states."""
    found = {}
    for name, pattern in _FIELDS.items():
        if m := re.search(pattern, text):
            groups = [g for g in m.groups() if g is not None]
            found[name] = float(groups[0]) * _UNITS.get(groups[1], 1)
    others = [float(a) * _UNITS.get(b, 1) for a, b in _OTHER.findall(text)]
    if others:
        found["others"] = sum(others)
    return found


def refine_cuda_oom(view: View, finding: Finding, items: list[Item]) -> Finding:
    """The kind of out-of-memory that `items` describe: fragmentation, optimizer states, another process, or plain."""
    first = items[0]
    sentence = max((i.event.text for i in items[:8]), key=lambda text: len(numbers_of(text)))
    size = numbers_of(sentence)
    finding.numbers |= {f"{name}_bytes": int(value) for name, value in size.items()}
    idle = size.get("idle")
    if idle is None and "reserved" in size and "allocated" in size:
        idle = size["reserved"] - size["allocated"]
    cause, why = "cuda_oom", ""
    total, free = size.get("total"), size.get("free", 0.0)
    # In a container the sentence cannot tell its own process from others: what PyTorch holds is its own at least.
    own = max(size.get("process", 0.0), size.get("allocated", 0.0) + (idle or 0.0), size.get("reserved", 0.0))
    states = any(_OPTIMIZER.search(text) for text in _innermost(view, first))
    elsewhere = None
    if total and own:
        elsewhere = total - free - own
        size["others"] = min(size.get("others", 0.0), elsewhere)
    if size.get("others", 0) > SHARED * (total or 1e18) or (elsewhere is not None and total and
                                                           elsewhere > max(2 * SHARED * total, FOREIGN_BYTES)):
        cause, why = "cuda_oom_shared_gpu", "another process holds much of the same GPU"
    elif refused := _refused(size):
        why = refused
    elif idle is not None and "request" in size and idle > size["request"] > SMALL_SEGMENT_BYTES and not (
            states and idle < IDLE_SHARE * (total or 0.0)):
        cause, why = "cuda_oom_fragmentation", "reserved but unallocated memory exceeds the request"
    elif states:
        cause, why = "cuda_oom_optimizer", "while the optimizer states were created"
    elif not size and _before_any_model(view, first):
        cause, why = "cuda_oom_shared_gpu", "before this run had put anything on the GPU"
    if cause == "cuda_oom" and not why and total and "free" in size and "request" in size:
        short = size["request"] - free - (idle or 0)
        finding.numbers["missing_bytes"] = max(0, int(short))
        why = f"{readable(short)} too much for {readable(total)} even with all that lies idle" if short > 0 else \
            f"{readable(free)} free and {readable(idle or 0)} idle would hold it, but not in one piece"
    finding.cause = cause
    if cause == "cuda_oom_optimizer" and not finding.fix:
        finding.fix = list(STATES_FIX)
    if why:
        finding.summary += f"; {why}"
        finding.confidence = min(finding.confidence, 0.85)
    who = subject_of(finding.where.ranks, [])
    if who and who not in finding.summary:
        finding.summary = f"{who}: {finding.summary}"
    return finding


def _refused(size: dict[str, float]) -> str:
    """Why a request cannot be a matter of room: larger than the device, above a limit, or less than what was free."""
    request, free, allowed = size.get("request", 0.0), size.get("free", 0.0), size.get("allowed")
    if request > size.get("total", 1e18):
        return f"more than the whole device has ({readable(size['total'])}): look at the shape that is asked for"
    if allowed is not None and free > request:
        return f"this process may use no more than {readable(allowed)} (set_per_process_memory_fraction)"
    if free - request > MARGIN * size.get("total", 1e18) and request > 0:
        return (f"yet {readable(free)} were free on the device: the driver or a limit refused, not the capacity "
                "(memory fraction, MIG slice, cgroup, mappings per process)")  # fmt: skip
    return ""


def _innermost(view: View, item: Item) -> list[str]:
    """The innermost frames in words; of a traceback that lost its head, the last lines above the message."""
    if frames := _frames(view, item):
        return [f"{'/'.join(f.file.split('/')[-2:])}:{f.function} {f.code}" for f in frames[-3:]]
    above = [s.text for s in item.log.tail if item.line - 6 <= s.line < item.line]
    return above if any('File "' in text for text in above) else []


def _frames(view: View, item: Item) -> list:  # type: ignore[type-arg]
    for raised in view.raised:
        tb = raised.traceback
        if raised.place.log == item.place.log and tb.line - 1 <= item.line <= tb.end_line + 2:
            return tb.origin.frames
    return []


def _before_any_model(view: View, item: Item) -> bool:
    """"CUDA error: out of memory" at the first touch of the GPU: a barrier, set_device, the CUDA context."""
    if "CUDA error: out of memory" not in item.event.text or view.progress:
        return False
    frames = _frames(view, item)
    words = " ".join(f"{f.function} {f.code}" for f in frames[-4:])
    return bool(re.search(r"barrier|set_device|init_process_group|_lazy_init|manual_seed|\.to\(|\.cuda\(|empty_cache",
                          words)) and "forward" not in words
