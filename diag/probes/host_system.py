"""The operating system's side of one host: memory, limits, control group, clock, kernel log. `root` replaces /."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from diag.probes.host_facts import Cgroup, Clock, HostFacts, KernelLine

#: A limit of a v1 control group this large is the kernel's way to say "none".
V1_UNLIMITED = 1 << 60
#: Lines of the kernel log that a diagnosis may need.
KERNEL_LINES = re.compile(r"NVRM|Xid|SXid|nvidia|Out of memory|oom-kill|oom_reaper|mlx5|infiniband|Machine check"
                          r"|Hardware Error|EXT4-fs error|XFS .*error|I/O error|nfs: server|LustreError"
                          r"|blocked for more than|segfault|AER:|PCIe Bus Error|EDAC", re.I)
MAX_KERNEL_LINES = 200
_LIMITS = {"nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC", "memlock": "RLIMIT_MEMLOCK", "stack": "RLIMIT_STACK",
           "core": "RLIMIT_CORE", "as": "RLIMIT_AS", "fsize": "RLIMIT_FSIZE"}
_LIBC_TIME_ERROR = 5
_PREFIXES = ("nccl-", "torch_", "__KMP_REGISTERED", "sem.loky", "pymp-")


def gather(facts: HostFacts, root: Path = Path("/")) -> None:
    """Fill what `facts` says of the system."""
    memory = dict(re.findall(r"^(\w+):\s+(\d+)", _text(root / "proc/meminfo"), re.M))
    facts.memory_total, facts.memory_available = _kib(memory, "MemTotal"), _kib(memory, "MemAvailable")
    facts.swap_total = _kib(memory, "SwapTotal")
    facts.huge_page_size = _kib(memory, "Hugepagesize")
    if "HugePages_Total" in memory:
        facts.huge_pages, facts.huge_pages_free = int(memory["HugePages_Total"]), int(memory["HugePages_Free"])
    chosen = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    facts.transparent_huge_pages = chosen[1] if chosen else ""
    model = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.M)
    facts.cpu = model[1] if model else ""
    facts.kernel = _text(root / "proc/sys/kernel/osrelease")
    system = re.search(r'^PRETTY_NAME="?([^"\n]+)', _text(root / "etc/os-release"), re.M)
    facts.system = system[1] if system else ""
    facts.cpus = os.cpu_count()
    facts.cpus_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else facts.cpus
    facts.cgroup = cgroup(root)
    _shm(facts, root)
    facts.limits = limits()


def limits() -> dict[str, tuple[int, int]]:
    """The resource limits of this process; -1 is unlimited."""
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    found = {}
    for name, constant in _LIMITS.items():
        if hasattr(resource, constant):
            soft, hard = resource.getrlimit(getattr(resource, constant))
            found[name] = (-1 if soft == resource.RLIM_INFINITY else soft,
                           -1 if hard == resource.RLIM_INFINITY else hard)
    return found


def _shm(facts: HostFacts, root: Path) -> None:
    place = root / "dev/shm"  # noqa: S108 - it is the subject
    try:
        size = os.statvfs(place)
        names = os.listdir(place)  # noqa: PTH208
    except OSError as error:
        facts.notes["shm"] = f"/dev/shm: {error.strerror or error}"
        return
    facts.shm_total, facts.shm_free = size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize
    facts.shm_leftovers = sum(name.startswith(_PREFIXES) for name in names)


def cgroup(root: Path = Path("/")) -> Cgroup | None:
    """The tightest limits between this process's control group and the root; None where there is none."""
    rows = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    if not rows:
        return None
    legacy = {name: path for _, names, path in rows for name in names.split(",") if name}
    base = root / "sys/fs/cgroup"
    if (base / "cgroup.controllers").exists():
        unified = next((path for number, names, path in rows if number == "0" and not names), "/")
        return _second(_levels(base, unified))
    if "memory" in legacy or "pids" in legacy:
        return _first({name: _levels(base / name, legacy.get(name, "/")) for name in ("memory", "cpu", "pids")})
    return None


