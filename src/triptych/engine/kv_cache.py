"""The paged key-value cache of one decoder: its size, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.config.schema import StageConfig
from triptych.engine.kv_budget import cache_budget, granted_blocks


def num_blocks(config: StageConfig, bytes_per_block: int, device: torch.device, taken_bytes: int) -> int:
    """How many blocks the deploy config pays for on `device`, see `cache_budget` and `granted_blocks`.

    Raises ConfigError when a single context does not fit.
    """
    device_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    cache_bytes = cache_budget(config, taken_bytes, device_bytes)
    return granted_blocks(config, bytes_per_block, cache_bytes, f"stages[{config.stage_id}]")


class KVCache:
    """One tensor a layer, [num_blocks, block_size, 2 * kv_heads, head_dim]: keys, then values. Block 0 is trash.

    With a `hidden_size` also `hidden` [num_blocks * block_size, hidden_size], hidden states that another stage needs:
    they lie in the blocks of their rows, so a prefix-cache hit has them too.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        hidden_size: int = 0,
    ) -> None:
        self.num_blocks, self.block_size, self.kv_heads = num_blocks, block_size, kv_heads
        self.dtype, self.itemsize = dtype, dtype.itemsize
        # Zeros, not garbage: a masked position still takes part as 0 * value, and NaN would survive that.
        self._whole = torch.zeros(
            layers, num_blocks, block_size, 2 * kv_heads, head_dim, dtype=dtype, device=device
        )  # so that all layers of a block are blanked at once
        self.layers: list[Tensor] = [self._whole[layer] for layer in range(layers)]
        self.hidden: Tensor | None = None
        if hidden_size:
            self.hidden = torch.zeros(num_blocks * block_size, hidden_size, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes + (0 if self.hidden is None else self.hidden.nbytes)

    def blank(self, block_ids: Sequence[int]) -> None:
        """Make keys and values of these blocks zero again."""
        if block_ids:
            self._whole.index_fill_(1, torch.tensor(block_ids, device=self._whole.device), 0.0)

    def hidden_of(self, block_ids: Sequence[int], rows: NDArray[np.int64]) -> Tensor:
        """The hidden states of `rows` [n] of the request that holds `block_ids`, as a copy [n, hidden_size]."""
        assert self.hidden is not None
        blocks = np.asarray(block_ids, dtype=np.int64)
        slots = blocks[rows // self.block_size] * self.block_size + rows % self.block_size
        return self.hidden.index_select(0, torch.from_numpy(slots).to(self.hidden.device))
