"""The compute rank's side of the exchange: gradients leave, weights come back.

sync    every bucket leaves after the last backward pass; the step ends when all weights are back
stream  a bucket leaves when backward has reduced its last gradient; the next forward pass waits for each module's
        weights when it reaches it. The same arithmetic in the same order, so the same bits.
async   as stream, but forward uses the weights of `staleness` steps ago: always exactly that many, so that all ranks
        compute with the same version and a run can be repeated.

A gradient accepted by the update pool is not applied before its step's commit: the norms, hence the clipping, and the
decision to leave an update out are made here, by the compute pool together, once every message was answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdtrain.config import Resolved
from pdtrain.config.resolved import rebalance_window
from pdtrain.model.moe import local
from pdtrain.model.transformer import Transformer
from pdtrain.parallel.gradients import RowParameters
from pdtrain.parallel.shard import units
from pdtrain.pools.feedback import Feedback
from pdtrain.pools.journal import Journal
from pdtrain.pools.links import CLOSED, reason
from pdtrain.pools.message import DTYPES, Header, Kind, PoolError, Status, as_bytes
from pdtrain.pools.own_state import OwnState
from pdtrain.pools.plan import Bucket, Plan
from pdtrain.pools.receiving import PLACED, Receiver
from pdtrain.pools.rejoin import Rejoined
from pdtrain.pools.sending import Sender
from pdtrain.pools.wire import decode, encode
from pdtrain.restart import Restart

if TYPE_CHECKING:
    from pdtrain.recorder import Recorder

#: What the compute pool votes on after each attempt at a step.
ACCEPTED, LEFT_OUT, AGAIN = 0, 1, 2


class ComputeSide:
    """One compute rank's half of the pools. Collective over the compute pool where it says so."""

    def __init__(
        self,
        resolved: Resolved,
        model: Transformer,
        rows: Mapping[str, RowParameters],
        plan: Plan,
        rank: int,
        group: dist.ProcessGroup,
        copies: Mapping[tuple[int, ...], dist.ProcessGroup],
        journal: Journal,
    ) -> None:
        settings = resolved.run.pools
        self.resolved = resolved
        self.journal = journal
        self.plan = plan
        self.rank = rank
        self.group = group  # the compute pool
        self.copies = copies
        self.streams = settings.mode != "sync"
        self.each_micro_batch = self.streams and settings.granularity == "micro_batch"
        self.staleness = resolved.staleness
        self.dtype = DTYPES[settings.payload]
        # Without staleness nobody needs the old weights once there are new ones: these go straight to their place.
        self.places = self.staleness == 0 and not next(model.parameters()).is_cuda
        self.attempts_allowed = settings.resend_limit
        self.buckets = plan.of(rank)
        self.feedback = Feedback(settings, self.buckets)
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self._report: dict[str, Any] = {}
        self.rebalance_every = rebalance_window(resolved.run) if settings.rebalance != "off" else 0
        self.lost_steps = 0  # that the run had reached before, beyond where it is resumed
        self.start = 0  # the version that training starts from
        self.step = 0  # steps done
        self._needed = 0  # the version that forward may use
        self._held = dict.fromkeys((bucket.index for bucket in self.buckets), 0)  # bucket -> version applied
        self._handed_on: dict[str, int] = {}  # shared piece -> version handed on to the other holders
        self._attempt = 0
        self._micro = 0
        self._left_out = False

        self.model_buffers = dict(model.named_buffers())
        self.parameters = dict(model.named_parameters())
        self.scales = {name: row.scales[0] for name, row in rows.items() if row.scales[0] != 1.0}
        self._by_index = {bucket.index: bucket for bucket in self.buckets}
        self._place = {piece.name: bucket for bucket in self.buckets for piece in bucket.pieces}
        self._shared = {piece.name: piece for piece in plan.shared if rank in piece.holders}
        self._ready: dict[int, dict[str, Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._sent: set[int] = set()  # buckets of this attempt whose last message has left
        self._settled = 0
        self.own = OwnState(self)
        self.rejoined: Rejoined | None = None  # how this start followed a death
        if self.streams:
            self._install_hooks(model)

    # -- joining --------------------------------------------------------------------------------------------------

    def connect(self, senders: dict[int, Sender], receivers: dict[int, Receiver], start: int, restored: bool) -> None:
        """Use these links from here; give the update pool the first masters, or take the restored weights."""
        self.senders, self.receivers, self.start, self.step, self._needed = senders, receivers, start, start, start
        self._held = dict.fromkeys(self._held, start)
        if not restored:
            for bucket in self.buckets:
                payload = encode([self._weight(piece.name) for piece in bucket.pieces], torch.float32)
                self._put(bucket, Header(Kind.MASTERS, start, start, bucket.index), payload)
            if self.dtype is not torch.float32:
                self._round()
            self._forget_counters()
            return
        self._held = dict.fromkeys(self._held, start - 1)
        self._handed_on = dict.fromkeys(self._shared, start - 1)
        self._obtain(self.parameters, start)

    def _forget_counters(self) -> None:
        """What travelled at the start belongs to no step."""
        for sender in self.senders.values():
            sender.drain()
            sender.take_counters()

    @torch.no_grad()
    def _round(self) -> None:
        """Compute with what the payload can carry from the first step on."""
        for parameter in self.parameters.values():
            part = local(parameter)
            part.copy_(part.to(self.dtype))

    def expects(self, peer: int, header: Header) -> Status:
        """The judgement on an arrived message: weights must be the version that they claim to be, of this run."""
        own = header.incarnation == self.journal.incarnation
        if own and (header.kind is not Kind.WEIGHTS or header.version == header.step):
            return Status.OK
        self.journal.note("pool_version_mismatch", step=header.step, peer=peer, direction="down", bucket=header.bucket,
                          version=header.version, expected=header.step, incarnation=header.incarnation,
                          expected_incarnation=self.journal.incarnation, action="resend")
        return Status.VERSION

    # -- one step -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights that the step under way computes with."""
        return max(self.start, self._settled, self.step - self.staleness)

    def begin(self, *, again: bool, consumed: int = 0) -> None:
        """A step begins, or begins `again` because its gradients belonged to other weights than they should.

        `consumed`: the sequences of the steps before.
        """
        if not again:
            self.journal.begin()
            self.own.begin(consumed)
            self._attempt, self._left_out = 0, False
        self._ready, self._sums, self._micro, self._sent = {}, {}, 0, set()
        self.feedback.begin()
        self._needed = self.version
        if not self.streams:
            self._obtain(self.parameters, self._needed)

    def reduces(self, last: bool) -> bool:
        """Whether the micro-batch that comes now reduces its gradients inside the compute pool."""
        return last or self.each_micro_batch

    def next_micro_batch(self, index: int) -> None:
        """Backward of micro-batch `index` begins."""
        self._micro = index

    @torch.no_grad()
    def deliver(self) -> bool:
        """After the last backward pass, before anything scales the gradients: send what is left, wait for every answer.

        Collective. False: the step must be computed again.
        Raises PoolError: again and again, or an update rank is gone.
        """
        with self.journal.handing_over():
            for bucket in reversed(self.buckets):  # when streaming: with a parameter that took no part, gradient zero
                if bucket.index not in self._sent:
                    self._send_gradients(bucket, [self._gradient(piece.name) for piece in bucket.pieces])
            refused = [header for sender in self.senders.values() for header in sender.drain()]
        self.own.await_owners()
        verdict = ACCEPTED
        if refused:
            verdict = AGAIN if any(header.status is Status.VERSION for header in refused) else LEFT_OUT
        verdict = self._vote(verdict)
        if verdict == AGAIN:
            self._attempt += 1
            if self._attempt > self.attempts_allowed:
                header = refused[0] if refused else Header(Kind.GRADIENTS, self.step + 1, self.version)
                raise PoolError(
                    f"pools: {header.words()} were refused {self._attempt} times for their weight version; "
                    f"rank {self.rank} (compute) gives up"
                )
            return False
        self._left_out = verdict == LEFT_OUT
        return True

    def _vote(self, mine: int) -> int:
        if dist.get_world_size(self.group) == 1:
            return mine
        device = next(iter(self.parameters.values())).device
        vote = torch.tensor(float(mine), device=device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group)
        return int(vote.item())

    @property
    def left_out(self) -> bool:
        """Whether the update pool refused this step's gradients and the policy is to leave the update out."""
        return self._left_out

    def commit(self, factors: Mapping[str, float], lr: float, skipped: bool) -> None:
        """Tell the update pool how to apply the step, clipping factors by row and learning rate, or not to."""
        version = self.version
        self.step += 1
        if not skipped:
            self.feedback.applied()
        why = "" if not skipped else "version" if self._left_out else "non-finite gradient or spike"
        said = {"scales": self.scales, "factors": dict(factors), "lr": lr, "skipped": skipped, "why": why}
        body = as_bytes(json.dumps(said).encode())
        for sender in self.senders.values():
            sender.put(Header(Kind.COMMIT, self.step, self.step - 1, attempt=self._attempt), body)
        if not self.streams:
            self.settle()
        self.journal.end(self.step, version, self.step - 1 - version, 0, self.senders, self.receivers)

    def explained(self, error: RuntimeError, step: int) -> Exception:
        """`error` of a collective of the compute pool as one line, where a dead rank is what it tells of."""
        if reason(error) != CLOSED:
            return error
        others = ", ".join(str(rank) for rank in self.plan.compute if rank != self.rank)
        return PoolError(
            f"pools: rank {self.rank} (compute) lost a rank of the compute pool ({others}): {CLOSED} in step {step}"
        )

    def settle(self) -> None:
        """Take the weights of every step done so far: before a validation, and at the end of a synchronous step."""
        self._needed = self._settled = self.step
        self._obtain(self.parameters, self.step)

    def after(self, step: int, *, save: Mapping[str, Any] | None = None, end: bool | str = False) -> None:
        """Tell the update pool what to do after `step`: save a checkpoint, end ("saved": only if it was), or go on."""
        said: dict[str, Any] = {"save": save, "end": end}
        if self.rebalance_every and (step + 1) % self.rebalance_every == 0:
            said["measure"] = True
        if self.own.wanted:
            said["keep"] = {"consumed": self.own.consumed, "buffers": self.buffers()}
        body = as_bytes(json.dumps(said).encode())
        for sender in self.senders.values():
            sender.put(Header(Kind.AFTER, step, step), body)

    def buffers(self) -> dict[str, Any]:
        """The model's buffers as plain lists: the update pool saves them with the rest."""
        return {name: buffer.tolist() for name, buffer in self.model_buffers.items()}

    def report(self, step: int) -> dict[str, Any]:
        """The update pool's answer to `after(step)`."""
        payload = self.receivers[min(self.receivers)].take(Kind.REPORT, step)
        assert payload is not None
        self._report = json.loads(payload.numpy().tobytes())
        return self._report

    def pool_report(self, step: int) -> list[list[Any]]:
        """How busy every update rank was until `step`, where `after(step)` has asked: see `UpdateRank.one_step`."""
        report = self._report if self._report.get("step") == step else self.report(step)
        return list(report["pool"])

    def newest_report(self) -> dict[str, Any]:
        """The newest answer that is here, without waiting; empty when there is none."""
        payload = self.receivers[min(self.receivers)].newest(Kind.REPORT)
        return {} if payload is None else json.loads(payload.numpy().tobytes())

    # -- what is recorded -----------------------------------------------------------------------------------------

    def attach(self, recorder: Recorder) -> None:
        """Record from here."""
        self.journal.attach(recorder)
        self.journal.note(
            "pool", role="compute", index=self.rank, mode=self.resolved.run.pools.mode,
            peers=self.plan.peers(self.rank), incarnation=self.journal.incarnation, state_bytes=0,
            launch=Restart.from_environment().launch,
            working_bytes=sum(local(p).numel() * p.element_size() for p in self.parameters.values()),
        )

    def describe(self) -> dict[str, Any]:
        """`pools` in environment.json."""
        settings = self.resolved.run.pools
        return self.plan.describe(settings.mode, settings.payload, self.staleness, self.dtype.itemsize,
                                  top_k=settings.top_k, state_tensors=self.resolved.state_tensors)

    def measured(self) -> dict[str, tuple[float, str]]:
        """Of the last step, what is reduced over the compute pool at a logging interval: value, operation."""
        last = self.journal.last
        seconds = max(last.get("step_seconds", 0.0), 1e-9)
        return {
            "pools/compute_busy": (last.get("busy_seconds", 0.0) / seconds, "mean"),
            "pools/communication": (
                (last.get("wait_seconds", 0.0) + last.get("hand_over_seconds", 0.0)) / seconds, "mean"
            ),
            "pools/bytes_up": (last.get("bytes_sent", 0), "sum"),
            "pools/bytes_down": (last.get("bytes_received", 0), "sum"),
            "pools/queue_depth": (last.get("queue_depth", 0), "max"),
            "pools/latency_seconds": (last.get("latency_seconds", 0.0), "mean"),
            "pools/resends": (last.get("resends", 0), "sum"),
            "pools/checksum_errors": (last.get("checksum_errors", 0), "sum"),
            "pools/staleness": (last.get("staleness", 0), "max"),
        }

    def heard(self) -> dict[str, float]:
        """What the update pool last said of itself, on rank 0."""
        if self.rank:
            return {}
        self._report = self.newest_report() or self._report
        if not self._report:
            return {}
        seconds = max(self._report["step_seconds"], 1e-9)
        return {"pools/update_busy": self._report["busy_seconds"] / seconds, "pools/version": self._report["version"]}

    def close(self) -> None:
        """Part from the update pool in good order."""
        self.journal.summarise()
        for sender in self.senders.values():
            sender.close()
        for receiver in self.receivers.values():
            receiver.close()
        if self.own.keep is not None:
            self.own.keep.remove()

    # -- gradients ------------------------------------------------------------------------------------------------

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        return torch.zeros_like(self._weight(name)) if gradient is None else local(gradient)

    def _weight(self, name: str) -> Tensor:
        return local(self.parameters[name].detach())

    def _send_gradients(self, bucket: Bucket, gradients: list[Tensor]) -> None:
        micro = self._micro if self.each_micro_batch else 0
        header = Header(Kind.GRADIENTS, self.step + 1, self.version, bucket.index, micro, self._attempt)
        self._put(bucket, header, self.feedback.payload(bucket, gradients))  # nobody scales them before `drain`

    def _put(self, bucket: Bucket, header: Header, payload: Tensor) -> None:
        self.senders[bucket.owner].put(header, payload)

    def _install_hooks(self, model: Transformer) -> None:
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: self._reduced(name, parameter))
        anywhere: Any = SimpleNamespace(dp=None, world=None, edp=None)  # only the modules of each unit matter here
        for modules, _, _ in units(model, anywhere):
            own = {parameter for module in modules for parameter in module.parameters()}
            needs = [name for name, parameter in self.parameters.items() if parameter in own]
            for module in modules:
                module.register_forward_pre_hook(self._before(needs), prepend=True)

    def _before(self, names: list[str]):
        def hook(module: nn.Module, arguments: Any) -> None:
            self._obtain(names, self._needed)

        return hook

    @torch.no_grad()
    def _reduced(self, name: str, parameter: Tensor) -> None:
        """A gradient of the micro-batch under way is reduced; its bucket leaves with the last of them."""
        last = self._micro == self.resolved.accumulation - 1
        if not (last or self.each_micro_batch) or parameter.grad is None:
            return
        gradient = local(parameter.grad)
        if self.each_micro_batch:  # .grad holds this micro-batch's share alone; their sum, for the norms, is kept here
            share, before = gradient.clone(), self._sums.get(name)
            total = share if before is None else before + share
            if last:
                gradient.copy_(total)
            else:
                self._sums[name], parameter.grad = total, None
            gradient = share
        bucket = self._place.get(name)
        if bucket is None:
            return
        ready = self._ready.setdefault(bucket.index, {})
        ready[name] = gradient
        if len(ready) == len(bucket.pieces):
            with self.journal.handing_over():
                self._send_gradients(bucket, [ready[piece.name] for piece in bucket.pieces])
            self._ready[bucket.index] = {}
            if last:
                self._sent.add(bucket.index)

    # -- weights --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _obtain(self, names: Iterable[str], version: int) -> None:
        """Bring the named parameters to `version`, waiting for what is not here yet."""
        for name in names:
            bucket = self._place.get(name)
            if bucket is not None and self._held[bucket.index] < version:
                self._take_weights(bucket, version)
            piece = self._shared.get(name)
            if piece is not None and self._handed_on.get(name, self.start) < version:
                with self.journal.waiting("pool_wait_weights"):  # of whoever exchanges the piece
                    dist.broadcast(self._weight(name), src=piece.rank, group=self.copies[piece.holders])
                self._handed_on[name] = version

    def _take_weights(self, bucket: Bucket, version: int) -> None:
        with self.journal.waiting("pool_wait_weights"):
            for older in range(self._held[bucket.index] + 1, version + 1):  # none is passed over: all are on their way
                payload = self.receivers[bucket.owner].take(Kind.WEIGHTS, older, bucket.index)
        assert payload is not None
        if payload is not PLACED:
            self._copy(bucket, payload)
        self._held[bucket.index] = version
        if self.parameters[bucket.pieces[0].name].is_cuda:
            torch.cuda.current_stream().synchronize()  # FSDP gathers on a stream of its own

    def place(self, header: Header, payload: Tensor) -> None:
        """Weights have arrived, and forward waits for them or does not need them yet. From a link's thread."""
        self._copy(self._by_index[header.bucket], payload)

    @torch.no_grad()
    def _copy(self, bucket: Bucket, payload: Tensor) -> None:
        for piece, value in zip(bucket.pieces, decode(payload, bucket, self.dtype), strict=True):
            self._weight(piece.name).copy_(value)
