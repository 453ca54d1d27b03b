"""What a rank keeps of its state, and where all ranks go on: whole versions only, the newest that all have."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from diag.errors import UsageError
from pdtrain.pools.keep import Keep, name_of, remove_all
from pdtrain.pools.rejoin import Held, Rejoined, choose
from pdtrain.restart import Failure, Restart


class Torn(Exception):
    pass


def state(value: float) -> list[Tensor]:
    numbers = torch.full((7,), int(value)).to(torch.uint8)
    return [torch.full((3, 5), value), torch.full((), value), torch.empty(0), numbers]


def file(folder: Path, identity: str = "run", *, adopt: bool = True) -> Keep:
    return Keep(folder / "keep", identity, state(0.0), 100, adopt=adopt)


def test_the_last_two_versions_survive_and_a_torn_one_is_never_used(tmp_path: Path) -> None:
    keep = file(tmp_path)
    for version in (4, 5, 6):
        keep.write(version, {"consumed": 16 * version}, state(float(version)))

    def die(version: int) -> None:
        raise Torn

    keep.interrupt = die
    with pytest.raises(Torn):
        keep.write(7, {"consumed": 112}, state(7.0))
    again = file(tmp_path)
    assert again.adopted and again.versions() == [6], "version 5 was overwritten by what was never finished"
    held = state(0.0)
    assert again.read(6, held) == {"consumed": 96}
    assert all((ours == theirs).all() for ours, theirs in zip(held, state(6.0), strict=True))


def test_a_changed_byte_is_a_version_that_is_not_whole(tmp_path: Path) -> None:
    keep = file(tmp_path)
    keep.write(1, {}, state(1.0))
    keep.write(2, {}, state(2.0))
    size = (tmp_path / "keep").stat().st_size
    with (tmp_path / "keep").open("r+b") as stream:
        stream.seek(4096 + (size - 4096) // 2 - 4096 + 10)  # in the tensors of the first slot, which holds version 2
        stream.write(b"\x77")
    assert file(tmp_path).versions() == [1]


def test_what_belongs_to_another_run_or_layout_is_replaced(tmp_path: Path) -> None:
    file(tmp_path).write(3, {}, state(3.0))
    assert not file(tmp_path, "another").adopted and file(tmp_path, "another").versions() == []
    file(tmp_path, "another").write(3, {}, state(3.0))
    assert not Keep(tmp_path / "keep", "another", state(0.0)[:1], 100, adopt=True).adopted
    file(tmp_path, "third").write(3, {}, state(3.0))
    assert file(tmp_path, "third", adopt=False).versions() == [], "the first start of a job adopts nothing"


def test_beyond_the_version_that_is_gone_on_from_nothing_is_left(tmp_path: Path) -> None:
    keep = file(tmp_path)
    keep.write(8, {}, state(8.0))
    keep.write(9, {}, state(9.0))
    keep.forget_beyond(8)
    assert file(tmp_path).versions() == [8]


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"pools\.keep = .*file' cannot be used for 2 x .* bytes: (Not a dir|File)"):
        Keep(tmp_path / "file" / "keep", "run", state(0.0), 10, adopt=False)


def test_files_of_one_run_are_removed_and_of_no_other(tmp_path: Path) -> None:
    for run in ("a", "b"):
        Keep(tmp_path / name_of(tmp_path / run, 2), "run", state(0.0), 10, adopt=False)
    remove_all(tmp_path, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == [name_of(tmp_path / "b", 2)]


@pytest.mark.parametrize("held, version, newest, lacking", [
    ([None, None, (5, 4), (5, 4)], 5, 5, ()),
    ([None, None, (5, 4), (4, 3)], 4, 5, ()),
    ([None, None, (5, 4), ()], None, 5, (3,)),  # a host that lost its file
    ([None, None, (6, 5), (4,)], None, 6, (3,)),  # torn, and what is left is too old
    ([None, (4, 3), (5, 4), (5, 4)], 4, 5, ()),  # a compute rank with something of its own
    ([None, (), (5, 4), (5, 4)], 5, 5, (1,)),  # that lost it: the weights are good all the same
    ([None, None, None, None], None, 0, ()),
])  # fmt: skip
def test_all_go_on_at_the_newest_version_that_all_have(
    held: list[tuple[int, ...] | None], version: int | None, newest: int, lacking: tuple[int, ...]
) -> None:
    found = choose([Held(each, adopted=bool(each)) for each in held], (2, 3))
    assert (found.version, found.newest, found.lacking) == (version, newest, lacking)
    assert found.begun == any(held)


@pytest.mark.parametrize("source, reached, lacking, words", [
    ("kept", 7, (), "all ranks go on after step 7, which the update pool has kept; nothing is lost"),
    ("kept", 8, (1,), "(rank 1 (compute) did not keep its own random numbers and rounding); step 8 is lost"),
    ("checkpoint", 12, (3,), "(rank 3 (update) did not keep a whole copy of step 12); steps 8 to 12 are lost"),
    ("beginning", 12, (), "begin anew, no checkpoint was saved yet; steps 8 to 12 are lost and computed again"),
])  # fmt: skip
def test_one_line_says_where_it_goes_on_and_what_that_cost(
    source: str, reached: int, lacking: tuple[int, ...], words: str
) -> None:
    restart = Restart("x", 1, (Failure(1, 2, "was killed by SIGKILL"),))
    line = Rejoined(restart, 7, reached, source, lacking, 2, 3.0).line()
    assert line.startswith("pools: start 2, because rank 2 (update) was killed by SIGKILL: ") and words in line


def test_a_restart_travels_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = Restart("job").after(2, "was killed by SIGKILL").after(0, "gave no answer")
    monkeypatch.setenv("PDTRAIN_RESTART", restart.to_environment())
    assert Restart.from_environment() == restart and restart.start == 3
    monkeypatch.setenv("PDTRAIN_RESTART", "[1]")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert Restart.from_environment() == Restart("other", 2)
