"""Pairs of ranks exchange messages over torch.distributed, many pairs at once, and no wait is without a bound.

Rank 0 conducts: it leaves each round (pairs, bytes) in the job's store; every rank takes its part in it and leaves what
it measured. A rank that leaves nothing in time is named and left out of the following rounds. Each pair has a process
group of its own, made when it is first needed: in Gloo an operation that timed out closes every connection of its
context (gloo/transport/tcp/unbound_buffer.cc, `signalException`), so that a shared group would end with its first dead
member. A group that failed is thrown away; the pair gets a new one under a new name.

The receiver measures, from the moment it is ready: Gloo sends nothing before the other side has posted its receive, so
that a process which gets no processor for a while measures too little, never too much. Hence the best of some messages
counts. What the sender sees is the filling of its socket buffers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from diag.errors import UsageError
from diag.probes.localise import Measured, Outcome, Place, localise
from diag.probes.localise_search import Mode

#: Timed messages per direction and round; the best is the rate.
BURSTS = 3
#: Up to this many ranks every pair keeps its connection; beyond, each round opens its own (sockets, threads).
KEEP = 64
#: Seconds beyond the timeout that a loaded machine may take to answer.
GRACE = 2.0
#: A rank that is not told of a next round for this many timeouts has lost its conductor.
PATIENCE = 6.0


class Round(msgspec.Struct):
    """One round: (a, b, generation of their group) of each pair, message size, whether groups are kept for later.

    `last`: it is over.
    """

    pairs: list[tuple[int, int, int]]
    bytes: int
    last: bool = False
    keep: bool = True


class Answer(msgspec.Struct):
    """What one rank measured: the best rate into it in bytes/s, or what went wrong; both when it went wrong later.

    `messages`: the rates of all messages.
    """

    rate: float | None = None
    problem: str = ""
    messages: tuple[float, ...] = ()


def locate_links(store: Any, rank: int, places: Sequence[Place], *, backend: str = "gloo", mode: Mode = "quick",
                 passes: int = 1, timeout: float = 10.0, baseline: dict[tuple[str, str], float] | None = None,
                 progress: Callable[[str], None] | None = None) -> Outcome | None:
    """Find the slow host or link of a job; called on all its ranks, the `Outcome` is on rank 0, None on the others.

    Args:
        store: a torch store that all ranks share and nobody else writes to (wrap it in a PrefixStore).
        places: one per rank in rank order, the same on every rank.
        timeout: seconds for one pair in one round, connection included.

    Raises:
        UsageError: this rank lost the conductor or the store.
    """
    pairs = PairGroups(store, rank, backend, timeout)
    try:
        if rank == 0:
            conductor = Conductor(store, pairs, len(places), timeout)
            try:
                return localise(conductor.measure, places, mode=mode, passes=passes, baseline=baseline,
                                progress=progress)
            finally:
                conductor.end()
        serve(store, pairs, timeout, progress)
        return None
    finally:
        pairs.close()


class Conductor:
    """Rank 0: hands out rounds and collects answers."""

    def __init__(self, store: Any, pairs: PairGroups, world: int, timeout: float, first: int = 0) -> None:
        self._store, self._pairs, self._world, self._timeout = store, pairs, world, timeout
        self._generation: dict[tuple[int, int], int] = {}
        self._lost: dict[int, str] = {}
        self.round = first

    def restart(self) -> None:
        """Before another localisation among the same ranks: those that were silent may have come back."""
        self._lost = {}

    def measure(self, pairs: list[tuple[int, int]], message_bytes: int) -> Measured:
        """Both directions of disjoint `pairs` at once. Takes at most the timeout and a little more."""
        measured = Measured()
        alive = sorted((min(pair), max(pair)) for pair in pairs if not set(pair) & set(self._lost))
        whole = [(a, b, self._generation.get((a, b), 0)) for a, b in alive]
        task = Round(whole, message_bytes, keep=self._world <= KEEP)
        self._store.set(f"round/{self.round}", msgspec.json.encode(task).decode())
        answers: dict[int, Answer] = {}
        mine = take_part(task, 0, self._pairs, self._timeout)
        if mine is not None:
            answers[0] = mine
        ranks = [rank for a, b, _ in whole for rank in (a, b) if rank != 0]
        answers |= self._collect(ranks)
        self.round += 1
        for a, b, generation in whole:
            for source, target in ((a, b), (b, a)):
                answer = answers.get(target)
                if answer is None:
                    self._lost[target] = f"did not answer within {self._timeout:.0f} s"
                elif answer.rate is not None:
                    measured.rates[source, target] = answer.rate
                    measured.messages[source, target] = answer.messages
                else:
                    measured.problems[source, target] = answer.problem
            if not task.keep or any(answers.get(end) is None or answers[end].problem for end in (a, b)):
                self._generation[a, b] = generation + 1
        for a, b, _ in whole:  # what the partner saw says more than silence
            for gone, partner in ((a, b), (b, a)):
                seen = answers.get(partner)
                if gone in self._lost and seen is not None and seen.problem:
                    self._lost[gone] = f"did not answer; rank {partner}: {seen.problem}"
        measured.lost = dict(self._lost)
        return measured

    def _collect(self, ranks: list[int]) -> dict[int, Answer]:
        keys = {rank: f"answer/{self.round}/{rank}" for rank in ranks}
        if not keys:
            return {}
        with contextlib.suppress(RuntimeError):  # a rank is missing: take what is there
            self._store.wait(list(keys.values()), timedelta(seconds=self._timeout + GRACE))
        found = {}
        for rank, key in keys.items():
            if self._store.check([key]):
                found[rank] = msgspec.json.decode(self._store.get(key), type=Answer)
        return found

    def end(self) -> None:
        """Tell everybody that it is over."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"round/{self.round}", msgspec.json.encode(Round([], 0, last=True)).decode())
        self.round += 1


