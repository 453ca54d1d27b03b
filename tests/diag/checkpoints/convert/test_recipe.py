"""Recipes are held to numpy: whatever is cut, joined, stacked, transposed or strided, the bytes are those of numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from diag.checkpoints import open_checkpoint
from diag.checkpoints.canonical import Checkpoint, Chunk, Container, Tensor
from diag.checkpoints.convert import recipe as r
from diag.checkpoints.convert.source import Source
from diag.checkpoints.files import Folder
from diag.errors import ArtefactError

SHAPES = {"a": (8, 6), "b": (8, 6), "c": (3, 4, 6), "s": ()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, dict[str, Tensor], dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("recipe")
    arrays = {name: np.asarray(np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + 1000 * n)
              for n, (name, shape) in enumerate(SHAPES.items())}
    save_file(arrays, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    return Source([checkpoint]), checkpoint.tensors, arrays


def test_scalars_and_whole_tensors(source) -> None:
    reader, tensors, arrays = source
    for name, array in arrays.items():
        assert np.array_equal(reader.read(r.whole(tensors[name])), array)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_chains_of_operations_equal_numpy(source, data) -> None:
    reader, tensors, arrays = source
    name = data.draw(st.sampled_from(["a", "c"]))
    recipe, array = r.whole(tensors[name]), arrays[name]
    for _ in range(data.draw(st.integers(1, 5))):
        axis = data.draw(st.integers(0, array.ndim - 1)) if array.ndim else 0
        kind = data.draw(st.sampled_from(["narrow", "transpose", "every", "select", "unsqueeze", "twice", "stack"]))
        if kind == "narrow" and array.ndim:
            start = data.draw(st.integers(0, array.shape[axis] - 1))
            length = data.draw(st.integers(1, array.shape[axis] - start))
            recipe = r.narrow(recipe, axis, start, length)
            array = np.take(array, range(start, start + length), axis)
        elif kind == "transpose" and array.ndim >= 2:
            recipe, array = r.transpose(recipe), np.swapaxes(array, -1, -2)
        elif kind == "every" and array.ndim and array.shape[axis] > 1:
            first, step = data.draw(st.integers(0, array.shape[axis] - 1)), data.draw(st.integers(1, 3))
            recipe = r.every(recipe, first, step, axis)
            array = np.take(array, range(first, array.shape[axis], step), axis)
        elif kind == "select" and array.ndim > 1:
            index = data.draw(st.integers(0, array.shape[axis] - 1))
            recipe, array = r.select(recipe, index, axis), np.take(array, index, axis)
        elif kind == "unsqueeze" and array.ndim < 4:
            recipe, array = r.unsqueeze(recipe, axis), np.expand_dims(array, axis)
        elif kind == "twice" and array.ndim and array.size < 300:
            recipe, array = r.concat([recipe, recipe], axis), np.concatenate([array, array], axis)
        elif kind == "stack" and array.ndim < 4 and array.size < 300:
            recipe, array = r.stack([recipe, recipe], axis), np.stack([array, array], axis)
    assert recipe.shape == array.shape
    assert np.array_equal(reader.read(recipe), array)
    if array.ndim:
        first = data.draw(st.integers(0, array.size))
        last = data.draw(st.integers(first, array.size))
        got = [np.empty(0, np.float32)]
        for offsets, sizes in r.rows_of_box(array.shape, first, last, data.draw(st.integers(1, 20))):
            out = np.empty(sizes, np.float32)
            reader.fill(recipe, offsets, out)
            got.append(out.reshape(-1))
        assert np.array_equal(np.concatenate(got), array.reshape(-1)[first:last])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tiling_of_the_source_is_read_alike(tmp_path_factory, data) -> None:
    """Boxes, flat pieces of the whole, and boxes whose flat pieces end anywhere."""
    shape = (6, 5, 4)
    array = np.arange(120, dtype=np.uint16).reshape(shape)
    folder = tmp_path_factory.mktemp("tiled")
    chunks, blob = [], bytearray()

    def add(offsets, sizes, flat, content) -> None:
        raw = np.ascontiguousarray(content).tobytes()
        chunks.append(Chunk(offsets, sizes, Container("x", 0, 0, "raw"), len(blob), len(raw), flat))
        blob.extend(raw)

    for start, stop in ((0, 2), (2, 6)):
        for column, end in ((0, 3), (3, 5)):
            offsets, sizes = (start, column, 0), (stop - start, end - column, 4)
            own = array[start:stop, column:end]
            if data.draw(st.booleans()):
                add(offsets, sizes, None, own)
            else:
                cut = data.draw(st.integers(1, own.size - 1))
                add(offsets, sizes, (cut, own.size), own.reshape(-1)[cut:])
                add(offsets, sizes, (0, cut), own.reshape(-1)[:cut])
    (folder / "x").write_bytes(blob)
    tensor = Tensor("t", "bfloat16", shape, chunks)
    reader = Source([Checkpoint(Folder(folder), "raw", {"t": tensor})])
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    step = [data.draw(st.integers(1, 3)) for _ in shape]
    recipe = r.whole(tensor)
    for axis in range(3):
        recipe = r.every(recipe, low[axis], step[axis], axis)
    wanted = array[low[0] :: step[0], low[1] :: step[1], low[2] :: step[2]]
    assert np.array_equal(reader.read(r.transpose(recipe)), np.swapaxes(wanted, -1, -2))


def test_a_hole_in_the_source_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(16))
    tensor = Tensor("gone", "float32", (4, 2), [Chunk((0, 0), (2, 2), Container("x", 0, 16, "raw"), 0, 16)])
    reader = Source([Checkpoint(Folder(tmp_path), "raw", {"gone": tensor})])
    with pytest.raises(ArtefactError, match="gone: its chunks hold 4 of 8"):
        reader.read(r.whole(tensor))
    short = Tensor("short", "float32", (8,), [Chunk((0,), (8,), Container("x", 0, 16, "raw"), 0, 32)])
    reader = Source([Checkpoint(Folder(tmp_path), "raw", {"short": short})])
    with pytest.raises(ArtefactError, match="x: ends at byte 16, 16 bytes too early"):
        reader.read(r.whole(short))


def test_what_cannot_be_joined_is_refused(source) -> None:
    _, tensors, _ = source
    with pytest.raises(ArtefactError, match="cannot be joined"):
        r.concat([r.whole(tensors["a"]), r.transpose(r.whole(tensors["b"]))])
    with pytest.raises(ArtefactError, match="8 rows cannot be cut into 3"):
        r.split(r.whole(tensors["a"]), 3)
