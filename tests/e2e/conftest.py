"""The HTTP application over a scripted pipeline, for the tests of the API that need no model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.fake_pipeline import DEPLOY, RAW, FakeLoader, FakeOrchestrator, client_of
from triptych.models.qwen3_omni.config import OmniConfig, parse_config
from triptych.models.qwen3_omni.processor import Processor
from triptych.models.qwen3_omni.synthetic_tokenizer import build_tokenizer, write_tokenizer
from triptych.server.app import create_app


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(build_tokenizer(1500, seed=7), folder)
    return Processor(folder)


@pytest.fixture(scope="session")
def config(processor: Processor) -> OmniConfig:
    ids = {
        f"{kind}_token_id": processor.tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in ("audio", "image", "video")
    }
    return parse_config(RAW | {"thinker_config": RAW["thinker_config"] | ids})


@pytest.fixture
def pipeline() -> FakeOrchestrator:
    return FakeOrchestrator()


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def make_app(
    pipeline: FakeOrchestrator, loader: FakeLoader, processor: Processor, config: OmniConfig
) -> Callable[..., FastAPI]:
    def make(**options: Any) -> FastAPI:
        values: dict[str, Any] = {"processor": processor, "config": config, "deploy": DEPLOY, "model_name": "omni"}
        return create_app(orchestrator=pipeline, loader=loader, **(values | options))

    return make


@pytest.fixture
async def client(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app()) as client:
        yield client
