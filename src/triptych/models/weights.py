"""Fill a module built on the meta device from a checkpoint, tensor by tensor.

Everything that can be wrong is found from the files' headers before a weight is read, and named. Then each parameter is
allocated on its device and each tensor copied into its place from a memory map, so the host never holds more than the
module's own weights and the pages being copied. A weight that is to be quantised is allocated when its first tensor
comes and quantised after its last, so that no more than a few of them are ever held in full.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from triptych.config.schema import Quantization
from triptych.errors import CheckpointError
from triptych.layers.quantized_weight import quantize
from triptych.models.placement import Layout, Placement
from triptych.models.safetensors_index import StoredTensor, tensor_index

_LOADABLE = ("F64", "F32", "F16", "BF16")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_STACKED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_NAMED = 5  # tensors spelled out in an error; the rest are counted


def load_weights(
    module: nn.Module,
    placements: Callable[[Layout], Iterable[Placement]],
    model_dir: str | Path,
    *,
    prefixes: Sequence[str],
    ignored: Sequence[str] = (),
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantized: Mapping[str, Quantization] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Layout:
    """Load a stage's tensors into `module` and return the layout of its experts.

    Of the checkpoint only names that start with one of `prefixes` are looked at, and only files that hold some are
    opened. All of them must be placed, except those that start with one of `ignored`. Parameters become `dtype` on
    `device`, those that `quantized` names a QuantizedWeight there; buffers that the module has computed move there and
    keep their type. `progress(done, total)` counts bytes of the checkpoint.

    Raises CheckpointError naming what does not fit: see `tensor_index`, and a missing, extra or misshapen tensor, one
    of a type that needs converting first, or a parameter that the placements fill in part or twice. Raises ConfigError
    where something is to be quantised and cannot be, see `quantize`.
    """
    owned, skipped = tuple(prefixes), tuple(ignored)
    index = tensor_index(model_dir, lambda name: name.startswith(owned) and not name.startswith(skipped))
    layout = _detect_layout(index, model_dir)
    placed: defaultdict[str, list[Placement]] = defaultdict(list)
    for placement in placements(layout):
        placed[placement.source].append(placement)
    _check_tensors(placed, index, model_dir)
    _check_coverage(module, placed)
    methods = quantized or {}
    _materialise(module, dtype, torch.device(device), methods)
    _copy(module, placed, index, methods, dtype, torch.device(device), progress)
    return layout


def read_tensor(model_dir: str | Path, name: str) -> Tensor:
    """One tensor of a checkpoint as stored, on the host. Raises CheckpointError when it is not there."""
    stored = tensor_index(model_dir, lambda candidate: candidate == name).get(name)
    if stored is None:
        raise CheckpointError(f"{model_dir} does not hold {name}")
    with safe_open(stored.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _detect_layout(index: Mapping[str, StoredTensor], model_dir: str | Path) -> Layout:
    single = next((name for name in index if _ONE_EXPERT.search(name)), None)
    stacked = next((name for name in index if _STACKED_EXPERTS.search(name)), None)
    if single and stacked:
        raise CheckpointError(f"{model_dir} mixes experts stored one by one ({single}) and stacked ({stacked})")
    return "fused" if stacked else "per_expert"


def _check_tensors(
    placed: Mapping[str, Sequence[Placement]], index: Mapping[str, StoredTensor], model_dir: str | Path
) -> None:
    if missing := [name for name in placed if name not in index]:
        raise CheckpointError(f"{model_dir} lacks {_some(missing)}, which its config.json asks for")
    if extra := [name for name in index if name not in placed]:
        raise CheckpointError(f"{model_dir} holds {_some(extra)}, for which its config.json has no place")
    for name, places in placed.items():
        stored = index[name]
        if stored.dtype not in _LOADABLE:
            raise CheckpointError(f"{name} has type {stored.dtype}; only {', '.join(_LOADABLE)} can be loaded")
        for place in places:
            if place.shape != stored.shape:
                raise CheckpointError(
                    f"{name} has shape {list(stored.shape)} in {stored.file}, and config.json asks for "
                    f"{list(place.shape)}"
                )


def _check_coverage(module: nn.Module, placed: Mapping[str, Sequence[Placement]]) -> None:
    """Every element of every parameter is filled exactly once."""
    targets = dict(module.named_parameters()) | _persistent_buffers(module)
    spans: defaultdict[str, defaultdict[int | None, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for places in placed.values():
        for place in places:
            if place.target not in targets:
                raise CheckpointError(f"{place.source} is placed at {place.target}, which the module does not have")
            spans[place.target][place.index].append(_span(place, tuple(targets[place.target].shape)))
    for name, target in targets.items():
        filled = spans[name]
        rows: Iterable[int | None] = [None] if None in filled or not filled else range(target.shape[0])
        length = target.shape[0] if None in filled or not filled else target.shape[1]
        if None in filled and len(filled) > 1:
            raise CheckpointError(f"parameter {name} is filled twice: as a whole and by index")
        for row in rows:
            _check_line(name if row is None else f"{name}[{row}]", sorted(filled[row]), length)


def _check_line(name: str, spans: Sequence[tuple[int, int]], length: int) -> None:
    end = 0
    for start, stop in spans:
        if start < end:
            raise CheckpointError(f"parameter {name} is filled twice from row {start} on")
        if start > end:
            break
        end = stop
    if end != length:
        raise CheckpointError(f"parameter {name} is not filled from row {end} on: no tensor is placed there")


def _span(place: Placement, shape: tuple[int, ...]) -> tuple[int, int]:
    room = shape if place.index is None else shape[1:]
    fits = place.index is None or 0 <= place.index < shape[0]
    stop = place.start + place.shape[0]
    if not fits or len(room) != len(place.shape) or stop > room[0] or room[1:] != place.shape[1:]:
        raise CheckpointError(
            f"{place.source} of shape {list(place.shape)} does not fit {place.target} of shape {list(shape)} at "
            f"index {place.index}, row {place.start}"
        )
    return place.start, stop


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device, later: Container[str]) -> None:
    """Give parameters storage, but for those `later`; move computed buffers. One with two names stays one parameter."""
    persistent = _persistent_buffers(module)
    fresh: dict[int, nn.Parameter] = {}
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            if (f"{path}.{name}" if path else name) in later:
                continue
            if id(parameter) not in fresh:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                fresh[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            setattr(child, name, fresh[id(parameter)])
        for name, buffer in child.named_buffers(recurse=False):
            full = f"{path}.{name}" if path else name
            if full in persistent:
                setattr(child, name, torch.empty(buffer.shape, dtype=dtype, device=device))
            elif buffer.is_meta:
                raise RuntimeError(
                    f"buffer {full} is on the meta device and in no checkpoint: compute it after loading"
                )
            else:
                setattr(child, name, buffer.to(device))


def _copy(
    module: nn.Module,
    placed: Mapping[str, Sequence[Placement]],
    index: Mapping[str, StoredTensor],
    quantized: Mapping[str, Quantization],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> None:
    targets: dict[str, Tensor] = dict(module.named_parameters())
    targets |= _persistent_buffers(module)
    left = Counter(place.target for places in placed.values() for place in places if place.target in quantized)
    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for name in placed:
        by_file[index[name].file].append(name)
    total, done = sum(index[name].nbytes for name in placed), 0
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name in names:
                    tensor = file.get_tensor(name)
                    for place in placed[name]:
                        if targets[place.target].is_meta:
                            targets[place.target] = torch.empty_like(targets[place.target], dtype=dtype, device=device)
                        whole = targets[place.target]
                        room = whole if place.index is None else whole[place.index]
                        room[place.start : place.start + place.shape[0]].copy_(tensor)
                        if place.target in quantized:
                            left[place.target] -= 1
                            if not left[place.target]:
                                del whole, room
                                _quantize(module, place.target, targets.pop(place.target), quantized[place.target])
                    done += index[name].nbytes
                    if progress is not None:
                        progress(done, total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _quantize(module: nn.Module, name: str, weight: Tensor, method: Quantization) -> None:
    """Put a weight, now complete, in place of the parameter `name`."""
    path, _, own = name.rpartition(".")
    holder = module.get_submodule(path)
    delattr(holder, own)
    setattr(holder, own, quantize(weight, method))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
