"""How runs end: processes killed by signals, silence, stale build locks, trouble only at the exit, outside stops."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median

from diag.artefacts.log_facts import Progress
from diag.identity import expand_tasks
from diag.logs.culprit import UNSEEN_FIX, crashed_ranks, first_task
from diag.logs.known import pick_evidence, subject_of
from diag.logs.view import Item, Place, View, evidence
from diag.schema import Evidence, Finding, Where

#: A silence counts when it is this many times the usual interval between progress lines ...
SILENCE_INTERVALS = 10
#: ... and at least this long.
SILENCE_SECONDS = 600.0
#: A stamp this many lines above a line says when that was printed.
NEAR_LINES = 20
#: Lines that a shell or a wrapper adds below the launcher's.
LAST_WORDS = 5
SIGNALS = {-9: "killed_unconfirmed", 137: "killed_unconfirmed", -7: "shm_too_small", 135: "shm_too_small",
           -11: "segfault", 139: "segfault", -4: "segfault", 132: "segfault"}
_NAMES = {"Killed": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6, "Terminated": -15, "SIGKILL": -9,
          "SIGSEGV": -11, "SIGBUS": -7, "SIGABRT": -6, "SIGTERM": -15, "Illegal instruction": -4}


@dataclass(frozen=True, slots=True)
class Exit:
    """One process whose end a launcher reports."""

    code: int
    rank: int | None
    host: str | None
    place: Place
    item: Item | None = None


def exits(view: View) -> list[Exit]:
    """All reported ends of processes, in reading order."""
    found: list[Exit] = []
    who = view.identity
    for index, block in view.blocks:
        found.append(Exit(block.code, block.rank, block.host or None, Place(index, block.line)))
    failed = view.of("agent-failed", "deepspeed-exit")
    alone = len({(item.place.log, item.event.speaker.pid) for item in failed}) == 1 and not view.of("srun-task")
    for item in failed:
        local = item.groups.get("local")
        rank = who.rank_from_local(int(local), item.host, alone=alone) if local is not None else None
        found.append(Exit(int(item.groups["code"]), rank, item.host, item.place, item))
    for item in view.of("srun-task"):
        status = re.search(r"exit code (\d+)", item.groups["what"])
        code = int(status[1]) if status else _NAMES.get(item.groups["what"], 1)
        for task in expand_tasks(item.groups["tasks"])[:4096]:
            found.append(Exit(code, task, item.groups["host"], item.place, item))
    for item in view.of("mpirun-signal"):
        found.append(Exit(-int(item.groups["signal"]), int(item.groups["rank"]), item.groups["host"], item.place, item))
    found += [Exit(1, int(item.groups["rank"]), None, item.place, item) for item in view.of("mpirun-first-exit")]
    for item in crashed_ranks(view):
        rank = int(item.groups["rank"])
        found.append(Exit(int(item.groups["code"]), rank, who.host_of.get(rank), item.place, item))
    found += _hydra(view)
    for item in view.of("spawn-process"):
        code = _NAMES.get(item.groups.get("signal", ""), int(item.groups.get("code") or 1))
        number = int(item.groups["process"])
        found.append(Exit(code, number if who.one_host() else None, item.host, item.place, item))
    return sorted(found, key=lambda e: (e.place.log, e.place.line))


def _hydra(view: View) -> list[Exit]:
    """The blocks of MPICH's launcher: one line names the process, one of the next its end, a signal as its number."""
    found = []
    for item in view.of("hydra-process"):
        end = next((i for i in view.of("hydra-code") if i.log is item.log and 0 < i.line - item.line <= 2), None)
        if end is not None:
            code = int(end.groups.get("code") or 0)
            signal = int(end.groups.get("signal") or 0) or (code if -code in SIGNALS or code in (6, 15) else 0)
            rank = int(item.groups["rank"]) if "rank" in item.groups else None
            found.append(Exit(-signal or code, rank, item.groups["host"], item.place, item))
    return found


