"""The data of one run: training sequences by number, validation sequences, and the way back to the documents."""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import xxhash

from diag.errors import ArtefactError, UsageError
from pdtrain.config.schema import Run
from pdtrain.data.build import cached, in_memory
from pdtrain.data.indexed import open_indexed
from pdtrain.data.order import Shuffle, derive_key, mix64
from pdtrain.data.paths import resolve
from pdtrain.data.sources import standard_library
from pdtrain.data.store import I64, DocumentSpan, Stream, TokenStore, split
from pdtrain.data.tokenizer import Tokenizer, open_tokenizer

_DECODE_SAMPLE = 1 << 18  # tokens decoded to learn the bytes per token of a corpus that does not know


class Data:
    """A tokenised corpus, split, packed and put into an endless order that depends on the seed alone.

    The training documents are laid end to end in an order drawn from `seed` and cut into windows: window k is tokens
    k·S … k·S+S, so that the last token, a target only, is the next window's first. Each epoch visits every window
    once, in an order of its own. Sequence number n of this endless order is what `sequences` returns, whatever the
    parallel layout; a run's position is the count of sequences that it has consumed.
    """

    def __init__(self, store: TokenStore, tokenizer: Tokenizer | None, run: Run, what: str) -> None:
        self.store = store
        self.tokenizer = tokenizer
        self.sequence_length = run.train.sequence_length
        self.validation_sequences = run.train.val_sequences
        self.seed = run.train.seed
        self._share = run.data.val_share
        self._model_vocab = run.model.vocab_size
        train, self._validation = split(store, run.data.val_share)
        order = np.argsort(mix64(train.documents, derive_key(self.seed, 1)), kind="stable")
        lengths = np.diff(train.ends, prepend=0)
        self._train = Stream.of(store, train.documents[order], train.first[order], lengths[order])
        self._windows = self._train.windows(self.sequence_length)
        self._what = what
        self._check_size()

    @property
    def vocab_size(self) -> int:
        """Ids are 0 … vocab_size-1. Of token files without a tokenizer this is the model's, checked on every read."""
        return self.tokenizer.vocab_size if self.tokenizer else self._model_vocab

    @property
    def tokenizer_name(self) -> str:
        """`bytes`, the tokenizer's file name, or `unknown` (token files without data.tokenizer)."""
        return self.tokenizer.name if self.tokenizer else "unknown"

    @property
    def sequences_per_epoch(self) -> int:
        """Windows of the training split."""
        return self._windows

    @cached_property
    def description(self) -> str:
        """One line: where the tokens come from, and how many."""
        known = self.store.documents["bytes"].min() >= 0
        size = f", {int(self.store.documents['bytes'].sum()):,} bytes" if known else ""
        return (
            f"{self._what}: {len(self.store.documents):,} documents, {self.store.tokens:,} tokens{size}; "
            f"tokenizer {self.tokenizer_name}; {self._windows:,} training sequences of {self.sequence_length} per "
            f"epoch, {self._validation.tokens:,} tokens held out"
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides which tokens sequence n holds. A resume on another one is another run."""
        parts = (
            self.store.identity,
            self.tokenizer.identity if self.tokenizer else "unknown",
            f"{self.seed} {self.sequence_length} {self._share!r}",
        )
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())

    def sequences(self, start: int, count: int) -> I64:
        """Training sequences start … start+count-1 as int64 [count, S+1]: inputs are [:, :-1], targets [:, 1:].

        Raises:
            ArtefactError: a token file holds an id beyond the model's vocabulary.
        """
        return self._cut(self._train, self._window_numbers(start, count))

    def validation(self, count: int) -> I64:
        """The first `count` sequences of the held-out split (fewer where it is smaller), int64 [n, S+1]; no seed."""
        count = min(count, self._validation.windows(self.sequence_length))
        return self._cut(self._validation, np.arange(count, dtype=np.int64))

    def documents(self, start: int, count: int) -> list[list[DocumentSpan]]:
        """For each training sequence start … start+count-1: the documents that its S+1 tokens come from, in order."""
        length = self.sequence_length
        return [
            self._train.spans(window * length, window * length + length + 1)
            for window in self._window_numbers(start, count).tolist()
        ]

    def documents_of_step(self, step: int, train_batch: int) -> list[list[DocumentSpan]]:
        """The documents of optimizer step `step` (1-based, as in metrics.jsonl) of a run with this train batch."""
        if step < 1:
            raise UsageError(f"steps are counted from 1, not {step}")
        return self.documents((step - 1) * train_batch, train_batch)

    def training_tokens(self, count: int) -> I64:
        """The first `count` tokens of the training stream (fewer where it is shorter): a sample for statistics."""
        return self._train.read(0, min(count, self._train.tokens))

    def bytes_per_token(self, split: str) -> float | None:
        """Bytes of text per token of the `train` or `validation` split; a separator counts as one byte.

        None for token files without data.tokenizer: nobody knows what their ids stand for.
        """
        stream = {"train": self._train, "validation": self._validation}[split]
        if stream.tokens == 0:
            return None
        sizes = self.store.documents["bytes"][stream.documents]
        if sizes.min() >= 0:
            whole = self.store.documents["length"][stream.documents]
            share = np.diff(stream.ends, prepend=0) / whole  # 1 except for a document divided between the splits
            return float((sizes * share).sum() / stream.tokens)
        if self.tokenizer is None:
            return None
        sample = stream.read(0, min(stream.tokens, _DECODE_SAMPLE))
        return len(self.tokenizer.decode(sample)) / len(sample)

    def _window_numbers(self, start: int, count: int) -> I64:
        numbers = np.arange(start, start + count, dtype=np.int64)
        epochs, places = np.divmod(numbers, self._windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            windows[chosen] = _shuffle(self._windows, self.seed, epoch)(places[chosen])
        return windows

    def _cut(self, stream: Stream, windows: I64) -> I64:
        length = self.sequence_length
        out = np.empty((len(windows), length + 1), dtype=np.int64)
        for row, window in zip(out, windows.tolist()):
            stream.read(window * length, window * length + length + 1, row)
        if out.size and (out.min() < 0 or out.max() >= self._model_vocab):
            self._refuse(stream, out, windows)
        return out

    def _refuse(self, stream: Stream, out: I64, windows: I64) -> None:
        row, column = np.argwhere((out < 0) | (out >= self._model_vocab))[0].tolist()
        at = int(windows[row]) * self.sequence_length + column
        span = stream.spans(at, at + 1)[0]
        raise ArtefactError(
            f"{span.name}: document {span.record}, token {span.start} is id {int(out[row, column])}; "
            f"model.vocab_size = {self._model_vocab} ends at {self._model_vocab - 1}"
        )

    def _check_size(self) -> None:
        need = self.sequence_length + 1
        if len(self.store.documents) == 0:
            raise UsageError(f"data.path: {self._what} holds no text")
        if self._windows == 0:
            raise UsageError(
                f"data.path: {self._what} leaves {self._train.tokens:,} tokens for training, less than one sequence of "
                f"{need}; add text or lower train.sequence_length"
            )
        held = self._validation.tokens
        if self._share > 0 and self.validation_sequences > 0 and held < need:
            raise UsageError(
                f"data.val_share = {self._share:g} of {self._what} holds out {held:,} tokens, less than one sequence "
                f"of {need}; raise it, or set train.val_sequences = 0"
            )


@lru_cache(maxsize=4)
def _shuffle(windows: int, seed: int, epoch: int) -> Shuffle:
    return Shuffle(windows, seed, 2, epoch)


def open_data(run: Run, cache_dir: Path | None = None) -> Data:
    """Open what `run.data` names: tokenise it if need be, split and order it.

    Args:
        run: the whole configuration; the sections data, train and model.vocab_size matter.
        cache_dir: where tokenised text is kept; absent: `$XDG_CACHE_HOME/pdtrain`, or `~/.cache/pdtrain`.

    Raises:
        UsageError: a path that does not exist, no text, or a tokenizer with more ids than `model.vocab_size`.
        ArtefactError: a file that is damaged.
        MissingExtra: data.tokenizer needs a library that is not installed.
    """
    what = resolve(run.data.path)
    tokenizer = open_tokenizer(run.data.tokenizer) if what.kind != "indexed" or run.data.tokenizer else None
    if tokenizer and tokenizer.vocab_size > run.model.vocab_size:
        raise UsageError(
            f"data.tokenizer: {tokenizer.name} has {tokenizer.vocab_size:,} ids, model.vocab_size = "
            f"{run.model.vocab_size:,} holds fewer; set model.vocab_size = {tokenizer.vocab_size} or more"
        )
    if what.kind == "indexed":
        store = open_indexed(what.paths, what.names)
    elif tokenizer is None:
        raise AssertionError("text always has a tokenizer")
    elif what.kind == "library" and run.data.tokenizer is None:
        store = in_memory(standard_library(), tokenizer)
    else:
        source = standard_library() if what.kind == "library" else what.source(run.data.text_key)
        store = cached(source, tokenizer, cache_dir)
    return Data(store, tokenizer, run, what.label)
