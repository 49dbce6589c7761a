"""Which models Triptych serves, where their files are, and which deploy profile fits a machine. Imports no torch."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.synthetic_cache import ensure_checkpoint
from triptych.models.qwen3_omni.synthetic_config import SIZES

logger = logging.getLogger(__name__)
# Names that work wherever a model is asked for: a trained checkpoint in the package, and random ones made on first use.
EMBEDDED = {"tiny": Path(__file__).parent / "tiny"}
SYNTHETIC = SIZES


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A `model_type` and the profiles that serve it: on CPU, on one CUDA device, on several."""

    model_type: str
    cpu: str
    one_device: str
    several_devices: str

    def profile(self, platform: Literal["cpu", "cuda"], num_devices: int) -> str:
        """The deploy profile for a machine with `num_devices` CUDA devices."""
        if platform == "cpu":
            return self.cpu
        return self.one_device if num_devices < 2 else self.several_devices


FAMILIES = {
    "qwen3_omni_moe": ModelFamily(
        model_type="qwen3_omni_moe",
        cpu="qwen3_omni_moe",
        one_device="qwen3_omni_moe_1gpu",
        several_devices="qwen3_omni_moe",
    ),
}


def locate(model: str) -> Path:
    """The checkpoint folder that `model` names: a small model's name, a folder, or a Hugging Face repository.

    A folder of a small model's name is `./name`; the bare name means the model, and the log says so. A random model is
    made, and a repository downloaded (with its own progress and no deadline), the first time only.
    Raises CheckpointError when there is no such thing.
    """
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            if model not in (*EMBEDDED, *SYNTHETIC):
                return folder.resolve()
            logger.warning("%s is the model of that name, not the folder here: that is ./%s", model, model)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a name too long, an unknown ~user, a folder not to be entered
        raise CheckpointError(f"{model!r:.200} cannot be a checkpoint folder: {error!s:.200}") from error
    if model in EMBEDDED:
        return EMBEDDED[model]
    for size in SYNTHETIC:
        if model == size:
            return ensure_checkpoint(size)
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _download(model)
    names = ", ".join([*EMBEDDED, *SYNTHETIC])
    raise CheckpointError(f"{model!r} is not a checkpoint folder, an owner/name repository, or one of {names}")


def family(model_dir: Path) -> ModelFamily:
    """The family of a checkpoint folder. Raises CheckpointError naming the families there are."""
    path = model_dir / "config.json"
    try:
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist: {model_dir} is not a checkpoint folder") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a model config: {error}") from error
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"{path}: model_type {model_type!r} is not served; served: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{repository!r} is no folder here, and fetching it as a Hugging Face repository failed: "
            + " ".join(str(error).split())
        ) from error
