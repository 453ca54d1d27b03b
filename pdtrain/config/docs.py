"""docs/config.md from schema, presets and rules: `python -m pdtrain.config.docs` (or `make docs`) writes it.

A test compares the file with `render()`, and demands an example of a mistake for every rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diag.errors import UsageError
from pdtrain.config import keys
from pdtrain.config.dump import scalar
from pdtrain.config.load import parse_run, presets
from pdtrain.config.schema import MODULES

INTRODUCTION = """\
# The run configuration

<!-- Written by `make docs` from pdtrain/config; edit the descriptions there. -->

A run is described by one TOML file, or by a preset that ships with the package, and changed on the command line:

    pdtrain train run.toml --set train.steps=500
    pdtrain train --preset sparrow --set modules.experts.expert=2 --print-config

- Every key has a default: a file names only what differs. `--print-config` prints the result with every default and
  its meaning; what it prints is a configuration again.
- `--set section.key=value` takes TOML values (`3`, `1e-4`, `true`, `[..]`) and bare words (`--set precision.all=bf16`).
  Later ones win.
- A key without a value (default "absent" below) is unset again with `none`, as in `--set optimizer.clip=none`.
- An unknown key is an error, and so is every contradiction between keys; all of them are shown at once, before any
  process starts, with exit status 2. Warnings go to stderr and the run goes on.
- `train_batch = micro_batch x accumulation x DP`: give any two, or `micro_batch` alone, and the rest follows.
- `--nproc N`, and the world size of a torchrun job, set `parallel.ranks`.
"""

TABLE_INTRODUCTION = f"""\
## [modules.*]: the module policy table

