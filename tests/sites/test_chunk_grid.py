"""Every chunk belongs to one rank at each site, and the chunks are the bucket."""

import itertools

import hypothesis.strategies as st
from hypothesis import given, settings

from sites.local.chunk_grid import grid

RANKS = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@settings(derandomize=True, max_examples=300, deadline=None)
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
