"""Joining the pools, and the update rank's whole run.

All ranks describe what they hold, make the same plan from it, create one group per pair and direction in its order, and
learn from the update pool where the run stands. After that the pools share nothing but messages.
"""

from __future__ import annotations

import json
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
from pdtrain.config import Resolved
from pdtrain.model.transformer import Transformer, row_of
from pdtrain.parallel.gradients import RowParameters
from pdtrain.parallel.layout import Layout
from pdtrain.pools.compute import ComputeSide
from pdtrain.pools.faults import faults_of
from pdtrain.pools.journal import Journal
from pdtrain.pools.links import End
from pdtrain.pools.message import DTYPES
from pdtrain.pools.plan import Piece, Plan, make_plan
from pdtrain.pools.receiving import Receiver
from pdtrain.pools.sending import Sender
from pdtrain.pools.state import RemoteCheckpointer, UpdateCheckpointer
from pdtrain.pools.update import UpdateSide

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
    compute, _ = _groups(layout)
    pieces = describe(model, rank)
    mine = {
        "pieces": [asdict(piece) for piece in pieces],
        "buffers": {name: list(buffer.shape) for name, buffer in model.named_buffers()},
        "fingerprint": data_fingerprint,
        "starts": _starts(run_dir) if rank == 0 else 0,
    }
    plan, told = _agree(resolved, layout, mine)
    copies = _copies(plan)
    journal = Journal("compute", told["starts"] + 1)
    side = ComputeSide(resolved, model, rows, plan, rank, compute, copies, journal)
    ends = _ends(resolved, layout, plan, rank, journal)
    joined = _hear(layout)
    if joined.error:
        raise UsageError(joined.error)
    senders, receivers = _links(ends, rank, side.expects)
    for name, value in joined.buffers.items():
        side.model_buffers[name].copy_(torch.tensor(value))
    side.connect(senders, receivers, joined.step, joined.source is not None)
    if joined.source is not None:
        side.lost_steps = max(0, _reached(run_dir) - joined.step)
    own = Checkpointer(run_dir / "checkpoints", resolved.run, model, None, rows, data_fingerprint, group=compute)
    return side, RemoteCheckpointer(run_dir / "checkpoints", side, own, joined.where), joined


class UpdateRank:
    """A whole run of one update rank: join, restore, then step by step what the compute pool asks for."""

    def __init__(self, resolved: Resolved, layout: Layout, rank: int, run_dir: Path) -> None:
        """Collective with `join_compute`.

        Raises UsageError like it.
        """
        _, group = _groups(layout)
        plan, told = _agree(resolved, layout, {})
        _copies(plan)
        self.resolved = resolved
        self.journal = Journal("update", told["starts"] + 1)
        self.side = UpdateSide(resolved, plan, rank, self.journal)
        self.buffers = {name: torch.zeros(shape) for name, shape in told["buffers"].items()}
        first = rank == layout.ranks
        rows = list(dict.fromkeys(piece.row for bucket in plan.buckets for piece in bucket.pieces))
        self.checkpoints = UpdateCheckpointer(
            run_dir / "checkpoints", resolved.run, self.side, rows, told["fingerprint"], layout.world, group,
            self.buffers if first else {},
        )
        self.ends = _ends(resolved, layout, plan, rank, self.journal)
        self.layout = layout
        self.rank = rank

    def restore(self, resume: Path | Literal["latest"] | None) -> Joined:
        """Restore what is asked for, tell every rank, and connect.

        Raises UsageError on every rank of the job: nothing to resume from, a checkpoint that does not fit.
        """
        checkpoints = self.checkpoints
        try:
            start = checkpoints.restore(resume)
            if start.source is None and resume is None and checkpoints.has_any():
                raise UsageError(
                    f"{checkpoints.root.parent} already holds checkpoints; add --resume to go on, or choose another "
                    "--run-dir"
                )
            removed, aside = checkpoints.tidy(start.step)
            joined = Joined(
                start.step, start.consumed, start.mixed, str(start.source) if start.source else None,
                list(start.passed_over), removed, aside, checkpoints.where,
                {name: buffer.tolist() for name, buffer in self.buffers.items()} if start.source else {},
            )
        except UsageError as error:
            joined = Joined(error=str(error))
        joined = _hear(self.layout, joined)
        if joined.error:
            raise UsageError(joined.error)
        senders, receivers = _links(self.ends, self.rank, self.side.expects)
        self.side.connect(senders, receivers, joined.step, joined.source is not None)
        return joined

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
        wanted = after["save"]
        if wanted is None:
            self.side.report(saved=None, problem="", where={})
            return not after["end"]
        for name, value in wanted["buffers"].items():
            self.buffers[name].copy_(torch.tensor(value))
        recorder = self.journal.recorder
        assert recorder is not None
        with recorder.span("checkpoint", self.side.step):
            saved = self.checkpoints.save(self.side.step, wanted["consumed"], wanted["rows"])
        self.side.report(saved=saved, problem=self.checkpoints.problem, where=self.checkpoints.where)
        return not after["end"]


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


def _groups(layout: Layout) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The two pools; every rank of the job creates both."""
    compute = dist.new_group(list(range(layout.ranks)), group_desc="compute pool")
    update = dist.new_group(list(range(layout.ranks, layout.world)), backend="gloo", group_desc="update pool")
    return compute, update


def _copies(plan: Plan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for every set of ranks that hold the same piece; every rank of the job creates them all."""
    holders = sorted({piece.holders for piece in plan.shared})
    return {ranks: dist.new_group(list(ranks), group_desc="pool copies") for ranks in holders}


def _agree(resolved: Resolved, layout: Layout, mine: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan, and what the first compute rank knows; the same on all ranks."""
    texts: list[Any] = [None] * layout.world
    dist.all_gather_object(texts, json.dumps(mine))
    told = [json.loads(text) for text in texts]
    shards = [[msgspec.convert(piece, Piece) for piece in each["pieces"]] for each in told[: layout.ranks]]
    settings = resolved.run.pools
    item_bytes = DTYPES[settings.payload].itemsize
    return make_plan(shards, layout.update, int(settings.bucket_mb * MB), item_bytes), told[0]


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


def _links(ends: list[End], rank: int, judge: Any) -> tuple[dict[int, Sender], dict[int, Receiver]]:
    """Start the threads: a compute rank sends up and receives down, an update rank the other way round."""
    senders, receivers = {}, {}
    faults = faults_of(rank)
    for end in ends:
        if (end.direction == "up") == (rank < end.peer):
            senders[end.peer] = Sender(end, faults)
        else:
            receivers[end.peer] = Receiver(end, judge)
    return senders, receivers


def _reached(run_dir: Path) -> int:
    """The last step in metrics.jsonl, 0 where there is none that can be read."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            rows = stream.read().splitlines()
    except OSError:
        return 0
    for row in reversed(rows):
        try:
            step = json.loads(row)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        return int(step)
    return 0


def _starts(run_dir: Path) -> int:
    """How often this run directory was started before: the incarnation that messages carry is one more."""
    try:
        with (run_dir / "events" / "rank_0.jsonl").open("rb") as stream:
            return sum(row.startswith(b'{"event":"start"') for row in stream)
    except OSError:
        return 0
