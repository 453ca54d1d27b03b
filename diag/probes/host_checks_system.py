"""Judgement of the operating system's side: shared memory, limits, control group, file systems, clock, kernel log.

Thresholds are named below. Those without a public source are where a run of some ranks with data loaders would fail or
crawl; between them and what would be comfortable a finding is `info`.
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.detectors import NotChecked
from diag.probes.host_facts import Mount
from diag.probes.host_words import GIB, MIB, Place, plural, size
from diag.probes.xid import lines_of
from diag.schema import Finding, Severity

#: NVIDIA's framework containers ask for --shm-size=1g or --ipc=host; Docker's default is 64 MiB.
SHM_LEAST = 1 * GIB
SHM_FREE_LEAST = 256 * MIB
#: 1024 is the usual default of login shells, and a data loader with many workers meets it.
FILES_LEAST = 1024
FILES_COMFORT = 4096
PROCESSES_LEAST = 1024
#: One rank's Python, torch and CUDA context take 3 to 5 GiB of host memory before any data.
RANK_MEMORY = 4 * GIB
#: Of a file system that is written to.
FREE_LEAST = 1 * GIB
FREE_SHARE = 0.01
CHECKPOINT_FREE = 10 * GIB
INODES_SHARE = 0.01
#: A checkpoint of 100 GB at 50 MB/s takes half an hour.
WRITE_LEAST = 50e6
FSYNC_MOST = 2.0
#: Below this, timestamps of hosts order events well enough; above it, logs cannot be merged by time (and tokens, leases
#: and make-like caches begin to fail).
SKEW_MOST = 0.5
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "cifs", "smb", "wekafs", "panfs", "orangefs")


def check(place: Place) -> Iterator[Finding | NotChecked]:
    """Everything about the system of one host."""
    yield from shared_memory(place)
    yield from limits(place)
    yield from control_group(place)
    for mount in place.facts.mounts:
        yield from file_system(place, mount)
    yield from storage(place)
    yield from clock(place)
    yield from kernel_log(place)


def shared_memory(place: Place) -> Iterator[Finding | NotChecked]:
    """/dev/shm: data loader workers hand batches over through it, and NCCL its buffers."""
    facts = place.facts
    total, free = facts.shm_total, facts.shm_free
    if total is None or free is None:
        if "shm" in facts.notes:
            yield place.finding("shm_too_small", "warning", f"there is no usable /dev/shm ({facts.notes['shm']})",
                                at="/dev/shm", text=facts.notes["shm"])
        return
    if total < SHM_LEAST:
        yield place.finding("shm_too_small", "warning", f"/dev/shm has {size(total)}; data loaders and NCCL want at "
                            f"least {size(SHM_LEAST)}", at="/dev/shm", text=f"{size(total)}, {size(free)} free",
                            total_bytes=total, free_bytes=free)
    elif free < SHM_FREE_LEAST:
        left = f"; {plural(facts.shm_leftovers, 'file')} of NCCL or torch lie there" if facts.shm_leftovers else ""
        yield place.finding("shm_too_small", "warning", f"/dev/shm is full: {size(free)} of {size(total)} free{left}",
                            at="/dev/shm", text=f"{size(free)} of {size(total)} free", total_bytes=total,
                            free_bytes=free,
                            fix=["Remove what dead processes left: ls -la /dev/shm, lsof +D /dev/shm."])


def limits(place: Place) -> Iterator[Finding]:
    """ulimit: open files, processes, locked memory (RDMA registers all its buffers)."""
    known = place.facts.limits
    soft, hard = known.get("nofile", (-1, -1))
    if 0 <= soft < FILES_COMFORT:
        severity: Severity = "warning" if soft < FILES_LEAST else "info"
        yield place.finding("too_many_open_files", severity, f"a process may open {soft} files only (hard limit "
                            f"{'none' if hard < 0 else hard})", at="ulimit -n", text=f"soft {soft}, hard {hard}",
                            soft=soft, hard=hard)
    soft, hard = known.get("nproc", (-1, -1))
    if 0 <= soft < PROCESSES_LEAST:
        yield place.finding("host_limits", "warning", f"the user may have {soft} processes and threads only",
                            at="ulimit -u", text=f"soft {soft}, hard {hard}", soft=soft,
                            fix=["Raise nproc in /etc/security/limits.conf or the service's LimitNPROC."])
    soft, hard = known.get("memlock", (-1, -1))
    if 0 <= soft < 64 * GIB and any(port.state == "Active" for port in place.facts.ib):
        yield place.finding("host_limits", "warning", f"a process may lock {size(soft)} of memory only; RDMA registers "
                            "more", at="ulimit -l", text=f"soft {soft}, hard {hard}", soft=soft,
                            fix=["ulimit -l unlimited; in containers --ulimit memlock=-1; under Slurm "
                                 "PropagateResourceLimitsExcept=MEMLOCK."])
    for name, words in (("as", "address space"), ("fsize", "file size")):
        soft, _ = known.get(name, (-1, -1))
        if soft >= 0:
            yield place.finding("host_limits", "warning", f"the {words} of a process is limited to {size(soft)}",
                                at=f"ulimit ({words})", text=f"soft {soft}", soft=soft,
                                fix=[f"Remove the limit: ulimit -{'v' if name == 'as' else 'f'} unlimited."])


def control_group(place: Place) -> Iterator[Finding]:
    """The container's own limits: memory, processor time, number of processes."""
    group, facts = place.facts.cgroup, place.facts
    if group is None:
        return
    ranks = facts.local_ranks or 1
    at = f"cgroup v{group.version}"
    if group.memory_limit is not None and (facts.memory_total is None or group.memory_limit < facts.memory_total):
        wanted = ranks * RANK_MEMORY
        used = max((group.memory_used or 0) - (group.memory_cache or 0), 0)
        left = group.memory_limit - used
        short = group.memory_limit < wanted or left < RANK_MEMORY / 4
        words = f"the control group may use {size(group.memory_limit)} of memory"
        if facts.memory_total:
            words += f" of the host's {size(facts.memory_total)}"
        if group.memory_limit < wanted:
            words += f"; {plural(ranks, 'rank')} {'wants' if ranks == 1 else 'want'} {size(wanted)} before any data"
        elif short:
            words += f", and {size(left)} are left"
        yield place.finding("memory_limit_low", "warning" if short else "info", words, at=at,
                            text=f"limit {group.memory_limit}, used {group.memory_used}",
                            limit_bytes=group.memory_limit, left_bytes=left)
    if group.oom_kills:
        yield place.finding("host_oom", "warning", f"{plural(group.oom_kills, 'process')} of this control group "
                            f"{'was' if group.oom_kills == 1 else 'were'} killed for memory", at=at,
                            text=f"oom_kill {group.oom_kills}", confidence=0.7, kills=group.oom_kills)
    if group.cpus is not None and group.cpus < max(ranks, 1):
        yield place.finding("host_limits", "warning", f"the control group has {group.cpus:g} processors for "
                            f"{plural(ranks, 'rank')}", at=at, text=f"cpu quota {group.cpus:g}", cpus=group.cpus,
                            fix=["Raise the container's cpu quota; a rank needs at least one core for its own thread."])
    if group.pids_limit is not None and group.pids_limit - (group.pids_used or 0) < PROCESSES_LEAST // 2:
        yield place.finding("host_limits", "warning", f"the control group may have {group.pids_limit} processes and "
                            f"threads, {group.pids_used or 0} exist", at=at, text=f"pids.max {group.pids_limit}",
                            fix=["Raise the container's pids limit (--pids-limit)."], pids=group.pids_limit)