def serve(store: Any, pairs: PairGroups, timeout: float, progress: Callable[[str], None] | None = None,
          first: int = 0) -> int:
    """Any other rank: take part in round after round until the last; the number of the next one.

    Raises:
        UsageError: the conductor or the store is not heard any more.
    """
    number = first
    while True:
        key = f"round/{number}"
        try:
            store.wait([key], timedelta(seconds=PATIENCE * (timeout + GRACE)))
            task = msgspec.json.decode(store.get(key), type=Round)
        except RuntimeError as error:
            raise UsageError(f"rank {pairs.rank}: rank 0, which conducts the measuring, is not heard any more:"
                             f" {_first_line(error)}") from None
        if progress is not None:
            progress(f"round {number}")
        number += 1
        if task.last:
            return number
        answer = take_part(task, pairs.rank, pairs, timeout)
        if answer is not None:
            try:
                store.set(f"answer/{number - 1}/{pairs.rank}", msgspec.json.encode(answer).decode())
            except RuntimeError as error:
                raise UsageError(f"rank {pairs.rank}: the store of the job is gone: {_first_line(error)}") from None


def take_part(task: Round, rank: int, pairs: PairGroups, timeout: float) -> Answer | None:
    """This rank's part of a round; None when it rests."""
    for a, b, generation in task.pairs:
        if rank in (a, b):
            other = b if rank == a else a
            rates: list[float] = []
            try:
                pairs.exchange(other, generation, task.bytes, rates)
                if not task.keep:
                    pairs.forget(other)
                return Answer(rate=max(rates), messages=tuple(rates))
            except (RuntimeError, ValueError) as error:  # everything that torch raises for a lost or slow peer
                pairs.drop(other)
                return Answer(rate=max(rates, default=None), problem=_words(error, timeout))
    return None


