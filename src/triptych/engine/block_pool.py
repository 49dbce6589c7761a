"""Blocks of the paged KV cache as integers: who holds them, and which contents can be reused.

Owns reference counts, the free list and the prefix hashes. Knows no tensors: block i is row i of the runner's pool.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from triptych.engine.request import EngineRequest

# Padded rows of a batch write here. It is never handed out, so what lands in it is never read by a request.
TRASH_BLOCK = 0


@dataclass(slots=True)
class Block:
    """One block. `hash` and `token_ids` are set while its contents can be found by `match_prefix`."""

    block_id: int
    ref_count: int = 0
    hash: bytes | None = None
    token_ids: list[int] = field(default_factory=list)


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, content_keys: Mapping[int, bytes]
) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it lacks.

    A block's hash covers its parent's hash, its token ids, and each entry of `content_keys` (row index -> digest) whose
    row lies in it. Media that began in an earlier block is covered through the parent.
    """
    for index in range(len(hashes), len(token_ids) // block_size):
        start, end = index * block_size, (index + 1) * block_size
        digest = blake2b(hashes[-1] if hashes else b"", digest_size=16)
        digest.update(array("q", token_ids[start:end]))
        if content_keys:
            for row in sorted(row for row in content_keys if start <= row < end):
                digest.update(array("q", (row, len(content_keys[row]))))
                digest.update(content_keys[row])
        hashes.append(digest.digest())


class BlockPool:
    """`num_blocks` blocks of `block_size` rows, block 0 being the trash block.

    The free list is ordered by reuse: blank blocks first, then cached contents from the least to the most recently
    freed, so it is the LRU list of the prefix cache. A hit takes a block back out of it in constant time.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = False) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self.enable_prefix_caching = enable_prefix_caching
        self.num_hit_tokens = 0
        self.num_forgotten = 0  # blocks whose cached contents were given up; only then does a hit become shorter
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._cached: dict[bytes, Block] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request holds; cached contents among them count, they are given up on demand."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool that requests hold, in [0, 1]."""
        return self.num_used / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` rows need."""
        return -(-num_tokens // self.block_size)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, forgetting the oldest cached contents if need be. RuntimeError if fewer are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free; compare num_free first")
        block_ids = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            block = self._blocks[block_id]
            block.ref_count = 1
            if block.hash is not None:
                del self._cached[block.hash]
                self.num_forgotten += 1
                block.hash = None
                block.token_ids = []
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that `match_prefix` found, once more each."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
            self.num_hit_tokens += self.block_size

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each. Last block first, so that of a prefix the head is forgotten last."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref_count == 0:
                raise RuntimeError(f"block {block_id} is freed but nobody holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.hash is None:
                    self._free.move_to_end(block_id, last=False)

    def freed_by(self, holders: Iterable[Sequence[int]]) -> set[int]:
        """The blocks that would be free if all these block tables were freed together."""
        counts = Counter(block_id for block_ids in holders for block_id in block_ids)
        return {block_id for block_id, count in counts.items() if self._blocks[block_id].ref_count == count}

    def hash_blocks(self, request: EngineRequest) -> None:
        """Bring `request.block_hashes` up to date with its token ids."""
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.content_keys)

    def match_prefix(self, token_ids: list[int], hashes: Sequence[bytes] | None = None) -> list[int]:
        """The longest run of cached blocks that holds a prefix of `token_ids`, without taking hold of them.

        `hashes` are those of `extend_block_hashes`; None computes them for ids without media. Token ids are compared
        as well, so a hit never rests on a hash alone.
        """
        if not self.enable_prefix_caching:
            return []
        if hashes is None:
            extend_block_hashes(hashes := [], token_ids, self.block_size, {})
        block_ids = []
        start, size = 0, self.block_size
        for block_hash in hashes:
            block = self._cached.get(block_hash)
            if block is None or token_ids[start : start + size] != block.token_ids:
                break
            block_ids.append(block.block_id)
            start += size
        return block_ids

    def cache_full_blocks(self, request: EngineRequest) -> None:
        """Let others find the full blocks of rows that `request` has computed. Call only after the rows were computed.

        Rows from `single_from` on stay private: they were computed one a step, so a prompt that took them over would
        not equal the same prompt computed cold. Contents that another block already holds are not registered twice.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        end = min(request.num_computed_tokens, len(request.token_ids))
        if request.single_from is not None:
            end = min(end, request.single_from)
        if end // size <= request.num_cached_blocks:
            return
        self.hash_blocks(request)
        for index in range(request.num_cached_blocks, end // size):
            block_hash = request.block_hashes[index]
            if block_hash not in self._cached:
                block = self._blocks[request.block_ids[index]]
                block.hash = block_hash
                block.token_ids = request.token_ids[index * size : (index + 1) * size]
                self._cached[block_hash] = block
        request.num_cached_blocks = end // size
