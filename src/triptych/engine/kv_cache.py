"""The paged key-value cache of one decoder: its size, and its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.config.schema import StageConfig
from triptych.errors import ConfigError


def block_bytes(*, layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return layers * block_size * 2 * kv_heads * head_dim * dtype.itemsize


def num_blocks(config: StageConfig, bytes_per_block: int, device: torch.device, weight_bytes: int) -> int:
    """How many blocks the deploy config pays for, the trash block included.

    `num_kv_blocks` when set; else `kv_cache_bytes` on a CPU. On a GPU `gpu_memory_utilization` is this stage's share of
    the card, and its cache gets what its own weights leave of that. Never more than `max_num_seqs` whole contexts can
    fill. Raises ConfigError when a single context does not fit.
    """
    per_context = -(-config.max_model_len // config.block_size)
    wanted = config.max_num_seqs * per_context + 1
    if config.num_kv_blocks:
        granted = config.num_kv_blocks
    elif device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.gpu_memory_utilization) - weight_bytes
        granted = min(wanted, max(0, budget) // bytes_per_block)
    else:
        granted = min(wanted, config.kv_cache_bytes // bytes_per_block)
    if granted < per_context + 1:
        raise ConfigError(
            f"the KV cache gets {granted} blocks of {config.block_size} tokens ({bytes_per_block} bytes each), but one "
            f"context of {config.max_model_len} needs {per_context + 1}; raise kv_cache_bytes, num_kv_blocks or "
            "gpu_memory_utilization, or lower max_model_len",
            f"stages[{config.stage_id}]",
        )
    return granted


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