One table per row, `[modules.NAME]`: {", ".join(MODULES)}.
Attention, dense FFN, embedding and head are split over the tensor group, routed experts over the expert group; router,
shared expert and norms are whole on every rank (sharded for storage by `parallel.fsdp`). Router and norms compute in
FP32 unless their own row says otherwise; norms have no weight decay.
"""


@dataclass(frozen=True, slots=True)
class Example:
    """A configuration that is wrong in one way. `rule` names the function of rules.py that says so, if one does."""

    wrong: str
    toml: str
    rule: str = ""
    overrides: tuple[str, ...] = ()
    world: int | None = None
    planned: bool = False  #: only `--dry-run` gets this far

    def lines(self) -> list[str]:
        """What the command prints for it."""
        try:
            loaded = parse_run(
                self.toml, "run.toml", overrides=self.overrides, world=self.world, train=not self.planned
            )
        except UsageError as error:
            return [line.strip() for line in str(error).splitlines() if not line.endswith("in the configuration:")]
        return [f"warning: {line}" for line in loaded.warnings]


def _toml(**sections: str) -> str:
    """`modules_attention="tensor = 2"` -> "[modules.attention]", "tensor = 2"."""
    return "\n".join(f"[{name.replace('__', '.')}]\n{body}" for name, body in sections.items())


SPARROW = {"parallel": "ranks = 8", "modules__attention": "tensor = 2", "modules__experts": "expert = 4"}

EXAMPLES = (
    Example("unknown key", _toml(train="stepz = 500")),
    Example("unknown key of another trainer", _toml(modules__attention="tp = 2")),
    Example("unknown key in --set", "", overrides=("moe.topk=2",)),
    Example("unknown section", _toml(trian="steps = 5")),
    Example("wrong type", _toml(train='steps = "many"')),
    Example("out of range", _toml(optimizer="lr = -1e-4")),
    Example("no such choice", _toml(precision='all = "fp16"')),
    Example(
        "TP does not divide the heads",
        _toml(parallel="ranks = 6", model="heads = 64\nkv_heads = 64", modules__attention="tensor = 6"),
        "tensor_divides_heads",
    ),
    Example(
        "TP does not divide the key/value heads",
        _toml(parallel="ranks = 4", model="kv_heads = 2", modules__attention="tensor = 4"), "tensor_divides_heads",
    ),
    Example(
        "TP does not divide a width",
        _toml(parallel="ranks = 2", model="vocab_size = 50257", modules__attention="tensor = 2"),
        "tensor_divides_widths",
    ),
    Example(
        "TP does not divide the sequence",
        _toml(parallel="ranks = 2", train="sequence_length = 511", modules__attention="tensor = 2"),
        "sequence_parallel_divides",
    ),
    Example(
        "EP does not divide the experts", _toml(parallel="ranks = 3", modules__experts="expert = 3"),
        "expert_divides_experts",
    ),
    Example("world size fits neither factorisation", _toml(**SPARROW), "ranks_factorise", world=7),
    Example("world size fits attention only", _toml(**SPARROW), "ranks_factorise", world=6),
    Example("update pool takes all", _toml(pools='mode = "sync"\nupdate_ranks = 4'), "ranks_factorise", world=4),
    Example(
        "batch identity broken",
        _toml(parallel="ranks = 4", train="micro_batch = 4\naccumulation = 2\ntrain_batch = 48"), "batch_identity",
    ),
    Example(
        "batch that no accumulation gives", _toml(parallel="ranks = 4", train="micro_batch = 4\ntrain_batch = 40"),
        "batch_identity",
    ),
    Example(
        "more than three group families", _toml(**SPARROW | {"parallel": "ranks = 16\npipeline = 2"}),
        "group_families", planned=True,
    ),
    Example("degree leaves its domain", _toml(
        model="heads = 16\nkv_heads = 16", parallel="ranks = 16", modules__attention="tensor = 16"
    ), "degrees_stay_in_their_domain"),
    Example("capacity factor below 1", _toml(model__moe="capacity_factor = 0.8"), "capacity_holds_an_even_share"),
    Example("top-k above the experts", _toml(model__moe="experts = 4\ntop_k = 6"), "routing_has_enough_experts"),
    Example("groups do not divide the experts", _toml(model__moe="groups = 3"), "routing_has_enough_experts"),
    Example("two kinds of balancing", _toml(model__moe="bias_update_speed = 0.001"), "balancing_is_one"),
    Example("no balancing", _toml(model__moe="aux_loss = 0"), "balancing_is_one"),
    Example("more dense layers than layers", _toml(model="dense_layers = 5"), "layers_fit"),
    Example("odd head dimension", _toml(model="head_dim = 33"), "heads_are_whole"),
    Example("heads not in whole groups", _toml(model="kv_heads = 3"), "heads_are_whole"),
    Example("width that grouped GEMM refuses", _toml(model__moe="expert_hidden = 250"), "grouped_gemm_aligned"),
    Example(
        "own TP on a row that follows",
        _toml(parallel="ranks = 4", modules__attention="tensor = 4", modules__dense_ffn="tensor = 2"),
        "degrees_stand_on_their_rows",
    ),
    Example("EP on another row", _toml(modules__router="expert = 2"), "degrees_stand_on_their_rows"),
    Example("BF16 router", _toml(modules__router='dtype = "bf16"'), "fp32_rows_stay_fp32"),
    Example(
        "cadences that never meet", _toml(checkpoint="every = 200", modules__experts="checkpoint_every = 500"),
        "checkpoints_hold_every_row",
    ),
    Example("cadence without saves", _toml(modules__experts="checkpoint_every = 500"), "checkpoints_hold_every_row"),
    Example("warm-up as long as the run", _toml(optimizer="warmup_steps = 100"), "schedule_reaches_its_peak"),
    Example("rewind without checkpoints", _toml(train='on_spike = "rewind"'), "rewind_has_somewhere_to_go"),
    Example("validation on nothing", _toml(data="val_share = 0"), "validation_has_documents"),
    Example("too few rows for bytes", _toml(model="vocab_size = 128"), "bytes_fit_the_vocabulary"),
    Example("update ranks without a mode", _toml(pools="update_ranks = 2"), "pools_have_ranks"),
    Example("mode without update ranks", _toml(pools='mode = "sync"'), "pools_have_ranks"),
    Example("kept state without pools", _toml(pools='keep = "/dev/shm/pools"'), "kept_state_is_used"),
    Example(
        "kept state that nobody uses", _toml(pools='mode = "sync"\nupdate_ranks = 1\nkeep = "/dev/shm/pools"'),
        "kept_state_is_used",
    ),
    Example(
        "folder without a name", _toml(pools='mode = "sync"\nupdate_ranks = 1\noffload = ""'), "kept_state_is_used",
    ),
    Example(
        "micro-batches that wait", _toml(pools='mode = "sync"\nupdate_ranks = 1\ngranularity = "micro_batch"'),
        "micro_batches_leave_early",
    ),
    Example("a wait without end", _toml(pools='mode = "sync"\nupdate_ranks = 1\ntimeout_seconds = 1e300')),
    Example("pipeline (planned, not trained)", _toml(parallel="ranks = 2\npipeline = 2"), "no_pipeline_yet"),
    Example(
        "tensor without sequence parallel",
        _toml(parallel="ranks = 2\nsequence_parallel = false", modules__attention="tensor = 2"),
        "sequence_parallel_is_on",
    ),
    Example(
        "pools that rewind",
        _toml(pools='mode = "sync"\nupdate_ranks = 1', train='on_spike = "rewind"', checkpoint="every = 10"),
        "no_rewind_of_pools_yet",
    ),
    Example("rebalancing one pool", _toml(pools='rebalance = "auto"'), "rebalancing_has_its_steps"),
    Example(
        "rebalancing all the time",
        _toml(pools='mode = "sync"\nupdate_ranks = 1\nrebalance = "auto"\nrebalance_every = 2'),
        "rebalancing_has_its_steps",
    ),
    Example(
        "rebalancing after the end",
        _toml(pools='mode = "sync"\nupdate_ranks = 1\nrebalance = "advise"\nrebalance_every = 500'),
        "rebalancing_has_its_steps",
    ),
    Example(
        "rebalancing a short run",
        _toml(pools='mode = "sync"\nupdate_ranks = 1\nrebalance = "auto"', train="steps = 12"),
        "rebalancing_has_its_steps",
    ),
    Example("stale weights", _toml(pools='mode = "async"\nupdate_ranks = 1'), "stale_weights_are_meant"),
    Example(
        "asynchronous without staleness", _toml(pools='mode = "async"\nupdate_ranks = 1\nstaleness = 0'),
        "stale_weights_are_meant",
    ),
    Example(
        "staleness where nothing is stale", _toml(pools='mode = "stream"\nupdate_ranks = 1\nstaleness = 2'),
        "stale_weights_are_meant",
    ),
    Example(
        "stale weights for Muon", _toml(pools='mode = "async"\nupdate_ranks = 1\nstaleness = 2',
                                        optimizer='name = "muon"'), "stale_weights_are_meant",
    ),
    Example(
        "thinned without feedback", _toml(pools='mode = "stream"\nupdate_ranks = 1\ntop_k = 0.1'),
        "what_a_payload_takes_is_fed_back",
    ),
    Example(
        "thinned for nothing",
        _toml(pools='mode = "stream"\nupdate_ranks = 1\ntop_k = 0.7\nerror_feedback = true'),
        "what_a_payload_takes_is_fed_back",
    ),
    Example(
        "nothing to feed back", _toml(pools='mode = "stream"\nupdate_ranks = 1\nerror_feedback = true'),
        "what_a_payload_takes_is_fed_back",
    ),
    Example("absurd size of a message", _toml(pools='mode = "stream"\nupdate_ranks = 1\nbucket_mb = 1e9')),
)  # fmt: skip


def render() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_presets(), *_sections(), *_mistakes()])


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield from (f"- `{name}`: {purpose}" for name, purpose in presets().items())
    yield ""


def _sections() -> Iterator[str]:
    root = keys.tree()
    for name in root.tables:
        if name == "modules":
            yield TABLE_INTRODUCTION
            yield from _keys(root.tables[name].tables["attention"])
        else:
            yield from _section(root.tables[name])


def _section(table: keys.Table) -> Iterator[str]:
    yield f"## [{table.name}]\n\n{table.description}\n"
    yield from _keys(table)
    for sub in table.tables.values():
        yield from _section(sub)


def _keys(table: keys.Table) -> Iterator[str]:
    yield "| key | default | values | meaning |\n|---|---|---|---|"
    for name, key in table.keys.items():
        default = "absent" if key.default is None else f"`{scalar('x', key.default).removeprefix('x = ')}`"
        yield f"| `{name}` | {default} | {key.expected} | {key.description} |"
    yield ""


def _mistakes() -> Iterator[str]:
    yield (
        "## What a mistake looks like\n\nEach line as `pdtrain train run.toml` prints it after `pdtrain: `; warnings "
        "do not stop the run.\n\n| wrong | what is printed |\n|---|---|"
    )
    for example in EXAMPLES:
        printed = "<br>".join(f"`{line}`" for line in example.lines())
        yield f"| {example.wrong} | {printed.replace('|', chr(92) + '|')} |"
    yield ""


if __name__ == "__main__":
    target = Path(__file__).parents[2] / "docs" / "config.md"
    target.write_text(render(), encoding="utf-8")
    print(f"wrote {target}")
