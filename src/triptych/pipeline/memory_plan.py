"""How a deployment divides the memory of its devices, before anything is started. Imports no torch.

A KV cache is sized by the functions that size the stage's own (`engine.kv_budget`), from the same share of the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from triptych.config.schema import ConnectorExtra, DeployConfig, StageConfig, StageKind
from triptych.config.units import DTYPE_BYTES
from triptych.engine.kv_budget import bytes_per_block, cache_budget, least_blocks, most_blocks, offered_blocks
from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.tensor_shapes import tensor_shapes
from triptych.pipeline.footprint import Footprint, Parts, footprint, weight_parts
from triptych.pipeline.launch import LaunchPlan
from triptych.pipeline.limits import keeps_hidden

GIB = 2**30
# Estimates of what a process takes by itself: of a CUDA device its context and kernels, of a CPU Python and torch.
CUDA_PROCESS_BYTES = 600 * 2**20
CPU_PROCESS_BYTES = 250 * 2**20
_LARGEST_GIB = 4096  # where the search for a device that is large enough ends


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One replica on its device. `index` is its stage's place in the deploy config; `block_bytes` 0: no KV cache."""

    name: str
    index: int
    config: StageConfig
    footprint: Footprint
    layers: int
    block_bytes: int

    @property
    def taken_bytes(self) -> int:
        return sum(item.nbytes for item in self.footprint.taken)

    @property
    def fixed_bytes(self) -> int:
        """Weights, encoded media and state: what does not depend on the device's size."""
        return self.taken_bytes + sum(item.nbytes for item in self.footprint.state)

    @property
    def least_bytes(self) -> int:
        """A KV cache of one context, without which the stage does not start."""
        return least_blocks(self.config) * self.block_bytes

    @property
    def most_bytes(self) -> int:
        """A KV cache of as many whole contexts as there may be requests."""
        return most_blocks(self.config) * self.block_bytes

    def budget(self, device_bytes: int | None) -> int:
        """Bytes that the KV cache may have on a CUDA device of that size, or on a CPU (None)."""
        return cache_budget(self.config, self.taken_bytes, device_bytes)

    def blocks(self, device_bytes: int | None) -> int:
        """KV blocks that the stage gets there."""
        return offered_blocks(self.config, self.block_bytes, self.budget(device_bytes)) if self.block_bytes else 0

    def starts(self, device_bytes: int | None) -> bool:
        """Whether its KV cache holds one context."""
        return not self.block_bytes or self.blocks(device_bytes) >= least_blocks(self.config)

    def workspace_bytes(self, device_bytes: int | None) -> int:
        """Estimate of the largest step: of its rows, or of a decode that gathers one layer of the whole cache."""
        cache = self.blocks(device_bytes) * self.block_bytes
        return max(self.footprint.workspace, cache // self.layers if self.layers else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """A device, "cpu" or "cuda:N", and the replicas on it. `size` is bytes of the whole device."""

    name: str
    replicas: tuple[ReplicaLoad, ...]

    @property
    def processes(self) -> dict[str, tuple[ReplicaLoad, ...]]:
        """Process name -> its replicas on this device."""
        found: defaultdict[str, tuple[ReplicaLoad, ...]] = defaultdict(tuple)
        for replica in self.replicas:
            found[replica.config.process] += (replica,)
        return dict(found)

    def shared(self, size: int) -> int | None:
        """The size that shares are taken of: none on a CPU, where caches have sizes of their own."""
        return None if self.name == "cpu" else size

    def workspace_bytes(self, process: str, size: int) -> int:
        """Estimate of a step of one of the process's stages: they take turns."""
        return max(replica.workspace_bytes(self.shared(size)) for replica in self.processes[process])

    @property
    def process_bytes(self) -> int:
        """Estimate of what a process takes beside its stages."""
        return CPU_PROCESS_BYTES if self.name == "cpu" else CUDA_PROCESS_BYTES

    def total(self, size: int) -> int:
        """Everything on the device."""
        held = sum(
            replica.fixed_bytes + replica.blocks(self.shared(size)) * replica.block_bytes for replica in self.replicas
        )
        return held + sum(self.workspace_bytes(process, size) + self.process_bytes for process in self.processes)

    def least_total(self) -> int:
        """What a device of any size has to hold: with KV caches of one context each, or of `num_kv_blocks`."""
        caches = [
            replica.config.num_kv_blocks * replica.block_bytes or replica.least_bytes for replica in self.replicas
        ]
        steps = [max(each.footprint.workspace for each in replicas) for replicas in self.processes.values()]
        fixed = sum(replica.fixed_bytes for replica in self.replicas)
        return fixed + sum(caches) + sum(steps) + len(steps) * self.process_bytes

    def fits(self, size: int) -> bool:
        """Whether every stage starts, and all of them have room for their steps."""
        return all(replica.starts(self.shared(size)) for replica in self.replicas) and self.total(size) <= size

    def smallest(self) -> int | None:
        """The smallest size in whole GiB on which this fits; None where none is large enough."""
        first = sum(replica.fixed_bytes for replica in self.replicas) // GIB + 1
        return next((gib * GIB for gib in range(first, _LARGEST_GIB + 1) if self.fits(gib * GIB)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What every device of a deployment has to hold. `parts` are the parameters of each stage."""

    deploy: DeployConfig
    config: OmniConfig
    parts: Mapping[StageKind, Parts]

    @property
    def devices(self) -> dict[str, DeviceLoad]:
        """By name, in order of first use."""
        loads: defaultdict[str, tuple[ReplicaLoad, ...]] = defaultdict(tuple)
        for index, stage in enumerate(self.deploy.stages):
            for name, replica in self.deploy.replicas(stage.stage).items():
                device = "cuda:0" if replica.devices == "cuda" else replica.devices
                loads[device] += (self._load(name, index, replica, device),)
        return {name: DeviceLoad(name=name, replicas=replicas) for name, replicas in loads.items()}

    def changed(self, index: int, **keys: Any) -> MemoryPlan:
        """The plan with other values for keys of stage number `index`."""
        stages = list(self.deploy.stages)
        stages[index] = msgspec.structs.replace(stages[index], **keys)
        deploy = msgspec.structs.replace(self.deploy, stages=tuple(stages))
        return MemoryPlan(deploy=deploy, config=self.config, parts=self.parts)

    def _load(self, name: str, index: int, replica: StageConfig, device: str) -> ReplicaLoad:
        decoder = self.config.decoder(replica.stage)
        hidden, itemsize = keeps_hidden(replica, self.deploy), DTYPE_BYTES[replica.dtype]
        link = replica.input_connectors.get("talker")
        extra = self.deploy.connectors[link].extra if link is not None else ConnectorExtra()
        return ReplicaLoad(
            name=name,
            index=index,
            config=replica,
            footprint=footprint(
                replica,
                self.config,
                self.parts[replica.stage],
                on_cpu=device == "cpu",
                chunk_frames=extra.codec_chunk_frames,
            ),
            layers=decoder.num_hidden_layers if decoder else 0,
            block_bytes=bytes_per_block(replica, decoder, itemsize, keep_hidden=hidden) if decoder else 0,
        )


def memory_plan(launch: LaunchPlan) -> MemoryPlan:
    """Plan a deployment from the headers of its checkpoint's files or, where there are none, from its `config.json`.

    Raises CheckpointError, see `tensor_shapes`, and where a stage has no weights at all.
    """
    parts = weight_parts(tensor_shapes(launch.model_dir))
    for stage in launch.deploy.stages:
        if not parts[stage.stage]:
            raise CheckpointError(
                f"{launch.model_dir} holds no weights of the {stage.stage}, which its config.json has"
            )
    return MemoryPlan(deploy=launch.deploy, config=launch.config, parts=parts)
