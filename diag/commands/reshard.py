"""`pdtrain diag reshard`: move a checkpoint to another format, layout or family of names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from diag.commands.output import Output, report_options

#: Repeated here so that --help needs no import of the converter; a test holds the two equal.
FORMATS = ("dcp", "hf", "universal", "zero1", "zero2", "megatron", "megatron-legacy")
_COUNT = click.IntRange(1, 65536)


@click.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(FORMATS), help="Format of DST.")
@click.option("--ranks", type=_COUNT, help="dcp: over how many files the tensors are spread (default 1).")
@click.option("--dp", type=_COUNT, help="zero1, zero2: data-parallel ranks.")
@click.option("--tp", type=_COUNT, help="Tensor-parallel degree (megatron, megatron-legacy).")
@click.option("--pp", type=_COUNT, help="Pipeline stages (megatron, megatron-legacy).")
@click.option("--ep", type=_COUNT, help="Expert-parallel degree (megatron, megatron-legacy).")
@click.option("--names", metavar="FAMILY", help="Family of names in DST; default: what readers of the format expect.")
@click.option("--from-names", metavar="FAMILY", help="Family of names in SRC, where the names alone do not tell.")
@click.option("--from", "from_format", metavar="FORMAT", help="Format of SRC, where its files alone do not tell.")
@click.option("--mapping", "mappings", multiple=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
              metavar="FILE", help="Your own table of names (TOML); extends the family it names.")
@click.option("--fact", "facts", multiple=True, metavar="NAME=N",
              help="A number that SRC does not record: heads, kv_heads, head_dim, ...")
@click.option("--weights-only", is_flag=True, help="Leave the optimizer's states out.")
@click.option("--skip-unmapped", is_flag=True, help="Leave out, and list, tensors that a family has no name for.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="hf: bytes of one file at most.")
@click.option("--max-memory", metavar="SIZE", help="Memory of the whole process at most, for example 512MB.")
@click.option("--threads", type=click.IntRange(1, 64), help="Copying threads; default: the cores, 8 at most.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@report_options
def reshard(source: Path, destination: Path, output: Output, **wish: Any) -> int:
    """Move the checkpoint SRC, optimizer states included, to DST in another format or layout, bit for bit.

    SRC is a checkpoint of any known format. DST must not exist; it appears when everything is written, read back and
    compared. Interrupted, the same command goes on where it stopped. What the target has no place for is listed.

    Families of names: pdtrain, mixtral, qwen-moe, deepseek, megatron, megatron-layers, megatron-legacy, torchtitan,
    torchtitan-llama (docs/reshard.md).
    """
    from diag.checkpoints.convert.answer import resharded

    return output.emit(resharded(source, destination, force=output.force, quiet=output.json, **wish))
