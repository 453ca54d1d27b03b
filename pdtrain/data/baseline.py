"""What a byte n-gram reaches on the same validation text: the mark that a trained model has to be far below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdtrain.data.corpus import Data

TRAINING_TOKENS = 16 << 20  #: of the training split, enough for 65,536 pairs
PRIOR = 20.0  #: weight of the unigram distribution in each row of the bigram, in counts


@dataclass(frozen=True, slots=True)
class Baseline:
    """Bits per byte of the validation text under byte n-gram models fitted on the training split."""

    unigram: float
    bigram: float
    bytes_scored: int


def byte_baseline(data: Data) -> Baseline | None:
    """Fit on the training split, score the validation sequences that the trainer uses.

    Unigram: counts plus one. Bigram: p(b|a) = (n(a,b) + PRIOR·p(b)) / (n(a) + PRIOR), a Dirichlet prior around the
    unigram (MacKay and Peto 1995). Like the model, the n-grams predict tokens 2 … S+1 of every sequence and never see
    across two sequences. None where there is no validation text, or ids that nobody can turn into bytes.
    """
    held_out = data.validation(data.validation_sequences)
    if data.tokenizer is None or not len(held_out):
        return None
    sample = np.frombuffer(data.tokenizer.decode(data.training_tokens(TRAINING_TOKENS)), dtype=np.uint8)
    texts = [np.frombuffer(data.tokenizer.decode(row), dtype=np.uint8) for row in held_out]
    pairs = np.bincount(_pairs(sample), minlength=1 << 16).reshape(256, 256).astype(np.float64)
    single = np.bincount(sample, minlength=256).astype(np.float64)
    unigram = (single + 1) / (single.sum() + 256)
    bigram = (pairs + PRIOR * unigram) / (pairs.sum(axis=1, keepdims=True) + PRIOR)
    scored = np.concatenate([_pairs(text) for text in texts])
    if not len(scored):
        return None
    bits = -np.log2(bigram.reshape(-1)[scored]), -np.log2(unigram[scored & 255])
    return Baseline(unigram=float(bits[1].mean()), bigram=float(bits[0].mean()), bytes_scored=len(scored))


def bigram_bits_per_byte(data: Data) -> float:
    """Bits per byte of the byte bigram (`byte_baseline`), NaN where there is none."""
    baseline = byte_baseline(data)
    return float("nan") if baseline is None else baseline.bigram


def _pairs(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    return text[:-1].astype(np.int64) << 8 | text[1:]
