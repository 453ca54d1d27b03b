"""One pair of ranks and one direction: a process group of two that carries messages one way and answers the other.

Each end of a link is one thread, the only one that uses the group, so a slow peer holds up nobody else and a dead one
breaks this link alone. A wait of the training loop is bounded; what a thread has found out is raised there. The two
ends: sending.py, receiving.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from pdtrain.pools.message import HEADER_BYTES, Header, Kind, PoolError

Direction = Literal["up", "down"]  # gradients to the update pool; weights back
#: Messages sent ahead of the oldest unanswered one.
WINDOW = 4
#: Who may not be the first to speak of a silence waits up to so much longer.
MERCY_SECONDS = 10.0
#: Why a peer is lost, when its process is gone.
CLOSED = "connection closed"
#: What is sent anew when a step is computed again.
REPEATED = (Kind.GRADIENTS, Kind.COMMIT)


@dataclass(frozen=True, slots=True)
class End:
    """This rank's end of one link. `names`: rank -> its name in messages to people."""

    group: dist.ProcessGroup
    rank: int
    peer: int
    direction: Direction
    incarnation: int
    timeout_seconds: float
    resend_limit: int
    depth: int  #: messages that may wait to be sent
    note: Callable[..., None]
    names: Callable[[int], str]

    def lost(self, reason: str, waiting_for: str, seconds: float = 0.0, *, alive: bool = False) -> PoolError:
        """The peer is gone or silent; recorded and told. `alive`: its process answers, so it may wait for others."""
        silent = reason.startswith("no answer")
        self.note("pool_timeout" if silent else "pool_peer_lost", peer=self.peer, direction=self.direction,
                  waiting_for=waiting_for, reason=reason, seconds=round(seconds, 3), alive=alive or None)
        me, peer = self.names(self.rank), self.names(self.peer)
        if alive:
            text = f"pools: {me} waited {seconds:.0f} s for {peer}, which answers but has not sent {waiting_for}"
        elif silent:
            limit = f"{self.timeout_seconds:g} s"
            text = f"pools: {me} got no answer from {peer} in {limit} while waiting for {waiting_for}"
        else:
            text = f"pools: {me} lost {peer}: {reason} while waiting for {waiting_for}"
        return PoolError(text)

    def refused(self, header: Header, why: str, *, by_peer: bool) -> str:
        """One side will not take what the other sends, in words."""
        taker, giver = (self.peer, self.rank) if by_peer else (self.rank, self.peer)
        return f"pools: {self.names(taker)} refused {header.words()} from {self.names(giver)}: {why}"

    def send(self, tensor: Tensor) -> Any:
        return dist.isend(tensor, group=self.group, group_dst=self._other())

    def receive(self, tensor: Tensor) -> None:
        work = dist.irecv(tensor, group=self.group, group_src=self._other())
        if work is not None:
            work.wait()

    def _other(self) -> int:
        return 1 - dist.get_rank(self.group)


@dataclass(slots=True)
class Counters:
    """What one end did since it was asked last."""

    bytes: int = 0  #: payload of gradients and weights
    overhead_bytes: int = 0  #: headers, answers and what the pools tell each other in JSON
    messages: int = 0
    seconds: float = 0.0
    blocked: float = 0.0  #: seconds in which the training loop waited for room, or for the answers
    latency_sum: float = 0.0
    answers: int = 0
    queue_depth: int = 0
    resends: int = 0
    checksum_errors: int = 0
    duplicates: int = 0
    version_mismatches: int = 0


    def count(self, header: Header) -> None:
        """One message, whichever way it went."""
        bulk = header.kind in (Kind.GRADIENTS, Kind.WEIGHTS, Kind.MASTERS)
        self.bytes += header.length if bulk else 0
        self.overhead_bytes += 2 * HEADER_BYTES + (0 if bulk else header.length)
        self.messages += 1


class LinkThread:
    """The thread of one end, and the error that ended it."""

    def __init__(self, end: End, name: str) -> None:
        self.end = end
        self.error: PoolError | None = None
        self.counters = Counters()
        self.changed = threading.Condition()
        self.closing = False
        self._thread = threading.Thread(target=self._guarded, name=f"pool {name} {end.peer}", daemon=True)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except PoolError as error:
            self._fail(error)
        except Exception as error:  # the thread has no caller: the training loop must learn of it
            if not self.closing:
                self._fail(self.end.lost(reason(error), self._waiting_for()))

    def _fail(self, error: PoolError) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def _run(self) -> None:
        raise NotImplementedError

    def _waiting_for(self) -> str:
        raise NotImplementedError

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def take_counters(self) -> Counters:
        """The counters since the last call."""
        with self.changed:
            counters, self.counters = self.counters, Counters()
        return counters


def reason(error: BaseException) -> str:
    """What Gloo says, in few words."""
    text = str(error)
    closed = ("Connection closed", "reset by peer", "Broken pipe", "Connection refused")
    return CLOSED if any(word in text for word in closed) else " ".join(text.split())[:160]
