"""What to change where a device is too small: every key is tried by planning again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.engine.kv_budget import least_blocks
from triptych.pipeline.memory_plan import DeviceLoad, MemoryPlan, ReplicaLoad
from triptych.pipeline.warm_up import least_contexts

Change = tuple[str, Any]  # a key of a stage, and its new value


def advice(plan: MemoryPlan, device: str, size: int) -> list[str]:
    """Changes that each make everything on `device` fit its `size` by themselves, as "stages[0].dtype: bfloat16".

    Of every key the value nearest to that of the plan. Empty where no single key is enough.
    """
    found: list[str] = []
    seen: set[tuple[int, str]] = set()
    for replica in plan.devices[device].replicas:
        for key, value in _candidates(replica, least_contexts(plan.config)[replica.config.stage]):
            if (replica.index, key) in seen:
                continue
            if plan.changed(replica.index, **{key: value}).devices[device].fits(size):
                seen.add((replica.index, key))
                found.append(f"stages[{replica.index}].{key}: {value}")
        if (replica.index, "devices") not in seen and _fits_apart(plan, replica, device, size):
            seen.add((replica.index, "devices"))
            found.append(f"stages[{replica.index}].devices: another device of this size")
    return found


def _candidates(replica: ReplicaLoad, least_context: int) -> Iterator[Change]:
    """Values to try, of each key the nearest first."""
    stage = replica.config
    if stage.dtype == "float32":
        yield "dtype", "bfloat16"
    if replica.block_bytes and stage.quantization is None:
        yield "quantization", "int8"
    if replica.block_bytes and stage.num_kv_blocks:
        for share in range(9, 0, -1):
            yield "num_kv_blocks", max(least_blocks(stage), stage.num_kv_blocks * share // 10)
    elif replica.block_bytes and stage.devices == "cpu":
        for share in range(9, 0, -1):
            yield "kv_cache_bytes", max(replica.least_bytes, stage.kv_cache_bytes * share // 10)
    elif replica.block_bytes:
        now = round(100 * stage.gpu_memory_utilization)
        for percent in sorted(range(1, 100), key=lambda percent: abs(percent - now)):
            yield "gpu_memory_utilization", percent / 100
    if replica.block_bytes:
        step = 1024 if stage.max_model_len > 1024 else stage.block_size
        for length in range((stage.max_model_len - 1) // step * step, least_context - 1, -step):
            yield "max_model_len", length
    seqs = stage.max_num_seqs // 2
    while seqs:
        yield "max_num_seqs", seqs
        seqs //= 2


def _fits_apart(plan: MemoryPlan, replica: ReplicaLoad, device: str, size: int) -> bool:
    """Whether the replica fits a device of its own, and the others this one without it."""
    here = plan.devices[device].replicas
    if device == "cpu" or len(here) == 1:
        return False
    others = tuple(other for other in here if other.name != replica.name)
    return all(DeviceLoad(name=device, replicas=part).fits(size) for part in ((replica,), others))
