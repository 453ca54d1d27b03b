"""The sending end of a link.

It keeps up to `WINDOW` messages unanswered, and each payload until its answer says that it arrived whole; a damaged one
is sent again, a bounded number of times.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pdtrain.pools.faults import Fault
from pdtrain.pools.links import MERCY_SECONDS, WINDOW, End, LinkThread
from pdtrain.pools.message import HEADER_BYTES, Header, Kind, PoolError, Status, checksum

#: A message held back by the fault `reorder` leaves after this long, when no other follows.
HELD_SECONDS = 0.3
#: A message is late when its answer comes after this share of what a wait may last.
LATE_SHARE = 0.2
NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class Outgoing:
    """A message that waits to be sent or answered. The payload must not change meanwhile."""

    header: Header
    payload: Tensor
    tries: int = 0
    sent: float = 0.0
    handed: float = 0.0
    works: list[Any] = field(default_factory=list)


class Sender(LinkThread):
    """The sending end. `put` hands a message over, `drain` waits until everything was answered."""

    def __init__(self, end: End, faults: list[Fault]) -> None:
        self.faults = faults
        self.queue: deque[Outgoing] = deque()
        self.inflight: dict[int, Outgoing] = {}
        self.refused: list[Header] = []
        self._sequence = self._order = self._answered = 0
        self._held: Outgoing | None = None
        self._in_hand = False
        self._answer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        super().__init__(end, "send")

    def put(self, header: Header, payload: Tensor) -> None:
        """Send `payload` (host, contiguous) soon. Waits, a bounded time, while `depth` messages are ahead of it.

        Raises PoolError: the peer is gone, silent, or refuses what it was sent.
        """
        size = payload.numel() * payload.element_size()
        header = header.like(incarnation=self.end.incarnation, length=size, checksum=checksum(payload) if size else 0)
        with self.changed:
            self._wait(lambda: len(self.queue) < self.end.depth, "room to send " + header.words())
            self._order += 1
            self.queue.append(Outgoing(header.like(order=self._order), payload, handed=time.perf_counter()))
            self.counters.count(header)  # here, so that it belongs to the step whose loop handed it over
            self.counters.queue_depth = max(self.counters.queue_depth, len(self.queue) + len(self.inflight))
            self.changed.notify_all()

    def drain(self) -> list[Header]:
        """Wait until every message was answered; those refused for their version, with their headers.

        Raises PoolError like `put`.
        """
        with self.changed:
            self._wait(self._idle, self._waiting_for())
            refused, self.refused = self.refused, []
        return refused

    def ping(self, seconds: float) -> bool:
        """Whether the peer's process answers anything within `seconds`: its links work while its loop waits."""
        with self.changed:
            if self.error is not None or self.closing:
                return False
            before = self._answered
            self.queue.append(Outgoing(Header(Kind.PING, 0, 0, incarnation=self.end.incarnation), NOTHING))
            self.changed.notify_all()
            return self.changed.wait_for(lambda: self._answered > before or self.error is not None, seconds) \
                and self.error is None

    def _idle(self) -> bool:
        return not self.queue and not self.inflight and not self._in_hand and self._held is None

    def close(self) -> None:
        """Tell the peer that nothing more comes, and end the thread."""
        if self.error is None:
            self.drain()
            self.put(Header(Kind.END, 0, 0), NOTHING)
            self.drain()
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self._thread.join(timeout=5)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Under the lock: until `ready`, an error, or the time is up. Counted: meanwhile the training loop stands."""
        began = time.monotonic()
        try:
            self._until(ready, what)
        finally:
            self.counters.blocked += time.monotonic() - began

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        began, limit = time.monotonic(), self.end.timeout_seconds
        while not ready():
            self._raise()
            left = limit - (time.monotonic() - began)
            if left <= 0 or not self.changed.wait(left):
                if ready():
                    return
                self._raise()
                if not self.inflight and limit == self.end.timeout_seconds:
                    # Nothing has left, so the peer owes no answer; it sees that better, and speaks first.
                    limit += 2 * min(self.end.timeout_seconds, MERCY_SECONDS)
                    continue
                self.error = self.end.lost(f"no answer in {limit:g} s", what, limit)
        self._raise()

    def _waiting_for(self) -> str:
        first = next(iter(self.inflight.values()), None) or next(iter(self.queue), None)
        return f"an answer to {first.header.words()}" if first is not None else "an answer"

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.queue and not self.inflight and not self.closing:
                    if not self.changed.wait(HELD_SECONDS if self._held is not None else None):
                        break
                if self.closing and not self.queue and not self.inflight:
                    return
                message = self.queue.popleft() if self.queue and len(self.inflight) < WINDOW else None
                self._in_hand = True  # neither in the queue nor unanswered
                self.changed.notify_all()
            began = time.perf_counter()
            if message is None and self._held is not None and not self.inflight:
                message, self._held = self._held, None
            if message is not None:
                self._send(message)
            elif self.inflight:
                self._receive_answer()
            with self.changed:
                self.counters.seconds += time.perf_counter() - began
                self._in_hand = False
                self.changed.notify_all()

    def _send(self, message: Outgoing) -> None:
        about = (self.end.direction, message.header, message.tries)
        struck = [fault for fault in self.faults if fault.meets(*about)]
        for fault in struck:
            if fault.kind in ("delay", "slow"):
                time.sleep(fault.seconds)
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        kinds = {fault.kind: fault for fault in struck}
        if "reorder" in kinds and self._held is None:
            self._held = message
            return
        self._post(message, kinds)
        if "duplicate" in kinds:
            self._post(Outgoing(message.header, message.payload, message.tries, handed=message.handed), {})
        if self._held is not None:
            held, self._held = self._held, None
            self._post(held, {})

    def _post(self, message: Outgoing, faults: dict[str, Fault]) -> None:
        self._sequence += 1
        header, payload = message.header.like(sequence=self._sequence), message.payload
        if message.tries:
            header = header.like(order=0)
        if "version" in faults:
            fault = faults["version"]
            header = header.like(version=fault.version) if fault.incarnation is None else \
                header.like(incarnation=fault.incarnation)
        if "corrupt" in faults and header.length:
            payload = payload.clone()
            payload.view(torch.uint8).view(-1)[header.length // 2] ^= 0x10
        message.tries += 1
        message.sent = time.perf_counter()
        message.works = [self.end.send(header.pack())]
        if header.length:
            message.works.append(self.end.send(payload))
        message.works.append(payload)  # alive until it was answered
        with self.changed:
            self.inflight[self._sequence] = message

    def _receive_answer(self) -> None:
        self.end.receive(self._answer)
        answer = Header.unpack(self._answer)
        now = time.perf_counter()
        with self.changed:
            message = self.inflight.pop(answer.sequence)
            self._answered += 1
            self.counters.answers += 1
            self.counters.latency_sum += now - message.sent
        for work in message.works[:-1]:
            work.wait()
        message.works = []
        header = message.header
        if message.handed and (seconds := now - message.handed) > LATE_SHARE * self.end.timeout_seconds:
            self.end.note("pool_late", step=header.step, peer=self.end.peer, direction=self.end.direction,
                          bucket=header.bucket, seconds=round(seconds, 3))
        if answer.status is Status.CHECKSUM:
            self._again(message, "checksum")
        elif answer.status in (Status.VERSION, Status.REFUSED) and header.kind is Kind.GRADIENTS:
            with self.changed:
                self.refused.append(header.like(status=answer.status))
        elif answer.status is not Status.OK:
            self._again(message, "version")

    def _again(self, message: Outgoing, reason: str) -> None:
        header = message.header
        if message.tries > self.end.resend_limit:
            raise PoolError(self.end.refused(header, f"{reason} wrong {message.tries} times in a row", by_peer=True))
        self.end.note("pool_resend", step=header.step, peer=self.end.peer, direction=self.end.direction,
                      bucket=header.bucket, attempt=message.tries + 1, reason=reason)
        with self.changed:
            self.counters.resends += 1
            self.counters.count(header)
            self.queue.appendleft(message)
