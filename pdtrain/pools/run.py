"""Joining the pools, and the update rank's whole run.

All ranks describe what they hold, make the same plan from it, create one group per pair and direction in its order, and
learn from the update pool where the run stands. After that the pools share nothing but messages.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from diag.errors import UsageError
from pdtrain.checkpoint import Checkpointer, Restored
from pdtrain.checkpoint.manifest import Manifest, complete_checkpoints
from pdtrain.config import Resolved
from pdtrain.model.transformer import Transformer, row_of
from pdtrain.parallel.gradients import RowParameters
from pdtrain.parallel.layout import Layout
from pdtrain.pools.compute import ComputeSide
from pdtrain.pools.faults import faults_of, strike
from pdtrain.pools.journal import Journal
from pdtrain.pools.keep import Keep
from pdtrain.pools.links import End
from pdtrain.pools.message import DTYPES
from pdtrain.pools.plan import MOST_INDEXED, Piece, Plan, make_plan
from pdtrain.pools.receiving import Receiver
from pdtrain.pools.rejoin import Held, agree, has_begun, open_keep, rejoined
from pdtrain.pools.sending import Sender
from pdtrain.pools.state import RemoteCheckpointer, UpdateCheckpointer
from pdtrain.pools.update import UpdateSide
from pdtrain.restart import Restart

if TYPE_CHECKING:
    from pdtrain.recorder import Recorder

#: A link may be silent for as long as a validation or a checkpoint takes; who waits for it has a bound of its own.
LINK_TIMEOUT = timedelta(days=7)
MB = 1_000_000
#: Enough of metrics.jsonl to hold its last whole line.
TAIL_BYTES = 1 << 20


class Joined(msgspec.Struct):
    """Where the run stands, as the update pool tells it: see Restored and Checkpointer.tidy."""

    step: int = 0
    consumed: int = 0
    mixed: dict[str, int] = {}
    source: str | None = None
    passed_over: list[str] = []
    removed: list[str] = []
    aside: list[str] = []
    where: dict[str, str] = {}
    buffers: dict[str, Any] = {}
    kept: bool = False
    error: str = ""

    def restored(self) -> Restored:
        """As the unseparated run knows it."""
        source = Path(self.source) if self.source else None
        return Restored(self.step, self.consumed, self.mixed, source, tuple(self.passed_over))


def join_compute(
    resolved: Resolved, layout: Layout, rank: int, model: Transformer, rows: dict[str, RowParameters],
    data_fingerprint: str, run_dir: Path,
) -> tuple[ComputeSide, RemoteCheckpointer, Joined]:
    """A compute rank joins; collective over all ranks of the job. Call `ComputeSide.close` in the end.

    Raises UsageError: nothing to resume from, a checkpoint that does not fit, more update ranks than shards.
    """
    compute, _ = _groups(resolved, layout)
    pieces = describe(model, rank)
    mine = {
        "pieces": [asdict(piece) for piece in pieces],
        "buffers": {name: list(buffer.shape) for name, buffer in model.named_buffers()},
        "fingerprint": data_fingerprint,
        "starts": _starts(run_dir) if rank == 0 else 0,
        "begun": rank == 0 and has_begun(run_dir),
    }
    plan, told = _agree(resolved, layout, mine)
    copies = _copies(resolved, plan)
    journal = Journal("compute", told["starts"] + 1)
    side = ComputeSide(resolved, model, rows, plan, rank, compute, copies, journal)
    ends = _ends(resolved, layout, plan, rank, journal)
    side.own.keep, held = open_keep(resolved.run.pools, run_dir, rank, plan, side.own.tensors(), 0)
    agreement = agree(held, plan, told["begun"])
    last_seen = _last_row(run_dir) if rank == 0 else {}
    joined = _hear(layout)
    if joined.error:
        raise UsageError(joined.error)
    senders, receivers = _links(ends, rank, side.expects, side.place if side.places else None)
    for name, value in joined.buffers.items():
        side.model_buffers[name].copy_(torch.tensor(value))
    side.connect(senders, receivers, joined.step, joined.source is not None or joined.kept)
    if joined.kept:
        side.own.restore(joined.step)
    if agreement.begun and rank == 0:
        source = "kept" if joined.kept else "checkpoint" if joined.source is not None else "beginning"
        side.rejoined = rejoined(agreement, joined.step, source, last_seen, layout.ranks)
    if joined.source is not None:
        side.lost_steps = max(0, last_seen.get("step", 0) - joined.step)
    own = Checkpointer(run_dir / "checkpoints", resolved.run, model, None, rows, data_fingerprint, group=compute)
    return side, RemoteCheckpointer(run_dir / "checkpoints", side, own, joined.where), joined


class UpdateRank:
    """A whole run of one update rank: join, restore, then step by step what the compute pool asks for."""

    def __init__(self, resolved: Resolved, layout: Layout, rank: int, run_dir: Path) -> None:
        """Collective with `join_compute`.

        Raises UsageError like it.
        """
        _, group = _groups(resolved, layout)
        plan, told = _agree(resolved, layout, {})
        _copies(resolved, plan)
        self.resolved = resolved
        self.journal = Journal("update", told["starts"] + 1)
        held = Held()
        try:
            self.side = UpdateSide(resolved, plan, rank, self.journal)
        except UsageError as error:  # said to all ranks below
            held = Held(error=str(error))
        self.buffers = {name: torch.zeros(shape) for name, shape in told["buffers"].items()}
        self.keep: Keep | None = None
        if not held.error:
            numbers = sum(buffer.numel() for buffer in self.buffers.values())
            self.keep, held = open_keep(resolved.run.pools, run_dir, rank, plan, self.side.kept(), numbers)
        self.ends = _ends(resolved, layout, plan, rank, self.journal)
        self.agreement = agree(held, plan, told["begun"])
        if self.keep is not None:
            self.keep.interrupt = lambda version: strike(self.side.faults, "keep", version)
        first = rank == layout.ranks
        rows = list(dict.fromkeys(piece.row for bucket in plan.buckets for piece in bucket.pieces))
        self.checkpoints = UpdateCheckpointer(
            run_dir / "checkpoints", resolved.run, self.side, rows, told["fingerprint"], layout.world, group,
            self.buffers if first else {},
        )
        self.layout = layout
        self.rank = rank
        self.regroups = False  # whether this start ends to go on with another split

    def restore(self, resume: Path | Literal["latest"] | None) -> Joined:
        """Restore what is asked for, tell every rank, and connect.

        Raises UsageError on every rank of the job: nothing to resume from, a checkpoint that does not fit.
        """
        checkpoints, version = self.checkpoints, self.agreement.version
        try:
            saved = complete_checkpoints(checkpoints.root) if self.agreement.begun else []
            if version is not None and version >= max((manifest.step for _, manifest in saved), default=0):
                joined = self._from_kept(version, [manifest for _, manifest in saved])
            else:
                joined = self._from_checkpoint("latest" if saved else resume)
        except UsageError as error:
            joined = Joined(error=str(error))
        joined = _hear(self.layout, joined)
        if joined.error:
            if self.keep is not None:
                self.keep.remove()
            raise UsageError(joined.error)
        senders, receivers = _links(self.ends, self.rank, self.side.expects)
        strike(self.side.faults, "join", joined.step)
        self.side.connect(senders, receivers, joined.step, joined.source is not None or joined.kept)
        if self.keep is not None:
            if not joined.kept:
                self.keep.write(joined.step, {"consumed": joined.consumed, "buffers": joined.buffers}, self.side.kept())
            self.side.tell_kept()
        return joined

    def _from_checkpoint(self, resume: Path | Literal["latest"] | None) -> Joined:
        checkpoints = self.checkpoints
        start = checkpoints.restore(resume)
        if start.source is None and resume is None and checkpoints.has_any():
            raise UsageError(
                f"{checkpoints.root.parent} already holds checkpoints; add --resume to go on, or choose another "
                "--run-dir"
            )
        removed, aside = checkpoints.tidy(start.step)
        return Joined(
            start.step, start.consumed, start.mixed, str(start.source) if start.source else None,
            list(start.passed_over), removed, aside, checkpoints.where,
            {name: buffer.tolist() for name, buffer in self.buffers.items()} if start.source else {},
        )

    def _from_kept(self, version: int, saved: list[Manifest]) -> Joined:
        """All ranks go on at `version`, which this one has whole in its file."""
        assert self.keep is not None
        facts = self.keep.read(version, self.side.kept())
        self.keep.forget_beyond(version)
        if saved:
            self.checkpoints.where = dict(saved[-1].rows)
        removed, aside = self.checkpoints.tidy(version)
        return Joined(version, facts["consumed"], removed=removed, aside=aside, where=self.checkpoints.where,
                      buffers=facts["buffers"], kept=True)  # fmt: skip

    def attach(self, recorder: Recorder) -> None:
        """Record from here."""
        self.journal.attach(recorder)
        self.journal.note(
            "pool", role="update", index=self.rank - self.layout.ranks, mode=self.resolved.run.pools.mode,
            peers=sorted(self.side.receivers), incarnation=self.journal.incarnation, working_bytes=0,
            state_bytes=self.side.state_bytes,
        )

    def one_step(self) -> bool:
        """One step, and what is to be done after it; False when the run ends here."""
        after = self.side.run_step()
        wanted, step = after["save"], self.side.step
        if self.keep is not None and after["end"] is not True:  # else all that is left is to save it
            with self._span("keep"):
                self.keep.write(step, after["keep"], self.side.kept())
            self.side.tell_kept()
        busy = {"pool": self._busy()} if "measure" in after else {}
        if wanted is None:
            self.side.report(saved=None, problem="", where={}, **busy)
            return not after["end"]
        for name, value in wanted["buffers"].items():
            self.buffers[name].copy_(torch.tensor(value))
        strike(self.side.faults, "checkpoint", step)
        with self._span("checkpoint"):
            saved = self.checkpoints.save(step, wanted["consumed"], wanted["rows"])
        self.side.report(saved=saved, problem=self.checkpoints.problem, where=self.checkpoints.where, **busy)
        self.regroups = after["end"] == "saved" and saved
        return not (self.regroups if after["end"] == "saved" else after["end"])

    def _busy(self) -> list[Any]:
        """Of every update rank since this was asked last: rank, steps, seconds of a step, busy seconds, state bytes."""
        pool: list[Any] = [None] * self.layout.update
        steps, seconds, busy, _ = self.journal.take_window()
        dist.all_gather_object(pool, (self.rank, steps, seconds, busy, self.side.state_bytes),
                               group=self.checkpoints.group)
        return pool

    def _span(self, name: str) -> AbstractContextManager[object]:
        recorder = self.journal.recorder
        assert recorder is not None
        return recorder.span(name, self.side.step)

    def close(self) -> None:
        """The run ends well."""
        self.side.close()
        if self.keep is not None:
            self.keep.remove()


def describe(model: Transformer, rank: int) -> list[Piece]:
    """This rank's shard of every parameter, in forward order."""
    pieces = []
    for name, parameter in model.named_parameters():
        local, offset = _place(parameter)
        pieces.append(Piece(rank, name, row_of(name), tuple(parameter.shape), offset, local, ()))
    return pieces


