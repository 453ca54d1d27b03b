"""From file, preset and --set to a run: what is taken, what is refused, and in which words."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from diag.errors import UsageError
from pdtrain.config import load_run, presets, read_run, resolve, to_toml
from pdtrain.config.keys import all_keys, nearest
from pdtrain.config.load import parse_run


def refused(text: str = "", *overrides: str, **options) -> list[str]:
    """The lines of the error for `text` and `overrides`."""
    with pytest.raises(UsageError) as caught:
        parse_run(text, "run.toml", overrides=overrides, **options)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_defaults_are_a_legal_run():
    run = load_run()
    assert (run.train.accumulation, run.train.train_batch) == (1, run.train.micro_batch)


def test_file_changes_only_what_it_names(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 7\n[modules.norm]\nclip = 0.5\n")
    loaded = read_run(file)
    assert loaded.name == "mine"
    assert loaded.run.train.steps == 7
    assert loaded.run.train.micro_batch == load_run().train.micro_batch
    # a row keeps its own defaults when the file names only one of its keys
    assert (loaded.run.modules.norm.clip, loaded.run.modules.norm.weight_decay_scale) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=50", "train.steps", 50),
        (" train.steps = 50 ", "train.steps", 50),
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("precision.all=bf16", "precision.all", "bf16"),
        ('precision.all="bf16"', "precision.all", "bf16"),
        ("recorder.wandb=true", "recorder.wandb", True),
        ("data.path=/corpus/*.jsonl", "data.path", "/corpus/*.jsonl"),
        ("data.path=2024", "data.path", "2024"),
        ("data.path=2024-01-01", "data.path", "2024-01-01"),
        ("data.path=a=b", "data.path", "a=b"),
        ("optimizer.clip=none", "optimizer.clip", None),
        ("model.moe={top_k = 3}", "model.moe.top_k", 3),
        ("modules.attention.recompute=none", "modules.attention.recompute", "none"),
    ],
)
def test_set_takes_toml_values_and_bare_words(override: str, key: str, value: object):
    found = load_run(overrides=[override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_later_set_wins_over_earlier_and_over_the_file():
    text = "[train]\nsteps = 1\n[optimizer]\nwarmup_steps = 0\n"
    run = parse_run(text, "run.toml", overrides=["train.steps=2", "train.steps=3"]).run
    assert run.train.steps == 3


def test_a_set_that_hides_a_second_key_is_one_text():
    assert load_run(overrides=["data.path=1\nother = 2"]).data.path == "1\nother = 2"


@pytest.mark.parametrize("override", ["train.steps", "=3", "", "train..steps=3", ".steps=3", "train steps=3"])
def test_malformed_set_is_explained(override: str):
    (line,) = refused("", override)
    assert line.startswith("--set: takes section.key=value, got ")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.stepz", "train.steps"),
        ("trian.steps", "train.steps"),
        ("moe.top_k", "model.moe.top_k"),
        ("train.lr", "optimizer.lr"),
        ("modules.attention.tp", "modules.attention.tensor"),
        ("modules.expert.expert", "modules.experts.expert"),
        ("model.num_experts", "model.moe.experts"),
        ("train.global_batch_size", "train.train_batch"),
        ("max_steps", "train.steps"),
    ],
)
def test_unknown_key_offers_the_nearest(key: str, meant: str):
    assert nearest(key) == meant
    (line,) = refused("", f"{key}=1")
    assert line == f"--set: {key} is not a known key; did you mean {meant}?"


def test_unknown_key_with_nothing_near_lists_the_section():
    (line,) = refused("[train]\nzzz = 1\n")
    assert line.startswith("run.toml: train.zzz is not a known key; [train] has steps, seed, ")


def test_every_key_is_its_own_nearest():
    assert [key for key in all_keys() if nearest(key) != key] == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[train]\nsteps = 'ten'", 'train.steps = "ten" is text; expected a whole number at least 1'),
        ("[train]\nsteps = 1.5", "train.steps = 1.5 is not a whole number; expected a whole number at least 1"),
        ("[train]\nsteps = 0", "train.steps = 0 is out of range; expected a whole number at least 1"),
        ("[train]\nsteps = true", "train.steps = true is a truth value; expected a whole number at least 1"),
        ("[train]\nsteps = [1, 2]", "train.steps = [1, 2] is a list; expected a whole number at least 1"),
        ("[train]\nsteps = 2024-01-01", "train.steps = 2024-01-01 is a date or time; expected a whole number"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan is out of range; expected a number above 0"),
        ("[optimizer]\nlr = inf", "optimizer.lr = inf is out of range; expected a number above 0"),
        ("[recorder]\nwandb = 1", "recorder.wandb = 1 is a number; expected true or false"),
        ("[data]\npath = 3", "data.path = 3 is a number; expected text"),
        ("[precision]\nall = 'fp16'", 'precision.all = "fp16" is none of the choices; expected "bf16" or "fp32"'),
        ("train = 3", "train = 3 is a section; its keys are steps, seed, "),
    ],
)
def test_wrong_value_is_named_with_what_was_expected(text: str, line: str):
    (found,) = refused(text)
    assert found.startswith(f"run.toml: {line}")


def test_all_mistakes_are_shown_at_once_with_their_places():
    lines = refused("[train]\nstepz = 5\nmicro_batch = 'x'\n[model.moe]\ncapacity_factor = 0.5\n", "optimizer.lr=-1")
    assert lines == [
        "4 mistakes in the configuration:",
        "run.toml: train.stepz is not a known key; did you mean train.steps?",
        'run.toml: train.micro_batch = "x" is text; expected a whole number at least 1',
        "--set: optimizer.lr = -1 is out of range; expected a number above 0",
        "run.toml: model.moe.capacity_factor = 0.5 drops tokens even when routing is perfectly balanced; "
        'use at least 1 (start at 1.25), or "none" for dropless',
    ]


def test_a_wrong_key_breaks_no_rule_that_depends_on_it():
    """ranks is unknown and so is tensor: that 1 rank does not fit tensor 2 would be our invention."""
    lines = refused("[parallel]\nranks = 'eight'\n[modules.attention]\ntensor = 2\n[modules.experts]\nexpert = 2\n")
    assert len(lines) == 1
    assert "parallel.ranks" in lines[0]
    lines = refused("[parallel]\nrank = 8\n[modules.attention]\ntensor = 2\n")
    assert lines == ["run.toml: parallel.rank is not a known key; did you mean parallel.ranks?"]


def test_control_characters_are_shown_not_sent():
    (line,) = refused('[train]\n"st\\u001b[31meps" = 1\n')
    assert "\x1b" not in line
    assert r"\x1b[31m" in line
    (line,) = refused('[train]\nsteps = "\\u001b[2J\\n"')
    assert "\x1b" not in line


def test_long_values_are_cut():
    (line,) = refused(f"[train]\nsteps = '{'x' * 5000}'")
    assert len(line) < 250


def test_file_that_cannot_be_read_is_one_line(tmp_path: Path):
    cut, binary = tmp_path / "cut.toml", tmp_path / "binary.toml"
    cut.write_text("[train\nsteps = 5")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, words in [
        (tmp_path / "absent.toml", "no such configuration file"),
        (tmp_path, "is a directory, not a TOML file"),
        (cut, "not valid TOML: "),
        (binary, "not UTF-8 at byte 0"),
    ]:
        with pytest.raises(UsageError) as caught:
            read_run(path)
        assert words in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_deeply_nested_file_is_no_traceback():
    assert "nested too deeply" in refused("a = " + "[" * 100_000)[0]


def test_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 12\r\n")
    assert load_run(file).train.steps == 12


def test_preset_name_is_checked_and_offered():
    with pytest.raises(UsageError, match="no preset \"sparow\"; did you mean sparrow?"):
        load_run(preset="sparow")
    with pytest.raises(UsageError, match="--preset tiny"):
        load_run("tiny")
    with pytest.raises(UsageError, match="not both"):
        load_run("run.toml", preset="tiny")


def test_world_sets_the_ranks_and_the_batch_stays():
    run = load_run(preset="sparrow", world=4)
    assert run.parallel.ranks == 4
    assert (run.train.train_batch, run.train.accumulation) == (8, 4)
    # the update pool keeps its size
    pooled = load_run(preset="sparrow", overrides=["pools.mode=sync", "pools.update_ranks=2"], world=10)
    assert pooled.parallel.ranks == 8


def test_presets_ship_and_say_what_they_are_for():
    assert {"tiny", "sparrow", "moe-small", "deepseek-v3"} <= set(presets())
    assert all(len(purpose) > 20 for purpose in presets().values())
    assert [read_run(preset=name).warnings for name in presets()] == [()] * len(presets())


#: What users and typos put where a value belongs.
VALUES = (
    "0", "-1", "1", "2", "3", "8", "64", "1000000", "99999999999999999999", "1.5", "nan", "inf", "1e400", "true",
    "none", "''", "[]", "{}", "[1", "2024-01-01", "\x00", "bf16", "full", "sync", "async", "sigmoid", "mla", "off",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_any_input_is_a_run_or_a_usage_error(seed: int):
    """Damaged files, wild values, any world: never a traceback, and what is accepted can be resolved and reloaded."""
    chance = random.Random(seed)
    folder = Path(__file__).parents[2] / "pdtrain" / "config" / "presets"
    texts = [path.read_text() for path in sorted(folder.glob("*.toml"))]
    accepted = 0
    for _ in range(150):
        text = chance.choice(texts).encode()
        if chance.random() < 0.3:
            at = chance.randrange(len(text))
            text = text[:at] + bytes([chance.randrange(256)]) + text[at + chance.randrange(9) :]
        overrides = [
            f"{chance.choice(list(all_keys()))}={chance.choice(VALUES)}" for _ in range(chance.choice([0, 1, 1, 2, 6]))
        ]
        world = chance.choice([None, None, 1, 2, 6, 8, 2048, 10**7])
        try:
            loaded = parse_run(text.decode(errors="ignore"), "run.toml", overrides=overrides, world=world)
        except UsageError as error:
            assert all(char.isprintable() or char == "\n" for char in str(error))
            continue
        accepted += 1
        resolve(loaded.run)
        assert parse_run(to_toml(loaded.run), "printed.toml").run == loaded.run
    assert accepted > 5
