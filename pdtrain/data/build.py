"""From texts to a token store: in memory for a small corpus, or once into a cache that all ranks then map."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diag.errors import UsageError
from pdtrain.data.sources import Document, Source
from pdtrain.data.store import DOCUMENT, TokenStore
from pdtrain.data.tokenizer import Tokenizer

FORMAT = 1  #: of the cache; raise it when tokens, table or their meaning change
_BATCH_TEXT = 4 << 20  # characters tokenised together: enough to keep every core of the tokenizer busy
_BATCH_DOCUMENTS = 4096

Sink = Callable[[NDArray[np.generic]], object]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id."""
    return np.dtype("<u1") if vocab_size <= 1 << 8 else np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def tokenise(source: Source, tokenizer: Tokenizer, sink: Sink) -> tuple[NDArray[np.void], str]:
    """Hand the tokens of all documents to `sink`, in order; returns their table and the identity of the content."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([] if tokenizer.separator is None else [tokenizer.separator], dtype=dtype)
    content, tables, position = xxhash.xxh3_128(), [], 0
    with _progress() as advance:
        for batch in _batches(source.documents()):
            table = np.zeros(len(batch), dtype=DOCUMENT)
            for row, document, ids in zip(table, batch, tokenizer.encode([document.text for document in batch])):
                tokens = np.concatenate([ids.astype(dtype), end])
                text = document.text.encode()
                row["file"], row["record"], row["offset"] = document.file, document.record, document.offset
                row["start"], row["length"], row["bytes"] = position, len(tokens), len(text) + 1
                row["key"] = xxhash.xxh3_64_intdigest(text)
                content.update(tokens.tobytes())
                content.update(len(tokens).to_bytes(8, "little"))
                position += len(tokens)
                sink(tokens)
            tables.append(table)
            advance(len(batch), int(table["bytes"].sum()))
    return np.concatenate(tables) if tables else np.zeros(0, dtype=DOCUMENT), content.hexdigest()


def in_memory(source: Source, tokenizer: Tokenizer) -> TokenStore:
    """Tokenise now and keep the tokens in memory: for the default corpus and other small ones."""
    chunks: list[NDArray[np.generic]] = []
    table, identity = tokenise(source, tokenizer, chunks.append)
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, dtype=token_dtype(tokenizer.vocab_size))
    return TokenStore([tokens], table, source.names, identity)


def cached(source: Source, tokenizer: Tokenizer, cache_dir: Path | None) -> TokenStore:
    """Tokenise once, then map. Any number of processes may call this at once: one builds, the others wait for it.

    An entry is a directory that appears by one rename, so a killed build leaves nothing that could be read; what it
    left is removed by the next. The key covers path, size, inode and both times of every file: an edited file is
    tokenised anew, and no rank has to read the corpus just to find that nothing changed.

    Raises:
        UsageError: the cache directory cannot be written, or a file changed while it was read.
        ArtefactError: the source is damaged.
    """
    root = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdtrain"
    key = _key(source, tokenizer)
    entry = root / f"tokens-{key}"
    if (store := _load(entry)) is not None:
        return store
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"tokens-{key}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when its holder dies
            if (store := _load(entry)) is None:
                _build(source, tokenizer, entry)
                store = _load(entry)
    except OSError as error:
        raise UsageError(
            f"cannot write the token cache {error.filename or root}: {error.strerror}; make room, or choose another "
            "place with XDG_CACHE_HOME"
        ) from None
    if store is None:
        raise UsageError(f"the token cache {entry} vanished while it was opened; start again")
    if _key(source, tokenizer) != key:
        shutil.rmtree(entry, ignore_errors=True)
        raise UsageError("data.path: a file changed while it was being tokenised; start again when it is complete")
    return store


def _build(source: Source, tokenizer: Tokenizer, entry: Path) -> None:
    """Write `entry`; the caller holds its lock, so whatever unfinished build lies there is dead."""
    unfinished = entry.with_name(entry.name + ".unfinished")
    for leftover in (unfinished, entry):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    try:
        with (unfinished / "tokens.bin").open("wb", buffering=1 << 20) as stream:
            table, identity = tokenise(source, tokenizer, lambda tokens: stream.write(tokens.tobytes()))
            _settle(stream)
        with (unfinished / "documents.npy").open("wb") as stream:
            np.save(stream, table, allow_pickle=False)
            _settle(stream)
        about = {
            "format": FORMAT,
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "tokens": int(table["length"].sum()),
            "files": list(source.names),
            "identity": identity,
        }
        with (unfinished / "about.json").open("wb") as stream:
            stream.write(json.dumps(about).encode())
            _settle(stream)
        unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _settle(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _load(entry: Path) -> TokenStore | None:
    """The finished entry, or None where it is absent or not whole (then it is built again)."""
    try:
        about = json.loads((entry / "about.json").read_bytes())
        table = np.load(entry / "documents.npy", mmap_mode="r" if about["tokens"] else None, allow_pickle=False)
        dtype, count = np.dtype(about["dtype"]), int(about["tokens"])
        whole = (entry / "tokens.bin").stat().st_size == count * dtype.itemsize and table.dtype == DOCUMENT
        if about["format"] != FORMAT or not whole:
            return None
        tokens = np.memmap(entry / "tokens.bin", dtype=dtype, mode="r") if count else np.zeros(0, dtype=dtype)
        return TokenStore([tokens], table, about["files"], about["identity"])
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _key(source: Source, tokenizer: Tokenizer) -> str:
    digest = xxhash.xxh3_128(f"{FORMAT} {tokenizer.identity} {source.text_key!r}".encode())
    for path, name in zip(source.paths, source.names):
        try:
            about = path.stat()
        except OSError as error:
            raise UsageError(f"data.path: cannot read {path}: {error.strerror}") from None
        state = (name, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_dev, about.st_ino)
        digest.update(f"{path.resolve()} {state!r}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_TEXT or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A line on stderr that counts documents and bytes, where stderr is a terminal and the work takes long."""
    if not sys.stderr.isatty():
        yield lambda documents, size: None
        return
    from time import monotonic

    total, began = [0, 0], monotonic()

    def advance(documents: int, size: int) -> None:
        total[0] += documents
        total[1] += size
        if monotonic() - began > 1:
            done = f"tokenising: {total[0]:,} documents, {total[1] / 1e6:,.0f} MB"
            print(f"\r{done}", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if monotonic() - began > 1:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