def attach_exits(view: View, finding: Finding) -> None:
    """Put the ranks and hosts that launchers report into a finding about a signal."""
    fitting = [e for e in exits(view) if SIGNALS.get(e.code) == finding.cause]
    if not fitting and finding.cause == "segfault":
        fitting = [e for e in exits(view) if e.code in (-6, 134)]
    if not fitting:
        return
    attempts: list[set[int]] = []
    lines = sorted(i.line for i in view.of("agent-failed", "torchrun-root"))
    for end in fitting:
        number = sum(1 for line in lines if line <= end.place.line) // 2
        while len(attempts) <= number:
            attempts.append(set())
        if end.rank is not None:
            attempts[number].add(end.rank)
    named = [ranks for ranks in attempts if ranks]
    same = len({frozenset(ranks) for ranks in named}) <= 1
    if named and same and not finding.where.ranks:
        finding.where.ranks = sorted(named[0])
    elif named and not same:
        finding.where.ranks = []  # another rank each time: it is the host, not the rank
    hosts = {e.host for e in fitting if e.host}
    if not hosts and (task := first_task(view)) is not None:
        hosts = {task.groups["host"]}
    finding.where.hosts = sorted({*finding.where.hosts, *hosts}) or finding.where.hosts
    who = subject_of(finding.where.ranks, finding.where.hosts)
    if who and not finding.summary.startswith(who):
        finding.summary = f"{who}: {finding.summary[:1].lower()}{finding.summary[1:]}"
    if not same:
        finding.summary += " (another rank at each attempt)"
        finding.numbers["ranks_by_attempt"] = [sorted(r) for r in named]


def _ordinary(code: int) -> bool:
    """Whether a program left with `code` by itself: no signal, and not a shell's word on one."""
    return 0 < code < 126 or code == 255


def silent_failure(view: View) -> Finding | None:
    """A launcher names the rank that failed first with an ordinary exit status; what that rank said is not here."""
    first = next((e for e in exits(view) if _ordinary(e.code)), None)
    blocks = [block for _, block in view.blocks if block.root and _ordinary(block.code)]
    ranks = sorted({block.rank for block in blocks}) if len({block.rank for block in blocks}) == 1 else []
    if first is None or (first.item is None and not blocks):
        return None
    index, line = first.place.log, first.place.line
    proof = [first.item.evidence()] if first.item is not None else [
        i.evidence() for i in view.of("torchrun-rank", "torchrun-exitcode")
        if i.place.log == index and line - 4 <= i.line <= line][:3]
    ranks = ranks or ([first.rank] if first.rank is not None and not blocks else [])
    hosts = sorted({block.host for block in blocks if block.host} or ({first.host} if first.host else set()))
    who = subject_of(ranks, hosts if len(hosts) == 1 else []) or "One rank"
    return Finding(cause="exception_unknown", severity="error", confidence=0.5, evidence=proof,
                   where=Where(ranks=ranks, hosts=hosts if len(hosts) == 1 else []),
                   summary=f"{who} ended first, with exit status {first.code}; what it printed is not among these "
                           "lines: look for its own log", fix=list(UNSEEN_FIX))


def peer_gone(view: View) -> Finding | None:
    """NCCL names the host whose side of a connection closed; why its process went away is not here."""
    items = [(i, found[1]) for i in view.of("nccl-remote-gone", "nccl-peer-closed")
             if (found := re.search(r"[Cc]onnection closed by remote peer ([\w.-]+?)<", i.event.text))]
    hosts = sorted({host for _, host in items})
    if len(hosts) != 1:
        return None
    return Finding(cause="peer_exception", severity="error", confidence=0.5, where=Where(hosts=hosts),
                   evidence=pick_evidence([i for i, _ in items]), fix=list(UNSEEN_FIX),
                   summary=f"The process on {hosts[0]} went away; the others only saw its connection close")


def jit_lock(view: View) -> Finding | None:
    """Everybody announced a JIT build and nobody ever loaded it; no error. The usual stale lock."""
    if view.of("file-baton"):
        return None  # the signature says it outright
    starts, loaded = view.of("extension-root", "fused-kernels-wait"), view.of("extension-loaded", "fused-kernels-done")
    if not starts or view.progress:
        return None
    last = starts[-1]
    if any(i.place.log != last.place.log or i.line > last.line for i in loaded):
        return None
    log = view.logs[last.place.log]
    after = [s for s in log.tail if s.line > last.line]
    if view.raised and any(r.short not in ("KeyboardInterrupt",) for r in view.raised):
        return None
    if len(after) > 12:
        return None
    return Finding(cause="jit_build_lock", severity="error", confidence=0.68,
                   summary="The log ends while a JIT-compiled extension is awaited: a build lock left behind blocks "
                           "all ranks", evidence=pick_evidence(starts[-3:]), where=Where())


