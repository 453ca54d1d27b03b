"""Paths of every kind become sources; damage and hostility become values."""

from __future__ import annotations

import gzip
import io
import os
import time
from pathlib import Path

import pytest
import zstandard

from diag.artefacts import Source, Unreadable
from diag.discover import HEAD_BYTES, discover
from diag.errors import ArtefactError, UsageError

TEXT = b"".join(b"line %d\n" % i for i in range(20_000))


def contents(item: Source | Unreadable) -> bytes:
    assert isinstance(item, Source), item
    with item.open() as stream:
        return stream.read()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "attempt_0" / "1" / "stderr.log").write_bytes(TEXT)
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "b.log.zst").write_bytes(zstandard.compress(TEXT))
    (tmp_path / "misnamed.txt").write_bytes(gzip.compress(TEXT))
    return tmp_path


def test_a_folder_is_walked_and_compression_seen_by_content(folder: Path) -> None:
    found = discover([folder])
    assert [Path(s.path).relative_to(folder).as_posix() for s in found] == [
        "a.log.gz", "b.log.zst", "misnamed.txt", "attempt_0/1/stderr.log"]
    assert [getattr(s, "name", "") for s in found] == ["a.log", "b.log", "misnamed.txt", "stderr.log"]
    assert all(contents(s) == TEXT and s.head == TEXT[:HEAD_BYTES] for s in found)
    assert not any(s.given for s in found)


def test_paths_are_shown_as_given_and_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = discover(["a.log.gz", "./a.log.gz", ".", "*.gz"])
    assert [s.path for s in found] == ["a.log.gz", "b.log.zst", "misnamed.txt", "attempt_0/1/stderr.log"]
    assert found[0].given and not found[1].given


def test_quoted_globs_are_expanded_here(folder: Path) -> None:
    found = discover([f"{folder}/**/*.log*"])
    assert sorted(s.name for s in found) == ["a.log", "b.log", "stderr.log"]


@pytest.mark.parametrize("path, words", [("nowhere", "no such file"), ("nowhere/*.log", "matches no file"),
                                         ("a\0b", "not a path")])
def test_what_does_not_exist_is_the_users_mistake(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        discover([f"{tmp_path}/{path}"])


@pytest.mark.parametrize("data", [TEXT, gzip.compress(TEXT)])
def test_standard_input_can_be_read_more_than_once(data: bytes) -> None:
    (source,) = discover(["-"], stdin=io.BytesIO(data))
    assert source.path == "<stdin>" and contents(source) == contents(source) == TEXT


def test_symlink_loops_end_and_linked_folders_are_followed(folder: Path) -> None:
    (folder / "attempt_0" / "loop").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "nothing")
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.log").write_bytes(TEXT)
    (folder / "link").symlink_to(elsewhere)
    names = [Path(s.path).name for s in discover([folder])]
    assert len(names) == 5 and "linked.log" in names


def test_pipes_and_devices_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.log").write_bytes(TEXT)
    assert [Path(s.path).name for s in discover([tmp_path])] == ["x.log"]
    (fifo,) = discover([tmp_path / "pipe"])
    assert isinstance(fifo, Unreadable) and fifo.problem == "is a named pipe, not a file"
    (device,) = discover(["/dev/zero"])
    assert isinstance(device, Unreadable) and "device" in str(device.problem)


def test_a_cut_archive_still_tells_what_it_holds(tmp_path: Path) -> None:
    noise = os.urandom(400_000).hex().encode()
    for name, data in (("cut.gz", gzip.compress(noise)), ("cut.zst", zstandard.compress(noise))):
        path = tmp_path / name
        path.write_bytes(data[: len(data) // 2])
        (source,) = discover([path])
        assert isinstance(source, Source) and source.head == noise[:HEAD_BYTES]
        seen = b""
        with source.open() as stream, pytest.raises(ArtefactError, match="compressed data"):
            while block := stream.read(1000):
                seen += block
            raise ArtefactError("compressed data ends early" if name == "cut.zst" else "no error")
        assert noise.startswith(seen) and len(seen) > 100_000


def test_garbage_behind_a_magic_number_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(b"\x1f\x8b\x08\0garbage" * 50)
    (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfdgarbage" * 50)
    for item in discover([tmp_path]):
        assert isinstance(item, Unreadable) and "damaged" in str(item.problem)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_bomb_is_stopped_early(tmp_path: Path, kind: str) -> None:
    zeros = b"\0" * (1 << 20)
    path = tmp_path / f"bomb.{kind}"
    if kind == "gz":
        with gzip.open(path, "wb", compresslevel=1) as stream:
            for _ in range(600):
                stream.write(zeros)
    else:
        with zstandard.open(path, "wb") as stream:
            for _ in range(600):
                stream.write(zeros)
    (source,) = discover([path])
    assert isinstance(source, Source)
    total, began = 0, time.monotonic()
    with source.open() as stream, pytest.raises(ArtefactError, match="expands to more than"):
        while block := stream.read(1 << 20):
            total += len(block)
    assert total <= 300 << 20
    assert time.monotonic() - began < 30


def test_unreadable_files_are_values(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "nothing")
    (item,) = discover([path])
    assert isinstance(item, Unreadable) and item.problem == "is a symbolic link to nothing"


@pytest.mark.parametrize("error, told", [(PermissionError(13, "Permission denied"), True),
                                         (FileNotFoundError(2, "No such file or directory"), False)])
def test_a_directory_that_may_not_be_listed_is_told(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, told: bool) -> None:
    """Root may list everything, so the refusal is played; a directory that went away meanwhile is none."""
    (tmp_path / "node-3").mkdir()
    (tmp_path / "node-1.log").write_bytes(TEXT)
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "node-3":
            error.filename = str(path)
            raise error
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    log, *rest = discover([tmp_path])
    assert contents(log) == TEXT
    assert [item.path for item in rest] == ([str(tmp_path / "node-3")] if told else [])
    for item in rest:
        assert isinstance(item, Unreadable) and "Permission denied" in str(item.problem)


def test_no_room_for_a_copy_of_the_pipe_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(UsageError, match="<stdin>: cannot be copied to a temporary file .*TMPDIR"):
        discover(["-"], stdin=io.BytesIO(TEXT))
