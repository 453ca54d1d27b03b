"""TensorBoard events, trainer_state.json, CSV, W&B files and console logs as tables: read whole, cut off, damaged."""

from __future__ import annotations

import json
import math
import random
import re
import struct
import zlib

import pytest

from diag.artefacts import (
    Unreadable,
    csv_table,
    memory_source,
    recognise,
    tensorboard_events,
    trainer_state,
    wandb_offline,
)
from diag.artefacts.metric_lines import read_table
from diag.artefacts.wire import masked_crcs


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def event(step: int, tag: str, value: float, *, tensor: bool = False) -> bytes:
    raw = struct.pack("<f", value)
    number = field(8, b"\x08\x01" + field(5, raw)) if tensor else b"\x15" + raw
    return b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + varint(step) + field(
        5, field(1, field(1, tag.encode()) + number))


def framed(*records: bytes) -> bytes:
    out = b""
    for record in records:
        head = struct.pack("<Q", len(record))
        out += head + struct.pack("<I", masked_crcs([head])[0]) + record + struct.pack("<I", masked_crcs([record])[0])
    return out


HEAD = b"\x09" + struct.pack("<d", 1.7e9) + field(3, b"brain.Event:2")
EVENTS = [HEAD] + [event(s, "lm loss", 5 - s / 50, tensor=s % 2 == 0) for s in range(1, 101)]


def test_crc32c_is_the_published_one() -> None:
    unmasked = (masked_crcs([b"123456789"])[0] - 0xA282EAD8) & 0xFFFFFFFF
    assert (unmasked >> 17 | unmasked << 15) & 0xFFFFFFFF == 0xE3069283  # RFC 3720, B.4


def test_events_of_both_kinds_are_read() -> None:
    source = memory_source(framed(*EVENTS), "events.out.tfevents.1.host")
    assert recognise(source) is tensorboard_events
    table = tensorboard_events.read(source)
    loss = table.series["lm loss"]
    assert list(loss.steps) == list(range(1, 101)) and loss.values[9] == pytest.approx(4.8) and table.problem is None
    assert table.series["time"].values[0] == pytest.approx(1.7e9 + 1)


def test_a_torn_tail_is_stated_and_a_damaged_record_left_out() -> None:
    data = framed(*EVENTS)
    table = tensorboard_events.read(memory_source(data[:-9], "events.out.tfevents.1"))
    assert len(table.series["lm loss"].steps) == 99 and "cut off" in table.problem and table.problem_severity == "info"
    flipped = bytearray(data)
    flipped[len(framed(*EVENTS[:40])) + 20] ^= 4
    table = tensorboard_events.read(memory_source(bytes(flipped), "events.out.tfevents.1"))
    assert len(table.series["lm loss"].steps) == 99 and "1 of 101 records" in table.problem
    assert table.problem_severity == "warning"
    assert isinstance(tensorboard_events.read(memory_source(framed(HEAD), "x")), Unreadable)


def test_a_trainer_state_is_read_with_its_lines_even_when_cut() -> None:
    history = [{"epoch": s / 10, "loss": 3 - s / 100, "learning_rate": 1e-4, "step": s} for s in range(1, 51)]
    history += [{"eval_loss": 2.4, "step": 50}, {"train_runtime": 9.0, "train_loss": 2.7, "step": 50}]
    history[29]["loss"] = math.nan
    text = json.dumps({"global_step": 50, "max_steps": 80, "log_history": history}, indent=2)
    source = memory_source(text.encode(), "trainer_state.json")
    assert recognise(source) is trainer_state
    table = trainer_state.read(source)
    assert table.total_steps == 80 and len(table.series["loss"].steps) == 50
    assert math.isnan(table.series["loss"].values[29])
    assert "train_runtime" not in table.series and list(table.series["eval_loss"].steps) == [50]
    line = table.series["loss"].lines[10]
    assert '"step": 11' in text.splitlines()[line - 1]
    cut = trainer_state.read(memory_source(text.encode()[:2000], "trainer_state.json"))
    assert 5 < len(cut.series["loss"].steps) < 50 and "cut off" in cut.problem


