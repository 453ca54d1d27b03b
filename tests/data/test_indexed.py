"""Megatron token files, written here by a writer that shares no code with the reader."""

from __future__ import annotations

import array
import struct

import pytest

from diag.errors import ArtefactError, PdtrainError
from pdtrain.data import open_data
from tests.data.helpers import run_on

TYPECODES = {1: "B", 4: "i", 5: "q", 8: "H"}


def write_indexed(prefix, documents, code=8, modes=False):
    """`documents`: lists of sequences, each a list of ids. All little-endian."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = array.array(TYPECODES[code], [token for sequence in sequences for token in sequence])
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    head += struct.pack("<QQ", len(sequences), len(documents) + 1)
    offset, offsets, bound, bounds = 0, [], 0, [0]
    for sequence in sequences:
        offsets.append(offset)
        offset += len(sequence) * tokens.itemsize
    for document in documents:
        bound += len(document)
        bounds.append(bound)
    body = struct.pack(f"<{len(sequences)}i", *map(len, sequences)) + struct.pack(f"<{len(offsets)}q", *offsets)
    body += struct.pack(f"<{len(bounds)}q", *bounds) + (bytes(len(sequences)) if modes else b"")
    prefix.with_name(prefix.name + ".idx").write_bytes(head + body)
    return prefix


def documents(count=20):
    """Document d: one to three sequences of ids 100·d, 100·d+1, … (unique over the corpus), then the end id 1."""
    result = []
    for d in range(count):
        ids = [100 * d + 2 + i for i in range(20 + 3 * d)]
        cut = [ids, ids[:7], ids[:5]][d % 3]
        rest = ids[len(cut) :]
        result.append([part for part in (cut, rest[:4], rest[4:] + [1]) if part] if d % 3 else [ids + [1]])
    return result


@pytest.fixture
def prefix(tmp_path):
    return write_indexed(tmp_path / "corpus_text_document", documents())


def refusal(path, **settings) -> str:
    with pytest.raises(PdtrainError) as error:
        data = open_data(run_on(path, vocab=4000, val=0, **settings))
        data.sequences(0, data.sequences_per_epoch)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("code", [4, 5, 8])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_round_trip(tmp_path, code, suffix):
    write_indexed(tmp_path / "c", documents(), code, modes=code == 4)
    data = open_data(run_on(f"{tmp_path}/c{suffix}", vocab=4000, val_share=0.0))
    flat = [[token for sequence in document for token in sequence] for document in documents()]
    assert data.store.tokens == sum(map(len, flat))
    for tokens, spans in zip(data.sequences(0, 30), data.documents(0, 30)):
        for span in spans:
            piece = tokens[span.position : span.position + span.stop - span.start].tolist()
            assert piece == flat[span.record - 1][span.start : span.stop]
            assert span.name == "c.bin"
            assert span.offset == sum(map(len, flat[: span.record - 1])) * {4: 4, 5: 8, 8: 2}[code]


def test_several_files_are_one_corpus(tmp_path):
    write_indexed(tmp_path / "part_0", documents(10))
    write_indexed(tmp_path / "part_1", documents(20)[10:])
    for path in (tmp_path, f"{tmp_path}/part_*.idx", f"{tmp_path}/part_*.bin", f"{tmp_path}/part_*"):
        data = open_data(run_on(path, vocab=4000, val_share=0.2))
        assert len(data.store.documents) == 20
        assert {span.name for spans in data.documents(0, 99) for span in spans} == {"part_0.bin", "part_1.bin"}


def test_validation_is_held_out_by_document(prefix):
    data = open_data(run_on(prefix, vocab=4000, val_share=0.2))
    held = set((data.validation(99)[data.validation(99) > 1] // 100).tolist())
    trained = set((data.sequences(0, data.sequences_per_epoch) // 100).flatten().tolist()) - {0}
    assert len(held) > 1 and not held & trained


def test_without_a_tokenizer_bytes_are_unknown(prefix):
    data = open_data(run_on(prefix, vocab=4000))
    assert data.tokenizer_name == "unknown" and data.vocab_size == 4000
    assert data.bytes_per_token("train") is None


def patched(path, offset, value):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)


def test_every_cut_of_the_index_is_noticed(prefix):
    index = prefix.with_name(prefix.name + ".idx")
    whole = index.read_bytes()
    for size in [*range(60), len(whole) // 2, len(whole) - 8, len(whole) - 1]:
        index.write_bytes(whole[:size])
        message = refusal(prefix)
        assert index.name in message and ("truncated" in message or "MMIDIDX" in message), (size, message)


def test_damaged_index_fields(prefix):
    index = prefix.with_name(prefix.name + ".idx")
    whole = index.read_bytes()
    count = struct.unpack_from("<Q", whole, 18)[0]
    for offset, value, expected in [
        (0, b"PK\x03\x04", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "index version 2"),
        (17, b"\x07", "tokens of type float32"),
        (17, b"\x63", "unknown code 99"),
        (18, struct.pack("<Q", 2**60), "truncated"),
        (18, struct.pack("<Q", count - 5), "more than its header announces"),
        (34, struct.pack("<i", -4), "negative length"),
        (34 + 4 * count, struct.pack("<q", -2), "negative length or an impossible offset"),
        (34 + 4 * count, struct.pack("<q", 3), "impossible offset"),
        (34 + 4 * count, struct.pack("<q", 2**40), "truncated"),
        (34 + 12 * count, struct.pack("<q", 5), "document boundaries do not run from 0"),
        (len(whole) - 16, struct.pack("<q", 10**6), "document boundaries do not run from 0"),
    ]:
        index.write_bytes(whole)
        patched(index, offset, value)
        message = refusal(prefix)
        assert expected in message and prefix.name in message, (offset, message)


def test_cut_or_missing_tokens(prefix):
    binary = prefix.with_name(prefix.name + ".bin")
    binary.write_bytes(binary.read_bytes()[:-2])
    assert "truncated" in refusal(prefix) and binary.name in refusal(prefix)
    binary.unlink()
    assert "both are needed" in refusal(prefix)


def test_index_missing_beside_its_tokens(prefix):
    prefix.with_name(prefix.name + ".idx").unlink()
    assert "needs its .idx" in refusal(prefix.with_name(prefix.name + ".bin"))


def test_ids_beyond_the_model_are_named_by_document(prefix):
    data = open_data(run_on(prefix, vocab=500, val_share=0.0))
    with pytest.raises(ArtefactError, match=r"corpus_text_document.bin: document \d+, token \d+ is id \d+; model"):
        data.sequences(0, data.sequences_per_epoch)
