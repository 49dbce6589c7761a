"""What a checkpoint's safetensors files hold, read from their headers alone. Imports no torch.

A file is an 8-byte little-endian header length, that much JSON ({name: {dtype, shape, data_offsets}}), then the data
(https://github.com/huggingface/safetensors#format). A sharded checkpoint adds `model.safetensors.index.json`, whose
`weight_map` says which file holds which tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LFS_POINTER = int.from_bytes(b"version ", "little")  # how the text file begins that Git LFS leaves in place of one
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. `dtype` is spelled as in the header: F32, F16, BF16 ..."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def tensor_index(model_dir: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder whose name is `wanted`; files that hold none of those are not opened.

    Raises CheckpointError naming the file or tensor: no weights in the folder, a bad index, a missing, truncated or
    corrupt file, a tensor that is not in the file the index names, or a wanted tensor the index leaves out.
    """
    folder = Path(model_dir)
    if (folder / INDEX).exists():
        return _sharded(folder, wanted)
    if not os.path.lexists(folder / SINGLE):
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    return {name: tensor for name, tensor in read_header(folder / SINGLE).items() if wanted(name)}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises CheckpointError when it is missing, truncated or corrupt."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if 2 <= length <= _MAX_HEADER else b""
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if length == _LFS_POINTER:
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights themselves: run `git lfs pull` there")
    if size < 8 + length <= 8 + _MAX_HEADER:
        raise CheckpointError(f"{path} is truncated: {size} bytes, and its header alone should have {8 + length}")
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, entry) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt: its header is not that of a safetensors file") from error
    if size != 8 + length + end:
        state = "truncated" if size < 8 + length + end else "corrupt"
        raise CheckpointError(f"{path} is {state}: {size} bytes, and its header promises {8 + length + end}")
    return tensors


def _stored(path: Path, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(path, tuple(int(size) for size in entry["shape"]), str(entry["dtype"]), end - begin)


def _sharded(folder: Path, wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    weight_map = _weight_map(folder / INDEX)
    found: dict[str, StoredTensor] = {}
    for file in sorted({file for name, file in weight_map.items() if wanted(name)}):
        if not (folder / file).exists():
            example = next(name for name, where in weight_map.items() if where == file and wanted(name))
            raise CheckpointError(f"{folder / file} does not exist; {INDEX} says it holds {example} and others")
        for name, tensor in read_header(folder / file).items():
            if not wanted(name):
                continue
            if weight_map.get(name) != file:
                raise CheckpointError(f"{folder / file} holds {name}, which {INDEX} does not place there")
            found[name] = tensor
    for name, file in weight_map.items():
        if wanted(name) and name not in found:
            raise CheckpointError(f"{folder / file} does not hold {name}, although {INDEX} says so")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = dict(weight_map).values()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON object with a weight_map") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: weight_map names {file!r}, which is not a file of this folder")
    return dict(weight_map)
