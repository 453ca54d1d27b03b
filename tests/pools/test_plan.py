"""Every element of the model crosses once each way, whatever the layout; the update ranks share it evenly."""

from __future__ import annotations

from math import prod

import pytest

from diag.errors import UsageError
from pdtrain.pools.plan import Piece, make_plan

#: name -> shape; the last is held whole by every rank
PARAMETERS = {"embed": (64, 8), "blocks.0.attention.wq": (8, 8), "head": (64, 8), "norm": (8,)}


def shards(ranks: int) -> list[list[Piece]]:
    """Each parameter split along its first axis, `norm` replicated."""
    found = []
    for rank in range(ranks):
        pieces = []
        for name, shape in PARAMETERS.items():
            whole = name == "norm"
            first = shape[0] if whole else shape[0] // ranks
            offset = (0 if whole else rank * first, *(0,) * (len(shape) - 1))
            pieces.append(Piece(rank, name, "norm" if whole else "attention", shape, offset, (first, *shape[1:]), ()))
        found.append(pieces)
    return found


@pytest.mark.parametrize("ranks, update", [(1, 1), (2, 1), (4, 2), (4, 3), (2, 4)])
def test_every_element_has_one_owner_and_few_pairs_talk(ranks: int, update: int):
    plan = make_plan(shards(ranks), update, bucket_bytes=256, item_bytes=4)
    exchanged = [(piece.name, piece.offset) for bucket in plan.buckets for piece in bucket.pieces]
    assert len(set(exchanged)) == len(exchanged), "a piece travels twice"
    assert sum(bucket.numel for bucket in plan.buckets) == sum(prod(shape) for shape in PARAMETERS.values())
    assert {bucket.owner for bucket in plan.buckets} == set(range(ranks, ranks + update))
    assert len(plan.pairs) <= ranks + update - 1
    for rank in range(ranks):
        assert [bucket.index for bucket in plan.of(rank)] == list(range(len(plan.of(rank))))
    theory = plan.describe("sync", "fp32", 0, 4)
    assert theory["bytes_up"] == 4 * sum(prod(shape) for shape in PARAMETERS.values())


def test_owners_are_balanced_and_replicas_are_handed_on_by_one_holder():
    plan = make_plan(shards(4), 2, bucket_bytes=1 << 20, item_bytes=4)
    sizes = [plan.parameters(rank) for rank in plan.update]
    assert max(sizes) - min(sizes) <= 8 * 16, sizes
    (shared,) = plan.shared
    assert (shared.name, shared.holders) == ("norm", (0, 1, 2, 3))


def test_more_update_ranks_than_shards_is_one_line():
    with pytest.raises(UsageError, match=r"pools\.update_ranks = 9 is more than this model can keep busy"):
        make_plan(shards(1), 9, bucket_bytes=256, item_bytes=4)
