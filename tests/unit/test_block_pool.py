"""The block pool: who holds a block, which contents can be found again, and in which order they are forgotten."""

from __future__ import annotations

import pytest

from triptych.config.sampling import SamplingParams
from triptych.engine.block_pool import TRASH_BLOCK, BlockPool, extend_block_hashes
from triptych.engine.request import EngineRequest

SIZE = 4


def computed(pool: BlockPool, token_ids: list[int], **fields: object) -> EngineRequest:
    """A request that holds new blocks for all of `token_ids` and has computed them."""
    request = EngineRequest(
        request_id="r", params=SamplingParams(), num_prompt_tokens=len(token_ids), token_ids=list(token_ids)
    )
    for name, value in fields.items():
        setattr(request, name, value)
    request.num_tokens = request.num_computed_tokens = len(token_ids)
    request.block_ids = pool.allocate(pool.blocks_for(len(token_ids)))
    pool.cache_full_blocks(request)
    return request


def caching_pool(num_blocks: int = 9) -> BlockPool:
    return BlockPool(num_blocks, SIZE, enable_prefix_caching=True)


def test_the_trash_block_is_never_handed_out() -> None:
    pool = BlockPool(5, SIZE)
    assert pool.num_free == pool.num_usable == 4
    assert TRASH_BLOCK not in pool.allocate(4)
    assert (pool.num_free, pool.num_used, pool.usage) == (0, 4, 1.0)


def test_allocating_more_than_is_free_raises_and_takes_nothing() -> None:
    pool = BlockPool(5, SIZE)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_freeing_a_block_nobody_holds_raises() -> None:
    pool = BlockPool(5, SIZE)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.free(block_ids)


