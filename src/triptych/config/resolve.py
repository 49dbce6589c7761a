"""Fill a loaded deploy config with what only the checkpoint knows, and print the result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import yaml

from triptych.config.schema import DeployConfig, DTypeName, StageConfig, StageKind
from triptych.errors import ConfigError

logger = logging.getLogger(__name__)

# How a stage draws its tokens where the deploy file says nothing: greedy text, and speech as its model was tuned for.
DEFAULT_SAMPLING: dict[StageKind, dict[str, Any]] = {
    "thinker": {"temperature": 0.0, "max_tokens": 2048},
    "talker": {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_tokens": 4096},
    "code2wav": {},
}


def resolve(
    deploy: DeployConfig, *, contexts: Mapping[StageKind, int], dtype: str, text_only: bool = False
) -> DeployConfig:
    """The config that the stages get: no "auto", no 0 that stands for "as the checkpoint says".

    `contexts` gives the longest sequence of each stage that the checkpoint has (tokens; codec frames for Talker and
    Code2Wav), `dtype` the type its weights are stored in. Speech stages go where the checkpoint has none or
    `text_only` asks for it. Raises ConfigError when a stage asks for more context than its checkpoint has.
    """
    stages: list[StageConfig] = []
    for index, stage in enumerate(deploy.stages):
        if stage.stage != "thinker" and text_only:
            continue
        if stage.stage not in contexts:
            logger.warning("the checkpoint has no %s: this server writes text and does not speak", stage.stage)
            continue
        stages.append(_resolve_stage(stage, contexts[stage.stage], dtype, f"stages[{index}]"))
    used = {name for stage in stages for name in stage.input_connectors.values()}
    connectors = {name: connector for name, connector in deploy.connectors.items() if name in used}
    return msgspec.structs.replace(deploy, stages=tuple(stages), connectors=connectors)


def _resolve_stage(stage: StageConfig, context: int, dtype: str, path: str) -> StageConfig:
    if stage.max_model_len > context:
        raise ConfigError(
            f"{stage.max_model_len} is more than the {context} positions of the checkpoint's {stage.stage}; "
            "write a smaller number, or 0 for all of them",
            f"{path}.max_model_len",
        )
    wanted: DTypeName = stage.dtype
    if wanted == "auto":
        stored = next((name for name in get_args(DTypeName) if name == dtype), None)
        if stored is None:
            raise ConfigError(
                f"the checkpoint is stored as {dtype!r}; write float32, bfloat16 or float16", f"{path}.dtype"
            )
        wanted = stored
    return msgspec.structs.replace(
        stage,
        max_model_len=stage.max_model_len or context,
        dtype=wanted,
        default_sampling_params=DEFAULT_SAMPLING[stage.stage] | stage.default_sampling_params,
    )


def to_yaml(deploy: DeployConfig) -> str:
    """The config as a deploy file: loading the text gives the same config again."""
    return yaml.safe_dump(msgspec.to_builtins(deploy), sort_keys=False, allow_unicode=True)
