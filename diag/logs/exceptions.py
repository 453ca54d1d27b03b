"""Python exceptions: which are the fault, which only report somebody else's, and what an unknown one means.

Tie rules (public meaning of the causes): others wait or complain because of it -> `peer_exception`; a known pattern
of a mistake in a program -> `code_error`; else `exception_unknown`. When both hold, `exception_unknown` is said,
because the log does not tell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diag.artefacts.log_facts import Traceback
from diag.artefacts.log_rare import shape
from diag.artefacts.traceback import short_type, user_frame
from diag.logs.culprit import WAITING, culprit_by_elimination
from diag.logs.known import GENERIC, is_everybody, subject_of
from diag.logs.view import Item, Place, Raised, View
from diag.schema import Evidence, Finding, Where

#: Exceptions that only tell what happened to another process.
REPORTERS = {"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException",
             "SignalException", "KeyboardInterrupt", "SystemExit", "GeneratorExit", "DistBackendError",
             "DistNetworkError", "DistStoreError", "BrokenPipeError", "ConnectionResetError", "ConnectionAbortedError",
             "ConnectionRefusedError", "RayActorError", "ActorDiedError", "WorkerCrashedError", "RayTaskError",
             "CheckpointException", "RendezvousConnectionError", "RendezvousTimeoutError", "RendezvousClosedError",
             "CancelledError"}
#: Errors of a file or its format; others raised while a checkpoint is read (AttributeError, say) are faults of code.
READ_ERRORS = {"OSError", "EOFError", "RuntimeError", "UnpicklingError", "BadZipFile", "ValueError", "error",
               "SafetensorError", "UnicodeDecodeError", "PickleError", "zlib.error", "BadGzipFile"}
_READERS = re.compile(r"torch/serialization\.py:(?:load|_load|_legacy_load|__init__|_open_zipfile_reader)$"
                      r"|safetensors/\S+:load|distributed/checkpoint/filesystem\.py:read")
#: Where torch looks up what the model asks for among what the checkpoint holds; it says no more than the name.
_PLANNERS = re.compile(r"torch/distributed/(?:_shard/)?checkpoint/\w*planner\w*\.py$")
#: Where torch.compile and Triton keep what they compiled; files that several processes write and read.
_CACHES = re.compile(r"torch/_inductor/\S+:\w*cache\w*$|triton/runtime/cache\.py:(?:put|get\w*)$")
CACHE_ERRORS = READ_ERRORS | {"FileNotFoundError", "FileExistsError", "PermissionError", "BlockingIOError",
                              "JSONDecodeError"}
_WRITERS = re.compile(r"torch/serialization\.py:(?:save|_save|_legacy_save|_open_zipfile_writer)$")
#: Messages of exceptions that only carry another one, whose own traceback follows.
_CARRIES = re.compile(r"^\s*$|^Caught \w+ in (?:DataLoader worker|replica|pin memory thread)|"
                      r"^-- (?:Tracebacks above this line|Process \d+ terminated)|"
                      r"^(?:A|One of the) \w*(?:process|worker)\w* (?:raised|failed)")
#: The carried traceback begins at most this many lines below; its frames take up to four lines each.
CARRIED_LINES = 8
#: Lines that parsers read and that are the whole message of an exception: others turn them into findings.
TELLING_FACTS = {"store-barrier", "clients-joined", "watchdog-timeout", "watchdog-status", "watchdog-at-work",
                 "desync-report", "checkpoint-exception", "monitored-barrier-peer", "horovod-stalled"}
#: Waits whose sentence stands below the exception that carries it.
WAITS_BELOW = {"hccl-wait", "hccl-peer-absent"}
#: An exception printed alone may be explained by the lines that follow it.
MESSAGE_LINES = 5
#: Lines after the end of a traceback that still belong to its message.
REACH = 3
#: Said of a process or job that ended: below a traceback such a line tells how it left, not what the exception was.
ENDS = frozenset({"segfault", "killed_unconfirmed", "preempted", "scheduler_time_limit", "node_failure"})


#: What cannot be imported is a matter of the environment, not of the program.
_IMPORTS = {"ModuleNotFoundError", "ImportError"}
IMPORT_FIX = (
    "Import it by hand with the job's own interpreter, on the host and in the container where it failed; the paths in "
    "the traceback say which interpreter that is.",
    "No such module: install it there, on every host (or activate the environment in the job script, not in the login "
    "shell).",
    "Undefined symbol or a missing lib*.so: it was built against another torch or CUDA; rebuild it against the one "
    "that is installed (python -c 'import torch; print(torch.__version__, torch.version.cuda)').",
)


@dataclass
class Group:
    """The same exception, wherever it was raised."""

    raised: list[Raised] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)


def claims(view: View) -> tuple[dict[int, list[Item]], list[Raised], list[Raised]]:
    """Which known lines stand in which traceback; the tracebacks nobody claims; those that only report others."""
    claimed: dict[int, list[Item]] = {}
    free: list[Raised] = []
    reporters: list[Raised] = []
    for number, raised in enumerate(view.raised):
        spans = _spans(raised)
        inside = [item for item in view.items if item.place.log == raised.place.log and not item.event.quoted
                  and item.event.speaker.mark == raised.traceback.speaker.mark
                  and any(low <= item.line <= high for low, high in spans)]
        known = [i for i in inside if i.rule.role == "initiating" and i.rule.id not in GENERIC
                 and not _leaves(i, raised)]
        victims = [i for i in inside if (i.rule.role == "victim" and i.rule.id != "launcher-wrappers"
                                         and not _leaves(i, raised)) or i.rule.id in TELLING_FACTS]
        if raised in view.ignored or carries(view, raised):
            reporters.append(raised)
        elif known:
            claimed[number] = known
        elif victims or _reports(raised):
            reporters.append(raised)
        else:
            free.append(raised)
    return claimed, free, reporters


def _leaves(item: Item, raised: Raised) -> bool:
    """Whether a line below the exception only says how its process left; it may be taken for a part of the message."""
    return item.rule.cause in ENDS and item.line > raised.traceback.line


def _reports(raised: Raised) -> bool:
    """Whether the exception only tells what happened elsewhere; what Ray carries home stands below its own."""
    name = short_type(raised.traceback.origin.type) if raised.short == "RayTaskError" else raised.short
    return name in REPORTERS


def carries(view: View, raised: Raised) -> bool:
    """Whether an exception only carries another one out of a worker: the traceback below it is the fault's own."""
    end = raised.traceback.end_line
    return bool(_CARRIES.match(raised.traceback.message)) and any(
        0 < other.traceback.line - end <= CARRIED_LINES + 4 * len(other.traceback.origin.frames)
        and other.place.log == raised.place.log
        and other.traceback.speaker.mark == raised.traceback.speaker.mark for other in view.raised)


