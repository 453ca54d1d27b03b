"""The share of passages read before: alignment does not matter, chance does not count."""

from __future__ import annotations

import numpy as np
import pytest

from pdtrain.data.repeats import PASSAGE, SLOTS, RepeatMeter


def text(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape)


def share(meter: RepeatMeter, sequences: np.ndarray) -> float:
    meter.add(sequences)
    found = meter.take()
    assert found is not None
    return found


def test_fresh_text_is_fresh_and_read_again_it_is_not() -> None:
    meter = RepeatMeter()
    assert share(meter, text(8, 1024)) == 0
    assert share(meter, text(8, 1024)) > 0.95  # a slot in the table may be taken over
    assert share(meter, text(8, 1024, seed=1)) == 0


@pytest.mark.parametrize("shift", [1, 17, 500])
def test_a_passage_is_recognised_at_any_offset(shift: int) -> None:
    meter = RepeatMeter()
    stream = text(5000)
    share(meter, stream[None, :2000])
    assert share(meter, stream[None, shift : 2000 + shift]) > 0.95 - shift / 2000


def test_half_of_a_batch() -> None:
    meter = RepeatMeter()
    old, new = text(4, 2048), text(4, 2048, seed=1)
    share(meter, old)
    assert share(meter, np.concatenate((old, new))) == pytest.approx(0.5, abs=0.05)


def test_repetition_inside_one_sequence_counts() -> None:
    assert share(RepeatMeter(), np.tile(text(128), 8)[None]) > 0.8


def test_what_was_read_long_ago_is_forgotten() -> None:
    meter = RepeatMeter()
    share(meter, text(1, 4096))
    for seed in range(1, 20):
        meter.add(text(16, SLOTS // 8, seed=seed))
    meter.take()
    assert share(meter, text(1, 4096)) < 0.3


def test_short_sequences_say_nothing() -> None:
    meter = RepeatMeter()
    meter.add(text(4, PASSAGE - 1))
    assert meter.take() is None
