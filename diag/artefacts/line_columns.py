"""Lines of equal length and layout, parsed by columns: numbers of many lines at once, without a regular expression.

Programs pad their numbers, so lines of one layout come in few lengths, and within one length most have their literal
text, points and signs in the same places. Such lines are cut out of the block as a matrix of bytes; what differs from
the first of them only in digits is read by arithmetic on whole columns. Values are exact: an integer of at most 15
digits times or over a power of ten of at most 22 is rounded once, as `float` does it. Everything else is left to the
caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

_L = TypeVar("_L")
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Fewer lines of one length are not worth it.
LEAST = 48
#: Different placements of points and signs that are tried per length.
ROUNDS = 8
MAX_LINE = 2000
_NUMBER = re.compile(rb"([-+]?)(\d{1,15})(?:\.(\d{0,14}))?(?:[eE]([-+])(\d{1,2}))?")


@dataclass(slots=True)
class Field:
    """Where one number lies in a line: columns of its mantissa and exponent digits, and how they are put together."""

    digits: list[int]
    fraction: int
    sign: int
    exponent: list[int]
    exponent_sign: int


def field_of(line: bytes, start: int, end: int) -> Field | None:
    """The field between two offsets, with the blanks before it as room for more digits; None for no plain number."""
    found = _NUMBER.fullmatch(line, start, end)
    if found is None or len(found[2]) + len(found[3] or b"") > 15:
        return None
    room = start
    if not found[1]:
        while room > 0 and line[room - 1] == 32 and start - room < 15 - len(found[2]) - len(found[3] or b""):
            room -= 1
        room = min(room + 1, start)  # one blank stays a separator
    digits = [*range(room, found.end(2))]
    if found[3]:
        digits += range(found.start(3), found.end(3))
    exponent = list(range(found.start(5), found.end(5))) if found[5] else []
    return Field(digits, len(found[3] or b""), -1 if found[1] == b"-" else 1, exponent, -1 if found[4] == b"-" else 1)


def values_of(matrix: Bytes, field: Field) -> Floats | None:
    """The numbers [n] of one field in lines [length, n] whose digit columns are known to be digits or blanks."""
    total = np.zeros(matrix.shape[1])
    for column in field.digits:
        total *= 10.0
        total += np.where(matrix[column] == 32, 0, matrix[column] - 48)
    power = np.full(matrix.shape[1], -field.fraction, dtype=np.int64)
    if field.exponent:
        size = np.zeros(matrix.shape[1], dtype=np.int64)
        for column in field.exponent:
            size = size * 10 + (matrix[column].astype(np.int64) - 48)
        power += field.exponent_sign * size
    if np.abs(power).max(initial=0) > 22:
        return None
    if not field.exponent:
        total = total / 10.0**field.fraction if field.fraction else total
    else:
        scale = 10.0 ** np.abs(power)
        total = np.where(power >= 0, total * scale, total / scale)
    return total if field.sign > 0 else -total


def batches(block: bytes, spans: Callable[[bytes], tuple[_L, list[tuple[int, int]], list[int]] | None],
            ) -> Iterator[tuple[_L, Ints, dict[int, Floats]]]:
    """(layout, numbers of the lines counted from 0, values by place) for groups of like lines in `block`.

    `spans` says of one line: its layout, the spans of all its numbers, and the places in that list of those that are
    wanted; None when the line has no layout known so far.
    """
    data = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(data == 10)
    if len(ends) < LEAST:
        return
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts
    counts = np.bincount(np.minimum(lengths, MAX_LINE))
    for length in np.flatnonzero(counts >= LEAST):
        if length < 12 or length == MAX_LINE:
            continue
        lines = np.flatnonzero(lengths == length)
        for _ in range(ROUNDS):
            if len(lines) < LEAST // 2:
                break
            begin = int(starts[lines[0]])
            first = block[begin : begin + int(length)]
            found = spans(first)
            if found is None:
                lines = lines[1:]
                continue
            layout, places, wanted = found
            like, values = _like(data, starts[lines], first, places, wanted)
            if values is not None and like.any():
                yield layout, lines[like], values
            else:
                like[0] = True
            lines = lines[~like]


def _like(data: Bytes, starts: Ints, first: bytes, places: list[tuple[int, int]], wanted: list[int],
          ) -> tuple[npt.NDArray[np.bool_], dict[int, Floats] | None]:
    """Which lines differ from `first` only in digits, and their values."""
    like = np.ones(len(starts), dtype=bool)
    found = [field_of(first, a, b) for a, b in places]
    if any(item is None for item in found):
        like[:] = False
        return like, None
    fields = [item for item in found if item is not None]
    matrix = sliding_window_view(data, len(first))[starts]
    pattern = np.frombuffer(first, dtype=np.uint8)
    digit = np.zeros(len(first), dtype=bool)
    for field in fields:
        digit[field.digits] = True
        digit[field.exponent] = True
    like &= ~((matrix != pattern) & ~digit).any(axis=1)
    matrix = np.ascontiguousarray(matrix[like].T)  # a column of digits is then a row in memory
    for field in fields:
        blank_before = np.ones(matrix.shape[1], dtype=bool)
        good = np.ones(matrix.shape[1], dtype=bool)
        last = field.digits[-1] if field.digits else -1
        for column in field.digits:
            cell = matrix[column]
            blank = cell == 32
            number = (cell >= 48) & (cell <= 57)
            good &= (blank & blank_before & (column != last)) | number
            blank_before &= blank
        for column in field.exponent:
            cell = matrix[column]
            good &= (cell >= 48) & (cell <= 57)
        if not good.all():
            places_ = np.flatnonzero(like)
            like[places_[~good]] = False
            return _again(data, starts, first, places, wanted, like)
    values: dict[int, Floats] = {}
    for place in wanted:
        numbers = values_of(matrix, fields[place])
        if numbers is None:
            like[:] = False
            return like, None
        values[place] = numbers
    return like, values


def _again(data: Bytes, starts: Ints, first: bytes, places: list[tuple[int, int]], wanted: list[int],
           like: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], dict[int, Floats] | None]:
    """As `_like` for the lines left after one with something odd in a digit column was dropped."""
    inner, values = _like(data, starts[like], first, places, wanted)
    result = np.zeros(len(like), dtype=bool)
    result[np.flatnonzero(like)[inner]] = True
    return result, values
