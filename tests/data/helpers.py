"""Small corpora on disk and configurations that name them."""

from __future__ import annotations

import json
from pathlib import Path

from pdtrain.config.schema import Data as DataSection
from pdtrain.config.schema import Model, Run, Train


def run_on(
    path: Path | str | None = None, *, length: int = 16, seed: int = 0, val: int = 1, vocab: int = 256, **data
) -> Run:
    """A run with small sequences on `path`."""
    return Run(
        model=Model(vocab_size=vocab),
        train=Train(sequence_length=length, seed=seed, val_sequences=val),
        data=DataSection(path=None if path is None else str(path), **data),
    )


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def distinct_texts(count: int, words: int = 30) -> list[str]:
    """Texts in which every word says where it stands, so that a token sequence can be found again."""
    return [" ".join(f"d{document}w{word}" for word in range(words + document % 7)) for document in range(count)]
