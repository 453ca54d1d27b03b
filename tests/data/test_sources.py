"""What users give: files, directories, globs, compression – and damage, which is one line that says where."""

from __future__ import annotations

import gzip
import json

import pytest
import zstandard

from diag.errors import ArtefactError, PdtrainError, UsageError
from pdtrain.data import open_data
from tests.data.helpers import distinct_texts, run_on, write_jsonl

TEXTS = distinct_texts(12)


def texts_of(path, cache, **settings):
    """The documents that a path gives, in corpus order."""
    data = open_data(run_on(path, val_share=0.0, **settings), cache_dir=cache)
    store = data.store
    return [
        bytes(store.parts[0][row["start"] : row["start"] + row["length"] - 1]).decode() for row in store.documents
    ]


def refusal(path, cache, **settings) -> str:
    with pytest.raises(PdtrainError) as error:
        open_data(run_on(path, **settings), cache_dir=cache)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_plain_and_compressed(tmp_path, suffix):
    plain = write_jsonl(tmp_path / "plain.jsonl", TEXTS).read_bytes()
    pack = {"": lambda raw: raw, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    (tmp_path / f"given.jsonl{suffix}").write_bytes(pack(plain))
    assert texts_of(tmp_path / f"given.jsonl{suffix}", tmp_path / "cache") == TEXTS


@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_compressed_file_of_several_frames_is_read_to_its_end(tmp_path, suffix, pack):
    path = tmp_path / f"log.txt{suffix}"
    path.write_bytes(pack(b"first part, " * 20) + pack(b"second part"))
    assert texts_of(path, tmp_path / "cache") == ["first part, " * 20 + "second part"]


def test_directory_is_searched_for_known_suffixes_in_a_fixed_order(tmp_path):
    for name in ("b.txt", "sub/a.txt", "a.txt", "notes.pdf", "c.txt.gz"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = f"text of {name}".encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    expected = [f"text of {name}" for name in ("a.txt", "b.txt", "c.txt.gz", "sub/a.txt")]
    assert texts_of(tmp_path / "corpus", tmp_path / "cache") == expected
    assert texts_of(f"{tmp_path}/corpus/*.txt", tmp_path / "cache") == expected[:2]
    assert texts_of(f"{tmp_path}/corpus/**/a.txt", tmp_path / "cache") == [expected[0], expected[3]]


def test_a_named_file_is_text_whatever_its_suffix(tmp_path):
    (tmp_path / "source.rs").write_text("fn main() { println!(); }")
    assert texts_of(tmp_path / "source.rs", tmp_path / "cache") == ["fn main() { println!(); }"]


def test_blank_lines_empty_texts_and_a_missing_last_newline_are_no_documents(tmp_path):
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "first of all"}\r\n\r\n   \n{"text": ""}\n{"text": "line five\\u2028 end"}')
    assert texts_of(path, tmp_path / "cache") == ["first of all", "line five\u2028 end"]
    data = open_data(run_on(path, length=4, val=0), cache_dir=tmp_path / "cache")
    assert data.store.documents["record"].tolist() == [1, 5]


def test_text_key_names_the_field(tmp_path):
    path = write_jsonl(tmp_path / "other.jsonl", TEXTS, key="content")
    assert texts_of(path, tmp_path / "cache", text_key="content") == TEXTS
    assert refusal(path, tmp_path / "cache") == (
        "other.jsonl:1: no field 'text'; set data.text_key to one of its fields: content"
    )


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "cut off', "texts.jsonl:4: not a JSON record"),
        ('["text"]', "texts.jsonl:4: a JSON list, not an object"),
        ('{"text": 7}', "texts.jsonl:4: field 'text' is a int, not text"),
        ('{"text": "\\ud800"}', "texts.jsonl:4: not a JSON record"),
        ("\udcff", "texts.jsonl:4: not a JSON record"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, line, message):
    path = write_jsonl(tmp_path / "texts.jsonl", TEXTS[:2])
    with path.open("a", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write("\n" + line + "\n" + json.dumps({"text": "after it"}) + "\n")
    assert refusal(path, tmp_path / "cache").startswith(message)
    assert not list((tmp_path / "cache").glob("tokens-*[!k]")), "a failed build leaves nothing"


def test_text_that_is_not_utf8_is_named_by_byte(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1") + b" text, long enough")
    assert "latin.txt: not UTF-8 at byte 2 (0xef)" in refusal(tmp_path / "latin.txt", tmp_path / "cache")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_compression_is_an_error_not_a_shorter_corpus(tmp_path, suffix, damage):
    plain = "".join(json.dumps({"text": text}) + "\n" for text in distinct_texts(400)).encode()
    whole = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}[suffix](plain)
    middle = len(whole) // 2
    damaged = whole[:middle] if damage == "cut" else whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    (tmp_path / f"shard.jsonl{suffix}").write_bytes(damaged)
    message = refusal(tmp_path / f"shard.jsonl{suffix}", tmp_path / "cache")
    assert message.startswith(f"shard.jsonl{suffix}:") and "damaged" in message


def test_paths_that_give_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "blank.txt").write_text("")
    assert "no file, directory or glob match" in refusal(tmp_path / "absent", tmp_path / "cache")
    assert "no file, directory or glob match" in refusal(tmp_path / "*.csv", tmp_path / "cache")
    assert "empty holds no .txt" in refusal(tmp_path / "empty", tmp_path / "cache")
    assert "pictures holds no .txt" in refusal(tmp_path / "pictures", tmp_path / "cache")
    assert "blank.txt holds no text" in refusal(tmp_path / "blank.txt", tmp_path / "cache")


def test_text_beside_token_files_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.idx").write_bytes(b"")
    with pytest.raises(UsageError, match="mixes text"):
        open_data(run_on(tmp_path))


def test_unreadable_files_are_usage_errors_or_artefact_errors_only(tmp_path):
    (tmp_path / "not.gz").write_bytes(b"plain text")
    with pytest.raises(ArtefactError, match="not.gz: damaged gzip"):
        open_data(run_on(tmp_path / "not.gz"), cache_dir=tmp_path / "cache")
