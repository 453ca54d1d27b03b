"""Degrees, batch and effective policies; and the TOML that a run is written as."""

from __future__ import annotations

import tomllib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrain.config import MODULES, load_run, presets, resolve, to_toml
from pdtrain.config.keys import all_keys
from pdtrain.config.load import parse_run


def test_sparrow_is_the_layout_of_the_small_procedure():
    found = resolve(load_run(preset="sparrow"))
    assert (found.world, found.tp, found.dp, found.ep, found.edp) == (8, 2, 4, 4, 2)
    assert (found.train_batch, found.accumulation, found.tokens_per_step) == (8, 2, 4096)


def test_deepseek_v3_is_the_published_job():
    found = resolve(load_run(preset="deepseek-v3"))
    assert (found.world, found.pipeline, found.tp, found.ep, found.dp, found.edp) == (2048, 16, 1, 64, 128, 2)
    assert found.tokens_per_step == 62_914_560


def test_dtype_precedence_row_then_fp32_rows_then_all():
    found = resolve(load_run(overrides=["precision.all=bf16", "modules.experts.dtype=fp32"]))
    assert {row: found.dtype(row) for row in MODULES} == {
        "attention": "bf16", "experts": "fp32", "shared_expert": "bf16", "router": "fp32",
        "dense_ffn": "bf16", "norm": "fp32", "embed_head": "bf16",
    }  # fmt: skip
    assert resolve(load_run(overrides=["modules.router.dtype=bf16"])).dtype("router") == "bf16"


def test_rows_inherit_clip_and_cadence():
    experts = ["modules.experts.checkpoint_every=50", "modules.experts.clip=0.25"]
    found = resolve(load_run(overrides=["checkpoint.every=10", *experts]))
    assert (found.clip("experts"), found.clip("attention")) == (0.25, 1.0)
    assert (found.checkpoint_every("experts"), found.checkpoint_every("router")) == (50, 10)
    assert resolve(load_run(overrides=["optimizer.clip=none"])).clip("attention") is None


def test_learning_rate_and_decay_are_scaled_by_row():
    found = resolve(load_run(overrides=["optimizer.lr=1e-3", "modules.router.lr_scale=0.5"]))
    assert found.lr("router") == pytest.approx(5e-4)
    assert (found.weight_decay("norm"), found.weight_decay("attention")) == (0.0, 0.1)


def test_unknown_row_is_named():
    with pytest.raises(KeyError, match="no module row 'mlp'"):
        resolve(load_run()).dtype("mlp")


@pytest.mark.parametrize("name", presets())
def test_printed_configuration_reloads_to_an_equal_run(name: str):
    run = load_run(preset=name)
    assert parse_run(to_toml(run, header="from a test"), "printed.toml").run == run


def test_printed_configuration_names_and_explains_every_key():
    text = to_toml(load_run(overrides=["optimizer.clip=none"]))
    for key in all_keys().values():
        assert key.description in text
    settings_lines = [line for line in text.splitlines() if " =" in line and "  # " in line]
    assert len(settings_lines) == len(all_keys())
    assert tomllib.loads(text)["optimizer"]["clip"] == "none"


floats = st.floats(min_value=1e-12, max_value=1e6)
rows = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["fp32", "bf16", None]),
        "recompute": st.sampled_from(["none", "full"]),
        "lr_scale": floats,
        "clip": st.none() | floats,
    },
)


@settings(max_examples=100, deadline=None)
@given(
    lr=floats, clip=st.none() | floats, path=st.none() | st.text(min_size=1).filter(lambda text: text != "none"),
    modules=st.dictionaries(st.sampled_from(MODULES), rows), seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_any_run_survives_printing(lr, clip, path, modules, seed):
    replace = msgspec.structs.replace
    run = load_run()
    changed = {row: replace(getattr(run.modules, row), **values) for row, values in modules.items()}
    run = replace(
        run,
        optimizer=replace(run.optimizer, lr=lr, clip=clip),
        data=replace(run.data, path=path),
        modules=replace(run.modules, **changed),
        train=replace(run.train, seed=seed),
    )
    assert parse_run(to_toml(run), "printed.toml").run == run
