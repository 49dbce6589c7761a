"""The memory plan as comments of YAML, below the deploy config that `triptych serve --dry-run` prints."""

from __future__ import annotations

from collections.abc import Iterator

from triptych.config.platform import cuda_memory_bytes, host_memory_bytes
from triptych.config.units import format_bytes
from triptych.pipeline.memory_advice import advice
from triptych.pipeline.memory_plan import DeviceLoad, MemoryPlan, ReplicaLoad

_HEAD = """
Memory in bytes, from the keys above and the checkpoint. "~" marks an estimate. On a CUDA device the engine measures its
weights before it sizes the KV cache, and may come out a few blocks apart. On a CPU packed weights may take less.
"""


def memory_report(plan: MemoryPlan, device_memory: int | None = None) -> str:
    """Every device with what is on it, whether that fits, and what to change if not.

    A CUDA device is as large as `device_memory` says, else as the driver says; a CPU has this machine's memory.
    """
    lines = _HEAD.strip().splitlines()
    for device in plan.devices.values():
        lines += ["", *_device(plan, device, _size(device.name, device_memory))]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _size(device: str, device_memory: int | None) -> int | None:
    if device == "cpu":
        return host_memory_bytes()
    return device_memory if device_memory is not None else cuda_memory_bytes(int(device.removeprefix("cuda:")))


def _device(plan: MemoryPlan, device: DeviceLoad, size: int | None) -> Iterator[str]:
    if size is None:
        smallest = device.smallest()
        yield f"{device.name}: its size is not known on this machine; --device-memory 80GiB plans for one of that size."
        if smallest is not None:
            yield f"  The smallest on which all of this fits, by its gpu_memory_utilization: {format_bytes(smallest)}."
    else:
        yield from _verdict(plan, device, size)
    for replica in device.replicas:
        yield from _replica(replica, device, size)
    for process in device.processes:
        steps = [replica.footprint.workspace for replica in device.processes[process]]
        yield f"  process {process}"
        yield _row("~ workspace", max(steps) if size is None else device.workspace_bytes(process, size), "largest step")
        yield _row("~ process", device.process_bytes, "Python and torch" if device.name == "cpu" else "CUDA context")
    if size is None:
        yield _row("total with one context each", device.least_total())
    else:
        beside = "; the server and its media workers come on top" if device.name == "cpu" else ""
        yield _row("total", device.total(size), f"of {format_bytes(size)}{beside}")


def _verdict(plan: MemoryPlan, device: DeviceLoad, size: int) -> Iterator[str]:
    total = device.total(size)
    if device.fits(size):
        yield f"{device.name}: fits; about {format_bytes(size - total)} of {format_bytes(size)} are left."
        for replica in device.replicas:
            more = replica.footprint.longest_decode - replica.workspace_bytes(device.shared(size))
            if more > size - total:
                yield (
                    f"  But a step of {replica.config.max_num_seqs} answers in the {replica.name}, one of them of "
                    f"{replica.config.max_model_len} tokens, gathers ~{format_bytes(replica.footprint.longest_decode)}:"
                )
                yield f"  if such are to come, lower stages[{replica.index}].max_num_seqs or max_model_len."
        return
    yield f"{device.name}: does not fit {format_bytes(size)}."
    for replica in device.replicas:
        if not replica.starts(device.shared(size)):
            yield (
                f"  {replica.name} does not start: its share leaves "
                f"{format_bytes(max(0, replica.budget(device.shared(size))))} for the KV cache, and one context of "
                f"{replica.config.max_model_len} tokens takes {format_bytes(replica.least_bytes)}."
            )
    if total > size:
        yield f"  All together take {format_bytes(total)}, {format_bytes(total - size)} too much."
    changes = advice(plan, device.name, size)
    if changes:
        yield "  Any one of these makes it fit:"
        yield from (f"    {change}" for change in changes)
        return
    smallest = device.smallest()
    yield (
        "  No single one of dtype, quantization, max_model_len, max_num_seqs, devices and "
        + ("kv_cache_bytes" if device.name == "cpu" else "gpu_memory_utilization")
        + " makes it fit"
        + (f"; a device of {format_bytes(smallest)} does." if smallest is not None else ".")
    )


def _replica(replica: ReplicaLoad, device: DeviceLoad, size: int | None) -> Iterator[str]:
    stage = replica.config
    share = ""
    if replica.block_bytes and device.name != "cpu" and not stage.num_kv_blocks:
        share = f", gpu_memory_utilization {stage.gpu_memory_utilization}"
        share += "" if size is None else f" = {format_bytes(int(size * stage.gpu_memory_utilization))}"
    kept = stage.dtype if stage.quantization is None else f"{stage.dtype}, projections in {stage.quantization}"
    yield f"  {replica.name} (stages[{replica.index}]), {kept}{share}"
    for item in replica.footprint.taken:
        yield _row(item.name, item.nbytes, item.note)
    if replica.block_bytes:
        yield _cache(replica, device, size)
    for item in replica.footprint.state:
        yield _row(item.name, item.nbytes, item.note)


def _cache(replica: ReplicaLoad, device: DeviceLoad, size: int | None) -> str:
    stage = replica.config
    each = f"of {stage.block_size} tokens, {replica.block_bytes:,} each"
    if size is None and not stage.num_kv_blocks:
        most = f"{stage.max_num_seqs} contexts can fill {format_bytes(replica.most_bytes)}"
        note = f"at least: one context of {stage.max_model_len}, in blocks {each}; {most}"
        return _row("KV cache", replica.least_bytes, note)
    blocks = replica.blocks(None if size is None else device.shared(size))
    tokens = max(0, blocks - 1) * stage.block_size
    contexts = f"{tokens:,} tokens, {tokens / stage.max_model_len:.1f} contexts of {stage.max_model_len}"
    return _row("KV cache", blocks * replica.block_bytes, f"{blocks:,} blocks {each}: {contexts}")


def _row(name: str, nbytes: int, note: str = "") -> str:
    return f"    {name:<27} {nbytes:>17,} {format_bytes(nbytes):>10}  {note}".rstrip()
