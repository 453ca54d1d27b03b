"""Save and restore of a run.

Rows of the policy table have their own cadence: a checkpoint holds the rows that are due and points to the older
folders of the others. Restoring such a mixture is allowed, said and recorded.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from diag.errors import PdtrainError, UsageError
from pdtrain.checkpoint import manifest as files
from pdtrain.checkpoint.manifest import Manifest
from pdtrain.checkpoint.state import row_state
from pdtrain.config import resolve
from pdtrain.config.schema import Run
from pdtrain.model.transformer import Transformer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a run stands. `mixed` maps rows to the older step they were restored from; `passed_over` says why newer
    checkpoints were not taken."""

    step: int = 0
    consumed: int = 0
    mixed: dict[str, int] = field(default_factory=dict)
    source: Path | None = None
    passed_over: tuple[str, ...] = ()


class Checkpointer:
    """Owns `root` (the run's `checkpoints/`). All methods are collective: every rank calls them at the same step."""

    def __init__(
        self,
        root: Path,
        run: Run,
        model: Transformer | None,
        optimizer: torch.optim.Optimizer | None,
        rows: Iterable[str],
        data_fingerprint: str,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.root = root
        self.run = run
        self.model = model
        self.optimizer = optimizer
        self.rows = tuple(rows)
        self.data_fingerprint = data_fingerprint
        self.problem = ""  # why the last save failed on this rank
        self.where: dict[str, str] = {}  # row -> folder that holds its newest save
        self.group = group  # who saves together; None: every rank of the job
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.leader = not dist.is_initialized() or dist.get_rank(group) == 0

    def row_state(self, row: str) -> dict[str, torch.Tensor]:
        """What is saved of a row, and loaded into (`pdtrain.checkpoint.state.row_state`)."""
        assert self.model is not None and self.optimizer is not None
        return row_state(self.model, self.optimizer, row)

    def after_restore(self) -> None:
        """What is left to do when every row was loaded."""

    # -- saving ---------------------------------------------------------------------------------------------------

    def due(self, step: int) -> list[str]:
        """Rows to save after optimizer step `step`; the first checkpoint of a run holds every row."""
        resolved = resolve(self.run)
        due = [row for row in self.rows if (every := resolved.checkpoint_every(row)) and step % every == 0]
        return list(self.rows) if due and not self.where else due

    def save(self, step: int, consumed: int, rows: Iterable[str] | None = None) -> bool:
        """Write the given rows (all by default) and commit. False, with one logged line, when it could not be written.

        A failure (disk full) leaves earlier checkpoints untouched and nothing half-written that looks complete.
        """
        chosen = list(rows) if rows is not None else list(self.rows)
        name = files.folder_name(step)
        temporary, final = self.root / f"{name}.tmp", self.root / name
        if self.leader:
            shutil.rmtree(temporary, ignore_errors=True)
        state = {key: value for row in chosen for key, value in self.row_state(row).items()}
        where = self.where | dict.fromkeys(chosen, name)
        problem = ""
        try:
            self._barrier()
            dcp.save(state, checkpoint_id=temporary, process_group=self.group, no_dist=not dist.is_initialized())
            if self.leader:
                files.commit(temporary, final, self._manifest(step, consumed, where))
        except (CheckpointException, OSError, PdtrainError) as error:
            problem = _first_line(error)
        self.problem = problem
        if self._any_failed(bool(problem)):
            if self.leader:
                shutil.rmtree(temporary, ignore_errors=True)
                with contextlib.suppress(OSError):
                    (self.root / f"{files.LATEST}.tmp").unlink(missing_ok=True)
                log.error("checkpoint at step %d was not written: %s", step, problem or "another rank failed")
            return False
        self.where = where
        if self.leader:
            try:
                files.sweep(self.root, self.run.checkpoint.keep)
            except OSError as error:  # what was saved is safe; the room is needed at the next save, which says so
                log.warning("older checkpoints could not be removed: %s", _first_line(error))
        return True

    def _manifest(self, step: int, consumed: int, where: dict[str, str]) -> Manifest:
        resolved = resolve(self.run)
        return Manifest(
            step=step,
            consumed=consumed,
            rows=where,
            world=self.world,
            layout={"tp": resolved.tp, "dp": resolved.dp, "ep": resolved.ep, "edp": resolved.edp},
            model=msgspec.to_builtins(self.run.model),
            data_fingerprint=self.data_fingerprint,
            seed=self.run.train.seed,
            time=time.time(),
            optimizer=self.run.optimizer.name,
        )

    # -- restoring ------------------------------------------------------------------------------------------------

    def restore(self, source: Path | Literal["latest"] | None) -> Restored:
        """Load `source` (a checkpoint folder, a run directory, or "latest" of this run) into model and optimizer.

        None starts anew. Any layout loads any other's checkpoint. Experts first, then the rest (DOMAIN.md §2).

        Raises:
            UsageError: nothing to resume from, or a checkpoint of another model or other data.
        """
        if source is None:
            return Restored()
        folder, manifest = self._choose(source)
        if differences := files.model_differences(manifest.model, msgspec.to_builtins(self.run.model)):
            raise UsageError(f"{folder} was saved from another model: {'; '.join(differences)}")
        if manifest.optimizer != self.run.optimizer.name:
            raise UsageError(
                f"{folder} holds the states of optimizer.name = \"{manifest.optimizer}\", which mean nothing to "
                f"\"{self.run.optimizer.name}\"; resume with the same optimizer"
            )
        if manifest.data_fingerprint != self.data_fingerprint:
            raise UsageError(
                f"{folder} was saved while training on other data (fingerprint {manifest.data_fingerprint}, now "
                f"{self.data_fingerprint}): its data position means nothing here; resume with the same data.*, "
                "train.seed and train.sequence_length"
            )
        by_folder: dict[str, list[str]] = {}
        for row in sorted(self.rows, key=lambda row: row != "experts"):
            if row not in manifest.rows:
                raise UsageError(f"{folder} does not hold the row {row!r}")
            by_folder.setdefault(manifest.rows[row], []).append(row)
        for name, rows in by_folder.items():
            state = {key: value for row in rows for key, value in self.row_state(row).items()}
            where, alone = folder.parent / name, not dist.is_initialized()
            try:
                dcp.load(state, checkpoint_id=where, process_group=self.group, no_dist=alone)
            except (CheckpointException, OSError, RuntimeError, EOFError) as error:
                raise UsageError(self._cannot_load(where, folder, error)) from None
        self.after_restore()
        if folder.parent == self.root:
            self.where = dict(manifest.rows)
        steps = {row: files.step_of(Path(name)) or 0 for row, name in manifest.rows.items()}
        mixed = {row: step for row, step in steps.items() if step != manifest.step}
        damaged = files.damaged_checkpoints(folder.parent) if source == "latest" else []
        newer = tuple(why for path, why in damaged if (files.step_of(path) or 0) > manifest.step)
        return Restored(manifest.step, manifest.consumed, mixed, folder, newer)

    def _cannot_load(self, damaged: Path, folder: Path, error: BaseException) -> str:
        """What is wrong with a checkpoint, and where to go from here."""
        what = "ends too early" if isinstance(_innermost(error), EOFError) else _first_line(error)
        older = [path for path, _ in files.complete_checkpoints(folder.parent) if path.name < folder.name]
        way_out = f"; an older one: --resume {older[-1]}" if older else ""
        return f"{damaged} cannot be loaded, a file of it is damaged ({what}){way_out}"

    def _choose(self, source: Path | Literal["latest"]) -> tuple[Path, Manifest]:
        root = self.root if source == "latest" else Path(source)
        if files.step_of(root) is not None:
            manifest = files.read_manifest(root)
            if missing := files.missing_parts(root, manifest):
                raise UsageError(f"{root} needs {', '.join(missing)} beside it, which is missing or incomplete")
            return root, manifest
        for candidate in (root, root / "checkpoints"):
            if complete := files.complete_checkpoints(candidate):
                return complete[-1]
        raise UsageError(f"no complete checkpoint under {root}: nothing to resume from")

    def has_any(self) -> bool:
        """Whether this run directory already holds a complete checkpoint."""
        return bool(files.complete_checkpoints(self.root))

    def tidy(self, step: int) -> tuple[list[str], list[str]]:
        """Before training goes on from `step`: remove leftovers of interrupted saves, set newer checkpoints aside.

        Returns the names of both on rank 0, empty lists elsewhere.
        """
        removed: list[str] = []
        aside: list[str] = []
        if self.leader:
            self.root.mkdir(parents=True, exist_ok=True)
            removed = files.remove_leftovers(self.root)
            aside = files.set_aside_newer(self.root, step)
        self._barrier()
        return removed, aside

    # -- agreement ------------------------------------------------------------------------------------------------

    def _any_failed(self, failed: bool) -> bool:
        if not dist.is_initialized():
            return failed
        device = "cpu" if self.model is None else next(self.model.parameters()).device
        flag = torch.tensor(float(failed), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier(group=self.group)


def _innermost(error: BaseException) -> BaseException:
    if isinstance(error, CheckpointException) and error.failures:
        return sorted(error.failures.items())[0][1][0]
    return error


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {_first_line(inner)}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
