"""Text to token ids: bytes, or a `tokenizers` JSON file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from diag.errors import MissingExtra, UsageError

#: How the usual tokenizers call the token between two documents, most specific first.
SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<|eot_id|>",
    "<eos>",
    "</s>",
    "[EOS]",
    "[SEP]",
)


#: A longer text is cut at line starts into pieces of about this many characters …
_PIECE = 1 << 20
#: … of which this many are tokenised together.
_PIECES_AT_ONCE = 8


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut where, after `size` characters, a line begins without white space: usual tokenizers end a token there."""
    start = 0
    while len(text) - start > size:
        match = _LINE_START.search(text, start + size)
        if match is None:
            break
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


_LINE_START = re.compile(r"\n(?=\S)")


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    name: str  #: shown to the user
    identity: str  #: hash of everything that decides the ids
    vocab_size: int  #: ids are 0 … vocab_size-1
    separator: int | None  #: id put after each document

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.generic]]:
        """The ids of each text, without separator."""
        ...

    def decode(self, tokens: NDArray[np.generic]) -> bytes:
        """The text of `tokens` [n] as UTF-8; each separator becomes one byte 0."""
        ...


class ByteTokenizer:
    """The bytes of the text's UTF-8; byte 0, which text does not use, ends a document."""

    name = "bytes"
    identity = "bytes-0"
    vocab_size = 256
    separator: int | None = 0

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.generic]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: NDArray[np.generic]) -> bytes:
        return np.asarray(tokens).astype(np.uint8).tobytes()


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library. Its own special-token templates are not applied.

    Raises:
        UsageError: the file is missing or is no tokenizer.
        MissingExtra: the library is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"data.tokenizer: cannot read {path}: {error.strerror}") from None
        try:
            import tokenizers
        except ImportError:
            raise MissingExtra("data.tokenizer", "train", "tokenizers") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for a file that it cannot parse
            raise UsageError(f"data.tokenizer: {path} is not a tokenizers JSON file: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UsageError(f"data.tokenizer: {path} has an empty vocabulary")
        self.name = path.name
        self.identity = xxhash.xxh3_128_hexdigest(content)
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = next((vocabulary[name] for name in SEPARATORS if name in vocabulary), None)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.generic]]:
        if all(len(text) <= _PIECE for text in texts):
            return self._encode(texts)
        return [np.concatenate(list(self._encode_long(text))) for text in texts]

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.generic]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def _encode_long(self, text: str) -> Iterator[NDArray[np.generic]]:
        """In pieces, because the library keeps some hundred bytes per token until a text is done."""
        batch: list[str] = []
        for piece in pieces(text, _PIECE):
            batch.append(piece)
            if len(batch) == _PIECES_AT_ONCE:
                yield from self._encode(batch)
                batch = []
        yield from self._encode(batch)

    def decode(self, tokens: NDArray[np.generic]) -> bytes:
        tokens = np.asarray(tokens)
        if self.separator is None:
            return self._decode(tokens)
        cuts = np.flatnonzero(tokens == self.separator)
        return b"\0".join(self._decode(part[part != self.separator]) for part in np.split(tokens, cuts))

    def _decode(self, tokens: NDArray[np.generic]) -> bytes:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False).encode("utf-8", "replace")


def open_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; absent: bytes."""
    return ByteTokenizer() if path is None else JsonTokenizer(Path(path).expanduser())