def file_system(place: Place, mount: Mount) -> Iterator[Finding]:
    """Free space and inodes where a run writes; a mount that does not answer."""
    where = f"{mount.path} ({mount.why})" if mount.why else mount.path
    if mount.hung:
        yield place.finding("stale_file_handle", "error", f"the file system of {where} does not answer: "
                            f"{mount.kind or 'type unknown'} from {mount.device or 'an unknown device'}", at=mount.path,
                            text="statvfs did not come back within its time limit", file=mount.path)
        return
    checkpoints = mount.why == "checkpoints"
    if mount.problem:
        if checkpoints:
            missing = "no such" in mount.problem.lower()
            cause = "stale_file_handle" if "stale" in mount.problem.lower() else "storage_unusable"
            hint = ": create it, on every host" if missing else ""
            yield place.finding(cause, "error", f"{where}: {mount.problem}{hint}", at=mount.path,
                                text=mount.problem, file=mount.path)
        return
    if mount.free is not None and mount.total:
        small = mount.total <= 10 * FREE_LEAST and not checkpoints
        full = mount.free < (FREE_SHARE * mount.total if small else FREE_LEAST)
        if full or (checkpoints and mount.free < CHECKPOINT_FREE):
            yield place.finding("disk_full", "error" if full and checkpoints else "warning" if full else "info",
                                f"{where} has {size(mount.free)} free of {size(mount.total)}", at=mount.path,
                                text=f"{mount.kind} {mount.device}: {mount.free} of {mount.total} bytes free",
                                free_bytes=mount.free, file=mount.path)
    if mount.inodes and mount.inodes_free is not None and mount.inodes_free < INODES_SHARE * mount.inodes:
        yield place.finding("disk_full", "warning", f"{where} has {mount.inodes_free:,} of {mount.inodes:,} inodes "
                            "free", at=mount.path, text=f"{mount.inodes_free} of {mount.inodes} inodes free",
                            file=mount.path)
    if mount.read_only and checkpoints:
        yield place.finding("storage_unusable", "error", f"{where} is mounted read-only", at=mount.path,
                            text=f"{mount.kind} {mount.device}: read-only", file=mount.path)
    if checkpoints and place.many and mount.kind and not mount.kind.startswith(_NETWORK):
        yield place.finding("storage_unusable", "info", f"{where} is on {mount.kind}, which looks local to each host: "
                            "another host will not find the shards", at=mount.path, text=f"{mount.kind} {mount.device}")


