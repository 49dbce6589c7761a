"""A model behind a listening socket, from loading it to the last answer that ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import uvicorn

from triptych.errors import TriptychError
from triptych.pipeline.launch import LaunchPlan, load_processor, make_loader
from triptych.pipeline.orchestrator import Orchestrator
from triptych.pipeline.supervisor import Progress
from triptych.server.app import create_app

LAST_WORDS_S = 5  # for answers that are told that the server stops, to tell their clients


class _Server(uvicorn.Server):
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
    # A client that takes nothing for as long as a request may last has left, whatever its connection says.
    patience_ms = min(int(1000 * plan.deploy.request_timeout_s), 2**31 - 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
    processor = load_processor(plan)
    async with contextlib.AsyncExitStack() as stack:
        tracing = None
        if otlp_traces_endpoint is not None:
            from triptych.server.tracing import Tracing  # OpenTelemetry is an extra

            tracing = Tracing.to(otlp_traces_endpoint, plan.deploy)
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
        server = _Server(
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
