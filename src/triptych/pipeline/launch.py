"""From the name of a model to a running pipeline: the one set-up that `serve`, `generate`, `demo` and `Omni` share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from triptych.config.load import load_deploy, located
from triptych.config.platform import Platform, detect_platform, num_cuda_devices
from triptych.config.resolve import resolve
from triptych.config.schema import DeployConfig, StageKind
from triptych.errors import CheckpointError, ConfigError
from triptych.media.loader import Loader
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.models.qwen3_omni.processor import Processor
from triptych.models.qwen3_omni.synthetic_cache import MARKER
from triptych.models.registry import family, locate
from triptych.pipeline.limits import check_limits

SMALL_PROFILE = "tiny_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything that is settled before a process starts. `name` is how clients address the model."""

    name: str
    model_dir: Path
    config: OmniConfig
    deploy: DeployConfig
    profile: str  # the deploy file, or the profile that was chosen


def plan(
    model: str,
    *,
    deploy_config: str | Path | None = None,
    platform: Platform | None = None,
    flags: Mapping[str, Any] | None = None,
    stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
    text_only: bool = False,
) -> LaunchPlan:
    """Find the checkpoint, choose and read the deploy config, and resolve one against the other.

    Without `deploy_config` the profile follows from the model's type and the machine. Starts nothing. Raises
    CheckpointError or ConfigError.
    """
    if platform not in (None, *get_args(Platform)):
        raise ConfigError(f"{platform!r} is not one of {', '.join(get_args(Platform))}", "platform")
    model_dir = locate(model)
    chosen = platform or detect_platform()
    profile = _profile(model_dir, chosen) if deploy_config is None else str(deploy_config)
    loaded = load_deploy(profile, platform=chosen, flags=flags or {}, stage_overrides=stage_overrides or {})
    config = load_config(model_dir)
    try:
        deploy = resolve(loaded, contexts=_contexts(config), dtype=config.dtype, text_only=text_only)
        check_limits(deploy, config)
    except ConfigError as error:
        raise located(error, profile) from error
    return LaunchPlan(name=model, model_dir=model_dir, config=config, deploy=deploy, profile=profile)


def load_processor(plan: LaunchPlan) -> Processor:
    """The tokenizer and chat template of a plan's checkpoint.

    Raises CheckpointError when they cannot be read, or do not go with config.json.
    """
    processor = Processor(plan.model_dir)
    for name in ("im_start_token_id", "im_end_token_id"):
        token_id = getattr(plan.config, name)
        if not processor.is_special(token_id):
            raise CheckpointError(
                f"the tokenizer in {plan.model_dir} has no special token of the id {token_id}, as config.json's {name} "
                "says: a tokenizer file is missing, or comes from another model"
            )
    return processor


def make_loader(plan: LaunchPlan, *, patient: bool = False) -> Loader:
    """What fetches and decodes the media of requests, in the running event loop. It starts nothing until it is asked.
    With `patient` requests wait for it, where else it sends away those that are too many.

    Raises CheckpointError when the checkpoint does not say how media is prepared, ConfigError when a limit cannot be
    followed.
    """
    return Loader(plan.deploy.media, str(plan.model_dir), patient=patient)


def _profile(model_dir: Path, platform: Platform) -> str:
    served = family(model_dir)
    marker = model_dir / MARKER
    if not marker.exists():
        return served.profile(platform, num_cuda_devices())
    return str(json.loads(marker.read_text(encoding="utf-8")).get("profile", SMALL_PROFILE))


def _contexts(config: OmniConfig) -> dict[StageKind, int]:
    contexts: dict[StageKind, int] = {"thinker": config.thinker.max_position_embeddings}
    if config.talker is not None and config.code2wav is not None:
        contexts["talker"] = config.talker.text.max_position_embeddings
        contexts["code2wav"] = config.code2wav.max_position_embeddings
    return contexts
