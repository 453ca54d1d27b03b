"""The token cache: built once however many ranks ask, whole or absent, never stale."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from diag.errors import UsageError
from pdtrain.data import build, open_data
from tests.data.helpers import distinct_texts, run_on, write_jsonl

#: Opens argv[1] with cache argv[2], reports on stderr each time that a build begins, prints the fingerprint.
OPEN = """
import sys, time
from pdtrain.data import build, open_data
from tests.data.helpers import run_on
begin = build.tokenise
def slow(source, tokenizer, sink):
    print("building", file=sys.stderr, flush=True)
    def pause(tokens):
        sink(tokens)
        time.sleep(float(sys.argv[3]))
    return begin(source, tokenizer, pause)
build.tokenise = slow
print(open_data(run_on(sys.argv[1]), cache_dir=__import__("pathlib").Path(sys.argv[2])).fingerprint)
"""


def start(path, cache, pause):
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, str(path), str(cache), str(pause)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_of_several_processes_one_builds_and_all_read_the_same(tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", distinct_texts(40))
    processes = [start(path, tmp_path / "cache", 0.02) for _ in range(3)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    assert sum(err.count("building") for _, err in results) == 1


def test_a_killed_build_leaves_nothing_half_used_and_the_next_one_builds(tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", distinct_texts(40))
    victim = start(path, tmp_path / "cache", 0.1)
    assert victim.stderr.readline() == "building\n"
    time.sleep(0.5)
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=10)
    left = sorted(entry.name for entry in (tmp_path / "cache").iterdir())
    assert any(name.endswith(".unfinished") for name in left)
    data = open_data(run_on(path), cache_dir=tmp_path / "cache")
    assert len(data.store.documents) == 40
    assert not list((tmp_path / "cache").glob("*.unfinished"))


def test_second_opening_maps_the_cache_and_an_edited_file_is_tokenised_anew(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "texts.jsonl", distinct_texts(40))
    before = open_data(run_on(path), cache_dir=tmp_path / "cache").sequences(0, 4)
    with monkeypatch.context() as context:
        context.setattr(build, "tokenise", None)  # would fail if it were called
        mapped = open_data(run_on(path), cache_dir=tmp_path / "cache")
    assert isinstance(mapped.store.parts[0], np.memmap)
    assert np.array_equal(mapped.sequences(0, 4), before)
    times = path.stat()
    path.write_text(path.read_text().replace("w0 ", "w! "))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time of modification
    assert not np.array_equal(open_data(run_on(path), cache_dir=tmp_path / "cache").sequences(0, 4), before)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "about.json"])
def test_a_damaged_entry_is_built_again(tmp_path, name):
    path = write_jsonl(tmp_path / "texts.jsonl", distinct_texts(40))
    before = open_data(run_on(path), cache_dir=tmp_path / "cache").sequences(0, 4)
    (file,) = (tmp_path / "cache").glob(f"tokens-*/{name}")
    file.write_bytes(file.read_bytes()[:-7])
    assert np.array_equal(open_data(run_on(path), cache_dir=tmp_path / "cache").sequences(0, 4), before)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "texts.jsonl", distinct_texts(40))
    real = build.tokenise

    def grown(*arguments):
        result = real(*arguments)
        with path.open("a") as stream:
            stream.write('{"text": "late"}\n')
        return result

    monkeypatch.setattr(build, "tokenise", grown)
    with pytest.raises(UsageError, match="changed while it was being tokenised"):
        open_data(run_on(path), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tokens-*[!k]"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", distinct_texts(40))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the token cache .*XDG_CACHE_HOME"):
        open_data(run_on(path), cache_dir=tmp_path / "file" / "cache")
