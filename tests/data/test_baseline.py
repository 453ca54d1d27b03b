from __future__ import annotations

import math

import numpy as np
import pytest

from pdtrain.data import open_data
from pdtrain.data.baseline import bigram_bits_per_byte, byte_baseline
from tests.data.helpers import run_on, write_jsonl


def corpus(tmp_path, texts, **settings):
    path = write_jsonl(tmp_path / "texts.jsonl", texts)
    return open_data(run_on(path, val=20, val_share=0.2, **settings), cache_dir=tmp_path / "cache")


def test_a_cycle_is_free_for_the_bigram_and_costs_log2_of_its_length_to_the_unigram(tmp_path):
    data = corpus(tmp_path, [f"{'abcdefgh' * 200}" + "abcdefgh"[: n % 8] for n in range(100)])
    baseline = byte_baseline(data)
    assert baseline.unigram == pytest.approx(3.0, abs=0.02)
    assert baseline.bigram < 0.02


def test_random_bytes_cost_their_entropy_to_both(tmp_path):
    random = np.random.default_rng(0)
    texts = ["".join(map(chr, random.integers(64, 128, 2000))) for _ in range(200)]
    baseline = byte_baseline(corpus(tmp_path, texts))
    assert baseline.unigram == pytest.approx(6.0, abs=0.1)
    assert baseline.bigram == pytest.approx(6.0, abs=0.15)
    assert baseline.bytes_scored == 20 * 16


def test_bigram_equals_the_sum_written_out(tmp_path):
    data = corpus(tmp_path, ["the cat sat on the mat", "a rat sat on the hat", "the bat", "that fat cat ate"] * 9)
    text = bytes(data.training_tokens(10**6).astype(np.uint8))
    bits, count = 0.0, 0
    for row in data.validation(20):
        for a, b in zip(row[:-1].tolist(), row[1:].tolist()):
            single = (text.count(bytes([b])) + 1) / (len(text) + 256)
            pair = sum(text[i] == a and text[i + 1] == b for i in range(len(text) - 1))
            seen = sum(text[i] == a for i in range(len(text) - 1))
            bits -= math.log2((pair + 20 * single) / (seen + 20))
            count += 1
    assert bigram_bits_per_byte(data) == pytest.approx(bits / count, rel=1e-12)


def test_default_corpus_sits_where_source_text_sits():
    data = open_data(run_on(None, length=256, val=32))
    baseline = byte_baseline(data)
    assert 2.5 < baseline.bigram < 4.2 < baseline.unigram < 5.2


def test_nothing_held_out_means_no_baseline(tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", ["some words of text"] * 20)
    data = open_data(run_on(path, val_share=0.0), cache_dir=tmp_path / "cache")
    assert byte_baseline(data) is None and math.isnan(bigram_bits_per_byte(data))
