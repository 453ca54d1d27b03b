"""Who still answers: heartbeats over the job's store, beside the data and never waiting for it.

Every rank writes a beat (a count, how far it is, where) several times a second from a thread of its own; the two lowest
ranks, and any rank whose own operation is overdue, read them all. A process of the own host that is gone is named at
once, one whose beat stands still after half of the timeout. The first verdict in the store counts for everybody.
The store belongs to the launcher (torchrun keeps it in its agent), so it outlives any rank.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from diag.probes.comm.records import Lost

#: Seconds between two beats.
TICK = 0.25
#: Ranks that read all beats; the second is for the death of the first.
OBSERVERS = 2
#: A launcher may start the ranks of a large job over this many seconds.
ARRIVAL = 60.0


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why the probe ends early: `kind` is "lost", "stuck", "failed" or "interrupted"; `position` who was where.

    `absent` are ranks that nobody has heard of yet, too early to call them lost: none of them can print the report.
    """

    kind: str
    lost: list[Lost] = []
    absent: list[int] = []
    text: str = ""
    position: list[str] = []
    by: int = 0


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's process can be looked at from the same machine. `space` is boot and process name space."""

    host: str
    pid: int
    started: str
    space: str
    node: str
    local_rank: int = 0
    device: str = ""

    def alive_as(self, me: Identity) -> bool:
        """Whether this very process exists and can be seen from `me`."""
        return self.space == me.space and _stat(self.pid)[1] == self.started != ""


def identity(host: str | None = None, device: str = "") -> Identity:
    """Of this process."""
    name = host or socket.gethostname()
    boot = _text("/proc/sys/kernel/random/boot_id")
    try:
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "net", "uts")]
    except OSError:
        spaces = ["", "", ""]
    return Identity(host=name, pid=os.getpid(), started=_stat(os.getpid())[1], space=boot + spaces[0],
                    node=f"{name}/{boot}/{spaces[1]}/{spaces[2]}", device=device,
                    local_rank=int(os.environ.get("LOCAL_RANK", "0") or 0))


