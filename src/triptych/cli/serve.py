"""`triptych serve`: the model behind an OpenAI-compatible API, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
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
    from triptych.pipeline.launch import LaunchPlan
    from triptych.pipeline.supervisor import Progress
    from triptych.server.tracing import Tracing

LAST_WORDS_S = 5  # for answers that are told that the server stops, to tell their clients

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


def _tracing(endpoint: str | None, plan: LaunchPlan) -> Tracing | None:
    if endpoint is None:
        return None
    from triptych.server.tracing import Tracing

    return Tracing.to(endpoint, plan.deploy)


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


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is found before a model is loaded. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with contextlib.ExitStack() as undo:
            # By this name asyncio knows TCP, and switches Nagle's algorithm off: it would hold deltas back for 40 ms.
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            undo.pop_all()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; try another --port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def serving(
    plan: LaunchPlan,
    listener: socket.socket,
    *,
    model_names: Sequence[str],
    api_key: str | None,
    log_level: str,
    on_progress: Progress,
    warm: bool = True,
    otlp_traces_endpoint: str | None = None,
    shutdown_timeout_s: float = 0,
    hurry: asyncio.Event | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """Load the model and answer on `listener`; stop both on leaving. Yields the server's task, ready for requests.

    On leaving, answers under way have `shutdown_timeout_s` to end, or until `hurry` is set; the others then end with an
    error.
    `warm` starts the first media worker then, instead of when the first file comes. Traces of requests go to
    `otlp_traces_endpoint`, as far as there is one.
    """
    import uvicorn

    from triptych.pipeline.launch import load_processor, make_loader
    from triptych.pipeline.orchestrator import Orchestrator
    from triptych.server.app import create_app

    class Server(uvicorn.Server):
        """uvicorn that leaves signals to its caller and says when it answers."""

        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            self.answering = asyncio.Event()

        @contextlib.contextmanager
        def capture_signals(self):  # type: ignore[no-untyped-def]  # uvicorn's own annotation differs by version
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.answering.set()

    # A client that takes nothing for as long as a request may last has left, whatever its connection says.
    patience_ms = min(int(1000 * plan.deploy.request_timeout_s), 2**31 - 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
    processor = load_processor(plan)
    async with contextlib.AsyncExitStack() as stack:
        tracing = _tracing(otlp_traces_endpoint, plan)
        if tracing is not None:
            stack.push_async_callback(tracing.close)  # after all that may still end a span
        loader = make_loader(plan)
        stack.push_async_callback(loader.close)
        orchestrator = await Orchestrator.start(
            deploy=plan.deploy,
            model=str(plan.model_dir),
            config=plan.config,
            log_level=log_level,
            on_progress=on_progress,
        )
        stack.push_async_callback(orchestrator.close)
        app = create_app(
            orchestrator=orchestrator,
            loader=loader,
            processor=processor,
            config=plan.config,
            deploy=plan.deploy,
            model_name=model_names[0],
            model_aliases=model_names[1:],
            api_key=api_key,
            tracing=tracing,
        )
        server = Server(
            uvicorn.Config(
                app,
                http="h11",  # not whatever is installed: this one bounds the headers
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
            )
        )
        answering = asyncio.create_task(server.answering.wait())
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.wait({answering, task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                raise TriptychError(f"the HTTP server did not start: {task.exception()}") from task.exception()
            if warm and (plan.config.media.has_audio or plan.config.media.has_vision):
                loader.warm()
            yield task
        finally:
            answering.cancel()
            server.should_exit = True
            hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
            await asyncio.wait({task, hurried}, timeout=shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            orchestrator.refuse()
            await asyncio.wait({task}, timeout=LAST_WORDS_S)
            # Who still sends a request, or does not read an answer, is cut off.
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({task})


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
    from triptych.cli.progress import LoadDisplay

    started = time.monotonic()
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
