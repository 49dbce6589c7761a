"""Loading shared by the two autoregressive stages: device, dtype, weights, cache, scheduler, runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn

from triptych.config.schema import StageConfig
from triptych.engine.inputs import PREFILL_CELL
from triptych.engine.kv_cache import KVCache, block_bytes, num_blocks
from triptych.engine.scheduler import Scheduler
from triptych.engine.scheduler_config import SchedulerConfig
from triptych.errors import ConfigError
from triptych.layers.linear import ROW_TILE
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.config import DecoderConfig, OmniConfig
from triptych.models.weights import load_weights
from triptych.stages.contract import StageContext

logger = logging.getLogger(__name__)


class Loadable(Protocol):
    """A model that is built on the meta device, filled from `placements`, then prepared."""

    prefixes: tuple[str, ...]

    def placements(self, layout: Layout) -> Iterable[Placement]: ...

    def prepare(self, *, row_tile: int) -> None: ...


M = TypeVar("M", bound=Loadable)


@dataclass(frozen=True, kw_only=True)
class DecoderSetup:
    """What a decoder stage steps with."""

    device: torch.device
    cache: KVCache
    scheduler: Scheduler


def stage_device(config: StageConfig) -> torch.device:
    """The device a stage runs on. Raises ConfigError when the deploy config names one that is not there."""
    name = config.devices
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(f"cuda:{name}" if name.isdigit() else name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"{name!r} is not there: this machine has {count} CUDA devices", f"stages[{config.stage_id}].devices"
            )
    return device


def stage_dtype(config: StageConfig, checkpoint: OmniConfig) -> torch.dtype:
    """The dtype of a stage's weights and activations; "auto" is the checkpoint's."""
    name = checkpoint.dtype if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{name!r} is not a dtype", f"stages[{config.stage_id}].dtype")
    return dtype


def load_model(context: StageContext, checkpoint: OmniConfig, build: Callable[[], M]) -> M:
    """Build a model without memory, stream its weights in, prepare it."""
    started = time.monotonic()
    with torch.device("meta"):
        model = build()
    assert isinstance(model, nn.Module)
    device, dtype = stage_device(context.config), stage_dtype(context.config, checkpoint)
    load_weights(
        model,
        model.placements,
        context.model,
        prefixes=model.prefixes,
        dtype=dtype,
        device=device,
        progress=context.progress,
    )
    model.prepare(row_tile=ROW_TILE if context.config.batch_invariant else 1)
    logger.info("%s: weights on %s as %s in %.2f s", context.config.stage, device, dtype, time.monotonic() - started)
    return model


def set_up_decoder(
    config: StageConfig, decoder: DecoderConfig, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> DecoderSetup:
    """Cache and scheduler of one decoder, sized by the deploy config."""
    per_block = block_bytes(
        layers=decoder.num_hidden_layers,
        block_size=config.block_size,
        kv_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_dim,
        dtype=dtype,
    )
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    blocks = num_blocks(config, per_block, device, weight_bytes)
    cache = KVCache(
        layers=decoder.num_hidden_layers,
        num_blocks=blocks,
        block_size=config.block_size,
        kv_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_dim,
        dtype=dtype,
        device=device,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_blocks=blocks,
            prefill_alignment=PREFILL_CELL if config.batch_invariant else 1,
            enable_prefix_caching=config.enable_prefix_caching,
        )
    )
    logger.info("%s: %d KV blocks of %d tokens, %d bytes", config.stage, blocks, config.block_size, cache.nbytes)
    return DecoderSetup(device=device, cache=cache, scheduler=scheduler)