def silence(view: View) -> Finding | None:
    """Progress lines stop; the log goes on (a scheduler's pulse, a monitor), or somebody had to stop the run."""
    done = finished_at(view)
    if done is not None or planned_exit(view) is not None:
        return _silent_exit(view, done) if done is not None else None
    last = view.last_progress()
    if last is None:
        return _silent_start(view)
    index, point = last
    if any(p.line > point.line and p.kind.startswith("bar") for p in view.logs[index].progress):
        return None  # a bar went on: an evaluation, or a training bar without a name
    log = view.logs[index]
    start = point.speaker.time
    if start is None:
        start = _time_near(view, index, point)
    later = [(s.line, s.speaker.time) for s in log.tail if s.line > point.line and s.speaker.time is not None]
    later += [(line, time) for line, time in log.clock if line > point.line]
    for other, item in enumerate(view.logs):
        if other != index and start is not None:
            later += [(0, time) for _, time in item.clock if time > start]
    end = max((time for _, time in later if time is not None), default=None)
    stopped = view.of("keyboard-interrupt", "slurm-time-limit", "slurm-cancelled", "import-site", "stuck-said")
    stopped = [i for i in stopped if i.place.before(Place(index, point.line, start)) is not True]
    gap = end - start if end is not None and start is not None else None
    if gap is None and len(later) >= 2:
        times = [t for _, t in later if t is not None]
        gap = max(times) - min(times)
    usual = _interval(view, index)
    long = gap is not None and gap > max(SILENCE_SECONDS, SILENCE_INTERVALS * (usual or 0.0))
    if not long and not (stopped and any(i.rule.id in ("import-site", "stuck-said") for i in stopped)) and \
            not (stopped and gap is None and any(i.rule.id == "keyboard-interrupt" for i in stopped)):
        return None
    for_ = f" for {_duration(gap)}" if gap is not None and long else ""
    usually = f" (usually every {_duration(usual)})" if usual else ""
    proof = [evidence(log, point.line, point.offset, point.text, point.speaker.time, point.speaker.rank)]
    tail = [s for s in log.tail if s.line > point.line]
    proof += [evidence(log, s.line, s.offset, s.text, s.speaker.time, s.speaker.rank) for s in tail[:3]]
    proof += pick_evidence(stopped[:2])
    sure = 0.8 if long else 0.55
    return Finding(cause="hang_silent", severity="error", confidence=sure, evidence=proof[:6],
                   where=Where(step=point.step if point.step >= 0 else None),
                   summary=f"Progress stopped after step {point.step}{for_}{usually}; no error, no timeout",
                   numbers={"silent_seconds": round(gap)} if gap is not None else {})


def _silent_exit(view: View, done: Item) -> Finding | None:
    """The work is done and the process does not go away: stopped by hand, or by the time limit."""
    stopped = [i for i in view.of("keyboard-interrupt", "slurm-time-limit", "import-site")
               if done.place.before(i.place) is True]
    if not stopped:
        return None
    return Finding(cause="hang_silent", severity="error", confidence=0.7, where=Where(),
                   summary="The work was done but the processes did not end", evidence=pick_evidence(stopped[:2]))


def _silent_start(view: View) -> Finding | None:
    """No progress at all, no error, and somebody dumped stacks or pressed Ctrl-C after a while."""
    stopped = view.of("import-site", "keyboard-interrupt", "stuck-said")
    if not stopped or all(i.rule.id == "stuck-said" for i in stopped) and len(stopped) < 2:
        return None
    times = [time for log in view.logs for _, time in log.clock]
    gap = max(times) - min(times) if len(times) >= 2 else None
    if gap is not None and gap < 120 and not view.of("import-site", "stuck-said"):
        return None
    return Finding(cause="hang_silent", severity="error", confidence=0.5, where=Where(),
                   summary="The run never got going and was stopped from outside; no error, no timeout",
                   evidence=pick_evidence(stopped[:3]))


def _time_near(view: View, index: int, point: Progress) -> float | None:
    """When a line without a stamp was printed: shortly after the stamp above it, else shortly before the one below."""
    clock = view.logs[index].clock
    before = [entry for entry in clock if entry[0] <= point.line]
    after = [time for number, time in clock if number > point.line]
    if before and point.elapsed is not None:
        return before[-1][1] + point.elapsed
    if before and (point.line - before[-1][0] <= NEAR_LINES or not after):
        return before[-1][1]
    return after[0] if after else None


