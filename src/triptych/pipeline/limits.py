"""What a stage would refuse when it loads, found before anything is started."""

from __future__ import annotations

import importlib.util

from triptych.config.platform import host_memory_bytes
from triptych.config.sampling import sampling_params
from triptych.config.schema import DeployConfig, StageConfig
from triptych.config.units import DTYPE_BYTES, format_bytes
from triptych.engine.kv_budget import bytes_per_block, granted_blocks
from triptych.engine.scheduler_config import scheduler_config
from triptych.errors import ConfigError
from triptych.models.qwen3_omni.config import DecoderConfig, OmniConfig
from triptych.pipeline.warm_up import least_contexts


def check_limits(deploy: DeployConfig, config: OmniConfig) -> None:
    """Hold a resolved deploy config to its checkpoint and to this machine.

    Raises ConfigError, with the dotted path, for a context, a token budget, a KV cache or a token id that cannot be,
    and where a package is missing. The cache of a CUDA device is for its stage to size: only there is the device's
    memory known.
    """
    for index, stage in enumerate(deploy.stages):
        if stage.quantization is not None and importlib.util.find_spec("torchao") is None:
            raise ConfigError(
                f"{stage.quantization!r} needs torchao, which is not installed; install triptych[quantization], or "
                "leave the key out",
                f"stages[{index}].quantization",
            )
        least = least_contexts(config)[stage.stage]
        if stage.max_model_len < least:
            raise ConfigError(
                f"{stage.max_model_len} is less than {least}, the least that the {stage.stage} can serve: the shortest "
                "turn of a user, the header of the answer and its beginning; write that or more, or 0 for all that the "
                "checkpoint allows",
                f"stages[{index}].max_model_len",
            )
        decoder = config.decoder(stage.stage)
        if decoder is not None:
            _check_engine(stage, decoder, keeps_hidden(stage, deploy), f"stages[{index}]")
            path = f"stages[{index}].default_sampling_params"
            sampling_params(stage.default_sampling_params, path).check_vocabulary(decoder.vocab_size, f"{path}.")


def keeps_hidden(stage: StageConfig, deploy: DeployConfig) -> bool:
    """Whether the stage's cache keeps a hidden state a row: the Thinker's does, for the Talker."""
    return stage.stage == "thinker" and deploy.stage("talker") is not None


def _check_engine(stage: StageConfig, decoder: DecoderConfig, keep_hidden: bool, path: str) -> None:
    block_bytes = bytes_per_block(stage, decoder, DTYPE_BYTES[stage.dtype], keep_hidden=keep_hidden)
    on_cpu = stage.replica(0).devices == "cpu"
    num_blocks = granted_blocks(stage, block_bytes, stage.kv_cache_bytes if on_cpu else 2**62, path)
    memory = host_memory_bytes()
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
