from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from diag.errors import UsageError
from pdtrain.data import open_data
from pdtrain.data.tokenizer import ByteTokenizer, JsonTokenizer, pieces
from tests.data.helpers import distinct_texts, run_on, write_jsonl

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'train' is not installed")

TEXTS = distinct_texts(60)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE of 300 ids with an end-of-text token, trained here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def data(bpe, tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    return open_data(run_on(path, vocab=300, tokenizer=str(bpe), val_share=0.1), cache_dir=tmp_path / "cache")


def test_documents_decode_to_their_text_and_end_with_the_separator(data):
    for number, row in enumerate(data.store.documents[:10]):
        ids = np.asarray(data.store.parts[0][row["start"] : row["start"] + row["length"]])
        assert ids[-1] == data.tokenizer.separator == 0
        assert data.tokenizer.decode(ids[:-1]).decode() == TEXTS[number]
        assert row["bytes"] == len(TEXTS[number]) + 1


def test_bytes_per_token_is_text_over_tokens(data):
    train, held = data.bytes_per_token("train"), data.bytes_per_token("validation")
    whole = sum(len(text) + 1 for text in TEXTS)
    assert 1.5 < train < 10 and 1.5 < held < 10
    assert train * data._train.tokens + held * data._validation.tokens == pytest.approx(whole)
    decoded = data.tokenizer.decode(data.training_tokens(10**9))
    assert len(decoded) / data._train.tokens == pytest.approx(train)


def test_the_split_does_not_depend_on_the_tokenizer(data, tmp_path):
    other = open_data(run_on(tmp_path / "texts.jsonl", val_share=0.1), cache_dir=tmp_path / "cache")
    common = set(data._validation.documents.tolist()) & set(other._validation.documents.tolist())
    assert len(common) >= min(len(data._validation.documents), len(other._validation.documents)) - 1


def test_vocabulary_larger_than_the_model_is_refused_with_the_number_to_set(bpe, tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    with pytest.raises(UsageError, match=r"bpe.json has 300 ids, model.vocab_size = 256 .* set model.vocab_size = 300"):
        open_data(run_on(path, tokenizer=str(bpe)), cache_dir=tmp_path / "cache")


def test_default_corpus_takes_a_tokenizer(bpe, tmp_path):
    data = open_data(run_on(None, vocab=512, tokenizer=str(bpe)), cache_dir=tmp_path / "cache")
    assert data.tokenizer_name == "bpe.json" and data.vocab_size == 300
    assert data.sequences(0, 2).max() < 300


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '{"model": {"type": "Nothing"}}', "\x00\x01"])
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path, content):
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(UsageError, match="broken.json is not a tokenizers JSON file") as error:
        JsonTokenizer(tmp_path / "broken.json")
    assert "\n" not in str(error.value)


def test_missing_tokenizer_and_missing_library_are_one_line(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*absent.json"):
        JsonTokenizer(tmp_path / "absent.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from pathlib import Path\nfrom pdtrain.data.tokenizer import JsonTokenizer\n"
        f"try: JsonTokenizer(Path({str(tmp_path / 'tokenizer.json')!r}))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("MissingExtra") and "pdtrain[train]" in out


def test_bytes_round_trip_every_character():
    text = "naïve 文字 \U0001f600"
    (ids,) = ByteTokenizer().encode([text])
    assert ByteTokenizer().decode(ids).decode() == text


def test_a_long_text_is_cut_at_line_starts_and_tokenises_as_a_whole(bpe):
    text = "".join(f"  indented d{n}w{n}\n\n" if n % 3 else f"d{n}w1 word\n" for n in range(2000))
    parts = list(pieces(text, 1000))
    assert len(parts) > 20 and "".join(parts) == text
    assert all(part[0] == "d" for part in parts)
    tokenizer = JsonTokenizer(bpe)
    whole = tokenizer._encode([text])[0]
    assert np.array_equal(np.concatenate(tokenizer._encode(parts)), whole)


def test_encoding_in_pieces_keeps_texts_apart(bpe, monkeypatch):
    monkeypatch.setattr("pdtrain.data.tokenizer._PIECE", 50)
    tokenizer = JsonTokenizer(bpe)
    texts = ["short", "d1w1 line\n" * 40, ""]
    assert [tokenizer.decode(ids).decode() for ids in tokenizer.encode(texts)] == texts
