from __future__ import annotations

import numpy as np
import pytest

from diag.loss.findings import findings_of

from .curves import healthy, run_of


def only(run):
    found = [f for f in findings_of(run) if f.severity != "info"]
    assert len(found) == 1, [f.summary for f in found]
    return found[0]


def test_a_falling_noisy_loss_is_silent() -> None:
    assert findings_of(run_of(loss=healthy(3000), grad_norm=np.ones(3000))) == []


def test_a_spike_that_comes_back_is_transient_and_blames_the_batch_when_the_norm_was_calm() -> None:
    loss, norm = healthy(), np.full(600, 0.5)
    loss[400:404] *= [1.6, 1.5, 1.3, 1.15]
    norm[400:403] = 4.0
    finding = only(run_of(loss=loss, grad_norm=norm, consumed_samples=np.arange(1, 601) * 64))
    assert finding.cause == "loss_spike" and finding.severity == "warning" and finding.where.step == 401
    assert finding.numbers["kind"] == "transient" and finding.numbers["grad_norm_led"] is False
    assert finding.numbers["suspect_samples"] == [400 * 64, 401 * 64]
    assert finding.numbers["height"] == pytest.approx(loss[400:404].max() - loss[380:400].mean(), rel=0.1)
    assert finding.numbers["last_step"] == 600


def test_a_norm_that_rose_before_the_loss_led() -> None:
    loss, norm = healthy(), np.full(600, 0.5)
    loss[400:404] *= 1.5
    norm[397:404] = [2, 8, 30, 60, 60, 30, 8]
    finding = only(run_of(loss=loss, grad_norm=norm, grad_norm__attention=np.where(np.arange(600) >= 397, norm, 0.3),
                          grad_norm__experts=np.where(np.arange(600) >= 400, norm, 0.3), lr=np.full(600, 3e-4)))
    assert finding.numbers["grad_norm_led"] is True and finding.numbers["grad_norm_step"] == 398
    assert finding.where.module == "attention" and finding.numbers["lr"] == pytest.approx(3e-4)


def test_a_slow_recovery_is_told_from_a_quick_one() -> None:
    loss = healthy(900)
    loss[400:] *= np.exp(0.6 * np.exp(-np.arange(500) / 40))
    finding = only(run_of(loss=loss))
    assert finding.numbers["kind"] == "slow" and 60 < finding.numbers["duration_points"] < 250


def test_a_loss_that_stays_up_diverged() -> None:
    loss = healthy()
    loss[400:] *= 1.5
    finding = only(run_of(loss=loss))
    assert (finding.cause, finding.severity, finding.where.step) == ("loss_divergence", "error", 401)


def test_a_slow_climb_has_no_jump_and_is_a_divergence_all_the_same() -> None:
    loss = healthy(1000)
    loss[500:] *= np.exp(0.7 * np.arange(500) / 500)
    finding = only(run_of(loss=loss))
    assert finding.cause == "loss_divergence" and finding.numbers["climbed"]


@pytest.mark.parametrize("tau", [30, 100, 200])
def test_a_rise_too_gentle_for_a_jump_that_has_ended_high_is_a_divergence(tau: int) -> None:
    loss = healthy(1500)
    loss[900:] *= np.exp(0.7 * (1 - np.exp(-np.arange(600) / tau)))
    finding = only(run_of(loss=loss))
    assert (finding.cause, finding.severity) == ("loss_divergence", "error")
    assert 900 <= finding.where.step <= 900 + tau


def test_other_data_that_move_the_loss_are_no_divergence() -> None:
    loss = healthy(1500)
    loss[700:] *= np.exp(0.3 * (1 - np.exp(-np.arange(800) / 100)))
    loss[1100:] *= np.exp(-0.2 * (1 - np.exp(-np.arange(400) / 100)))
    assert not [f for f in findings_of(run_of(loss=loss)) if f.severity != "info"]


def test_a_jump_at_a_resume_is_one_of_the_resume() -> None:
    loss = healthy()
    loss[400:] *= np.exp(0.3 * np.exp(-np.arange(200) / 30))
    assert only(run_of(loss=loss, resumes=[(401, 400)])).cause == "loss_resume_jump"


def test_a_fall_at_a_resume_says_repeated_data_but_not_where_replayed_steps_agree() -> None:
    loss = healthy()
    loss[400:] *= 0.8
    finding = only(run_of(loss=loss, resumes=[(401, 400)]))
    assert finding.cause == "loss_resume_jump" and finding.numbers["kind"] == "drop"
    steps = np.concatenate([np.arange(1, 421), np.arange(391, 601)])
    stairs = healthy()
    stairs[390:] *= 0.8  # an epoch ended there, before the restart
    again = run_of(steps=steps, loss=np.concatenate([stairs[:420], stairs[390:]]))
    assert again.resumes[0].replayed == 30 and findings_of(again) == []


