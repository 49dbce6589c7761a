"""Options that several commands share, and how they become a launch plan."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.config.platform import cuda_memory_bytes
from triptych.errors import ConfigError

if TYPE_CHECKING:
    from triptych.config.schema import DeployConfig
    from triptych.pipeline.launch import LaunchPlan


class PlatformName(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class LogLevel(StrEnum):
    """`triptych.log.LEVELS` as choices."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


Model = Annotated[
    str,
    typer.Argument(help="A checkpoint folder, a Hugging Face repository, or tiny, nano, bench, mini.", metavar="MODEL"),
]
DeployConfigPath = Annotated[
    str | None,
    typer.Option(
        "--deploy-config",
        "--stage-configs-path",
        help="A deploy file, or the name of a shipped profile. Default: chosen by model and machine.",
        metavar="FILE",
    ),
]
StageOverrides = Annotated[
    str | None,
    typer.Option(help='JSON by stage_id, e.g. \'{"1": {"max_num_seqs": 8}}\'; wins over everything else.'),
]
PlatformOption = Annotated[
    PlatformName | None, typer.Option("--platform", help="Default: cuda where an NVIDIA device is found, else cpu.")
]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help="How much the log says.")]


def make_plan(
    model: str,
    deploy_config: str | None,
    platform: PlatformName | None,
    stage_overrides: str | None,
    *,
    flags: dict[str, Any] | None = None,
    text_only: bool = False,
) -> LaunchPlan:
    """The launch plan for what was given on the command line. Raises ConfigError or CheckpointError."""
    from triptych.config.load import parse_stage_overrides
    from triptych.pipeline.launch import plan

    return plan(
        model,
        deploy_config=deploy_config,
        platform=platform.value if platform else None,
        flags=flags,
        stage_overrides=parse_stage_overrides(stage_overrides) if stage_overrides is not None else {},
        text_only=text_only,
    )


def check_devices(deploy: DeployConfig) -> None:
    """Find out before any process starts whether the CUDA devices of the stages are there. Raises ConfigError."""
    for index, stage in enumerate(deploy.stages):
        for replica in range(stage.num_replicas):
            device = stage.replica(replica).devices
            if device != "cpu" and cuda_memory_bytes(int(device.partition(":")[2] or 0)) is None:
                raise ConfigError(
                    f"{device!r} is not there, the driver of this machine finds no such CUDA device; name another, or "
                    "serve with --platform cpu",
                    f"stages[{index}].devices",
                )


def check_writable(out: Path) -> None:
    """Find out before a model is loaded whether its speech has a file to go to. Raises ConfigError."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder; --out cannot be written")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ConfigError(f"--out {out} cannot be written: permission denied")


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM unwind the command, stage processes included, and end it with status 130 or 143."""
    status = 130

    def on_terminate(number: int, frame: FrameType | None) -> None:
        nonlocal status
        status = 128 + number
        interrupt = signal.getsignal(signal.SIGINT)  # asyncio has one of its own, which cancels the main task
        (interrupt if callable(interrupt) else signal.default_int_handler)(signal.SIGINT, frame)

    previous = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(status) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
