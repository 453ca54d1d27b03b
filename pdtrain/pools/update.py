"""The update rank's side: FP32 masters and moments of the pieces it owns, and the step.

Gradients are added up in FP32 in the order of the micro-batches. Nothing is applied before the step's commit, which the
compute pool sends when every gradient was accepted by every owner; so what a step does is decided once, and a version
of the weights either exists on all update ranks or on none. The optimizer is the trainer's own, over the same shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdtrain.config import Resolved
from pdtrain.optim import moments_of, optimizer_over, set_learning_rate
from pdtrain.optim.muon import MuonAdamW
from pdtrain.pools.faults import faults_of, strike
from pdtrain.pools.journal import Journal
from pdtrain.pools.matrices import Matrices
from pdtrain.pools.message import DTYPES, Header, Kind, PoolError, Status, as_bytes
from pdtrain.pools.offload import mapped_zeros, return_freed_memory
from pdtrain.pools.plan import Bucket, Piece, Plan
from pdtrain.pools.receiving import NewerAttempt, Receiver
from pdtrain.pools.sending import Sender
from pdtrain.pools.wire import decode, encode, spread


class OwnedBucket:
    """One bucket on its owner: masters, their optimizer, and the gradients of the step under way."""

    def __init__(self, bucket: Bucket, resolved: Resolved, zeros: Callable[[tuple[int, ...]], Tensor]) -> None:
        self.bucket = bucket
        self.masters = [torch.nn.Parameter(zeros(piece.local)) for piece in bucket.pieces]
        rows: dict[str, list[torch.nn.Parameter]] = {}
        for piece, master in zip(bucket.pieces, self.masters, strict=True):
            rows.setdefault(piece.row, []).append(master)
        self.optimizer = optimizer_over(resolved.run, rows)
        self.moments = moments_of(self.optimizer)
        for master in self.masters:
            state = self.optimizer.state[master]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {moment: zeros(tuple(master.shape)) for moment in self.moments[master]}
        self.sums: list[Tensor] | None = None
        self.thinned = resolved.run.pools.top_k < 1

    def pieces(self) -> Iterator[tuple[Piece, torch.nn.Parameter]]:
        """Every piece with its master."""
        return zip(self.bucket.pieces, self.masters, strict=True)

    @property
    def state_bytes(self) -> int:
        """Masters and moments."""
        return sum(4 * master.numel() * (1 + len(self.moments[master])) for master in self.masters)

    def kept(self) -> list[Tensor]:
        """Everything that the next step depends on: masters, and whatever their optimizer remembers."""
        found: list[Tensor] = []
        for master in self.masters:
            state = self.optimizer.state[master]
            found += [master.detach(), *(state[name] for name in sorted(state))]
        return found

    @torch.no_grad()
    def load(self, payload: Tensor) -> None:
        """Take the first masters of a new run."""
        for master, value in zip(self.masters, decode(payload, self.bucket, torch.float32), strict=True):
            master.copy_(value)

    @torch.no_grad()
    def add(self, payload: Tensor, dtype: torch.dtype) -> None:
        """Add one micro-batch's gradients."""
        values = decode(spread(payload, self.bucket.numel, dtype) if self.thinned else payload, self.bucket, dtype)
        if self.sums is None:
            self.sums = values
        else:
            torch._foreach_add_(self.sums, values)

    @torch.no_grad()
    def apply(self, scales: dict[str, float], factors: dict[str, float], lr: float) -> None:
        """One optimizer step with the sum of the gradients: scaled, clipped, applied as without pools.

        Of matrices that Muon takes, up to their directions: `Matrices` goes on when it has all parts.
        """
        assert self.sums is not None
        for (piece, master), gradient in zip(self.pieces(), self.sums, strict=True):
            for factor in (scales.get(piece.row), factors.get(piece.row)):
                if factor is not None:
                    gradient.mul_(torch.tensor(factor))
            master.grad = gradient
        set_learning_rate(self.optimizer, lr)
        if isinstance(self.optimizer, MuonAdamW):
            self.optimizer.step_apart()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()


