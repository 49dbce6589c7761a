"""What a stage would refuse when it loads, found before anything is started."""

from __future__ import annotations

import os

from triptych.config.sampling import sampling_params
from triptych.config.schema import DeployConfig, DTypeName, StageConfig
from triptych.config.units import format_bytes
from triptych.engine.kv_budget import bytes_per_block, granted_blocks
from triptych.engine.scheduler_config import scheduler_config
from triptych.errors import ConfigError
from triptych.models.qwen3_omni.config import DecoderConfig, OmniConfig

_ITEMSIZE: dict[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_limits(deploy: DeployConfig, config: OmniConfig) -> None:
    """Hold a resolved deploy config to its checkpoint and to this machine.

    Raises ConfigError, with the dotted path, for a token budget, a KV cache or a token id that cannot be. The cache of
    a CUDA device is for its stage to size: only there is the device's memory known.
    """
    for index, stage in enumerate(deploy.stages):
        decoder = _decoder(stage, config)
        if decoder is not None:
            kept = stage.stage == "thinker" and deploy.stage("talker") is not None  # hidden states, for the Talker
            _check_engine(stage, decoder, decoder.hidden_size if kept else 0, f"stages[{index}]")
            path = f"stages[{index}].default_sampling_params"
            sampling_params(stage.default_sampling_params, path).check_vocabulary(decoder.vocab_size, f"{path}.")


def _decoder(stage: StageConfig, config: OmniConfig) -> DecoderConfig | None:
    if stage.stage == "thinker":
        return config.thinker
    return config.talker.text if stage.stage == "talker" and config.talker is not None else None


def _check_engine(stage: StageConfig, decoder: DecoderConfig, hidden_size: int, path: str) -> None:
    block_bytes = bytes_per_block(
        layers=decoder.num_hidden_layers,
        block_size=stage.block_size,
        kv_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_dim,
        itemsize=_ITEMSIZE[stage.dtype],
        hidden_size=hidden_size,
    )
    on_cpu = stage.replica(0).devices == "cpu"
    num_blocks = granted_blocks(stage, block_bytes, stage.kv_cache_bytes if on_cpu else 2**62, path)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = stage.num_replicas * num_blocks * block_bytes
    if on_cpu and needed > memory:
        each = "" if stage.num_replicas == 1 else f" in each of {stage.num_replicas} replicas"
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks{each} takes {format_bytes(needed)}, more than the "
            f"{format_bytes(memory)} of this machine; lower num_kv_blocks, kv_cache_bytes or num_replicas",
            path,
        )
    try:
        scheduler_config(stage, num_blocks)
    except ConfigError as error:
        raise ConfigError(error.reason, f"{path}.{error.path}") from error