def _text(path: str) -> str:
    try:
        return Path(path).read_text("ascii").strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """(state letter, start time) of a process; empty when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def process_state(pid: int) -> str:
    """The state letter of a process as /proc gives it (R, S, D, T, Z, ...); empty when there is none."""
    return _stat(pid)[0]


class _Seen:
    """The last beat of one rank and since when it has not changed."""

    def __init__(self, now: float) -> None:
        self.raw = b""
        self.since = self.moved = now
        self.steps = -1
        self.label = ""
        self.failure = ""
        self.done = False

    def take(self, raw: bytes, now: float) -> None:
        if raw == self.raw:
            return
        self.raw, self.since = raw, now
        _, steps, self.label, self.failure, self.done = json.loads(raw)
        if steps != self.steps:
            self.steps, self.moved = steps, now


class Control(threading.Thread):
    """The control thread of one rank. `connect` makes its own client of the store (a torch TCPStore or alike).

    The measuring thread calls `enter`; the main thread reads `verdict` and `store_silent()`.
    """

    def __init__(self, connect: Callable[[], Any], rank: int, world: int, timeout: float, me: Identity) -> None:
        super().__init__(name="pdtrain-control", daemon=True)
        self.connect, self.rank, self.world, self.timeout, self.me = connect, rank, world, timeout, me
        self.verdict: Verdict | None = None
        self.said = False
        self.store_error = ""
        self.identities: dict[int, Identity] = {}
        self.label, self.steps, self.failure, self.done, self.asked_to_stop = "start", 0, "", False, False
        self._beats = 0
        self._store: Any = None
        self._seen: dict[int, _Seen] = {}
        self._lock = threading.Lock()
        self.begun = self.contact = self.stepped = time.monotonic()

    # The measuring thread -----------------------------------------------------------------------------------------

    def enter(self, label: str) -> None:
        """Say what is done now; every call counts as progress."""
        self.label, self.steps, self.stepped = label, self.steps + 1, time.monotonic()

    def publish(self, kind: str, record: Any) -> None:
        """Leave a record in the store at once, so that it outlives this rank."""
        if self._store is not None:
            line = msgspec.json.encode([kind, record]) + b"\n"
            with self._lock:
                self._store.append(f"records/{self.rank}", line.decode())

    # The main thread ----------------------------------------------------------------------------------------------

    def store_silent(self) -> bool:
        """Whether the store has not answered for the whole timeout, or broke."""
        return bool(self.store_error) or time.monotonic() - self.contact > self.timeout

    def records(self) -> list[tuple[str, Any]]:
        """What all ranks have left, rank by rank; what the store gives in bounded time."""
        found: list[tuple[str, Any]] = []

        def collect() -> None:
            for rank in range(self.world):
                key = f"records/{rank}"
                if self._store.check([key]):
                    found.extend(tuple(msgspec.json.decode(line)) for line in self._store.get(key).splitlines() if line)

        self._bounded(collect)
        return list(found)

    def decide(self, verdict: Verdict) -> None:
        """Propose `verdict`; the first one of the job counts."""
        verdict.by = self.rank
        kept: list[bytes] = []
        text = msgspec.json.encode(verdict).decode()
        self._bounded(lambda: kept.append(self._store.compare_set("verdict", "", text)))
        self.verdict = msgspec.json.decode(kept[0], type=Verdict) if kept and kept[0] else verdict

    def interrupted(self, by: str) -> Verdict:
        """The verdict that the signal `by` ended the probe, with who was where."""
        missing = absent(self._seen, self.rank)
        late = f" before {ranks_words(missing)} had arrived" if missing else ""
        return Verdict(kind="interrupted", text=by + late, absent=missing, position=where(self._seen))

    def good_bye(self) -> None:
        """All is measured: wait until the store knows that this rank may go, or does not answer."""
        self.done = True
        before, end = self._beats, time.monotonic() + self.timeout / 2
        while self._beats < before + 2 and not self.store_error and time.monotonic() < end:
            time.sleep(TICK / 5)

    def say(self) -> None:
        """The report is out: whoever waits for it may go."""
        self._bounded(lambda: self._store.set("said", "1"))

    def _bounded(self, ask: Callable[[], object]) -> None:
        """Ask the store, and leave it when it does not answer: its client has one lock and no limit of its own."""

        def quietly() -> None:
            with suppress(Exception):  # whatever its client raises means that the store is gone
                ask()

        thread = threading.Thread(target=quietly, daemon=True)
        thread.start()
        thread.join(max(2.0, self.timeout / 4))

    # The thread itself --------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._store = self.connect()
            self._store.set(f"who/{self.rank}", msgspec.json.encode(self.me).decode())
            seen = self._seen = {rank: _Seen(time.monotonic()) for rank in range(self.world)}
            last = time.monotonic()
            while True:
                self._beat()
                now = time.monotonic()
                if now - last > max(1.0, self.timeout / 8):  # this process did not run itself: nobody else is to blame
                    for item in seen.values():
                        item.since, item.moved = item.since + now - last, item.moved + now - last
                last = now
                if self.verdict is None and not self.done and self._observes():
                    self._observe(seen, now)
                time.sleep(TICK)
        except Exception as error:  # whatever the store's client raises means that the store is gone
            self.store_error = str(error).splitlines()[0] if str(error) else type(error).__name__

    def _beat(self) -> None:
        self._beats += 1
        beat = [self._beats, self.steps, self.label, self.failure, self.done]
        with self._lock:
            self._store.set(f"beat/{self.rank}", json.dumps(beat))
        if self.verdict is None and self._store.check(["verdict"]):
            self.verdict = msgspec.json.decode(self._store.get("verdict"), type=Verdict)
        self.said = self.said or self._store.check(["said"])
        self.contact = time.monotonic()

    def _observes(self) -> bool:
        overdue = time.monotonic() - self.stepped > self.timeout
        return self.rank < OBSERVERS or self.asked_to_stop or bool(self.failure) or overdue

    def _observe(self, seen: dict[int, _Seen], now: float) -> None:
        missing = [rank for rank in seen if not seen[rank].raw]
        arrived = missing and [rank for rank in missing if self._store.check([f"beat/{rank}"])]
        for rank in arrived or []:
            self.identities[rank] = msgspec.json.decode(self._store.get(f"who/{rank}"), type=Identity)
        present = [rank for rank in seen if seen[rank].raw or rank in (arrived or [])]
        verdict = None
        for _ in range(2):  # twice: who said good-bye after the first look and went has not died
            for rank, raw in zip(present, self._store.multi_get([f"beat/{rank}" for rank in present]), strict=True):
                seen[rank].take(bytes(raw), now)
            verdict = judge(seen, self.identities, self.rank, self.me, now=now, begun=self.begun, timeout=self.timeout)
            if verdict is None:
                return
        if verdict is not None and not self.done:
            self.decide(verdict)


def judge(seen: dict[int, _Seen], who: dict[int, Identity], rank: int, me: Identity, *, now: float, begun: float,
          timeout: float, state: Callable[[int], tuple[str, str]] = _stat) -> Verdict | None:
    """The verdict on what has been seen, or None: all is well, or it is too early to say."""
    lost = []
    for other, item in seen.items():
        if other == rank or item.done:
            continue
        if not item.raw:
            if now - begun > max(timeout, ARRIVAL):
                lost.append(Lost(rank=other, how="absent", at="start", seconds=round(now - begun, 1)))
            continue
        identity_, quiet = who.get(other), now - item.since
        here = identity_ is not None and identity_.space == me.space
        letter, started = state(identity_.pid) if here and identity_ is not None else ("", "")
        how = ""
        if here and identity_ is not None and (started != identity_.started or letter in ("Z", "X", "")):
            how = "gone"
        elif quiet > timeout / 2:
            how = "stopped" if letter in ("T", "t") else "silent"
        if how:
            host = identity_.host if identity_ is not None else ""
            lost.append(Lost(rank=other, how=how, host=host, at=item.label, seconds=round(quiet, 1)))
    if lost:
        return Verdict(kind="lost", lost=_own_host(lost, seen, who, me), position=where(seen))
    failed = {other: item for other, item in seen.items() if item.failure}
    waited = max((now - item.moved for item in failed.values()), default=0.0)
    if failed and (waited > timeout / 2 or len(failed) == len(seen)):
        first = min(failed)
        text = f"{ranks_words(sorted(failed))}: {failed[first].failure}"
        return Verdict(kind="failed", text=text, absent=absent(seen, rank), position=where(seen))
    working = [item for item in seen.values() if item.raw and not item.done]
    if working and len(working) == len(seen) and all(now - item.moved > timeout for item in working):
        return Verdict(kind="stuck", position=where(seen))
    return None


def _own_host(lost: list[Lost], seen: dict[int, _Seen], who: dict[int, Identity], me: Identity) -> list[Lost]:
    """When nobody of at least two other hosts is heard any more, it is the own host that is cut off."""
    nodes = {other: item.node for other, item in who.items()}
    foreign = {node for other, node in nodes.items() if node != me.node}
    silent = {item.rank for item in lost if item.how == "silent"}
    if len(foreign) < 2 or any(other not in silent for other, node in nodes.items() if node != me.node):
        return lost
    seconds = max(item.seconds for item in lost)
    return [Lost(rank=other, how="silent", host=me.host, at=seen[other].label, seconds=seconds)
            for other, node in nodes.items() if node == me.node]


def where(seen: dict[int, _Seen]) -> list[str]:
    """`position` of the ranks that have been heard of."""
    return position({other: item.label for other, item in seen.items() if item.raw})


def absent(seen: dict[int, _Seen], rank: int) -> list[int]:
    """The ranks other than `rank` itself that nobody has heard of yet."""
    return [other for other, item in seen.items() if not item.raw and other != rank]


def position(labels: dict[int, str]) -> list[str]:
    """Who is where, in words: ["ranks 0-2: all_reduce 64 MiB", "rank 3: start"]."""
    groups: dict[str, list[int]] = {}
    for rank, label in labels.items():
        groups.setdefault(label, []).append(rank)
    return [f"{ranks_words(ranks)}: {label}" for label, ranks in groups.items()]


def ranks_words(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-2"."""
    from diag.report.model import rank_list

    return f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}"


def speaker(world: int, verdict: Verdict) -> int:
    """Who prints: the lowest rank that still answers."""
    gone = {item.rank for item in verdict.lost} | set(verdict.absent)
    return next((rank for rank in range(world) if rank not in gone), 0)
