"""Another split of the same ranks: what the ranks hand to the launcher that starts them again, and to the next start.

`<run_dir>/regroup.json` holds the change that the ranks want and those that were made. Rank 0 writes the wish before
the checkpoint; the ranks end when that is complete, and the launcher, which finds the wish, writes config.toml with the
new split and starts as many ranks again with --resume. Whatever is killed in between, the directory can be resumed:
with the old split until config.toml is replaced, with the new one from then on.

No torch: the launcher imports this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from diag.errors import UsageError
from diag.pools.legal import Limits
from diag.pools.ratio import split_words
from pdtrain.config import Run, to_toml
from pdtrain.config.resolved import fill
from pdtrain.config.rules import check
from pdtrain.recorder.environment import write_config
from pdtrain.recorder.files import write_atomically

FILE = "regroup.json"
#: Set by the launcher for the ranks: "first" start, or one that "regrouped" the pools or "went back".
VARIABLE = "PDTRAIN_POOL_LAUNCHER"
MOST_BYTES = 1 << 20


class Move(msgspec.Struct, kw_only=True):
    """One change of the split: (compute, update) ranks `before` and `after` it.

    `step`: after which it was made; `began`: when, in Unix seconds; `step_seconds`: measured before it.
    `failed`: the job did not start with the new split, and went back.
    """

    step: int
    before: tuple[int, int]
    after: tuple[int, int]
    why: str
    began: float
    step_seconds: float
    failed: bool = False


class Book(msgspec.Struct, kw_only=True):
    """regroup.json. `micro_batch`: that of the split which the run began with, the largest that fits its memory."""

    micro_batch: int
    wanted: Move | None = None
    done: list[Move] = []


def read_book(run_dir: Path, run: Run) -> Book:
    """The changes of this run; none where the file is absent or damaged."""
    path = run_dir / FILE
    try:
        if path.stat().st_size <= MOST_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=Book)
    except (OSError, msgspec.MsgspecError):
        pass
    return Book(micro_batch=run.train.micro_batch)


def write_book(run_dir: Path, book: Book) -> None:
    """Replace regroup.json as one step. Raises OSError."""
    write_atomically(run_dir / FILE, msgspec.json.encode(book) + b"\n")


def split_of(run: Run) -> tuple[int, int]:
    """(compute, update) ranks."""
    return run.parallel.ranks, run.pools.update_ranks


def limits_of(run: Run, micro_batch: int | None = None) -> Limits:
    """What layout and batch demand of the compute ranks. `micro_batch`: the largest one (default: that of `run`)."""
    modules, batch = run.modules, fill(run).train.train_batch
    return Limits(modules.attention.tensor, modules.experts.expert, run.parallel.pipeline, batch or 0,
                  micro_batch or run.train.micro_batch)


def regrouped(run: Run, compute: int, update: int, micro_batch: int | None = None) -> Run | None:
    """`run` with another split and the same sequences in each step; None where layout or batch forbid it.

    `micro_batch`: the largest allowed (default: that of `run`).
    """
    filled, limits = fill(run), limits_of(run, micro_batch)
    micro = limits.micro(compute) if limits.split(compute, update) else None
    if not limits.batch or micro is None:
        return None
    replace = msgspec.structs.replace
    other = fill(replace(
        run,
        parallel=replace(run.parallel, ranks=compute),
        pools=replace(run.pools, update_ranks=update),
        train=replace(filled.train, micro_batch=micro, accumulation=None),
    ))
    wrong = any(not mistake.warning for mistake in check(other))
    return None if wrong or other.train.train_batch != limits.batch else other


def splits(run: Run) -> list[tuple[int, int]]:
    """Every split of the run's ranks that the trainer takes, the present one among them."""
    total = sum(split_of(run))
    found = [(total - update, update) for update in range(1, total)]
    return [split for split in found if regrouped(run, *split) is not None]


class Relaunch:
    """The launcher's side: what is to be started when the ranks have ended. Ranks inherit `environment`."""

    environment = {VARIABLE: "first"}

    def __init__(self, run: Run, run_dir: Path, arguments: Callable[[Path, str | None], Sequence[str]]) -> None:
        """`arguments(config, resume)`: the command line of a rank."""
        self.run = run
        self.run_dir = run_dir
        self.arguments = arguments
        self._before: Run | None = None  # the split to go back to, until the new one has trained
        self._settle()

    def _settle(self) -> None:
        """A launcher that died may have left a wish: granted if config.toml has the new split by now, else void."""
        book = read_book(self.run_dir, self.run)
        if book.wanted is None:
            return
        if book.wanted.after == split_of(self.run):
            book.done.append(book.wanted)
        book.wanted = None
        self._write(book)

    def again(self, status: int) -> Sequence[str] | None:
        """The job has ended with `status`: how to start it again, or None.

        Raises UsageError: the directory cannot be written; the run is saved.
        """
        book = read_book(self.run_dir, self.run)
        move, book.wanted = book.wanted, None
        if move is None:
            return self._back(book) if status else None
        if status:
            self._write(book)
            return None
        other = regrouped(self.run, *move.after, book.micro_batch)
        if other is None:
            raise UsageError(f"{self.run_dir / FILE} asks for {split_words(move.after)} ranks, which do not fit the "
                             "run; go on with --resume")
        self._before, self.run = self.run, other
        print(f"pdtrain: regrouping the pools: {split_words(move.before)} -> {split_words(move.after)} (compute + "
              f"update), {sum(move.after)} ranks start again after step {move.step}", file=sys.stderr)
        config = self._config()
        book.done.append(move)
        self._write(book)
        os.environ[VARIABLE] = "regrouped"
        return self.arguments(config, "latest")

    def _back(self, book: Book) -> Sequence[str] | None:
        """The job has failed: go back to the split before, if that is because of the new one."""
        if self._before is None or not book.done or self._trained(book.done[-1].step):
            return None
        move = book.done[-1]
        self.run, self._before = self._before, None
        print(f"pdtrain: {split_words(move.after)} ranks did not come as far as their first step; going back to "
              f"{split_words(move.before)}", file=sys.stderr)
        config = self._config()
        move.failed = True
        self._write(book)
        os.environ[VARIABLE] = "went back"
        return self.arguments(config, "latest")

    def _trained(self, step: int) -> bool:
        """Whether a rank has recorded a step after `step`."""
        wanted = b'"event":"pool_step"'
        for path in (self.run_dir / "events").glob("rank_*.jsonl"):
            try:
                with path.open("rb") as stream:
                    stream.seek(max(0, path.stat().st_size - MOST_BYTES))
                    lines = [line for line in stream.read().splitlines() if wanted in line]
                if lines and msgspec.json.decode(lines[-1], type=dict[str, object]).get("step", 0) > step:  # type: ignore[operator]
                    return True
            except (OSError, msgspec.MsgspecError, TypeError):
                continue
        return False

    def _config(self) -> Path:
        try:
            return write_config(self.run_dir, to_toml(self.run))
        except OSError as error:
            raise UsageError(self._cannot(error)) from None

    def _write(self, book: Book) -> None:
        try:
            write_book(self.run_dir, book)
        except OSError as error:
            raise UsageError(self._cannot(error)) from None

    def _cannot(self, error: OSError) -> str:
        return (f"cannot write to {self.run_dir}: {error.strerror}; the run is saved: go on with "
                f"pdtrain train --run-dir {self.run_dir} --resume")
