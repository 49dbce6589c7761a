"""The paged key-value cache of one decoder: its size, and its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.config.schema import StageConfig
from triptych.engine.kv_budget import granted_blocks


def num_blocks(config: StageConfig, bytes_per_block: int, device: torch.device, weight_bytes: int) -> int:
    """How many blocks the deploy config pays for, see `granted_blocks`.

    The cache has `kv_cache_bytes` on a CPU. On a GPU `gpu_memory_utilization` is this stage's share of the card, and
    its cache gets what its own weights leave of that. Raises ConfigError when a single context does not fit.
    """
    cache_bytes = config.kv_cache_bytes
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        cache_bytes = int(total * config.gpu_memory_utilization) - weight_bytes
    return granted_blocks(config, bytes_per_block, cache_bytes, f"stages[{config.stage_id}]")


class KVCache:
    """One tensor a layer, [num_blocks, block_size, 2 * kv_heads, head_dim]: keys, then values. Block 0 is trash."""

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
    ) -> None:
        self.num_blocks, self.block_size, self.kv_heads = num_blocks, block_size, kv_heads
        # Zeros, not garbage: a masked position still takes part as 0 * value, and NaN would survive that.
        self.layers: list[Tensor] = [
            torch.zeros(num_blocks, block_size, 2 * kv_heads, head_dim, dtype=dtype, device=device)
            for _ in range(layers)
        ]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)