def test_the_end_of_an_epoch_is_a_stair_and_no_fault() -> None:
    loss = healthy(900) * 0.7 ** (np.arange(900) // 300)
    assert findings_of(run_of(loss=loss)) == []


def test_nan_is_told_from_one_skipped_step() -> None:
    loss = healthy()
    loss[200] = np.nan
    assert findings_of(run_of(loss=loss)) == []
    loss[500:] = np.nan
    finding = only(run_of(loss=loss))
    assert finding.cause == "loss_nan" and finding.where.step == 501


def test_the_way_into_nan_is_no_finding_of_its_own() -> None:
    loss = healthy()
    loss[496:500] *= [1.5, 3, 8, 20]
    loss[500:] = np.nan
    assert only(run_of(loss=loss)).cause == "loss_nan"


def test_a_long_divergence_before_nan_comes_first() -> None:
    loss = healthy()
    loss[400:500] *= 2
    loss[500:] = np.nan
    assert [f.cause for f in findings_of(run_of(loss=loss))] == ["loss_divergence", "loss_nan"]


def test_a_printed_zero_with_a_nan_norm_is_nan_and_without_it_degenerate() -> None:
    loss = np.concatenate([[12.2, 11.9, 11.5, 11.0], np.zeros(20)])
    bad = np.concatenate([np.ones(4), np.full(20, np.nan)])
    assert only(run_of(loss=loss, grad_norm=bad)).cause == "loss_nan"
    assert only(run_of(loss=loss, grad_norm=np.ones(24))).cause == "loss_degenerate"


def test_the_loss_scale_that_falls_to_its_minimum_covers_the_spike() -> None:
    loss, scale = healthy(), np.full(600, 65536.0)
    loss[400:] *= 1.6
    scale[400:] = np.maximum(65536.0 / 2.0 ** np.minimum(np.arange(1, 201), 40), 1.0)
    finding = only(run_of(loss=loss, loss_scale=scale))
    assert finding.cause == "fp16_loss_scale_collapse" and abs(finding.where.step - 401) <= 2
    search = np.maximum(2.0**32 / 2.0 ** np.arange(600), 65536.0)  # how Megatron begins
    assert findings_of(run_of(loss=healthy(), loss_scale=search)) == []


def test_a_rough_start_is_let_off_and_one_that_never_recovers_is_not() -> None:
    assert findings_of(run_of(loss=[11.6, 11.6, 10.6, 15.0, 11.8, 14.3, 9.2, 8.1, 7.6, 7.4, 7.3])) == []
    # warm-up and search of the scale in a public fp16 run of 64 GPUs: up, and coming down
    assert findings_of(run_of(steps=[20, 30, 40, 50, 60], loss=[14.1, 76.8, 31.7, 21.1, 17.0])) == []
    assert findings_of(run_of(steps=[1, 2, 3, 4], loss=[12.5, 12.5, 40.8, 39.0])) == []
    stays = only(run_of(loss=[12.5, 12.5, 40.8, 41.0, 40.2, 41.1, 40.6, 40.9, 41.3, 40.8]))
    assert (stays.cause, stays.severity) == ("loss_divergence", "warning") and stays.confidence <= 0.6


def test_a_reward_loss_around_zero_is_judged_by_its_own_range() -> None:
    rng = np.random.default_rng(0)
    loss = rng.normal(0, 0.1, 400)
    assert findings_of(run_of(loss=loss)) == []
    loss[300:] *= 1e4
    finding = only(run_of(loss=loss))
    assert finding.cause == "loss_divergence" and abs(finding.where.step - 301) <= 2


def test_a_period_is_an_oscillation_and_noise_is_none() -> None:
    swing = np.exp(0.1 * np.sin(np.arange(900) * 2 * np.pi / 37))
    finding = only(run_of(loss=healthy(900) * swing))
    assert finding.cause == "loss_oscillation" and finding.numbers["period_steps"] == pytest.approx(37, rel=0.1)


def test_from_scratch_without_learning_is_a_plateau() -> None:
    rng = np.random.default_rng(0)
    flat = 10.8 * np.exp(rng.normal(0, 0.003, 2000))
    assert only(run_of(loss=flat)).cause == "loss_plateau"
    assert findings_of(run_of(loss=flat / 8)) == []  # a fine-tune may stay where it began


def test_a_change_of_the_batch_size_explains_a_jump() -> None:
    loss = healthy()
    loss[400:440] *= 1.3
    found = findings_of(run_of(loss=loss, batch_size=np.where(np.arange(600) < 400, 64, 8)))
    assert [f.severity for f in found] == ["info"] and "batch size changed" in found[0].summary


@pytest.mark.parametrize("values", [[], [2.5], [2.5] * 200, [float("nan")], [0.0, 0.0], [1.0, float("inf"), 1.0],
                                    [1e-300, 1e300] * 40, [-1.0] * 80])
def test_odd_series_never_raise(values) -> None:
    if values:
        findings_of(run_of(loss=values, grad_norm=values, loss_scale=values, skipped=values))


def test_random_series_never_raise() -> None:
    rng = np.random.default_rng(1)
    for n in (2, 3, 4, 7, 9, 27, 28, 60, 110, 300):
        for _ in range(6):
            values = rng.choice([0.0, 1.0, 2.0, np.nan, np.inf, -1.0, 1e30, 1e-30], n) * rng.random(n)
            findings_of(run_of(loss=values, grad_norm=np.abs(values), lr=values))


def test_one_point_alone_is_told_and_warned_of_only_when_more_shows_it() -> None:
    loss, norm = healthy(), np.full(600, 0.5)
    loss[400] *= 1.4
    assert [(f.cause, f.severity) for f in findings_of(run_of(loss=loss, grad_norm=norm))] == [("loss_spike", "info")]
    norm[400] = 5.0
    assert only(run_of(loss=loss, grad_norm=norm)).cause == "loss_spike"  # the norm shows it too
    again = loss.copy()
    again[500] *= 1.4
    assert only(run_of(loss=again)).cause == "loss_spike"  # it repeats
    loss[400] *= 4
    assert only(run_of(loss=loss)).cause == "loss_spike"  # it is large
    longer = healthy()
    longer[400:402] *= 1.4
    assert only(run_of(loss=longer)).cause == "loss_spike"