def test_a_table_of_lightning_has_empty_cells() -> None:
    text = "epoch,step,train_loss,val_loss\n0,1,3.5,\n0,2,3.4,\n0,2,,3.6\n0,3,nan,\n"
    source = memory_source(text.encode(), "metrics.csv")
    assert recognise(source) is csv_table
    table = csv_table.read(source)
    assert list(table.series["train_loss"].steps) == [1, 2, 3] and list(table.series["val_loss"].lines) == [4]
    assert math.isnan(table.series["train_loss"].values[2])


def test_exports_lose_their_run_names_and_extremes() -> None:
    text = '"Step","big - train/loss","big - train/loss__MIN"\n'
    text += "".join(f'"{i}","{3 - i / 9}","1"\n' for i in range(9))
    assert set(csv_table.read(memory_source(text.encode(), "export.csv")).series) == {"train/loss"}
    board = "Wall time,Step,Value\n1.5,1,3.0\n2.5,2,2.9\n"
    assert "loss" in csv_table.read(memory_source(board.encode(), "loss.csv")).series


@pytest.mark.parametrize("text", ["name,size\na,1\n", "step\n1\n2\n", "1,2,3\n4,5,6\n", "hello world\n", ""])
def test_what_is_no_metrics_table_is_left_alone(text) -> None:
    assert csv_table.sniff(text.encode(), "x.csv") == 0.0


def wandb_file(rows: list[dict[str, float]]) -> bytes:
    out = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)

    def piece(kind: int, data: bytes) -> bytes:
        return struct.pack("<IHB", zlib.crc32(data, zlib.crc32(bytes([kind]))), len(data), kind) + data

    for step, row in enumerate(rows):
        items = b"".join(field(1, field(2, key.encode()) + field(16, json.dumps(value).encode()))
                         for key, value in row.items())
        record = field(2, items + field(2, b"\x08" + varint(step)))
        first = True
        while True:
            left = 32_768 - len(out) % 32_768
            if left < 7:
                out += b"\0" * left
                continue
            part, record = record[: left - 7], record[left - 7 :]
            out += piece((1 if not record else 2) if first else (4 if not record else 3), part)
            first = False
            if not record:
                break
    return out


def test_a_wandb_file_is_read_across_its_blocks() -> None:
    data = wandb_file([{"train/loss": 5 - s / 900, "text": "x" * 40, "lr": 1e-4} for s in range(2000)])
    assert len(data) > 3 * 32_768
    source = memory_source(data, "run-1.wandb")
    assert recognise(source) is wandb_offline
    table = wandb_offline.read(source)
    assert list(table.series["train/loss"].steps) == list(range(2000)) and "text" not in table.series
    assert table.series["train/loss"].values[900] == pytest.approx(4.0)
    flipped = bytearray(data)
    flipped[50_000] ^= 1
    damaged = wandb_offline.read(memory_source(bytes(flipped), "run-1.wandb"))
    assert 1900 < len(damaged.series["train/loss"].steps) < 2000 and "checksum" in damaged.problem
    cut = wandb_offline.read(memory_source(data[:60_000], "run-1.wandb"))
    assert "cut off" in cut.problem and cut.problem_severity == "info"


LINES = {
    "torchtitan": "[titan] 2025-01-01 10:00:{i:02d},123 - root - INFO - step: {i}  loss:  {loss:.4f}  grad_norm:  0.5  "
                  "memory: 40.2GiB(42.30%)  tps: 5,123  tflops: 301.2  mfu: 30.51%",
    "hf": "{{'loss': {loss:.4f}, 'grad_norm': 1.25, 'learning_rate': 2e-05, 'epoch': 0.0{i}, 'step': {i}}}",
    "nanogpt": "iter {i}: loss {loss:.4f}, time 132.31ms, mfu 30.11%",
    "llm.c": "s:{i} trl:{loss:.4f} lr:0.000300 norm:0.51",
    "deepspeed": "[2025-01-01 10:00:01,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=0, "
                 "lr=[0.0003], mom=[(0.9, 0.95)], loss={loss:.4f}",
    "own": "Batch {i} Loss: {loss:.4f}, Speed: 4.88 samples/sec, lr: 0.000100",
    "at": "loss at {i} {loss:.4f}",
    "ranks": "[rank1]: step {i} loss 9.0\n[rank0]: step {i} loss {loss:.4f} grad_norm 0.5",
}


