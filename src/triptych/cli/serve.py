"""`triptych serve`: the model behind an OpenAI-compatible API, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych import log
from triptych.cli.options import (
    DeployConfigPath,
    LogLevel,
    LogLevelOption,
    Model,
    PlatformOption,
    StageOverrides,
    check_devices,
    make_plan,
    stoppable,
)
from triptych.errors import ConfigError, TriptychError

if TYPE_CHECKING:
    import socket

    from triptych.pipeline.launch import LaunchPlan

logger = logging.getLogger(__name__)


def command(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = 8091,
    omni: Annotated[
        bool, typer.Option("--omni", help="Serve every stage. The default; accepted for compatibility.")
    ] = False,
    text_only: Annotated[bool, typer.Option("--text-only", help="Serve the Thinker alone: text, no speech.")] = False,
    deploy_config: DeployConfigPath = None,
    stage_overrides: StageOverrides = None,
    async_chunk: Annotated[
        bool | None,
        typer.Option(
            "--async-chunk/--no-async-chunk", help="Hand text and frames on as they come, or only when complete."
        ),
    ] = None,
    stage_init_timeout: Annotated[
        float | None, typer.Option("--stage-init-timeout", "--init-timeout", help="Seconds a stage may take to load.")
    ] = None,
    allowed_local_media_path: Annotated[
        str | None, typer.Option(help="Requests may name files below this folder.", metavar="DIR")
    ] = None,
    allowed_media_domains: Annotated[
        list[str] | None,
        typer.Option(
            help="Hosts that media may be fetched from, with their subdomains: a.com,b.org; may be given again. "
            "Default: every public one.",
            metavar="NAMES",
        ),
    ] = None,
    limit_mm_per_prompt: Annotated[str | None, typer.Option(hidden=True)] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TRIPTYCH_API_KEY", help="Ask clients for this bearer token.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name for clients to use; may be given again. Default: MODEL.")
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that answers under way may go on after Ctrl-C or SIGTERM; a second one ends them.",
            min=0,
            max=3600,
        ),
    ] = 20,
    profile: Annotated[
        Path | None,
        typer.Option(help="Write a trace of some steps of every stage into this folder.", metavar="DIR"),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send a trace of every request to this OpenTelemetry collector, over http/protobuf. "
            "Needs the extra triptych[otel].",
            metavar="URL",
        ),
    ] = None,
    platform: PlatformOption = None,
    log_level: LogLevelOption = LogLevel.info,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved deploy config and what memory it takes, and stop.")
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Plan --dry-run for CUDA devices of this size, e.g. 80GiB.", metavar="SIZE"),
    ] = None,
) -> None:
    """Serve MODEL behind an OpenAI-compatible API."""
    from triptych.cli.memory_report import memory_report
    from triptych.config.resolve import to_yaml
    from triptych.media.source import MediaSource
    from triptych.pipeline.memory_plan import memory_plan
    from triptych.server.listener import bind

    log.configure(log_level.value)
    if omni and text_only:
        raise ConfigError("--omni asks for every stage, --text-only for the Thinker alone; give one of them")
    if api_key is not None and not api_key.strip():
        raise ConfigError("the API key is empty; leave --api-key and TRIPTYCH_API_KEY out to serve without one")
    if limit_mm_per_prompt is not None:
        raise ConfigError(
            "--limit-mm-per-prompt is not in this version: all kinds of media have one limit together, "
            "media.max_parts in the deploy file"
        )
    device_bytes = _device_bytes(device_memory, dry_run)
    if otlp_traces_endpoint is not None:
        otlp_traces_endpoint = _traces_url(otlp_traces_endpoint)
    with stoppable():  # until the event loop takes the signals over
        flags = {
            "async_chunk": async_chunk,
            "stage_init_timeout_s": stage_init_timeout,
            "media": _media_flags(allowed_local_media_path, allowed_media_domains),
            "profile": {"dir": str(profile.expanduser().absolute())} if profile is not None else None,
        }
        plan = make_plan(model, deploy_config, platform, stage_overrides, flags=flags, text_only=text_only)
        if dry_run:
            asyncio.run(MediaSource(plan.deploy.media).close())  # raises for a folder or a host that cannot be
            memory = memory_plan(plan)
            if device_bytes is not None and set(memory.devices) == {"cpu"}:
                raise ConfigError(
                    "no stage is on a CUDA device; add --platform cuda, or leave it out", "--device-memory"
                )
            typer.echo(to_yaml(plan.deploy) + memory_report(memory, device_bytes), nl=False)
            return
        check_devices(plan.deploy)
        listener = bind(host, port)
        stages = ", ".join(stage.stage for stage in plan.deploy.stages)
        logger.info("starting %s with %s: %s", model, plan.profile, stages)
        status = asyncio.run(
            _serve_until_stopped(
                plan,
                listener,
                served_model_name or [model],
                api_key,
                log_level.value,
                otlp_traces_endpoint,
                shutdown_timeout,
            )
        )
        raise typer.Exit(status)


def _device_bytes(text: str | None, dry_run: bool) -> int | None:
    """The size that `--device-memory` gives. Raises ConfigError."""
    from triptych.config.units import parse_bytes

    if text is None:
        return None
    if not dry_run:
        raise ConfigError(
            "a server asks its devices for their size; it is --dry-run that plans for another", "--device-memory"
        )
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(str(error), "--device-memory") from error
    if size < 1:
        raise ConfigError(f"{text!r} is no memory at all; write for example 80GiB", "--device-memory")
    return size


def _traces_url(endpoint: str) -> str:
    """The URL that `--otlp-traces-endpoint` means. Raises ConfigError, which names the extra where that is missing."""
    try:
        from triptych.server.tracing import traces_url
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(
            "it needs OpenTelemetry: pip install 'triptych[otel]', or leave it out", "--otlp-traces-endpoint"
        ) from error
    return traces_url(endpoint)


def _media_flags(local_path: str | None, domains: list[str] | None) -> dict[str, Any] | None:
    """The keys of the deploy config's `media` that flags set. An empty path allows none, as with vLLM's flag."""
    given: dict[str, Any] = {}
    if local_path is not None:
        given["local_path"] = str(Path(local_path).expanduser().absolute()) if local_path else ""
    if domains:
        given["allowed_domains"] = [name.strip() for names in domains for name in names.split(",") if name.strip()]
        if not given["allowed_domains"]:
            raise ConfigError("--allowed-media-domains names no host; to fetch nothing, set media.fetch to false")
    return given or None


async def _serve_until_stopped(
    plan: LaunchPlan,
    listener: socket.socket,
    model_names: Sequence[str],
    api_key: str | None,
    log_level: str,
    otlp_traces_endpoint: str | None,
    shutdown_timeout_s: float,
) -> int:
    """Returns the exit status: 0 after SIGTERM, 130 after Ctrl-C."""
    started = time.monotonic()  # what the imports take counts
    from triptych.cli.progress import LoadDisplay
    from triptych.server.listener import url_of
    from triptych.server.serving import serving

    received: list[signal.Signals] = []
    this = asyncio.current_task()
    assert this is not None

    hurry = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if received:
            hurry.set()
        else:
            this.cancel()
        received.append(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with contextlib.AsyncExitStack() as stack:
            with LoadDisplay() as display:
                server = await stack.enter_async_context(
                    serving(
                        plan,
                        listener,
                        model_names=model_names,
                        api_key=api_key,
                        log_level=log_level,
                        on_progress=display,
                        otlp_traces_endpoint=otlp_traces_endpoint,
                        shutdown_timeout_s=shutdown_timeout_s,
                        hurry=hurry,
                    )
                )
            typer.echo(f"ready in {time.monotonic() - started:.1f} s at {url_of(listener)}", err=True)
            await asyncio.shield(server)
            raise TriptychError("the HTTP server stopped by itself; the log says why")
    except asyncio.CancelledError:
        if not received:
            raise
        logger.info("stopped by %s", received[0].name)
        return 130 if received[0] is signal.SIGINT else 0
    finally:
        listener.close()