def storage(place: Place) -> Iterator[Finding | NotChecked]:
    """Writing to the checkpoint path."""
    probe = place.facts.storage
    if probe is None:
        if place.live:
            yield NotChecked("write rate of the checkpoint path: name it with --path")
        return
    if probe.hung:
        yield place.finding("stale_file_handle", "error", f"writing to {probe.path} hangs: {probe.stage} did not come "
                            f"back within {probe.seconds or 0:.0f} s", at=probe.path, text=f"hangs in {probe.stage}",
                            file=probe.path)
    elif probe.problem:
        full = "space" in probe.problem.lower() or "quota" in probe.problem.lower()
        yield place.finding("disk_full" if full else "storage_unusable", "error",
                            f"cannot write to {probe.path}: {probe.problem}", at=probe.path,
                            text=f"{probe.stage}: {probe.problem}", file=probe.path)
    elif probe.write_rate is not None:
        slow = probe.write_rate < WRITE_LEAST or (probe.fsync_seconds or 0) > FSYNC_MOST
        words = f"{probe.path} takes {probe.write_rate / 1e6:,.0f} MB/s ({size(probe.bytes)} with fsync)"
        yield place.finding("slow_storage", "warning" if slow else "info", words, at=probe.path,
                            text=f"{probe.bytes} bytes in {probe.seconds or 0:.2f} s, fsync "
                            f"{probe.fsync_seconds or 0:.2f} s", file=probe.path, confidence=0.7,
                            bytes_per_second=round(probe.write_rate), fsync_seconds=probe.fsync_seconds)


def clock(place: Place) -> Iterator[Finding | NotChecked]:
    """The clock against rank 0's. Whether an NTP daemon disciplines it says little: many containers cannot know."""
    clock_ = place.facts.clock
    if clock_ is None or clock_.offset is None:
        if place.live:
            yield NotChecked("clock skew: only one host is known (run it under torchrun on all hosts)")
        return
    if abs(clock_.offset) > SKEW_MOST + 3 * (clock_.error or 0.0):
        ahead = "ahead of" if clock_.offset > 0 else "behind"
        yield place.finding("clock_skew", "warning", f"the clock of {place.facts.host} is {abs(clock_.offset):.3g} s "
                            f"{ahead} rank 0's", at="clock", text=f"offset {clock_.offset:+.6f} s, known to "
                            f"{clock_.error or 0:.6f} s", offset_seconds=round(clock_.offset, 6),
                            error_seconds=round(clock_.error or 0.0, 6))


def kernel_log(place: Place) -> Iterator[Finding | NotChecked]:
    """Xid and SXid lines since boot, each with the action that NVIDIA's catalogue names."""
    facts = place.facts
    if "kernel log" in facts.notes:
        yield NotChecked(f"kernel log: {facts.notes['kernel log']}")
    for entry in lines_of([(line.text, line.line, line.time) for line in facts.kernel_log]):
        yield place.finding(entry.cause, entry.severity, entry.summary, at="/dev/kmsg", text=entry.text,
                            line=entry.line if place.path is None else None, gpus=entry.gpus, fix=entry.fix,
                            confidence=0.85, count=entry.count, xid=entry.code)
    kills = [line for line in facts.kernel_log if "Killed process" in line.text]
    if kills:
        yield place.finding("host_oom", "info", f"the kernel killed {plural(len(kills), 'process')} for memory since "
                            "boot", at="/dev/kmsg", text=kills[-1].text, confidence=0.5, kills=len(kills))
