"""The demo: a real run, what it reached against simpler models of the same text, and its first diagnosis."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from diag.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from pdtrain.data.baseline import Baseline


def run_demo(run_dir: Path, steps: int | None, processes: int) -> int:
    """Train, compare, diagnose; 0 when it did its work, whatever the report says, else the job's status.

    Raises:
        MissingExtra: torch is not installed.
        UsageError: `run_dir` is in use.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("pdtrain demo", "train", "torch") from None
    from pdtrain.commands.train import start
    from pdtrain.config import read_run
    from pdtrain.data import open_data
    from pdtrain.data.baseline import byte_baseline

    if run_dir.exists():
        raise UsageError(f"--run-dir {run_dir} exists already; choose another")
    overrides = [f"train.steps={steps}"] if steps else []
    loaded = read_run(None, preset="tiny", overrides=overrides, world=processes)
    status = start(loaded, run_dir, None)
    if status:
        return status
    print(_result(run_dir, byte_baseline(open_data(loaded.run))))
    _diagnose(run_dir)
    return 0


def _result(run_dir: Path, baseline: Baseline | None) -> str:
    """What the model reached on held-out text, beside byte n-gram models of the same text."""
    scores = validation_curve(run_dir)
    (_, first), (step, last) = scores[0], scores[-1]
    table = {"this model, untrained": first}
    if baseline is not None:
        table |= {"byte unigram, fitted on the same text": baseline.unigram, "byte bigram": baseline.bigram}
    table[f"this model, after step {step}"] = last
    lines = [f"  {bits:6.3f}  {name}" for name, bits in table.items()]
    return "\n".join(["", "bits per byte of held-out text:", *lines, ""])


def validation_curve(run_dir: Path) -> list[tuple[int, float]]:
    """(step, validation bits per byte) of a run, in order."""
    found = []
    for line in (run_dir / "metrics.jsonl").read_bytes().splitlines():
        row = msgspec.json.decode(line)
        if isinstance(row.get("val_bits_per_byte"), float):
            found.append((row["step"], row["val_bits_per_byte"]))
    return found


def _diagnose(run_dir: Path) -> None:
    from diag.commands.output import Output
    from diag.diagnose import diagnose

    print(f"$ pdtrain diag router {run_dir}", file=sys.stderr)
    Output().emit(diagnose([run_dir], only="router"))
    print(f"\nNext: pdtrain diag postmortem {run_dir}, or read {run_dir}/metrics.jsonl", file=sys.stderr)
