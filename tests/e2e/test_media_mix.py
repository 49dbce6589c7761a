"""Two hundred requests that mix modalities: sixteen at a time with every cache equal each alone without any."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live_server import HEARTBEAT_S, LiveServer, wait_until
from tests.media_mix import mixed_requests

COUNT, AT_ONCE = 200, 16
CACHED = """
base_config: tiny_cpu
stages: [{stage_id: 0, enable_prefix_caching: true}]
"""
COLD = """
base_config: tiny_cpu
media: {cache_bytes: 0}
stages: [{stage_id: 0, enable_prefix_caching: false, encoder_cache_bytes: 0}]
"""


async def ask_all(url: str, bodies: list[dict[str, Any]], at_once: int) -> list[tuple[Any, ...]]:
    """What each request was answered, but for what names the request."""
    room = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def ask(body: dict[str, Any]) -> tuple[Any, ...]:
            async with room:
                response = await client.post("/v1/chat/completions", json={"model": "nano"} | body)
            answer = response.json()
            assert response.status_code == 200, answer
            message = answer["choices"][0]["message"]
            usage = answer["usage"]
            details = {k: v for k, v in usage["prompt_tokens_details"].items() if k != "cached_tokens"}
            audio = (message.get("audio") or {}).get("data")
            return message["content"], audio, answer["choices"][0]["finish_reason"], usage["completion_tokens"], details

        return list(await asyncio.gather(*map(ask, bodies)))


@pytest.mark.timeout(600)
async def test_mixed_requests_at_once_and_cached_equal_each_alone_and_cold(nano: Path, tmp_path: Path) -> None:
    bodies = mixed_requests(COUNT, seed=11)
    (tmp_path / "cached.yaml").write_text(CACHED, encoding="utf-8")
    (tmp_path / "cold.yaml").write_text(COLD, encoding="utf-8")
    with LiveServer(nano, log=tmp_path / "cached.log", deploy=tmp_path / "cached.yaml") as server:
        together = await ask_all(server.url, bodies, AT_ONCE)
        metrics = server.metrics()
        assert metrics["media_cache_hits_total"][""] > 0
        wait_until(lambda: not server.held(), 4 * HEARTBEAT_S, server.held)
    with LiveServer(nano, log=tmp_path / "cold.log", deploy=tmp_path / "cold.yaml") as server:
        alone = await ask_all(server.url, bodies, 1)
    assert together == alone
    assert len({text for text, *_ in alone}) > COUNT // 2  # the answers tell the requests apart