class UpdateSide:
    """One update rank's half of the pools."""

    def __init__(self, resolved: Resolved, plan: Plan, rank: int, journal: Journal) -> None:
        settings = resolved.run.pools
        self.resolved = resolved
        self.plan = plan
        self.rank = rank
        self.journal = journal
        self.streams = settings.mode != "sync"
        self.micros = resolved.accumulation if self.streams and settings.granularity == "micro_batch" else 1
        self.staleness = resolved.staleness
        self.on_mismatch = settings.on_mismatch
        self.dtype = DTYPES[settings.payload]
        if settings.offload:
            return_freed_memory()
        zeros = mapped_zeros(Path(settings.offload), rank) if settings.offload else torch.zeros
        self.owned = [OwnedBucket(bucket, resolved, zeros) for bucket in sorted(plan.of(rank), key=_forward_order)]
        self.matrices = Matrices(self.owned)
        self.state_bytes = sum(owned.state_bytes for owned in self.owned)
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self.start = 0
        self.step = 0
        self.skipped = 0
        self.faults = faults_of(rank)

    def expects(self, peer: int, header: Header) -> Status:
        """The judgement on an arrived message: gradients must belong to weights that are fresh enough, of this run."""
        own, theirs = self.journal.incarnation, header.incarnation
        newest = header.step - 1
        oldest = max(self.start, newest - self.staleness)
        if theirs == own and (header.kind is not Kind.GRADIENTS or oldest <= header.version <= newest):
            return Status.OK
        action: str = self.on_mismatch if header.kind is Kind.GRADIENTS else "resend"
        bound = max(self.start, newest - self.resolved.staleness_bound)
        if action == "accept" and not (theirs == own and bound <= header.version <= newest):
            action = "recompute"  # beyond the bound, or of another life of this run: never
        self.journal.note("pool_version_mismatch", step=header.step, peer=peer, direction="up", bucket=header.bucket,
                          version=header.version, expected=newest if not self.staleness else oldest,
                          incarnation=theirs, expected_incarnation=own, action=action)
        return {"accept": Status.OK, "drop": Status.REFUSED}.get(action, Status.VERSION)

    def connect(self, senders: dict[int, Sender], receivers: dict[int, Receiver], start: int, restored: bool) -> None:
        """Use these links from here; take the first masters, or give the restored weights out."""
        self.senders, self.receivers, self.start, self.step = senders, receivers, start, start
        for owned in self.owned:
            bucket = owned.bucket
            if restored:
                self._send_weights(owned)
            else:
                payload = receivers[bucket.rank].take(Kind.MASTERS, start, bucket.index)
                assert payload is not None
                owned.load(payload)
        for sender in senders.values():  # what travelled at the start belongs to no step
            sender.drain()
            sender.take_counters()

    # -- one step -------------------------------------------------------------------------------------------------

    def run_step(self) -> dict[str, Any]:
        """Collect, step, send the weights back; what the compute pool wants next (`after`)."""
        self.journal.begin()
        step = self.step + 1
        with self.journal.waiting("pool_wait_gradients"):
            commit = self._collect(step)
        self.step = step
        if commit["skipped"]:
            self.skipped += 1
            self.journal.note("pool_skipped", step=step, reason=commit["why"])
        for number, owned in enumerate(self.owned):
            done = [owned]
            if not commit["skipped"]:
                with self._span("optimizer"):
                    owned.apply(commit["scales"], commit["factors"], commit["lr"])
                    if owned is self.owned[0]:
                        strike(self.faults, "optimizer", step)
                    done = self.matrices.after(number)
            owned.sums = None
            if self.streams:
                for each in done:
                    self._send_weights(each)
        if not self.streams:
            for owned in self.owned:
                self._send_weights(owned)
        oldest = min((receiver.oldest.pop(step, step - 1) for receiver in self.receivers.values()), default=step - 1)
        staleness = step - 1 - oldest
        self.journal.end(step, step, staleness, self.state_bytes, self.senders, self.receivers)
        return self._from_all(Kind.AFTER, step)

    def _collect(self, step: int) -> dict[str, Any]:
        """Add up every gradient of `step` and return its commit; from the start again when it is computed again."""
        attempt = 0
        while True:
            try:
                for micro in range(self.micros):
                    for owned in reversed(self.owned):
                        receiver = self.receivers[owned.bucket.rank]
                        payload = receiver.take(Kind.GRADIENTS, step, owned.bucket.index, micro, attempt)
                        if payload is not None:
                            owned.add(payload, self.dtype)
                return self._from_all(Kind.COMMIT, step, attempt)
            except NewerAttempt:
                attempt += 1
                for owned in self.owned:
                    owned.sums = None

    def _from_all(self, kind: Kind, step: int, attempt: int = 0) -> dict[str, Any]:
        """The same JSON from every compute rank that exchanges with this one.

        Raises PoolError: they do not say the same.
        """
        texts: dict[int, bytes] = {}
        for peer, receiver in self.receivers.items():
            payload = receiver.take(kind, step, attempt=attempt)
            assert payload is not None
            texts[peer] = payload.numpy().tobytes()
        first = min(texts)
        if odd := [peer for peer, text in texts.items() if text != texts[first]]:
            raise PoolError(
                f"pools: ranks {first} and {odd[0]} (compute) disagree about step {step}; "
                f"rank {self.rank} (update) applies nothing"
            )
        result: dict[str, Any] = json.loads(texts[first])
        return result

    def _send_weights(self, owned: OwnedBucket) -> None:
        with self.journal.handing_over():
            payload = encode(owned.masters, self.dtype)
            header = Header(Kind.WEIGHTS, self.step, self.step, owned.bucket.index)
            self.senders[owned.bucket.rank].put(header, payload)

    def kept(self) -> list[Tensor]:
        """What this rank's file holds of one version."""
        return [tensor for owned in self.owned for tensor in owned.kept()]

    def tell_kept(self) -> None:
        """The state after the step is whole in this rank's file: the compute pool may commit the next one."""
        for sender in self.senders.values():
            sender.put(Header(Kind.KEPT, self.step, self.step), as_bytes(b""))

    def report(self, **fields: Any) -> None:
        """Answer every compute rank after the step: what was saved, and how busy this rank was."""
        last = self.journal.last
        answer = {name: last.get(name, 0) for name in ("step_seconds", "busy_seconds", "queue_depth", "latency_seconds",
                                                       "resends", "checksum_errors", "bytes_sent", "staleness")}
        body = as_bytes(json.dumps({"step": self.step, "version": self.step} | answer | fields).encode())
        for sender in self.senders.values():
            sender.put(Header(Kind.REPORT, self.step, self.step), body)

    def close(self) -> None:
        """Part from the compute pool in good order."""
        self.journal.summarise()
        for sender in self.senders.values():
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()

    def _span(self, name: str):
        recorder = self.journal.recorder
        assert recorder is not None
        return recorder.span(name)


def _forward_order(bucket: Bucket) -> tuple[int, int]:
    return (bucket.index, bucket.rank)
