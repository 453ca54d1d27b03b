"""The receiving end of a link.

Every message is checked, answered, and kept until somebody asks for it by kind, step, micro-batch and bucket: delays,
duplicates and another order change nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdtrain.pools.links import MERCY_SECONDS, REPEATED, WINDOW, End, LinkThread
from pdtrain.pools.message import HEADER_BYTES, Damaged, Header, Kind, PoolError, Status, checksum, describe

#: Steps for which a receiver remembers what it has seen, to know a duplicate.
REMEMBERED_STEPS = 8
#: What `take` returns for weights that are already where they belong.
PLACED = torch.empty(0, dtype=torch.uint8)
#: A process that lives answers a ping within this time.
PING_SECONDS = 2.0


class NewerAttempt(Exception):
    """The sender computes the step again: what was received of it is void."""


class Receiver(LinkThread):
    """The receiving end. `judge` looks at the header of a whole message: whether its version may be used.

    `place`, where given, takes weights to where they belong as they arrive, so that none wait in memory of their own.
    """

    def __init__(
        self, end: End, judge: Callable[[int, Header], Status], place: Callable[[Header, Tensor], None] | None = None
    ) -> None:
        self.judge = judge
        self.place = place
        self.alive: Callable[[float], bool] = lambda seconds: False  # asks the peer, through the other direction
        self.others: Sequence[Receiver] = ()  # this rank's other links of the same direction
        self.oldest: dict[int, int] = {}  # step -> the oldest weight version among the gradients taken for it
        self.box: dict[tuple[Kind, int, int, int], tuple[Header, Tensor]] = {}
        self.attempts: dict[int, int] = {}  # step -> newest attempt
        self._seen: set[tuple[Kind, int, int, int, int]] = set()
        self._newest_step = self._newest_order = 0
        self._answers: deque[tuple[Tensor, Any]] = deque()
        self._damaged: dict[tuple[Kind, int, int, int], int] = {}
        self._wanted = "messages"
        super().__init__(end, "receive")

    def take(self, kind: Kind, step: int, bucket: int = 0, micro: int = 0, attempt: int = 0) -> Tensor | None:
        """The payload, once it is here; None for gradients that were refused: their step's commit is here already.

        Raises:
            PoolError: the peer is gone or silent.
            NewerAttempt: gradients of a later attempt at this step are on their way.
        """
        began, limit, alive = time.monotonic(), self.end.timeout_seconds, False
        while not (found := self._look((kind, step, micro, bucket), attempt, began + limit)):
            waited = time.monotonic() - began
            if not alive and self.alive(PING_SECONDS):
                # Its loop waits for somebody else. Whoever waits for the silent one speaks first.
                alive, limit = True, limit + min(self.end.timeout_seconds, MERCY_SECONDS)
                continue
            alive = alive and self.alive(PING_SECONDS)
            error = self._blocked_by(limit) if alive else None
            with self.changed:
                self.error = error or self.end.lost(f"no answer in {limit:g} s", self._wanted, waited, alive=alive)
                raise self.error
        return found[0]

    def _blocked_by(self, seconds: float) -> PoolError | None:
        """Another peer that is gone or silent: what a peer that lives waits for, in a collective of its own pool."""
        for other in self.others:
            if not other.alive(PING_SECONDS):
                wanted = f"{self._wanted} from {self.end.names(self.end.peer)}"
                return other.error or other.end.lost(f"no answer in {PING_SECONDS:g} s", wanted, seconds)
        return None

    def _look(self, key: tuple[Kind, int, int, int], attempt: int, until: float) -> tuple[Tensor | None] | None:
        """What `take` returns, in a tuple; None when nothing has come by then."""
        kind, step, micro, bucket = key
        commit = (Kind.COMMIT, step, 0, 0)
        with self.changed:
            self._wanted = describe(kind, step, bucket, micro)
            while True:
                if kind in REPEATED and self.attempts.get(step, 0) > attempt:
                    raise NewerAttempt
                if key in self.box:
                    return (self.box.pop(key)[1],)
                if kind is Kind.GRADIENTS and commit in self.box:
                    return (None,)
                self._raise()
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self.changed.wait(left)

    def newest(self, kind: Kind) -> Tensor | None:
        """The newest message of `kind` that is here, without waiting; older ones are forgotten."""
        with self.changed:
            keys = sorted(key for key in self.box if key[0] is kind)
            found = [self.box.pop(key) for key in keys]
        return found[-1][1] if found else None

    def close(self) -> None:
        """Wait for the peer's END."""
        self._thread.join(timeout=self.end.timeout_seconds)
        self.closing = True

    def _waiting_for(self) -> str:
        return self._wanted

    def _run(self) -> None:
        packed = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        while True:
            self.end.receive(packed)
            try:
                header = Header.unpack(packed)
            except Damaged as error:
                raise self.end.lost(str(error), self._wanted) from None
            payload = torch.empty(header.length, dtype=torch.uint8)
            if header.length:
                self.end.receive(payload)
            began = time.perf_counter()
            status = self._verdict(header, payload)
            self._reply(header, status)
            with self.changed:
                self.counters.count(header)
                self.counters.seconds += time.perf_counter() - began
            if header.kind is Kind.END:
                self.closing = True
                self._settle()
                return

    def _settle(self) -> None:
        """Wait until the sender has read every answer."""
        while self._answers:
            self._answers.popleft()[1].wait()

    def _reply(self, header: Header, status: Status) -> None:
        """Answer without waiting: the sender reads its answers when its window is full, or has nothing to send."""
        answer = Header(Kind.ACK, header.step, header.version, header.bucket, header.micro, sequence=header.sequence,
                        incarnation=self.end.incarnation, status=status).pack()
        self._answers.append((answer, self.end.send(answer)))
        while len(self._answers) > 4 * WINDOW:
            self._answers.popleft()[1].wait()

    def _verdict(self, header: Header, payload: Tensor) -> Status:
        note = {"step": header.step, "peer": self.end.peer, "direction": self.end.direction, "bucket": header.bucket}
        if header.kind in (Kind.END, Kind.PING):
            return Status.OK
        if header.length and checksum(payload) != header.checksum:
            bad = self._damaged[header.key] = self._damaged.get(header.key, 0) + 1
            with self.changed:
                self.counters.checksum_errors += 1
            self.end.note("pool_checksum_error", attempt=bad, **note)
            if bad > self.end.resend_limit:
                self._reply(header, Status.CHECKSUM)  # the sender says the same, of itself
                self._settle()
                raise PoolError(self.end.refused(header, f"checksum wrong {bad} times in a row", by_peer=False))
            return Status.CHECKSUM
        identity = (*header.key, header.attempt)
        with self.changed:
            duplicate = identity in self._seen or header.step < self._newest_step - REMEMBERED_STEPS
            self.counters.duplicates += duplicate
        if duplicate:
            self.end.note("pool_duplicate", **note)
            return Status.OK
        if header.order:
            if header.order < self._newest_order:
                self.end.note("pool_reordered", **note)
            self._newest_order = max(self._newest_order, header.order)
        status = self.judge(self.end.peer, header)
        if status is not Status.OK:
            with self.changed:
                self.counters.version_mismatches += 1
            return status
        if header.kind is Kind.WEIGHTS and self.place is not None:
            self.place(header, payload)
            payload = PLACED
        with self.changed:
            self._seen.add(identity)
            if header.kind is Kind.GRADIENTS:
                self.oldest[header.step] = min(header.version, self.oldest.get(header.step, header.version))
            newest = self.attempts.get(header.step, 0)
            if header.kind not in REPEATED or header.attempt >= newest:
                self.box[header.key] = (header, payload)
            if header.kind in REPEATED and header.attempt > newest:
                self.attempts[header.step] = header.attempt
                for key in [key for key in self.box if self._outdated(key)]:
                    del self.box[key]
            if header.step > self._newest_step:
                self._newest_step = header.step
                limit = header.step - REMEMBERED_STEPS
                self._seen = {seen for seen in self._seen if seen[1] >= limit}
                self.attempts = {step: attempt for step, attempt in self.attempts.items() if step >= limit}
            self.changed.notify_all()
        return Status.OK

    def _outdated(self, key: tuple[Kind, int, int, int]) -> bool:
        return key[0] in REPEATED and self.box[key][0].attempt < self.attempts.get(key[1], 0)