def test_blocks_for_rounds_up() -> None:
    assert [BlockPool(2, SIZE).blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_computed_prefix_is_found_block_by_block() -> None:
    pool = caching_pool()
    request = computed(pool, list(range(10)))
    assert pool.match_prefix(list(range(10))) == request.block_ids[:2]
    assert pool.match_prefix([0, 1, 2, 3, 9, 9, 9, 9]) == request.block_ids[:1]
    assert pool.match_prefix([9, 1, 2, 3, 4, 5, 6, 7]) == []
    assert pool.match_prefix([0, 1, 2]) == []


def test_equal_tokens_after_another_prefix_are_no_hit() -> None:
    pool = caching_pool()
    computed(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    computed(pool, [2, 2, 2, 2])
    assert len(pool.match_prefix([2, 2, 2, 2, 5, 5, 5, 5])) == 1


def test_a_hit_compares_the_tokens_and_not_only_the_hash() -> None:
    pool = caching_pool()
    request = computed(pool, [1, 2, 3, 4])
    assert pool.match_prefix([1, 2, 3, 4], request.block_hashes) == request.block_ids
    assert pool.match_prefix([1, 2, 3, 5], request.block_hashes) == []


def test_other_media_behind_equal_placeholder_ids_is_no_hit() -> None:
    hashes: list[list[bytes]] = []
    for keys in ({}, {5: b"a"}, {5: b"b"}, {6: b"a"}, {1: b"a"}, {5: b"a", 6: b"b"}):
        hashes.append([])
        extend_block_hashes(hashes[-1], [7] * 12, SIZE, keys)
    assert len({h[1] for h in hashes}) == len({h[2] for h in hashes}) == 6
    assert len({h[0] for h in hashes}) == 2  # only row 1 lies in the first block


def test_hashes_extended_step_by_step_equal_those_made_at_once() -> None:
    tokens, whole, grown = list(range(19)), [], []  # type: list[int], list[bytes], list[bytes]
    extend_block_hashes(whole, tokens, SIZE, {9: b"k"})
    for end in range(20):
        extend_block_hashes(grown, tokens[:end], SIZE, {9: b"k"})
    assert grown == whole
    assert len(whole) == 4


def test_only_computed_full_blocks_can_be_found() -> None:
    pool = caching_pool()
    request = computed(pool, list(range(12)), num_cached_blocks=99)  # registers nothing yet
    request.num_cached_blocks = 0
    for rows, found in ((3, 0), (4, 1), (7, 1), (12, 3)):
        request.num_computed_tokens = rows
        pool.cache_full_blocks(request)
        assert len(pool.match_prefix(request.token_ids)) == found


def test_rows_from_single_from_on_stay_private() -> None:
    pool = caching_pool()
    request = computed(pool, list(range(12)), single_from=7)
    assert pool.match_prefix(request.token_ids) == request.block_ids[:1]


def test_rows_without_token_ids_are_never_found() -> None:
    pool = caching_pool()
    request = computed(pool, [])
    request.num_computed_tokens = 8
    pool.cache_full_blocks(request)
    assert request.num_cached_blocks == 0


def test_a_pool_without_prefix_caching_finds_nothing() -> None:
    pool = BlockPool(9, SIZE)
    request = computed(pool, list(range(8)))
    assert pool.match_prefix(request.token_ids) == []
    assert request.block_hashes == []


def test_contents_outlive_their_request_and_come_back_from_the_free_list() -> None:
    pool = caching_pool()
    request = computed(pool, list(range(8)))
    pool.free(request.block_ids)
    assert pool.num_used == 0
    hits = pool.match_prefix(request.token_ids)
    assert hits == request.block_ids
    pool.share(hits)
    assert (pool.num_used, pool.num_hit_tokens) == (2, 8)
    assert not set(pool.allocate(pool.num_free)) & set(hits)


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = caching_pool()
    request = computed(pool, list(range(4)))
    pool.share(request.block_ids)
    pool.free(request.block_ids)
    assert not pool.is_free(request.block_ids[0])
    pool.free(request.block_ids)
    assert pool.is_free(request.block_ids[0])


def test_blank_blocks_go_first_then_the_contents_freed_longest_ago() -> None:
    pool = caching_pool(num_blocks=7)
    old, new = computed(pool, [1] * 8), computed(pool, [2] * 8)
    pool.free(old.block_ids)
    pool.free(new.block_ids)
    assert pool.allocate(2) == [5, 6]
    assert len(pool.match_prefix(old.token_ids)) == len(pool.match_prefix(new.token_ids)) == 2
    pool.allocate(1)  # a prefix loses its tail first
    assert (len(pool.match_prefix(old.token_ids)), len(pool.match_prefix(new.token_ids))) == (1, 2)
    pool.allocate(1)
    assert (len(pool.match_prefix(old.token_ids)), len(pool.match_prefix(new.token_ids))) == (0, 2)


def test_a_hit_makes_contents_the_most_recently_used() -> None:
    pool = caching_pool(num_blocks=3)
    old, new = computed(pool, [1] * 4), computed(pool, [2] * 4)
    pool.free(old.block_ids)
    pool.free(new.block_ids)
    pool.share(old.block_ids)
    pool.free(old.block_ids)
    pool.allocate(1)
    assert pool.match_prefix(old.token_ids) == old.block_ids
    assert pool.match_prefix(new.token_ids) == []


def test_contents_computed_twice_are_registered_once() -> None:
    pool = caching_pool()
    first, second = computed(pool, [1] * 4), computed(pool, [1] * 4)
    assert pool.match_prefix([1] * 4) == first.block_ids
    pool.free(second.block_ids)
    assert pool.allocate(1) == second.block_ids  # it holds nothing worth keeping
    assert pool.match_prefix([1] * 4) == first.block_ids


def test_freed_by_counts_a_block_only_if_every_holder_is_named() -> None:
    pool = caching_pool()
    first = computed(pool, [1] * 8)
    pool.share(first.block_ids[:1])
    second = first.block_ids[:1] + pool.allocate(1)
    assert pool.freed_by([first.block_ids]) == {first.block_ids[1]}
    assert pool.freed_by([first.block_ids, second]) == {*first.block_ids, *second}
