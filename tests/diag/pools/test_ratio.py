"""The arithmetic of splits: by hand where it can be done by hand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from diag.artefacts import memory_source
from diag.artefacts.run_config import RunConfig
from diag.artefacts.run_config import read as read_config
from diag.pools.balance import verdict
from diag.pools.legal import Limits, command, command_without
from diag.pools.ratio import Split, choose, predicted, unseparated
from tests.diag.helpers import pdtrain


def anything(compute: int, update: int) -> bool:
    return True


def test_pools_that_take_turns_add_up() -> None:
    """8 + 4 with 200 and 80 ms (DOMAIN: the update pool idles 60 % beside the other): the work is 1.6 and 0.32 s."""
    now = Split(8, 4, 0.200, 0.080, 0.280)
    assert now.points == pytest.approx(100 * (200 - 80) / 280) and now.work_ratio == pytest.approx(5.0)
    choice = choose(now, anything)
    assert choice.balances and choice.best.text == "10 + 2" and choice.best.points == pytest.approx(0.0)
    assert choice.best.compute_seconds == choice.best.update_seconds == pytest.approx(0.16)
    assert choice.best.step_seconds == pytest.approx(0.32) and choice.gain < 0  # balance costs time in turns


def test_pools_that_overlap_are_as_long_as_the_longer() -> None:
    now = Split(4, 4, 0.4, 0.12, 0.4)
    other = predicted(now, 6, 2)
    assert other.step_seconds == pytest.approx(max(0.4 * 4 / 6, 0.12 * 4 / 2))
    choice = choose(now, anything)
    assert choice.balances and choice.best.update == 2 and choice.gain > 0.3


def test_an_update_hides_at_worst_as_long_as_now() -> None:
    """0.6 s per sequence before the first weights are needed: 3 + 1 was measured to take what 2 + 2 takes."""
    other = predicted(Split(2, 2, 1.8, 0.6, 1.86), 3, 1)
    assert other.step_seconds == pytest.approx(1.32) and other.longest_seconds == pytest.approx(1.86)
    turns = predicted(Split(8, 4, 0.2, 0.08, 0.28), 10, 2)
    assert turns.longest_seconds == turns.step_seconds, "pools that take turns hide nothing either way"
    assert "predicted step 1.32 s to 1.86 s against 1.86 s" in verdict(choose(Split(2, 2, 1.8, 0.6, 1.86), anything))


def test_a_wait_that_neither_explains_stays() -> None:
    assert predicted(Split(2, 2, 0.1, 0.1, 0.25), 3, 1).step_seconds == pytest.approx(0.1 * 2 / 3 + 0.2 + 0.05)


def test_what_is_measured_is_not_predicted() -> None:
    now = Split(3, 1, 0.3, 0.28, 0.33)
    choice = choose(now, anything)
    assert not choice.changes and choice.best is now and choice.balances


def test_no_split_balances_a_small_update() -> None:
    choice = choose(Split(2, 1, 0.30, 0.02, 0.33), anything)
    assert not choice.balances and choice.now.work_ratio == pytest.approx(30.0)


def test_layout_and_batch_limit_the_splits() -> None:
    limits = Limits(tensor=2, expert=2, batch=48, micro_batch=4)
    legal = [(n, 8 - n) for n in range(1, 8) if limits.split(n, 8 - n)]
    assert legal == [(2, 6), (4, 4), (6, 2)]
    assert [n for n in range(1, 9) if Limits(batch=48, micro_batch=4).compute(n)] == [1, 2, 3, 4, 6, 8]
    assert Limits(batch=12, micro_batch=4).micro(4) == 3
    typed = command(Limits(batch=12, micro_batch=4), "run", 4, 1)
    assert "train.micro_batch=3" in typed and "train.accumulation=1" in typed


def test_the_estimate_without_pools_is_the_work_over_all_ranks() -> None:
    found = unseparated(Split(2, 1, 0.3, 0.06, 0.4))
    assert found == (3, pytest.approx(0.22))
    assert unseparated(Split(2, 1, 0.3, 0.06, 0.4), lambda n: n % 2 == 0) == (2, pytest.approx(0.33))
    assert unseparated(Split(2, 1, 0.3, 0.06, 0.4), lambda n: False) is None


def test_nothing_measured_divides_by_nothing() -> None:
    nothing = Split(1, 1, 0.0, 0.0, 0.0)
    assert nothing.points == 0.0 and choose(nothing, anything).gain == 0.0


def test_what_is_to_be_typed_is_taken(tmp_path: Path) -> None:
    """A run's config.toml has every key written out, the accumulation too, so that other ranks alone do not fit."""
    shown = pdtrain("train", "--preset", "tiny", "--set", "pools.mode=sync", "--set", "pools.update_ranks=2", "--set",
                    "modules.attention.tensor=1", "--set", "modules.experts.expert=1", "--set", "train.micro_batch=4",
                    "--set", "train.train_batch=48", "--set", "pools.rebalance=auto", "--set", "pools.restarts=2",
                    "--set", "pools.keep=/dev/shm/kept", "--print-config")
    run = tmp_path / "a run"
    run.mkdir()
    (run / "config.toml").write_text(shown.out)
    config = read_config(memory_source(shown.out.encode(), "config.toml"))
    assert isinstance(config, RunConfig)
    limits = Limits.of(config)
    assert (limits.batch, limits.micro_batch) == (48, 4)
    typed = [command(limits, str(run), 3, 1), command(limits, str(run), 6, 2),
             command_without(limits, str(run), 4, config)]
    for line in typed:
        done = pdtrain(*shlex.split(line)[1:], "--dry-run")
        assert done.status == 0, done.err