def _spans(raised: Raised) -> list[tuple[int, int]]:
    spans, tb = [], raised.traceback
    while tb is not None:
        spans.append((tb.line, tb.end_line + REACH if tb.cause is None else tb.end_line))
        tb = tb.cause  # type: ignore[assignment]
    return spans


def exception_findings(view: View) -> list[Finding]:
    """One finding per distinct exception that no known cause claims, the earliest first."""
    _, free, _ = claims(view)
    groups: dict[tuple[str, str], Group] = {}
    for raised in free:
        origin = raised.traceback.origin
        key = (origin.type, shape(origin.message.split("\n")[0])[:160])
        groups.setdefault(key, Group()).raised.append(raised)
    for item in _bare(view):
        key = (item.groups["type"], shape(item.groups.get("message", ""))[:160])
        groups.setdefault(key, Group()).items.append(item)
    found = [_finding(view, group) for group in groups.values()]
    return [finding for finding in found if finding is not None]


def _bare(view: View) -> list[Item]:
    """Exception lines outside any traceback that no other rule matches: printed alone by a handler."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for raised in view.raised:
        spans.setdefault(raised.place.log, []).extend(_spans(raised))
    taken = {(i.place.log, i.line) for i in view.items
             if (i.rule.role in ("initiating", "victim", "noise", "context") and i.rule.id not in GENERIC)
             or i.rule.id in TELLING_FACTS}
    for item in view.items:
        if (item.rule.role == "initiating" and item.rule.id not in GENERIC or item.rule.id in WAITS_BELOW) and \
                not item.event.quoted:
            taken.update((item.place.log, item.line - back) for back in range(1, MESSAGE_LINES))
    result = []
    for item in view.of("python-exception"):
        inside = any(low - 1 <= item.line <= high for low, high in spans.get(item.place.log, ()))
        name = item.groups["type"].rsplit(".", 1)[-1]
        if inside or (item.place.log, item.line) in taken or name in REPORTERS or name.endswith("Warning"):
            continue
        result.append(item)
    return result


def _finding(view: View, group: Group) -> Finding | None:
    places = [r.place for r in group.raised] + [i.place for i in group.items]
    ranks = {r.rank for r in group.raised if r.rank is not None} | {i.rank for i in group.items if i.rank is not None}
    everybody = is_everybody(view, ranks) or (not ranks and len(places) >= max(3, (view.world or 4) // 2))
    if not ranks and not everybody:
        ranks = culprit_by_elimination(view, places[0])
    named = [] if everybody else sorted(ranks)
    lead = group.raised[0] if group.raised else None
    origin = lead.traceback.origin if lead else None
    kind = origin.type if origin else group.items[0].groups["type"]
    message = (origin.message if origin else group.items[0].groups.get("message", "")).split("\n")[0][:300]
    frame = user_frame(origin) if origin else None
    if origin and origin.frames and kind.rsplit(".", 1)[-1] in READ_ERRORS and _reads_checkpoint(origin):
        return _unreadable(view, group, origin, named)
    if origin and kind.rsplit(".", 1)[-1] in CACHE_ERRORS and _reads_cache(origin):
        return _cache_broken(group, origin, named)
    if origin and kind == "KeyError" and origin.frames and _PLANNERS.search(origin.frames[-1].file):
        return _lacks_key(group, origin, named)
    waiting = others_wait(view, places[0], ranks)
    buggy = any(i.rule.id in GENERIC and i.rule.cause == "code_error" and _inside(i, group) for i in view.items)
    if waiting and not everybody and not buggy:
        cause, sure = "peer_exception", 0.85
    elif buggy and not waiting:
        cause, sure = "code_error", 0.8
    else:
        cause, sure = "exception_unknown", 0.78
    if lead is None:
        sure -= 0.25
    hosts = sorted({h for h in [*(r.host for r in group.raised), *(view.identity.host_of.get(n) for n in named)] if h})
    subject = subject_of(named, hosts)
    at = f" at {frame.file}:{frame.line}" if frame else ""
    what = f"{kind}: {message}" if message else kind
    summary = f"{subject or 'A rank' if not everybody else 'Every rank'} raised {what}{at}"
    proof: list[Evidence] = [r.evidence() for r in group.raised[:4]] + [i.evidence() for i in group.items[:2]]
    numbers: dict[str, object] = {"exception": kind, "message": message, "times": len(places)}
    if lead and origin and lead.traceback.cause is not None:
        numbers["led_to"] = lead.traceback.type
        proof.insert(0, Evidence(path=lead.log.path, line=origin.line, offset=origin.offset, text=origin.text[:600],
                                 rank=lead.rank))
    return Finding(cause=cause, summary=summary, severity="fatal", confidence=sure,
                   where=Where(ranks=named, hosts=hosts, file=frame.file if frame else None,
                               line=frame.line if frame else None, time=proof[0].time),
                   evidence=proof[:5], numbers=numbers,
                   fix=list(IMPORT_FIX) if kind.rsplit(".", 1)[-1] in _IMPORTS else [])


def _reads_checkpoint(origin: Traceback) -> bool:
    """Whether the exception was raised inside the code that reads checkpoints."""
    names = [f"{f.file}:{f.function}" for f in origin.frames[-4:]]
    return any(map(_READERS.search, names)) and not any(map(_WRITERS.search, names))


def _reads_cache(origin: Traceback) -> bool:
    """Whether the exception was raised inside the code that reads or writes a compile cache."""
    return any(_CACHES.search(f"{f.file}:{f.function}") for f in origin.frames[-4:])


def _cache_broken(group: Group, origin: Traceback, ranks: list[int]) -> Finding:
    """An exception of a file, raised while what was compiled was stored or looked up."""
    return Finding(cause="compile_cache_race", severity="error", confidence=0.7, where=Where(ranks=ranks),
                   summary=f"A compile cache could not be used: {origin.type}: {origin.message[:160]}",
                   evidence=[r.evidence() for r in group.raised[:4]])


def _unreadable(view: View, group: Group, origin: Traceback, ranks: list[int]) -> Finding:
    """An exception of the file or its format, raised while a checkpoint was read."""
    caller = user_frame(origin)
    shown = f"{caller.file}:{caller.line}" if caller else "?"
    hosts = sorted({view.identity.host_of[r] for r in ranks if r in view.identity.host_of})
    return Finding(cause="ckpt_corrupt", severity="fatal", confidence=0.7,
                   where=Where(ranks=ranks, hosts=hosts, file=caller.file if caller else None,
                               line=caller.line if caller else None),
                   summary=f"A checkpoint could not be read at {shown}: {origin.type}: {origin.message[:160]}",
                   evidence=[r.evidence() for r in group.raised[:4]])


def _lacks_key(group: Group, origin: Traceback, ranks: list[int]) -> Finding:
    """A name that the model has and the checkpoint does not."""
    return Finding(cause="ckpt_missing_keys", severity="fatal", confidence=0.85, where=Where(ranks=ranks),
                   summary=f"The checkpoint has no tensor named {origin.message[:160]}, which the model asks for",
                   evidence=[r.evidence() for r in group.raised[:4]])


def _inside(item: Item, group: Group) -> bool:
    return any(item.place.log == r.place.log and any(low <= item.line <= high for low, high in _spans(r))
               for r in group.raised) or any(item.place.log == i.place.log and item.line == i.line
                                             for i in group.items)


def others_wait(view: View, place: Place, ranks: set[int]) -> bool:
    """Whether some other rank waits or complains, not before `place`."""
    for item in view.of(*WAITING):
        if item.rank is not None and item.rank in ranks:
            continue
        if item.place.before(place) is not True:
            return True
    return False