def _place(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.ndim
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(shape), tuple(offset)


def _groups(resolved: Resolved, layout: Layout) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The two pools; every rank of the job creates both."""
    limit = timedelta(seconds=resolved.collective_seconds)
    compute = dist.new_group(list(range(layout.ranks)), limit, group_desc="compute pool")
    update = dist.new_group(list(range(layout.ranks, layout.world)), limit, "gloo", group_desc="update pool")
    return compute, update


def _copies(resolved: Resolved, plan: Plan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for every set of ranks that hold the same piece; every rank of the job creates them all."""
    limit = timedelta(seconds=resolved.collective_seconds)
    holders = sorted({piece.holders for piece in plan.shared})
    return {ranks: dist.new_group(list(ranks), limit, group_desc="pool copies") for ranks in holders}


def _agree(resolved: Resolved, layout: Layout, mine: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan, and what the first compute rank knows; the same on all ranks."""
    texts: list[Any] = [None] * layout.world
    dist.all_gather_object(texts, json.dumps(mine))
    told = [json.loads(text) for text in texts]
    shards = [[msgspec.convert(piece, Piece) for piece in each["pieces"]] for each in told[: layout.ranks]]
    settings = resolved.run.pools
    item_bytes = DTYPES[settings.payload].itemsize

    def whole(piece: Piece) -> bool:
        return resolved.muon(piece.row, len(piece.shape))

    plan = make_plan(shards, layout.update, int(settings.bucket_mb * MB), item_bytes, whole)
    if settings.top_k < 1 and max(bucket.numel for bucket in plan.buckets) > MOST_INDEXED:
        raise UsageError(f"pools.top_k = {settings.top_k}: a shard has more than {MOST_INDEXED:,} elements; use 1")
    return plan, told[0]


def _hear(layout: Layout, mine: Joined | None = None) -> Joined:
    """What the first update rank says about the start."""
    said: list[Any] = [msgspec.json.encode(mine or Joined())]
    dist.broadcast_object_list(said, src=layout.ranks)
    return msgspec.json.decode(said[0], type=Joined)


def _ends(resolved: Resolved, layout: Layout, plan: Plan, rank: int, journal: Journal) -> list[End]:
    """This rank's ends of every link, up and down: two groups per pair, created by all ranks in the same order.

    (`use_local_synchronization` would let the members alone create them, but names them after the number of groups
    that a rank is in, torch 2.13, which differs between ranks.)
    """
    settings = resolved.run.pools

    def name(number: int) -> str:
        return f"rank {number} ({'compute' if number < layout.ranks else 'update'})"

    ends = []
    for pair in plan.pairs:
        for direction in ("up", "down"):
            group = dist.new_group(
                list(pair), timeout=LINK_TIMEOUT, backend="gloo", group_desc=f"pool {direction} {pair[0]}-{pair[1]}"
            )
            if rank not in pair:
                continue
            peer = pair[1] if rank == pair[0] else pair[0]
            ends.append(End(group, rank, peer, direction, journal.incarnation, settings.timeout_seconds,
                            settings.resend_limit, settings.buffers, journal.note, name))
    return ends


def _links(ends: list[End], rank: int, judge: Any, place: Any = None) -> tuple[dict[int, Sender], dict[int, Receiver]]:
    """Start the threads: a compute rank sends up and receives down, an update rank the other way round."""
    senders, receivers = {}, {}
    faults = faults_of(rank)
    for end in ends:
        if (end.direction == "up") == (rank < end.peer):
            senders[end.peer] = Sender(end, faults)
        else:
            receivers[end.peer] = Receiver(end, judge, place)
    for peer, receiver in receivers.items():
        receiver.alive = senders[peer].ping
        receiver.others = [other for other in receivers.values() if other is not receiver]
    return senders, receivers


def _last_row(run_dir: Path) -> dict[str, Any]:
    """The last row with a step in metrics.jsonl; empty where there is none that can be read."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            rows = stream.read().splitlines()
    except OSError:
        return {}
    for row in reversed(rows):
        with suppress(ValueError, KeyError, TypeError):
            said: dict[str, Any] = json.loads(row)
            return said | {"step": int(said["step"])}
    return {}


def _starts(run_dir: Path) -> int:
    """How often this run directory was started before: the incarnation that messages carry is one more."""
    counted = Restart.from_environment().count
    try:
        with (run_dir / "events" / "rank_0.jsonl").open("rb") as stream:
            return max(counted, sum(row.startswith(b'{"event":"start"') for row in stream))
    except OSError:
        return counted
