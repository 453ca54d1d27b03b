"""`pdtrain diag ckpt`: prove a checkpoint whole, list it, compare two."""

from __future__ import annotations

from pathlib import Path

import click

from diag.commands.output import Output, report_options
from diag.lazy import LazyGroup

TABLE = {
    "verify": ("diag.commands.ckpt:verify", "Is a checkpoint complete and undamaged? Which step is safe to resume?"),
    "ls": ("diag.commands.ckpt:ls", "What is in a checkpoint: modules, sizes, types, sharding, balance."),
    "diff": ("diag.commands.ckpt:diff", "Compare two checkpoints of any formats: the same weights?"),
}


@click.group(cls=LazyGroup, table=TABLE)
def ckpt() -> None:
    """Checkpoints of any trainer, offline and without torch.

    Formats: torch DCP (torchtitan, OLMo-core, accelerate, this trainer), safetensors, DeepSpeed ZeRO-0 to 3 and
    universal, Megatron torch_dist and mp_rank_*, plain .pt files.
    """


@click.command()
@click.argument("path")
@click.option("--deep", is_flag=True, help="Read every byte: all CRC32s, promised digests, NaN in any element.")
@click.option("--against", metavar="CONFIG", type=click.Path(exists=True),
              help="Hold names and shapes to a model: a run config of this trainer, or a Hugging Face config.json.")
@click.option("--no-values", is_flag=True, help="Leave out the scan for NaN and infinities.")
@click.option("--threads", type=click.IntRange(1, 64), default=None, help="Readers; default: the cores, 8 at most.")
@click.option("--seal", is_flag=True, help="If nothing is wrong, write integrity.json (SHA-256 of every file) into it.")
@report_options
def verify(path: str, deep: bool, against: str | None, no_values: bool, threads: int | None, seal: bool,
           output: Output) -> int:
    """Prove that the checkpoint at PATH is complete and undamaged.

    PATH is a checkpoint's folder, one file, or a directory of many steps: then every step is checked, and the answer is
    which is the newest that is safe to resume from. Each check passes, fails with tensor, file and byte range, or does
    not apply. Without --deep the structure is checked and a sample of the bytes.
    """
    from diag.checkpoints.answer import verified

    with output.progress() as progress:
        report = verified(path, deep=deep, against=against, values=not no_values, threads=threads, seal=seal,
                          progress=progress)
    return output.emit(report)


@click.command()
@click.argument("path")
@click.option("--depth", type=click.IntRange(0, 12), default=3, show_default=True, help="Levels of the module tree.")
@report_options
def ls(path: str, depth: int, output: Output) -> int:
    """List what the checkpoint at PATH holds: a tree by module, types, sharding, and what each rank wrote."""
    from diag.checkpoints.listing import listed

    return output.emit(listed(path, depth=depth))


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--all", "everything", is_flag=True, help="Compare optimizer states too, not only the weights.")
@report_options
def diff(first: str, second: str, everything: bool, output: Output) -> int:
    """Compare the checkpoints FIRST and SECOND, of any formats and layouts.

    Names that only one has, shapes and types that differ, and for the rest the largest difference and the relative norm
    of the difference per module. The headline answers whether they hold the same weights.
    """
    from diag.checkpoints.compare import compared

    with output.progress() as progress:
        report = compared(Path(first), Path(second), everything=everything, progress=progress)
    return output.emit(report)