class PairGroups:
    """The two-member process groups of one rank, by partner."""

    def __init__(self, store: Any, rank: int, backend: str, timeout: float) -> None:
        self._store, self.rank, self._backend, self._timeout = store, rank, backend, timeout
        self._groups: dict[int, tuple[int, Any]] = {}

    def exchange(self, other: int, generation: int, message_bytes: int, rates: list[float]) -> None:
        """Send to and receive from `other` at once; appends the rate of each message that came in, in bytes/s.

        Raises:
            RuntimeError: nothing came within the timeout, or the connection broke.
        """
        end = time.monotonic() + self._timeout
        group = self._group(other, generation)
        run = _exchange_nccl if self._backend == "nccl" else _exchange_gloo
        run(group, int(self.rank > other), message_bytes, end, rates)

    def forget(self, other: int) -> None:
        """Close the group with `other`, which has done its work."""
        self._groups.pop(other, None)

    def drop(self, other: int) -> None:
        """Forget the group with `other`: it is broken."""
        broken = self._groups.pop(other, None)
        if broken is not None:
            with contextlib.suppress(RuntimeError):
                broken[1].abort()

    def close(self) -> None:
        """Close all connections."""
        for other in list(self._groups):
            self.drop(other)

    def _group(self, other: int, generation: int) -> Any:
        known = self._groups.get(other)
        if known is not None and known[0] == generation:
            return known[1]
        self.drop(other)
        import torch.distributed as dist

        low, high = min(self.rank, other), max(self.rank, other)
        store = dist.PrefixStore(f"pair/{low}-{high}/{generation}", self._store)
        limit = timedelta(seconds=self._timeout)
        member = int(self.rank == high)
        if self._backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            group: Any = dist.ProcessGroupNCCL(store, member, 2, options)
        else:
            group = dist.ProcessGroupGloo(store, member, 2, limit)
        self._groups[other] = (generation, group)
        return group


def _exchange_gloo(group: Any, member: int, message_bytes: int, end: float, rates: list[float]) -> None:
    """Both directions at once, `BURSTS` times, the two ends in step before each."""
    import torch

    peer = 1 - member
    payload, room = torch.zeros(message_bytes, dtype=torch.uint8), torch.empty(message_bytes, dtype=torch.uint8)
    for burst in range(BURSTS):
        group.barrier().wait(_left(end))
        begun = time.perf_counter()
        arrival, sent = group.recv([room], peer, burst), group.send([payload], peer, burst)
        arrival.wait(_left(end))
        rates.append(message_bytes / max(time.perf_counter() - begun, 1e-9))
        sent.wait(_left(end))
    group.barrier().wait(_left(end))


def _exchange_nccl(group: Any, member: int, message_bytes: int, end: float, rates: list[float]) -> None:
    """One direction after the other: sends and receives of one communicator share a stream. Polls, never blocks."""
    import torch

    peer = 1 - member
    payload = torch.zeros(message_bytes, dtype=torch.uint8, device="cuda")
    mark = torch.zeros(1, dtype=torch.uint8, device="cuda")
    for burst in range(BURSTS + 1):  # the first one builds the communicator
        for sender in (0, 1):
            if sender == member:
                for tensor in (mark, payload):
                    group.send([tensor], peer, 0)
                continue
            group.recv([mark], peer, 0).wait()
            marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            marks[0].record()
            group.recv([payload], peer, 0).wait()
            marks[1].record()
            while not marks[1].query():
                _left(end)
                time.sleep(1e-4)
            if burst:
                rates.append(message_bytes / (marks[0].elapsed_time(marks[1]) / 1e3))


def _left(end: float) -> timedelta:
    """What is left until `end`. Raises RuntimeError when it is over."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise RuntimeError("Timed out")
    return timedelta(seconds=max(seconds, 0.001))


def _words(error: Exception, timeout: float) -> str:
    text = str(error)
    lower = text.lower()
    if "connection closed" in lower or "reset by peer" in lower or "broken pipe" in lower:
        return "the connection was closed by the other side"
    if "timed out" in lower or "timeout" in lower:
        return f"nothing came within {timeout:.0f} s"
    if "no route to host" in lower or "unreachable" in lower:
        return "there is no route to the other side"
    return _first_line(error)[:200]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
