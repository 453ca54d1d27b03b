"""Growing files: what is read once stays read, whatever happens to names, lines and folders."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest

from diag.artefacts.metric_table import MetricTable
from diag.artefacts.metrics import MetricsLog
from diag.artefacts.wire import masked_crcs
from diag.errors import UsageError
from diag.series import runs
from diag.watch.follow import Follower
from diag.watch.tails import Growth
from tests.diag.watch.helpers import Watched, append, events, megatron, metrics


class Followed:
    """A follower on a stopped clock."""

    def __init__(self, *paths: Path, **options: Any) -> None:
        self.follower = Follower([str(path) for path in paths], stopwatch=lambda: 0.0, **options)
        self.now = 0.0

    def poll(self) -> Growth:
        self.now += 1
        return self.follower.poll(self.now)

    def steps(self) -> list[int]:
        return [step for item in self.follower.artefacts() if isinstance(item, (MetricsLog, MetricTable))
                for step in next(iter(item.series.values())).steps]


def test_only_what_is_new_is_read_and_a_line_under_way_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics(range(1, 4)))
    followed = Followed(path)
    assert [point.step for _, point in followed.poll().news] == [1, 2, 3]
    assert not followed.poll().changed
    text = metrics(range(4, 5))
    append(path, text[:20])
    assert followed.poll().news == []
    append(path, text[20:] + metrics(range(5, 6))[:10])
    assert [point.step for _, point in followed.poll().news] == [4]
    assert followed.steps() == [1, 2, 3, 4]
    log = followed.follower.artefacts()[0]
    assert isinstance(log, MetricsLog) and log.series["loss"].lines.tolist() == [1, 2, 3, 4]


def test_a_torn_line_that_its_writer_takes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics(range(1, 4)) + '{"step": 4, "lo')
    followed = Followed(path)
    followed.poll()
    whole = path.read_text().rpartition("\n")[0] + "\n"
    path.write_text(whole)
    followed.poll()
    append(path, metrics(range(4, 6)))
    followed.poll()
    assert followed.steps() == [1, 2, 3, 4, 5]


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics(range(1, 40)))
    followed = Followed(tmp_path)
    followed.poll()
    path.write_text(metrics(range(1, 4)))
    followed.poll(), followed.poll()
    assert followed.steps() == [1, 2, 3]
    path.write_text(metrics(range(100, 180)))  # longer than before: only its beginning tells
    followed.poll(), followed.poll()
    assert followed.steps() == list(range(100, 180))


@pytest.mark.parametrize("whole_folder", [True, False])
def test_rotation_by_renaming_loses_no_line(tmp_path: Path, whole_folder: bool) -> None:
    path = tmp_path / "train.log"
    append(path, megatron(range(1, 30)))
    followed = Followed(tmp_path if whole_folder else path)
    followed.poll()
    append(path, megatron(range(30, 40)))
    path.rename(tmp_path / "train.log.1")
    append(path, megatron(range(40, 60)))
    for _ in range(3):
        followed.poll()
    from diag.artefacts import Artefacts

    (run, *others) = runs(Artefacts(followed.follower.artefacts()))
    assert others == [] and run.columns["loss"].steps.tolist() == list(range(1, 60))
    assert {part.path for part in run.parts} == {str(path), f"{path}.1"}


def test_rotation_by_copy_and_cut_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    append(path, megatron(range(1, 30)))
    watched = Watched(path)
    watched.ticks(2)
    (tmp_path / "train.log.1").write_text(path.read_text())
    path.write_text("")
    watched.tick()
    append(path, megatron(range(30, 45)))
    assert watched.ticks(3) == []
    assert watched.watch.run is not None and watched.watch.run.columns["loss"].steps[-1] == 44


def test_files_and_folders_that_appear_later(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    assert not followed.poll().changed
    append(tmp_path / "run" / "metrics.jsonl", metrics(range(1, 4)))
    assert followed.poll().changed
    append(tmp_path / "run" / "events" / "rank_0.jsonl", events(0, range(1, 4), start=True))
    followed.poll()
    (tmp_path / "run" / "late.jsonl").touch()
    followed.poll()
    append(tmp_path / "run" / "late.jsonl", metrics(range(7, 9)))
    followed.poll()
    assert sorted(Path(path).name for path in followed.follower.tails) == ["late.jsonl", "metrics.jsonl",
                                                                          "rank_0.jsonl"]


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--wait"):
        Followed(tmp_path / "nothing")
    followed = Followed(tmp_path / "soon.jsonl", wait=True)
    followed.poll()
    append(tmp_path / "soon.jsonl", metrics(range(1, 3)))
    followed.poll()
    assert followed.steps() == [1, 2]


def test_the_run_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, metrics(range(1, 40)))
    watched = Watched(tmp_path)
    watched.ticks(2)
    path.unlink()
    assert watched.ticks(5) == []
    assert watched.watch.ended == "gone"
    append(path, metrics(range(1, 10)))
    watched.ticks(3)
    assert watched.watch.ended is None


def test_tables_and_event_files_are_read_on(tmp_path: Path) -> None:
    append(tmp_path / "metrics.csv", "step,loss\n" + "".join(f"{s},{5 - s / 100}\n" for s in range(50)))
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"".join(map(record, range(50))))
    followed = Followed(tmp_path)
    followed.poll()
    append(tmp_path / "metrics.csv", "50,4.5\n51,")
    more = record(50) + record(51)
    with (tmp_path / "events.out.tfevents.1.host").open("ab") as stream:
        stream.write(more[:-7])
    followed.poll()
    tables = [item for item in followed.follower.artefacts() if isinstance(item, MetricTable)]
    assert sorted(table.format for table in tables) == ["csv", "tensorboard"]
    for table in tables:
        assert table.series["loss"].steps.tolist() == list(range(51))
        assert table.series["loss"].values[50] == pytest.approx(4.5)
    assert next(t for t in tables if t.format == "csv").series["loss"].lines.tolist() == list(range(2, 53))


def record(step: int) -> bytes:
    """One TensorBoard record: loss at a step."""
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 5 - step / 100)
    summary = b"\x0a" + bytes([len(value)]) + value
    body = b"\x09" + struct.pack("<d", 1.8e9 + step) + bytes([0x10, step, 0x2a, len(summary)]) + summary
    head = struct.pack("<Q", len(body))
    sums = masked_crcs([head, body])
    return head + struct.pack("<I", sums[0]) + body + struct.pack("<I", sums[1])


def test_documents_and_archives_are_read_again_when_they_change(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "metrics.jsonl.gz", "wt") as stream:
        stream.write(metrics(range(1, 5)))
    followed = Followed(tmp_path)
    followed.poll()
    assert followed.steps() == [1, 2, 3, 4]
    partial = tmp_path / ".partial"
    with gzip.open(partial, "wt") as stream:
        stream.write(metrics(range(1, 9)))
    partial.replace(tmp_path / "metrics.jsonl.gz")
    followed.poll()
    assert followed.steps() == list(range(1, 9))


def test_a_long_log_is_read_on_and_not_again(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(megatron(range(1, 40_000), total=100_000))
    followed = Followed(path)
    followed.poll()
    taken = followed.follower.tails[str(path)].offset
    assert followed.follower.behind == 0 and taken == path.stat().st_size
    append(path, megatron(range(40_000, 40_010), total=100_000))
    assert [point.step for _, point in followed.poll().news] == list(range(40_000, 40_010))
    log = followed.follower.artefacts()[0]
    assert log.lines == 40_009
