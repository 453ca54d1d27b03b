"""Which rank is in which group: checked by eye on 8 devices, by arithmetic on any world."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtrain.config import load_run
from pdtrain.parallel import layout as module
from pdtrain.parallel.layout import FAMILIES, Layout, compress

layouts = st.builds(
    lambda pipeline, tensor, expert, copies, update: Layout(
        pipeline * tensor * expert * copies + update, pipeline, tensor, expert, update
    ),
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3),
)  # fmt: skip


def test_eight_devices_as_the_domain_says():
    groups = Layout(8, tensor=2, expert=4).groups()
    assert groups == {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "dp": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "router": [[0, 1, 2, 3, 4, 5, 6, 7]],
    }


def test_pipeline_is_outermost_and_update_ranks_are_apart():
    groups = Layout(10, pipeline=2, tensor=2, expert=4, update=2).groups()
    assert groups["router"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["update"] == [[8, 9]]


@given(layouts)
def test_each_family_splits_the_compute_ranks_without_overlap(layout: Layout):
    groups = layout.groups()
    assert list(groups) == [family for family in FAMILIES if family in groups]
    for family, lists in groups.items():
        members = sorted(rank for ranks in lists for rank in ranks)
        first = layout.ranks if family == "update" else 0
        assert members == list(range(first, layout.world if family == "update" else layout.ranks))
        assert {len(ranks) for ranks in lists} == {layout.axes[family]}


@given(layouts)
def test_coordinates_agree_with_the_groups(layout: Layout):
    """Ranks of one group differ in exactly the coordinate of its family, and stand in its order."""
    same = {"tp": ("pp", "dp"), "dp": ("pp", "tp"), "ep": ("pp", "edp"), "edp": ("pp", "ep"), "pp": ("dp", "tp")}
    groups = layout.groups()
    for family, fixed in same.items():
        for ranks in groups.get(family, []):
            places = [layout.of(rank) for rank in ranks]
            assert [getattr(place, family) for place in places] == list(range(len(ranks)))
            assert len({tuple(getattr(place, name) for name in fixed) for place in places}) == 1


def test_of_and_group_of_refuse_what_is_not_there():
    layout = Layout(9, tensor=2, expert=4, update=1)
    assert layout.of(8).update == 0
    assert layout.of(8).tp is None
    assert layout.group_of("edp", 5) == [1, 5]
    with pytest.raises(ValueError, match="rank 9 is not in a world of 9"):
        layout.of(9)
    with pytest.raises(KeyError, match="rank 8 is in no tp group"):
        layout.group_of("tp", 8)


@pytest.mark.parametrize("degrees", [{"tensor": 3}, {"expert": 3}, {"pipeline": 3}, {"tensor": 0}, {"update": 8}])
def test_impossible_layouts_are_refused(degrees: dict[str, int]):
    with pytest.raises(ValueError, match="rank|at least 1"):
        Layout(8, **degrees)


def test_families_count_as_one_what_carries_the_same_traffic():
    assert Layout(8, tensor=2, expert=4).families() == ["TP", "DP", "EP"]
    assert Layout(2, tensor=2, expert=2).families() == ["TP", "EP", "DP"]
    assert Layout(8).families() == ["DP"]
    assert Layout(1).families() == []
    assert Layout(17, pipeline=2, tensor=2, expert=4, update=1).families() == ["TP", "DP", "EP", "PP"]


def test_text_lists_small_worlds_whole():
    text = Layout(8, tensor=2, expert=4).text()
    for piece in ("[0,1] [2,3] [4,5] [6,7]", "[0,2,4,6] [1,3,5,7]", "[0-3] [4-7]", "[0,4] [1,5] [2,6] [3,7]", "[0-7]"):
        assert piece in text


def test_text_of_a_large_world_stays_readable():
    text = Layout.from_run(load_run(preset="deepseek-v3")).text()
    assert len(text.splitlines()) == 7
    assert max(len(line) for line in text.splitlines()) < 250
    assert "[0-1920:128] [1-1921:128] [2-1922:128] ... [127-2047:128]" in text


@given(st.lists(st.integers(0, 10_000), min_size=1, unique=True).map(sorted))
def test_compressed_rank_lists_can_be_read_back(ranks: list[int]):
    body, _, step = compress(ranks)[1:-1].partition(":")
    if "-" in body:
        first, last = body.split("-")
        assert list(range(int(first), int(last) + 1, int(step or 1))) == ranks
    else:
        assert [int(rank) for rank in body.split(",")] == ranks


def test_examples_in_the_docstrings():
    assert doctest.testmod(module).failed == 0
