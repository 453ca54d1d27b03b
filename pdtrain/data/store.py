"""Tokens of all documents, and streams of documents in some order out of which sequences are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

#: One row per document. `part`: which token array; `start`, `length`: tokens of it there, separator included;
#: `file`, `record`, `offset`: where the text came from (record 0: the whole file, else the 1-based line or document
#: number); `bytes`: length of the text, separator counted as one byte, -1 where unknown; `key`: hash by which the
#: validation split is drawn.
DOCUMENT = np.dtype(
    [
        ("part", "<i4"),
        ("file", "<i4"),
        ("record", "<i8"),
        ("offset", "<i8"),
        ("start", "<i8"),
        ("length", "<i8"),
        ("bytes", "<i8"),
        ("key", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """A stretch of one document inside one sequence: tokens start … stop-1 of the document."""

    document: int  #: number of the document in the corpus
    name: str  #: file, as given or relative to the directory given
    record: int  #: 1-based line (JSONL) or document number (.bin/.idx) in that file; 0: the file is one document
    offset: int  #: byte at which the document begins in that file (in its decompressed text; in the .bin)
    start: int  #: first token, counted from the document's beginning
    stop: int  #: one past the last token
    position: int  #: where the first token stands in the sequence

    def __str__(self) -> str:
        record = f":{self.record}" if self.record else ""
        return f"{self.name}{record} tokens {self.start}-{self.stop}"


@dataclass(frozen=True, slots=True)
class TokenStore:
    """A tokenised corpus: token arrays (in memory or mapped) and the table of documents in them."""

    parts: Sequence[NDArray[np.generic]]
    documents: NDArray[np.void]  #: dtype DOCUMENT
    files: Sequence[str]
    identity: str  #: hash of the content, equal wherever the same documents lie

    @property
    def tokens(self) -> int:
        return int(self.documents["length"].sum())


@dataclass(frozen=True, slots=True)
class Stream:
    """Segments of documents laid end to end. Segment i is tokens first[i] … first[i]+length[i]-1 of documents[i]."""

    store: TokenStore
    documents: I64
    first: I64
    ends: I64  #: cumulative lengths: the position after segment i

    @classmethod
    def of(cls, store: TokenStore, documents: I64, first: I64, length: I64) -> Stream:
        return cls(store, documents, first, np.cumsum(length, dtype=np.int64))

    @property
    def tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(document, first token in it, length, position from `start`) of each segment in tokens start … stop-1."""
        segment = int(np.searchsorted(self.ends, start, side="right"))
        position = start
        while position < stop:
            begin = int(self.ends[segment - 1]) if segment else 0
            end = min(int(self.ends[segment]), stop)
            inside = int(self.first[segment]) + position - begin
            yield int(self.documents[segment]), inside, end - position, position - start
            position = end
            segment += 1

    def read(self, start: int, stop: int, out: I64 | None = None) -> I64:
        """Tokens start … stop-1 of the stream as int64 [stop - start]."""
        if out is None:
            out = np.empty(stop - start, dtype=np.int64)
        table = self.store.documents
        for document, inside, length, at in self.pieces(start, stop):
            begin = int(table["start"][document]) + inside
            out[at : at + length] = self.store.parts[table["part"][document]][begin : begin + length]
        return out

    def spans(self, start: int, stop: int) -> list[DocumentSpan]:
        """Which documents tokens start … stop-1 come from, in order."""
        spans = []
        for document, inside, length, at in self.pieces(start, stop):
            row = self.store.documents[document]
            name = self.store.files[int(row["file"])]
            place = (int(row["record"]), int(row["offset"]))
            spans.append(DocumentSpan(document, name, *place, inside, inside + length, at))
        return spans

    def windows(self, length: int) -> int:
        """How many windows of `length` tokens plus one target fit; the rest of the stream is not used."""
        return max(0, (self.tokens - 1) // length)


def split(store: TokenStore, share: float) -> tuple[Stream, Stream]:
    """(training, validation): whole documents drawn by their content hash until `share` of all tokens is held out.

    Documents of equal content share their hash and so their side. Where one long document would overshoot twice the
    share (a corpus that is a single file), only its tail is held out. Independent of any seed: runs compare.
    """
    length = store.documents["length"].astype(np.int64)
    everything = np.arange(len(length), dtype=np.int64)
    whole = np.zeros(len(length), dtype=np.int64)
    budget = int(length.sum() * share)
    if budget == 0:
        nothing = everything[:0]
        return Stream.of(store, everything, whole, length), Stream.of(store, nothing, nothing, nothing)
    order = np.argsort(store.documents["key"], kind="stable")
    keys, held = store.documents["key"][order], np.cumsum(length[order])
    count = int(np.searchsorted(held, budget)) + 1
    count = int(np.searchsorted(keys, keys[count - 1], side="right"))
    overshoot = int(held[count - 1]) > 2 * budget
    count = int(np.searchsorted(held, budget)) + 1 if overshoot else count
    drawn = order[:count]
    train = np.ones(len(length), dtype=bool)
    train[drawn] = False
    train_length, drawn_first, drawn_length = length.copy(), whole[:count].copy(), length[drawn]
    if overshoot:
        last = int(drawn[-1])
        tail = budget - (int(held[count - 2]) if count > 1 else 0)
        drawn_first[-1], drawn_length[-1] = length[last] - tail, tail
        train_length[last] -= tail
        train[last] = True
    kept = everything[train]
    return Stream.of(store, kept, whole[kept], train_length[kept]), Stream.of(store, drawn, drawn_first, drawn_length)
