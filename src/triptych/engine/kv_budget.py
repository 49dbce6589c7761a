"""How many blocks of KV cache a stage gets, in plain numbers. Imports no torch: a deploy config is planned with it."""

from __future__ import annotations

from typing import Protocol

from triptych.config.schema import StageConfig
from triptych.errors import ConfigError


class CachedDecoder(Protocol):
    """What the size of a cache follows from."""

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


def bytes_per_block(config: StageConfig, decoder: CachedDecoder, itemsize: int, *, keep_hidden: bool = False) -> int:
    """Bytes of one block: keys and values over all layers and, to `keep_hidden`, a hidden state a row."""
    values = decoder.num_hidden_layers * 2 * decoder.num_key_value_heads * decoder.head_dim
    return config.block_size * (values + (decoder.hidden_size if keep_hidden else 0)) * itemsize


def cache_budget(config: StageConfig, taken_bytes: int, device_bytes: int | None) -> int:
    """Bytes that the cache of a stage may have; less than 0 when `taken_bytes` are too many.

    On a CUDA device of `device_bytes` the stage has its share, `gpu_memory_utilization`, and the cache what
    `taken_bytes` (weights, encoded media) leave of it. On a CPU (None) it has `kv_cache_bytes`.
    """
    if device_bytes is None:
        return config.kv_cache_bytes
    return int(device_bytes * config.gpu_memory_utilization) - taken_bytes


def least_blocks(config: StageConfig) -> int:
    """Blocks without which a stage cannot serve: one whole context, and the trash block."""
    return -(-config.max_model_len // config.block_size) + 1


def most_blocks(config: StageConfig) -> int:
    """Blocks that a stage can fill: `max_num_seqs` whole contexts, and the trash block."""
    return config.max_num_seqs * (least_blocks(config) - 1) + 1


def offered_blocks(config: StageConfig, block_bytes: int, cache_bytes: int) -> int:
    """Blocks that a stage gets if they are enough, the trash block included.

    `num_kv_blocks` when set; else what `cache_bytes` pay for, and never more than can be filled.
    """
    return config.num_kv_blocks or min(most_blocks(config), max(0, cache_bytes) // block_bytes)


def granted_blocks(config: StageConfig, block_bytes: int, cache_bytes: int, path: str) -> int:
    """The same, or a ConfigError when one context does not fit; `path` is the stage's place in the deploy config."""
    granted, least = offered_blocks(config, block_bytes, cache_bytes), least_blocks(config)
    if granted < least:
        raise ConfigError(
            f"the KV cache gets {granted} blocks of {config.block_size} tokens ({block_bytes} bytes each), but one "
            f"context of {config.max_model_len} needs {least}; raise kv_cache_bytes, num_kv_blocks or "
            "gpu_memory_utilization, or lower max_model_len",
            path,
        )
    return granted
