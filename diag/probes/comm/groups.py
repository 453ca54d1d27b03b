"""The groups of a run configuration, made by the trainer's own code, and what its experts will exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diag.errors import UsageError
from diag.probes.comm.records import Extra

#: Families in the order in which they are measured.
FAMILIES = ("tp", "ep", "dp", "edp")
#: BF16 bytes of an element that dispatch sends; FP32 where the configuration says so.
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Family:
    """All groups of one family, and the process group that this rank belongs to."""

    name: str
    groups: Sequence[Sequence[int]]
    mine: Any

    def title(self, ranks: Sequence[int]) -> str:
        """The name of one group in tables: tp[0,1]."""
        from pdtrain.parallel.layout import compress

        return f"{self.name}{compress(list(ranks))}"


def configured(config: str, overrides: Sequence[str]) -> Any:
    """The run configuration. Raises UsageError as `pdtrain train` would."""
    from pdtrain.config import load_run

    return load_run(config, overrides=overrides)


def check_world(config: str, overrides: Sequence[str], world: int | None) -> int:
    """The number of compute ranks that `config` wants. Raises UsageError when the job has another."""
    from pdtrain.parallel.layout import Layout

    ranks = Layout.from_run(configured(config, overrides)).ranks
    if world is not None and world != ranks:
        raise UsageError(f"{config} has {ranks} compute ranks and this job has {world}; start it with {ranks} ranks, "
                         f"or add --set parallel.ranks={world}")
    return ranks


def families(config: str, overrides: Sequence[str], device: str) -> list[Family]:
    """Every family of more than one rank, made as the trainer makes them: the same meshes in the same order."""
    from pdtrain.parallel.layout import Layout
    from pdtrain.parallel.meshes import create_meshes

    layout = Layout.from_run(configured(config, overrides))
    meshes = create_meshes(layout, device)
    known = layout.groups()
    return [Family(name, known[name], getattr(meshes, name).get_group()) for name in FAMILIES
            if len(known[name][0]) > 1]


def dispatch(config: str, overrides: Sequence[str]) -> Extra | None:
    """What one rank sends to its experts in one dispatch of balanced routing; None without expert parallelism.

    Tokens of a micro-batch of a rank x top-k x hidden x bytes of an element, over all peers; a peer gets 1/EP of it.
    """
    from pdtrain.config.resolved import resolve
    from pdtrain.parallel.layout import Layout

    run = configured(config, overrides)
    layout = Layout.from_run(run)
    if layout.expert == 1:
        return None
    tokens = run.train.micro_batch * run.train.sequence_length / layout.tensor
    dtype = resolve(run).dtype("experts")
    item = ITEMSIZE.get(dtype, 2)
    sent = int(tokens * run.model.moe.top_k * run.model.hidden * item)
    return Extra(kind="dispatch", name=f"EP {layout.expert}", numbers={
        "bytes_per_rank": sent, "bytes_per_peer": sent // layout.expert, "tokens": int(tokens),
        "top_k": run.model.moe.top_k, "hidden": run.model.hidden, "dtype": dtype})
