"""Every chunk belongs to one rank at each site, and the chunks are the bucket."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from isthmus.sites.local.chunk_grid import grid
from isthmus.sites.local.sharing import sharing_of

RANKS = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@pytest.mark.no_cover
@settings(max_examples=300)
@given(numel=st.integers(0, 300), chunk_numel=st.integers(1, 70), ranks=RANKS)
def test_chunks_tile_the_bucket_and_each_has_one_owner_a_site(
    numel: int, chunk_numel: int, ranks: tuple[int, ...]
) -> None:
    cut = grid(numel, chunk_numel, ranks)
    spans = [cut.span(chunk) for chunk in range(cut.num_chunks)]
    assert sum(count for _, count in spans) == numel
    assert all(0 < count <= chunk_numel for _, count in spans)
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))
    for site, num_ranks in enumerate(ranks):
        owned = list(itertools.chain(*(cut.chunks(site, rank) for rank in range(num_ranks))))
        assert owned == list(range(cut.num_chunks))
        for rank in range(num_ranks):
            start, count = cut.shard(site, rank)
            assert sum(cut.span(chunk)[1] for chunk in cut.chunks(site, rank)) == count
            for chunk in cut.chunks(site, rank):
                assert cut.owner(site, chunk) == rank
                first, size = cut.span(chunk)
                assert start <= first
                assert first + size <= start + count


def test_some_ranks_of_a_site_share_a_bucket_as_if_they_were_all() -> None:
    sharing = sharing_of(((1, 4), ()), (5, 3))
    assert sharing == ((1, 4), 3)
    some, all_ranks = grid(20, 6, sharing), grid(20, 6, (2, 3))
    assert some.starts.tolist() == all_ranks.starts.tolist()
    assert [some.owner(0, chunk) for chunk in range(some.num_chunks)] == [
        (1, 4)[all_ranks.owner(0, chunk)] for chunk in range(some.num_chunks)
    ]
    assert some.shard(0, 4) == all_ranks.shard(0, 1)
    assert some.chunks(0, 4) == all_ranks.chunks(0, 1)
    assert some.chunks(1, 2) == all_ranks.chunks(1, 2)
    assert sharing_of((), (5, 3)) == (5, 3)


@pytest.mark.parametrize("participants", [((1,),), ((4, 1), ()), ((1, 1), ()), ((0, 5), ())])
def test_ranks_that_there_are_not_share_nothing(participants: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"sites|ranks"):
        sharing_of(participants, (5, 3))
