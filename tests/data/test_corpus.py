"""The promises to the trainer: one order for every layout, no leak, exact resume, and the way back to the documents."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from diag.errors import UsageError
from pdtrain.data import open_data
from tests.data.helpers import distinct_texts, run_on, write_jsonl


@pytest.fixture(scope="module")
def library():
    return open_data(run_on(length=256, val=4))


@pytest.fixture
def texts(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", distinct_texts(40))


def opened(path, cache, **settings):
    return open_data(run_on(path, **settings), cache_dir=cache)


def test_default_corpus_is_real_text_of_this_machine(library):
    assert library.vocab_size == 256 and library.tokenizer_name == "bytes"
    assert 1_000_000 < library.store.tokens < 16_000_000
    assert "documents" in library.description and f"{library.store.tokens:,} tokens" in library.description
    assert library.bytes_per_token("train") == library.bytes_per_token("validation") == 1.0


def test_data_needs_no_torch():
    code = "import sys, pdtrain.data, pdtrain.data.baseline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sequences_overlap_by_their_target_only(texts, tmp_path):
    data = opened(texts, tmp_path, val_share=0.0)
    windows = data.sequences(0, data.sequences_per_epoch)
    firsts, lasts = sorted(windows[:, :2].tolist()), windows[:, -1].tolist()
    stream = data.training_tokens(data.store.tokens)
    assert firsts == sorted(stream[k : k + 2].tolist() for k in range(0, len(stream) - 16, 16))
    assert sorted(lasts) == sorted(stream[16::16].tolist())


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_order_is_the_same_for_every_layout_and_slices_are_distinct(library, dp, micro):
    """What the trainer does: rank r reads consumed + m·micro·dp + r·micro … + micro."""
    batch = 2 * micro * dp
    slices = [
        library.sequences(consumed + m * micro * dp + rank * micro, micro)
        for consumed in (0, batch)
        for m in range(2)
        for rank in range(dp)
    ]
    assert np.array_equal(np.concatenate(slices), library.sequences(0, 2 * batch))
    assert len({row.tobytes() for part in slices for row in part}) == 2 * batch


def test_every_epoch_visits_every_window_once_in_a_new_order(texts, tmp_path):
    data = opened(texts, tmp_path)
    epoch = data.sequences_per_epoch
    first, second = data.sequences(0, epoch), data.sequences(epoch, epoch)
    assert sorted(map(bytes, first)) == sorted(map(bytes, second))
    assert len(set(map(bytes, first))) == epoch
    assert not np.array_equal(first, second)
    across = data.sequences(epoch - 2, 4)
    assert np.array_equal(across, np.concatenate([first[-2:], second[:2]]))


def test_resume_by_number_alone(texts, tmp_path):
    whole = opened(texts, tmp_path).sequences(0, 90)
    resumed = opened(texts, tmp_path)
    assert np.array_equal(resumed.sequences(37, 53), whole[37:])


def test_seed_changes_the_order_and_the_packs_but_not_the_validation_text(texts, tmp_path):
    one, two = opened(texts, tmp_path, seed=1, val_share=0.2), opened(texts, tmp_path, seed=2, val_share=0.2)
    assert not np.array_equal(one.sequences(0, 8), two.sequences(0, 8))
    assert not np.array_equal(one.training_tokens(200), two.training_tokens(200))
    assert np.array_equal(one.validation(99), two.validation(99))


def test_validation_documents_never_appear_in_training(texts, tmp_path):
    data = opened(texts, tmp_path, val_share=0.2)
    trained = {span.document for spans in data.documents(0, data.sequences_per_epoch) for span in spans}
    held_out = data.validation(1000)
    assert held_out.shape[1] == 17 and len(held_out) > 5
    words = {word for row in held_out for word in bytes(row.astype(np.uint8)).replace(b"\0", b" ").split()[1:-1]}
    numbers = {int(word[1:].split(b"w")[0]) for word in words}
    assert numbers and not numbers & trained
    assert 0.15 < data._validation.tokens / data.store.tokens < 0.3


def test_equal_documents_are_never_on_both_sides(tmp_path):
    path = write_jsonl(tmp_path / "twice.jsonl", distinct_texts(30) * 3)
    data = opened(path, tmp_path, val_share=0.2)
    keys = data.store.documents["key"]
    assert not set(keys[data._train.documents].tolist()) & set(keys[data._validation.documents].tolist())


def test_single_file_holds_out_its_tail(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number}\n" for number in range(2000)))
    data = opened(path, tmp_path, val_share=0.1)
    content = path.read_bytes() + b"\0"
    train, held = data._train.tokens, data._validation.tokens
    assert (train, held) == (len(content) - len(content) // 10, len(content) // 10)
    assert bytes(data.training_tokens(10**9).astype(np.uint8)) == content[:train]
    assert bytes(data.validation(1)[0].astype(np.uint8)) == content[train : train + 17]
    assert data.bytes_per_token("validation") == 1.0


def test_no_validation_when_nothing_is_held_out(texts, tmp_path):
    data = opened(texts, tmp_path, val_share=0.0)
    assert data.validation(5).shape == (0, 17)
    assert data.bytes_per_token("validation") is None


def test_documents_of_default_corpus_are_found_again_in_their_files(library):
    root = Path(sysconfig.get_path("stdlib"))
    sequences, spans = library.sequences(100, 20), library.documents(100, 20)
    for tokens, documents in zip(sequences, spans):
        assert sum(span.stop - span.start for span in documents) == 257
        for span in documents:
            content = (root / span.name).read_bytes() + b"\0"
            at = span.position
            assert bytes(tokens[at : at + span.stop - span.start].astype(np.uint8)) == content[span.start : span.stop]


def test_packs_mix_documents_from_different_files(library):
    names = [{span.name for span in spans} for spans in library.documents(0, 400)]
    assert len(set().union(*names)) > 100
    assert any(len(found) > 1 for found in names)


def test_step_names_its_documents_by_line_and_byte_offset(texts, tmp_path):
    data = opened(texts, tmp_path)
    lines, content = texts.read_text().splitlines(), texts.read_bytes()
    found = data.documents_of_step(3, train_batch=4)
    assert found == data.documents(8, 4) and len(found) == 4
    for tokens, spans in zip(data.sequences(8, 4), found):
        for span in spans:
            text = distinct_texts(40)[span.record - 1].encode() + b"\0"
            assert span.name == "texts.jsonl"
            assert content[span.offset :].startswith(lines[span.record - 1].encode())
            piece = tokens[span.position : span.position + span.stop - span.start]
            assert bytes(piece.astype(np.uint8)) == text[span.start : span.stop]
    with pytest.raises(UsageError, match="counted from 1"):
        data.documents_of_step(0, 4)


def test_fingerprint_tells_runs_apart_that_would_read_other_tokens(texts, tmp_path):
    base = opened(texts, tmp_path).fingerprint
    elsewhere = tmp_path / "moved"
    elsewhere.mkdir()
    (elsewhere / "renamed.jsonl").write_bytes(texts.read_bytes())
    assert opened(elsewhere / "renamed.jsonl", tmp_path).fingerprint == base
    assert opened(texts, tmp_path, seed=1).fingerprint != base
    assert opened(texts, tmp_path, length=8).fingerprint != base
    assert opened(texts, tmp_path, val_share=0.3).fingerprint != base
    texts.write_text(texts.read_text().replace("d3w3", "d3w4"))
    assert opened(texts, tmp_path).fingerprint != base


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab": 255}, "bytes has 256 ids, model.vocab_size = 255"),
        ({"length": 100_000}, "less than one sequence of 100001"),
        ({"val_share": 0.001}, "data.val_share = 0.001 .* holds out .* raise it, or set train.val_sequences = 0"),
    ],
)
def test_a_run_that_does_not_fit_the_corpus_is_refused_in_one_line(texts, tmp_path, settings, message):
    with pytest.raises(UsageError, match=message) as error:
        opened(texts, tmp_path, **settings)
    assert "\n" not in str(error.value)
