"""The HTTP application: its routes, and what each says. Every route answers with and without the `/v1` prefix.

`/health`, `/ready` and `/metrics` need no API key, so that probes and scrapers need none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from triptych import __version__
from triptych.config.schema import DeployConfig
from triptych.media.contract import MediaLoader
from triptych.models.qwen3_omni.config import OmniConfig
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.health import PipelineHealth, ProcessState
from triptych.pipeline.prepare import context_length, has_speech
from triptych.server import errors
from triptych.server.auth import require_key
from triptych.server.chat import Chat, Orchestrator
from triptych.server.errors import ModelNotFoundError
from triptych.server.metrics import Metrics
from triptych.server.protocol import ChatCompletionRequest
from triptych.server.sse import ClientGone

if TYPE_CHECKING:
    from triptych.server.tracing import Tracing

CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody reads the answer


def create_app(
    *,
    orchestrator: Orchestrator,
    loader: MediaLoader,
    processor: Processor,
    config: OmniConfig,
    deploy: DeployConfig,
    model_name: str,
    model_aliases: Sequence[str] = (),
    api_key: str | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application over a running orchestrator, a loader and tracing, which it neither starts nor stops.

    `model_name` and `model_aliases` are what the field `model` of a request may say. Without `api_key` everyone may
    ask.
    """
    metrics = Metrics(model_name, config.sample_rate, orchestrator.health, loader.stats)
    names = (model_name, *model_aliases)
    chat = Chat(
        orchestrator=orchestrator,
        loader=loader,
        processor=processor,
        config=config,
        deploy=deploy,
        metrics=metrics,
        model_names=names,
        tracing=tracing,
    )
    voices = list(config.talker.speaker_id) if config.talker and has_speech(config, deploy) else []
    api = _api(chat, names, voices, context_length(config, deploy))
    app = FastAPI(title="Triptych", version=__version__, docs_url=None, redoc_url=None)  # those pages load scripts
    key = [Depends(require_key(api_key))]
    app.include_router(api, prefix="/v1", dependencies=key)
    app.include_router(api, dependencies=key, include_in_schema=False)
    app.include_router(_probes(orchestrator, metrics, deploy.heartbeat_timeout_s))
    errors.install(app)
    app.add_exception_handler(ClientGone, _client_gone)
    return app


def _api(chat: Chat, names: Sequence[str], voices: Sequence[str], max_model_len: int) -> APIRouter:
    router = APIRouter()
    created = int(time.time())
    models = {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "triptych",
            "max_model_len": max_model_len,
        }
        for name in names
    }

    @router.post("/chat/completions", openapi_extra=_json_body(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await chat.complete(request)

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": list(models.values())}

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        if name not in models:
            raise ModelNotFoundError(name, names)
        return models[name]

    @router.get("/audio/models")
    async def list_audio_models() -> dict[str, Any]:
        spoken = list(models.values()) if voices else []
        return {"object": "list", "data": spoken, "models": [{"id": model["id"]} for model in spoken]}

    @router.get("/audio/voices")
    async def list_voices() -> dict[str, Any]:
        return {"voices": [{"id": voice, "name": voice} for voice in voices], "default": next(iter(voices), None)}

    return router


def _json_body(model: type[BaseModel]) -> dict[str, Any]:
    """A request body for `/openapi.json`, since the route reads the body itself. References are written out."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def written_out(value: Any) -> Any:
        if isinstance(value, list):
            return [written_out(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return written_out(definitions[value["$ref"].rsplit("/", 1)[-1]])
        return {key: written_out(item) for key, item in value.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": written_out(schema)}}}}


def _probes(orchestrator: Orchestrator, metrics: Metrics, heartbeat_timeout_s: float) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while every stage has a replica with a fresh heartbeat, else 503; the body tells each replica."""
        now = orchestrator.health()
        stages = _stages(now, heartbeat_timeout_s)
        kinds = {kind for process in now.processes.values() for kind in process.stages.values()}
        healthy = bool(kinds) and kinds == {stage["stage"] for stage in stages.values() if stage["alive"]}
        body = {"status": "ok" if healthy else "unhealthy", "ready": now.ready, "stages": stages}
        return JSONResponse(body, 200 if healthy else 503)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 when every stage takes requests, with one replica or more, else 503."""
        now = orchestrator.health()
        return JSONResponse({"ready": now.ready}, 200 if now.ready else 503)

    @router.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.scrape(), media_type=CONTENT_TYPE_LATEST)

    return router


def _stages(health: PipelineHealth, heartbeat_timeout_s: float) -> dict[str, dict[str, Any]]:
    """How every replica of a stage is, by its name: the stage's own where there is one."""
    stages = {}
    for process in health.processes.values():
        age = process.heartbeat_age_s
        alive = process.state is not ProcessState.FAILED and age is not None and age <= heartbeat_timeout_s
        for name, stage in process.stages.items():
            stats = health.stages.get(name)
            stages[name] = {
                "stage": stage,
                "alive": alive,
                "process": process.name,
                "state": str(process.state),
                "heartbeat_age_s": None if age is None else round(age, 3),
                "restarts": process.restarts,
                "running": stats.running if stats else 0,
                "waiting": stats.waiting if stats else 0,
            }
    return stages


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
