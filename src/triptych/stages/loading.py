"""What the two autoregressive stages share: device, dtype, weights, cache and scheduler at the start, then counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeVar

import torch
from torch import nn

from triptych.config.schema import StageConfig, StageKind
from triptych.connectors.wire import StageStats
from triptych.engine.buckets import decode_buckets
from triptych.engine.engine import Engine
from triptych.engine.kv_budget import bytes_per_block
from triptych.engine.kv_cache import KVCache, num_blocks
from triptych.engine.recorded_decodes import RecordedDecodes, StepModel
from triptych.engine.scheduler import Scheduler
from triptych.engine.scheduler_config import scheduler_config
from triptych.errors import ConfigError
from triptych.layers.linear import ROW_TILE
from triptych.layers.recording import GraphRecorder, Recorder
from triptych.models.placement import Layout, Placement
from triptych.models.qwen3_omni.backbone import projections
from triptych.models.qwen3_omni.config import DecoderConfig, OmniConfig
from triptych.models.weights import load_weights
from triptych.stages.contract import StageContext

logger = logging.getLogger(__name__)

_GROUPED = (9, 10)  # major CUDA capabilities with grouped products that leave the groups' ends on the device
_RECORDED_SHARE = 4  # of the memory that is free beside the KV cache, one part of so many is for recorded steps


class Loadable(Protocol):
    """A model that is built on the meta device and filled from `placements`."""

    prefixes: tuple[str, ...]

    def placements(self, layout: Layout) -> Iterable[Placement]: ...


M = TypeVar("M", bound=Loadable)


@dataclass(frozen=True, kw_only=True)
class DecoderSetup:
    """What a decoder stage steps with. `recorded`: its decode steps, where they are."""

    device: torch.device
    eager: bool
    cache: KVCache
    scheduler: Scheduler
    recorded: RecordedDecodes | None = None


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


def load_model(context: StageContext, build: Callable[[], M], device: torch.device, dtype: torch.dtype) -> M:
    """Build a model without memory and stream its weights in, quantised as the stage asks; the caller prepares it."""
    started, method = time.monotonic(), context.config.quantization
    with torch.device("meta"):
        model = build()
    assert isinstance(model, nn.Module)
    quantized = {} if method is None else dict.fromkeys(projections(model), method)
    load_weights(
        model,
        model.placements,
        context.model,
        prefixes=model.prefixes,
        dtype=dtype,
        device=device,
        quantized=quantized,
        progress=context.progress,
    )
    kept = f"{dtype}, {len(quantized)} projections as {method}," if quantized else dtype
    seconds, part = time.monotonic() - started, type(model).__name__
    logger.info("%s: weights of %s on %s as %s in %.2f s", context.config.stage, part, device, kept, seconds)
    return model


def allocated_bytes(device: torch.device) -> int:
    """What this process holds on a GPU; 0 for a CPU, where nothing is sized by it."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def row_tile(config: StageConfig) -> int:
    """How many rows a batch is padded to multiples of."""
    return ROW_TILE if config.batch_invariant else 1


def stage_recorder(
    config: StageConfig, device: torch.device, dtype: torch.dtype, decoder: DecoderConfig | None = None
) -> Recorder | None:
    """What records the steps of a stage: on CUDA, unless it is to be eager. A CPU has compiled code instead.

    Raises ConfigError where the experts of `decoder` have no product that could be recorded.
    """
    if device.type != "cuda" or config.enforce_eager:
        return None
    sparse = decoder is not None and any(map(decoder.is_sparse, range(decoder.num_hidden_layers)))
    capability = torch.cuda.get_device_capability(device)
    if sparse and (dtype != torch.bfloat16 or capability[0] not in _GROUPED):
        raise ConfigError(
            f"steps with experts in {str(dtype).removeprefix('torch.')} on a device of capability "
            f"{'.'.join(map(str, capability))} cannot be recorded: PyTorch has grouped products that do not ask the "
            f"host in bfloat16, on capability {' and '.join(map(str, _GROUPED))}; write true",
            f"stages[{config.stage_id}].enforce_eager",
        )
    return GraphRecorder(device)


def set_up_decoder(
    config: StageConfig,
    decoder: DecoderConfig,
    layers: StepModel,
    taken_bytes: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    recorder: Recorder | None = None,
    keep_hidden: bool = False,
) -> DecoderSetup:
    """Cache and scheduler of one decoder, sized by the deploy config, and its steps, if there is a `recorder`.

    On a GPU `taken_bytes` go from its share. `keep_hidden`: the cache has room for one hidden state a row.
    Raises ConfigError.
    """
    per_block = bytes_per_block(config, decoder, dtype.itemsize, keep_hidden=keep_hidden)
    blocks = num_blocks(config, per_block, device, taken_bytes)
    cache = KVCache(
        layers=decoder.num_hidden_layers,
        num_blocks=blocks,
        block_size=config.block_size,
        kv_heads=decoder.num_key_value_heads,
        head_dim=decoder.head_dim,
        dtype=dtype,
        device=device,
        hidden_size=decoder.hidden_size if keep_hidden else 0,
    )
    scheduler = Scheduler(scheduler_config(config, blocks, by_row=layers.by_row))
    logger.info("%s: %d KV blocks of %d tokens, %d bytes", config.stage, blocks, config.block_size, cache.nbytes)
    recorded = _record(config, decoder, layers, cache, recorder) if recorder is not None else None
    return DecoderSetup(device=device, eager=config.enforce_eager, cache=cache, scheduler=scheduler, recorded=recorded)


def _record(
    config: StageConfig, decoder: DecoderConfig, layers: StepModel, cache: KVCache, recorder: Recorder
) -> RecordedDecodes:
    """The decode steps of every shape that the deploy config allows."""
    started = time.monotonic()
    buckets = decode_buckets(
        max_rows=config.max_num_seqs,
        row_tile=row_tile(config),
        max_blocks=-(-config.max_model_len // config.block_size),
        most=_most_blocks(cache),
    )
    recorded = RecordedDecodes(layers, cache, buckets, recorder, hidden_size=decoder.hidden_size)
    count, seconds = len(buckets.largest_first()), time.monotonic() - started
    logger.info("%s: decode steps of %d shapes recorded in %.2f s", config.stage, count, seconds)
    return recorded


def _most_blocks(cache: KVCache) -> int | None:
    """How many blocks the largest recorded step may gather, keys and values of one layer, and attend to beside them."""
    layer = cache.layers[0]
    if layer.device.type != "cuda":
        return None
    free_bytes = torch.cuda.mem_get_info(layer.device)[0]
    return int(free_bytes // _RECORDED_SHARE // (2 * layer[0].nbytes))


class _ComputesWith(TypedDict):
    device: str
    dtype: str
    threads: int


def computes_with(device: torch.device, dtype: torch.dtype) -> _ComputesWith:
    """What `StageStats` says of the machine's side of a stage."""
    return {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}


def engine_stats(kind: StageKind, engine: Engine) -> StageStats:
    """What an autoregressive stage tells of itself."""
    scheduler, counts = engine.scheduler, engine.counts
    counts.preemptions = scheduler.num_preemptions
    counts.prefix_queries, counts.prefix_hits = scheduler.num_queried_tokens, scheduler.pool.num_hit_tokens
    return StageStats(
        stage=kind,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        parked=scheduler.num_parked,
        kv_blocks_used=scheduler.pool.num_used,
        kv_blocks_total=scheduler.pool.num_usable,
        **computes_with(engine.runner.device, engine.runner.cache.dtype),
        counts=counts,
    )
