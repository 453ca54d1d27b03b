"""`pdtrain diag comm`: what do the links of a job carry, and which one is not what it should be?"""

from __future__ import annotations

import click

from diag.commands.output import Output, report_options

_SIZE = "SIZE"


@click.command()
@click.argument("paths", nargs=-1, metavar="[PROBE.json]...")
@click.option("--nproc", type=click.IntRange(2, 64), metavar="N", help="Start N ranks on this machine.")
@click.option("--quick", "mode", flag_value="quick", help="Find a bad link, host or rank in few rounds.")
@click.option("--thorough", "mode", flag_value="thorough", help="Measure every link, both directions.")
@click.option("--passes", type=click.IntRange(1, 1000), metavar="N",
              help="With --thorough: repeat its rounds N times, for faults that come and go. [default: 1]")
@click.option("--baseline", metavar="PROBE.json", help="With --quick or --thorough: compare with a saved probe.")
@click.option("--op", "operations", multiple=True, metavar="NAME",
              help="Only this operation (may repeat): all_reduce, all_gather, reduce_scatter, all_to_all, "
                   "all_to_all_skewed, broadcast, send_recv.")
@click.option("--min", "smallest", default="1K", show_default=True, metavar=_SIZE, help="Smallest message.")
@click.option("--max", "largest", default="1G", show_default=True, metavar=_SIZE, help="Largest message.")
@click.option("--iterations", type=click.IntRange(3, 10_000), default=20, show_default=True, metavar="N")
@click.option("--budget", type=click.FloatRange(0.1, 86_400), metavar="SECONDS",
              help="Time for all sweeps; sizes that do not fit are left out. [default: 30; 5 with --quick]")
@click.option("--timeout", type=click.FloatRange(2, 3600), default=30.0, show_default=True, metavar="SECONDS",
              help="A rank that does not answer for so long is named.")
@click.option("--config", metavar="RUN.toml", help="Measure the TP, EP, DP and EDP groups of this run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="With --config: override a key.")
@click.option("--concurrent", is_flag=True, help="With --config: all groups of a family at the same time.")
@click.option("--ranks-per-node", type=click.IntRange(1), metavar="N", help="Default: as the ranks lie on hosts.")
@click.option("--no-extras", is_flag=True, help="No hierarchy, overlap and payload measurements.")
@click.option("--save", metavar="FILE", help="Also save all that was measured, for --baseline and plan --probe.")
@click.option("--png", metavar="FILE", help="Also draw the heat map of the links (needs matplotlib).")
@report_options
def comm(paths: tuple[str, ...], output: Output, **given: object) -> int:
    """Measure collectives and links between the ranks of a job; name a bad link, host or rank.

    `--nproc N` measures among N processes here; `torchrun ... --no-python -- pdtrain diag comm` on any number of hosts,
    NCCL where there are GPUs, Gloo elsewhere. The lowest rank that answers prints. With PROBE.json nothing is measured:
    saved probes are shown again.
    """
    from diag.probes.comm.command import run

    return run(paths, output, given)
