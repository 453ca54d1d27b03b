"""The training run, readable top to bottom: join the job, build, restore, loop, save."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch

from diag.errors import PdtrainError, UsageError
from pdtrain.checkpoint import Checkpointer
from pdtrain.config import Resolved, resolve, to_toml
from pdtrain.config.schema import Run
from pdtrain.data import open_data
from pdtrain.evaluate import validation_loss
from pdtrain.instruments import Instruments
from pdtrain.optim import build_optimizer, learning_rate
from pdtrain.parallel.gradients import rows_of
from pdtrain.parallel.layout import Layout
from pdtrain.parallel.meshes import create_meshes
from pdtrain.parallel.parallelize import build_parallel_model
from pdtrain.pools.compute import ComputeSide
from pdtrain.pools.rebalance import Rebalance
from pdtrain.pools.run import join_compute
from pdtrain.pools.serve import update
from pdtrain.pools.state import RemoteCheckpointer
from pdtrain.process import Place, StopRequest, joined_job
from pdtrain.recorder import Recorder, prepare_environment, write_config, write_environment
from pdtrain.recorder.snapshots import MemoryCapture
from pdtrain.spikes import SpikeGuard, SpikeWatch
from pdtrain.step import StepResult, TrainStep

log = logging.getLogger(__name__)

#: A run whose every update in a row is skipped for a non-finite gradient is lost; OLMo-core and others cap likewise.
MAX_SKIPPED_IN_A_ROW = 5


class TrainingFailed(PdtrainError):
    """The run cannot go on; not a mistake of the command line."""

    exit_status = 1


def train(run: Run, run_dir: Path, resume: Path | Literal["latest"] | None = None) -> None:
    """Train `run` in this process, one of the job that the environment describes; collective.

    Raises:
        UsageError: the job does not fit the configuration, the data or the checkpoint.
        TrainingFailed: non-finite gradients only, or a final checkpoint that could not be written.
    """
    resolved = resolve(run)
    prepare_environment(run_dir, run.recorder.flight_recorder_entries)
    with joined_job(run.train.threads, run.train.timeout_seconds) as place:
        _train(resolved, run_dir, resume, place)


def _train(resolved: Resolved, run_dir: Path, resume: Path | Literal["latest"] | None, place: Place) -> None:
    run = resolved.run
    if place.world != resolved.world:
        raise UsageError(f"the job has {place.world} processes, the configuration asks for {resolved.world}")
    stop_request = StopRequest()
    layout = Layout.from_run(run)
    meshes = create_meshes(layout, place.device.type, resolved.collective_seconds) if layout.ranks > 1 else None
    if place.rank >= layout.ranks:
        update(resolved, layout, run_dir, resume, place)
        return
    data = open_data(run)
    model = build_parallel_model(run, meshes, place.device)
    rows = rows_of(model, meshes)
    optimizer: torch.optim.Optimizer | None = None
    checkpoints: Checkpointer | RemoteCheckpointer
    pools: ComputeSide | None = None
    described = {"groups": layout.groups(), "data": data.description}
    if layout.update:
        pools, checkpoints, joined = join_compute(resolved, layout, place.rank, model, rows, data.fingerprint, run_dir)
        start, removed, aside = joined.restored(), joined.removed, joined.aside
        described["pools"] = pools.describe()
    else:
        optimizer = build_optimizer(run, rows)
        checkpoints = Checkpointer(run_dir / "checkpoints", run, model, optimizer, rows, data.fingerprint)
        start = checkpoints.restore(resume)
        if start.source is None and resume is None and checkpoints.has_any():
            raise UsageError(f"{run_dir} already holds checkpoints; add --resume to go on, or choose another --run-dir")
        removed, aside = checkpoints.tidy(start.step)

    if place.leader:
        write_config(run_dir, to_toml(run))
        write_environment(run_dir, described)
    settings = run.recorder
    with Recorder(
        run_dir,
        log_every=run.train.log_every,
        tensorboard=settings.tensorboard,
        wandb=settings.wandb,
        spans=settings.spans,
        stall_seconds=run.train.timeout_seconds / 2,  # before the collectives themselves give up
    ) as recorder:
        instruments = Instruments(resolved, model, list(rows), recorder, meshes, place, pools)
        instruments.announce(layout.text(), data.description, start, removed, aside)
        if start.consumed == start.step * resolved.train_batch:  # else a step does not tell its sequences
            instruments.documents = data.documents
        on_spike, guard = run.train.on_spike, None
        if on_spike != "warn":
            guard = SpikeGuard(on_spike, run.train.on_spike_max, meshes)
        elif place.leader:
            recorder.listeners.append(SpikeWatch(instruments.spike).row)
        step_once = TrainStep(resolved, model, optimizer, rows, data, meshes, place.device, recorder, guard, pools)
        memory = MemoryCapture(run_dir / "dumps", place.rank, place.device, entries=settings.memory_history_entries,
                               steps=settings.memory_snapshot_steps, complain=recorder.complain)
        validation = data.validation(run.train.val_sequences) if run.train.val_sequences else None
        consumed, step, previous, regroups = start.consumed, start.step, None, False
        rebalance = None
        if pools is not None and pools.rebalance_every:
            assert isinstance(checkpoints, RemoteCheckpointer)
            rebalance = Rebalance(pools, checkpoints, instruments, run_dir, step)
        skipped_in_a_row = torch.zeros((), device=place.device)

        def validate() -> dict[str, float]:
            if validation is None or not len(validation):
                return {}
            if pools is not None:
                pools.settle()  # the weights of every step so far
            with instruments.aside("validation", step):
                loss = validation_loss(model, validation, run.train.micro_batch, meshes, place.device)
            values = {"val_loss": loss}
            if bytes_per_token := data.bytes_per_token("validation"):
                values["val_bits_per_byte"] = loss / math.log(2) / bytes_per_token
            return values

        if step == 0:
            instruments.record(step, validate())
        while step < run.train.steps:
            began = time.perf_counter()
            lr = learning_rate(run.optimizer, step, run.train.steps)
            with memory.step(step + 1, model, optimizer) if optimizer is not None else nullcontext():
                try:
                    result = step_once(consumed, lr, bool(stop_request))
                except RuntimeError as error:
                    raise (error if pools is None else pools.explained(error, step + 1)) from error.__cause__
            step, consumed = step + 1, consumed + resolved.train_batch
            spike = result.spike
            if spike is None or spike.verdict.kind == "nan":
                skipped_in_a_row = (skipped_in_a_row + 1) * result.skipped
            seconds = time.perf_counter() - began
            last = step == run.train.steps
            validated = validate() if last or (run.train.val_every and step % run.train.val_every == 0) else {}
            data_values = {"data_repeated": step_once.repeats.take(), "epoch": consumed / data.sequences_per_epoch}
            instruments.after_step(step, result, lr, seconds, step_once.data_seconds, validated | data_values)
            stopping = _stop_agreed(previous if place.device.type == "cuda" else result)
            previous = result
            if spike is not None:
                instruments.spike(step, spike, consumed - resolved.train_batch)
                if spike.action == "rewind" and not stopping and guard is not None:
                    assert isinstance(checkpoints, Checkpointer)  # the configuration refuses this with pools
                    step = _rewind(checkpoints, instruments, guard, step, consumed)
                    continue
            if step % run.train.log_every == 0 and skipped_in_a_row.item() >= MAX_SKIPPED_IN_A_ROW:
                raise TrainingFailed(
                    f"step {step}: {MAX_SKIPPED_IN_A_ROW} updates in a row had non-finite gradients and were skipped; "
                    f"see grad_norm/* in {run_dir / 'metrics.jsonl'} for the module that went first"
                )
            due = checkpoints.due(step)
            regroups = rebalance is not None and not (stopping or last) and rebalance.wants(step)
            if stopping or last or due or regroups:
                with instruments.aside("checkpoint", step):
                    if rebalance is not None and regroups:
                        saved = regroups = rebalance.save(step, consumed)
                    else:
                        saved = checkpoints.save(step, consumed, None if stopping or last else due)
                instruments.checkpoint_saved(step, saved)
                if not saved and (stopping or last):
                    raise TrainingFailed(
                        f"the last checkpoint (step {step}) could not be written to {checkpoints.root}: "
                        f"{checkpoints.problem or 'another rank failed'}"
                    )
            if isinstance(checkpoints, RemoteCheckpointer):
                checkpoints.go_on(step)
            if stopping:
                instruments.note(f"{stop_request.why}: stopped after step {step}, saved, resume with --resume")
                break
            if regroups:
                break
        if pools is not None:
            pools.close()
        instruments.finish(step, regroups=regroups)


def _rewind(checkpoints: Checkpointer, instruments: Instruments, guard: SpikeGuard, step: int, consumed: int) -> int:
    """Back to the last checkpoint, with the data position where it is; returns the step to go on from. Collective.

    Before the first checkpoint there is nowhere to go: the dropped update is all that is done.
    """
    if not checkpoints.where:
        instruments.note(f"step {step}: no checkpoint yet to go back to; the update was dropped")
        return step
    start = checkpoints.restore("latest")
    guard.rewound()
    instruments.rewound(step, start, consumed)
    return start.step


def _stop_agreed(result: StepResult | None) -> bool:
    """Whether any rank asked to stop. On GPUs the step before is asked, so that the host need not wait for this one."""
    return result is not None and result.stop.item() > 0
