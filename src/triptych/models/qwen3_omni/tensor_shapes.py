"""Name and shape of every tensor of a checkpoint, without reading a weight. Imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from triptych.errors import CheckpointError
from triptych.models.safetensors_index import tensor_index

DEADLINE_S = 300


def tensor_shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """From the headers of the checkpoint's files; where it has none of them, from its `config.json`.

    The latter takes a child process and a few seconds: it builds the stages' modules, and with them imports torch.
    Raises CheckpointError, see `tensor_index` and `load_config`.
    """
    folder = Path(model_dir)
    if any(folder.glob("*.safetensors")):
        return {name: tensor.shape for name, tensor in tensor_index(folder).items()}
    command = [sys.executable, "-m", "triptych.models.qwen3_omni.meta_shapes", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"working out the tensors of {folder} took more than {DEADLINE_S} s") from error
    if done.returncode:
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        name = f"{CheckpointError.__module__}.{CheckpointError.__name__}: "
        raise CheckpointError(f"the tensors of {folder} cannot be worked out: {reason.removeprefix(name)}")
    shapes: dict[str, list[int]] = json.loads(done.stdout)
    return {name: tuple(shape) for name, shape in shapes.items()}