def _levels(base: Path, path: str) -> list[Path]:
    """The folder of the group and its parents, deepest first. In a container the path may not exist below `base`: then
    the container sees its own group as the root."""
    place = base / path.lstrip("/")
    found = []
    while place != base and base in place.parents:
        if place.is_dir():
            found.append(place)
        place = place.parent
    return [*found, base]


def _second(levels: list[Path]) -> Cgroup:
    group = Cgroup(version=2, memory_limit=_tightest(levels, "memory.max"), pids_limit=_tightest(levels, "pids.max"))
    limited = next((f for f in levels if group.memory_limit is not None
                    and _number(f / "memory.max") == group.memory_limit), levels[0])
    group.memory_used = _number(limited / "memory.current")
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(limited / "memory.stat"), re.M))
    group.memory_cache = int(stat["inactive_file"]) if "inactive_file" in stat else None
    events = dict(re.findall(r"^(\w+) (\d+)$", _text(levels[0] / "memory.events"), re.M))
    group.oom_kills = int(events["oom_kill"]) if "oom_kill" in events else None
    group.pids_used = _number(levels[0] / "pids.current")
    for folder in levels:
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            share = int(quota) / int(period)
            group.cpus = share if group.cpus is None else min(group.cpus, share)
    return group


def _first(levels: dict[str, list[Path]]) -> Cgroup:
    limit = _tightest(levels["memory"], "memory.limit_in_bytes")
    group = Cgroup(version=1, memory_limit=limit if limit is not None and limit < V1_UNLIMITED else None,
                   pids_limit=_tightest(levels["pids"], "pids.max"))
    limited = next((f for f in levels["memory"] if group.memory_limit is not None
                    and _number(f / "memory.limit_in_bytes") == group.memory_limit), levels["memory"][0])
    group.memory_used = _number(limited / "memory.usage_in_bytes")
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(limited / "memory.stat"), re.M))
    cache = stat.get("total_inactive_file", stat.get("inactive_file"))
    group.memory_cache = int(cache) if cache else None
    kills = re.search(r"^oom_kill (\d+)$", _text(levels["memory"][0] / "memory.oom_control"), re.M)
    group.oom_kills = int(kills[1]) if kills else None
    group.pids_used = _number(levels["pids"][0] / "pids.current")
    for folder in levels["cpu"]:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and quota > 0 and period:
            group.cpus = quota / period if group.cpus is None else min(group.cpus, quota / period)
    return group


def _tightest(levels: list[Path], name: str) -> int | None:
    known = [value for value in (_number(folder / name) for folder in levels) if value is not None]
    return min(known, default=None)


def clock() -> Clock:
    """Whether the kernel's clock is disciplined, by adjtimex(2): says nothing about the other hosts."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(512))  # all zero: modes 0, read only
    except (OSError, AttributeError):
        return Clock()
    return Clock(synchronised=None if state < 0 else state != _LIBC_TIME_ERROR)


def kernel_log(facts: HostFacts, text: str | None = None) -> None:
    """The lines of the kernel log that matter; `facts.notes["kernel log"]` when it may not be read.

    Reads /dev/kmsg without blocking: the ring as it is now.
    """
    if text is None:
        try:
            text = _ring()
        except OSError as error:
            facts.notes["kernel log"] = f"{error.strerror or error} (needs root, or kernel.dmesg_restrict = 0)"
            return
    kept = [(number, line) for number, line in enumerate(text.splitlines(), 1) if KERNEL_LINES.search(line)]
    for number, line in kept[-MAX_KERNEL_LINES:]:
        head, separator, message = line.partition(";")
        stamp = head.split(",")[2] if separator and head.count(",") >= 3 else ""
        seconds = f"{int(stamp) / 1e6:.6f}" if stamp.isdigit() else ""
        facts.kernel_log.append(KernelLine(text=(message if stamp else line)[:400], time=seconds, line=number))


def _ring() -> str:
    """Every record of /dev/kmsg."""
    records: list[bytes] = []
    handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while len(records) < 100_000:
            try:
                records.append(os.read(handle, 8192))
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten while reading: go on with the next
                continue
    finally:
        os.close(handle)
    return b"".join(record.split(b"\n")[0] + b"\n" for record in records).decode("utf-8", "replace")


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _kib(values: dict[str, str], name: str) -> int | None:
    return int(values[name]) * 1024 if name in values else None
