"""How many blocks of KV cache a stage gets, in plain numbers. Imports no torch: a deploy config is checked with it."""

from __future__ import annotations

from triptych.config.schema import StageConfig
from triptych.errors import ConfigError


def bytes_per_block(
    *, layers: int, block_size: int, kv_heads: int, head_dim: int, itemsize: int, hidden_size: int = 0
) -> int:
    """Bytes of one block: keys and values over all layers, and a hidden state of `hidden_size` a row."""
    return block_size * (layers * 2 * kv_heads * head_dim + hidden_size) * itemsize


def granted_blocks(config: StageConfig, block_bytes: int, cache_bytes: int, path: str) -> int:
    """How many blocks a stage gets, the trash block included.

    `num_kv_blocks` when set; else what `cache_bytes` pay for, and never more than `max_num_seqs` whole contexts can
    fill. Raises ConfigError when a single context does not fit; `path` is the stage's place in the deploy config.
    """
    per_context = -(-config.max_model_len // config.block_size)
    wanted = config.max_num_seqs * per_context + 1
    granted = config.num_kv_blocks or min(wanted, max(0, cache_bytes) // block_bytes)
    if granted < per_context + 1:
        raise ConfigError(
            f"the KV cache gets {granted} blocks of {config.block_size} tokens ({block_bytes} bytes each), but one "
            f"context of {config.max_model_len} needs {per_context + 1}; raise kv_cache_bytes, num_kv_blocks or "
            "gpu_memory_utilization, or lower max_model_len",
            path,
        )
    return granted