def _interval(view: View, index: int) -> float | None:
    """Seconds between progress lines: by their stamps, or as the lines themselves state."""
    items = [p for number, p in view.progress if number == index]
    times = [p.speaker.time for p in items if p.speaker.time is not None]
    steps = [b - a for a, b in zip(times, times[1:], strict=False) if b > a]
    bars = [(p.step, p.elapsed) for p in items if p.elapsed is not None and p.step > 0]
    steps += [seconds / step for step, seconds in bars[-1:]] if not steps else []
    if steps:
        return median(steps)
    for key, factor in (("elapsed_time_per_iteration_(s)", 1.0), ("elapsed_time_per_iteration_(ms)", 0.001),
                        ("step_time", 1.0), ("iter_time", 1.0), ("iter_time_(s)", 1.0)):
        values = [p.values[key] * factor for p in items if key in p.values]
        if values:
            return median(values)
    return None


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


#: Causes that may be mere noise of the exit, once the work is done and saved.
AT_EXIT = {"segfault", "killed_unconfirmed", "hang_undetermined", "hang_all_waiting", "collective_mismatch",
           "collective_missing_rank", "store_lost", "hang_silent", "exception_unknown", "peer_exception",
           "unexplained_end", "scheduler_time_limit", "dataloader_worker_killed", "cuda_kernel_fault",
           "uneven_batches", "slow_rank_work",
           "preempted", "rendezvous_timeout", "gpu_hw_fault"}


def finished_at(view: View) -> Item | None:
    """The last statement that training was done, or the save after the last step of all; if no training follows it."""
    done = view.of("done-training") or _saved_at_the_end(view) or _processes_ended_well(view)
    if not done:
        return None
    last = done[-1]
    return None if view.progress_after(last.place) > 1 or _begun_anew(view, last.place) else last


def _begun_anew(view: View, done: Place) -> bool:
    """Whether another run of the same program follows in the same file: it repeats a line of the start word by word."""
    starts = [i for i in view.of("world-size", "fused-kernels-wait") if i.place.log == done.log]
    before = {i.event.text for i in starts if i.line < done.line}
    return any(i.line > done.line and i.event.text in before for i in starts)


def ended_well(view: View, done: Place) -> bool:
    """Whether the launcher says that processes ended well after the work was done, and of none that it did not."""
    later = [e for e in exits(view) if done.before(e.place) is not False]
    return any(done.before(i.place) is True for i in view.of("deepspeed-success")) and \
        not any(e.code != 0 for e in later)


def _processes_ended_well(view: View) -> list[Item]:
    """A launcher's last words are that its processes ended well."""
    return [i for i in view.of("deepspeed-success") if i.log.tail and i.log.tail[-1].line <= i.line + LAST_WORDS
            and not any(j.log is i.log and j.line > i.line and j.rule.role in ("initiating", "victim")
                        for j in view.items)]


def _saved_at_the_end(view: View) -> list[Item]:
    """The saves that finished after a progress line which says that nothing is left to do."""
    last = view.last_progress()
    if last is None or last[1].total is None or last[1].step < last[1].total or last[1].kind.startswith("epoch"):
        return []
    return [i for i in view.of("save-done") if i.place.log == last[0] and i.line > last[1].line][:1]


def saved_after(view: View, place: Place) -> bool:
    """Whether a save that began is also known to have ended, or none began, after the work was done."""
    starts = [i for i in view.of("save-start") if place.before(i.place) is True]
    ends = [i for i in view.of("save-done") if place.before(i.place) is True]
    return len(ends) >= 1 or not starts


def planned_exit(view: View) -> Finding | None:
    """The program ended itself on purpose: a time budget, a kill switch, an exit interval."""
    items = view.of("planned-exit")
    if not items or view.progress_after(items[-1].place) > 1:
        return None
    return Finding(cause="healthy", role="context", severity="info", confidence=0.9, where=Where(),
                   summary="The program ended itself as planned", evidence=pick_evidence(items[-1:]))


def last_good_save(view: View) -> Evidence | None:
    """The last checkpoint that is known to be complete."""
    done = view.of("save-done")
    return done[-1].evidence() if done else None