@pytest.mark.parametrize("name", LINES)
def test_a_layout_is_learned_from_its_first_lines(name) -> None:
    numbers = {i: 3 - i / 100 for i in range(1, 90)}
    numbers[50] = float("nan")
    text = "starting\n" + "".join(LINES[name].format(i=i, loss=loss) + "\n" for i, loss in numbers.items())
    if name == "ranks":
        text += "[rank0]: step 90 loss 2.1 grad_norm 0.5\n"
    table = read_table(memory_source(text.encode(), "run.log"))
    loss = table.series["loss"]
    assert list(loss.steps)[:89] == list(numbers)
    assert loss.values[10] == pytest.approx(2.89, abs=1e-4) and math.isnan(loss.values[49])
    assert f"{numbers[11]:.4f}" in text.splitlines()[loss.lines[10] - 1]


def test_evaluations_are_no_training_steps() -> None:
    text = "".join(f"iter {i}: loss {3 - i / 500:.4f}, time 13.1ms, mfu 3%\n"
                   + (f"step {i}: train loss 2.9000, val loss 9.9000\n" if i % 50 == 0 else "") for i in range(300))
    table = read_table(memory_source(text.encode(), "run.log"))
    assert max(table.series["loss"].values) < 3.1 and list(table.series["val_loss"].values) == [9.9] * 6


def test_readers_never_raise_on_random_damage() -> None:
    rng = random.Random(0)
    state = json.dumps({"log_history": [{"loss": 1.0, "step": s} for s in range(30)]}).encode()
    table = b"step,loss\n" + b"".join(b"%d,2.5\n" % i for i in range(40))
    for reader, data in ((tensorboard_events, framed(*EVENTS[:30])), (wandb_offline, wandb_file([{"loss": 1.0}] * 30)),
                         (trainer_state, state), (csv_table, table)):
        for _ in range(60):
            bad = bytearray(data[: rng.randrange(1, len(data))] if rng.random() < 0.4 else data)
            for _ in range(rng.randrange(1, 6)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            reader.sniff(bytes(bad), "x")
            reader.read(memory_source(bytes(bad), "x"))


def test_lines_read_by_columns_are_read_exactly() -> None:
    rng = random.Random(3)
    values = [(i, rng.uniform(0.001, 12), rng.choice([0.5, 12.25, 999.123]), 10.0 ** rng.randint(-5, 1))
              for i in range(700)]
    text = "".join(f" iteration {i:8d}/ 900 | lm loss: {loss:.6E} | grad norm: {norm:.3f} | learning rate: {lr:.3E} | "
                   "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
                   for i, loss, norm, lr in values)
    text = text.replace(f"lm loss: {values[650][1]:.6E}", "lm loss: nan")
    table = read_table(memory_source((text[: len(text) // 4] + "\n" + text[len(text) // 4 :]).encode(), "run.log"))
    assert [f"{v:.6E}" for i, v in enumerate(table.series["loss"].values) if i != 650] == \
        [f"{v[1]:.6E}" for i, v in enumerate(values) if i != 650]
    assert list(table.series["grad_norm"].values) == [v[2] for v in values]
    assert list(table.series["learning_rate"].values) == [float(f"{v[3]:.3E}") for v in values]


def test_like_lines_are_told_from_lines_that_differ_in_more_than_digits() -> None:
    from diag.artefacts.line_columns import batches

    rows = [f"step {i:4d} loss {i / 8:8.3f} lr {10.0 ** -(i % 9):.1E}" for i in range(400)]
    rows[100] = "step  1x0 loss   12.500 lr 1.0E-01"
    rows[200] = "step 1 00 loss   25.000 lr 1.0E-02"
    pattern = re.compile(rb"step +(\d+) loss +([\d.]+) lr (\S+)")

    def spans(line: bytes):
        match = pattern.fullmatch(line)
        return None if match is None else ("layout", [match.span(k) for k in (1, 2, 3)], [0, 1, 2])

    seen = {}
    for _, numbers, values in batches("\n".join(rows).encode() + b"\n", spans):
        for k, number in enumerate(numbers.tolist()):
            seen[number] = tuple(values[j][k] for j in range(3))
    assert len(seen) > 350 and not {100, 200} & set(seen)
    assert all(seen[i] == (i, i / 8 if (i * 125) % 1 == 0 else i, float(f"{10.0 ** -(i % 9):.1E}")) for i in seen)
