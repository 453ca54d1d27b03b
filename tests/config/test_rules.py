"""The rules that join keys: each with what breaks it, what nearly does, and the advice it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from diag.errors import UsageError
from pdtrain.config import load_run, read_run
from pdtrain.config.docs import EXAMPLES, render
from pdtrain.config.load import parse_run
from pdtrain.config.rules import REFUSALS, RULES

ROOT = Path(__file__).parents[2]


def test_docs_are_what_the_schema_and_the_rules_say():
    assert (ROOT / "docs" / "config.md").read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.wrong.replace(" ", "-"))
def test_each_documented_mistake_is_caught_and_alone(example):
    lines = example.lines()
    assert lines, "the configuration of this example passes"
    rules = {rule.__name__: rule for rule in (*RULES, *REFUSALS)}
    if example.rule:
        assert example.rule in rules
    if not example.wrong.startswith(("world size fits neither", "update pool")):
        assert len(lines) == 1, "one fault, one line"


def test_every_rule_has_an_example():
    assert {rule.__name__ for rule in (*RULES, *REFUSALS)} == {example.rule for example in EXAMPLES if example.rule}


def said(*overrides: str, preset: str = "sparrow", world: int | None = None, train: bool = False) -> str:
    """Everything that is said about the preset with `overrides`: the mistakes, or the warnings."""
    try:
        loaded = parse_run(
            (ROOT / "pdtrain" / "config" / "presets" / f"{preset}.toml").read_text(),
            "run.toml", overrides=overrides, world=world, train=train,
        )  # fmt: skip
    except UsageError as error:
        return str(error)
    return "\n".join(f"warning: {line}" for line in loaded.warnings)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_tensor_sizes_that_divide_are_silent(tensor: int):
    assert said(f"modules.attention.tensor={tensor}") == ""


def test_legal_tensor_sizes_respect_heads_and_key_value_heads():
    words = said("modules.attention.tensor=6", "parallel.ranks=6", "model.heads=12", "model.kv_heads=4")
    assert "does not divide 4 key/value heads; use 1, 2 or 4" in words
    # latent attention has no key/value heads of its own
    assert said("model.attention=mla", "model.kv_heads=1", "modules.attention.tensor=8") == ""


def test_advice_of_the_factorisation_is_itself_legal():
    assert "parallel.ranks" not in said(world=12)  # fits both
    assert "use 4 or 8, or modules.experts.expert = 2\n" in said(world=6)  # 3 divides 6 ranks, but not 8 experts


def test_batch_identity_numbers():
    assert said("train.train_batch=12") == ""  # accumulation 3 follows
    assert "no multiple of 4; use 8 or 12" in said("train.train_batch=10")
    derived = ["train.train_batch=none", "train.accumulation=5"]
    assert load_run(preset="sparrow", overrides=derived).train.train_batch == 20
    words = said("train.accumulation=4")
    assert "train.train_batch = 8 is not micro_batch 1 x accumulation 4 x DP 4 = 16" in words
    assert "train.accumulation = 2" in words


def test_group_families_count_dp_edp_and_router_once():
    assert said() == ""
    words = said("parallel.pipeline=2", "parallel.ranks=16")
    assert words.startswith("warning: ")
    assert "4 group families (TP + DP + EP + PP)" in words
    # two ranks that differ in tensor and experts alone: TP, EP and the router's DP
    assert said(preset="tiny") == ""


def test_capacity_factor_of_one_is_legal():
    assert said("model.moe.capacity_factor=1") == ""
    assert "drops tokens" in said("model.moe.capacity_factor=0.99")


def test_bias_balancing_with_a_guard_loss_is_silent():
    assert said("model.moe.bias_update_speed=0.001", "model.moe.aux_loss=1e-4") == ""
    assert said("model.moe.bias_update_speed=0.001", "model.moe.aux_loss=0") == ""
    assert "steers the main gradient" in said("model.moe.bias_update_speed=0.001", "model.moe.aux_loss=2e-4")


def test_group_limited_routing_must_reach_top_k():
    limited = ("model.moe.groups=4", "model.moe.top_groups=1")
    assert said(*limited) == ""  # 2 experts per group, top-2
    assert "more than the 2 experts in top_groups 1 of 4 groups" in said(*limited, "model.moe.top_k=3")


def test_rows_that_follow_may_repeat_attentions_degree():
    assert said("modules.dense_ffn.tensor=2") == ""
    assert "differs from modules.attention.tensor = 2" in said("modules.embed_head.tensor=4")
    assert "routed experts are split by expert" in said("modules.experts.tensor=2")


def test_cadences_that_meet_are_silent():
    assert said("checkpoint.every=200", "modules.experts.checkpoint_every=1000") == ""
    assert said("checkpoint.every=1000", "modules.attention.checkpoint_every=200") == ""
    assert "checkpoint.every = 1000 is no multiple of the shortest interval, 300" in said(
        "checkpoint.every=1000", "modules.attention.checkpoint_every=300"
    )


def test_byte_vocabulary_is_asked_only_of_bytes():
    small = "model.vocab_size=128"
    assert "cannot hold 256 byte values" in said(small)
    assert said(small, "data.tokenizer=words.json") == ""
    assert said(small, "data.path=corpus.bin") == ""


def test_what_can_only_be_planned_is_refused_to_train():
    pools = ("pools.mode=sync", "pools.update_ranks=2", "train.on_spike=rewind", "checkpoint.every=10")
    for overrides in (("parallel.pipeline=2", "parallel.ranks=16"), pools):
        assert "yet" not in said(*overrides)
        assert "yet" in said(*overrides, train=True)


def test_warnings_come_with_the_mistakes_and_name_their_place():
    words = said("modules.router.dtype=bf16", "model.moe.top_k=9")
    assert words.splitlines()[0] == "1 mistake in the configuration:"
    assert "  warning: --set: modules.router.dtype" in words


def test_bf16_router_is_a_warning_so_that_drills_can_do_it():
    loaded = read_run(preset="tiny", overrides=["modules.router.dtype=bf16"])
    assert len(loaded.warnings) == 1
    assert "first suspect when routing collapses" in loaded.warnings[0]
