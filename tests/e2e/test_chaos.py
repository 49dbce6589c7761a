"""A live server under a mixed crowd: clients leave, stage processes are killed, and in the end the server itself.

Every stage has a process of its own here, and every handoff goes through shared memory.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.live_server import HEARTBEAT_S, LOAD_S, LiveServer, is_gone, sse_events, wait_until
from tests.media_files import image_file, noise

DEPLOY = """
base_config: tiny_cpu
connectors:
  shm: {extra: {inline_bytes: 0}}
stages:
  - {stage_id: 0, process: text}
  - {stage_id: 1, process: speech}
  - {stage_id: 2, process: wave}
"""
PROCESSES = {"talker": "speech", "thinker": "text"}
ERROR_S = 2.0  # from the death of a stage, or the start of a request after it, to the client's error
RESTART_S = 60.0
GROWTH = 16 * 2**20  # what a process that has served a crowd before may hold more after another: allocators breathe


def requests() -> list[dict[str, Any]]:
    """Eight requests, no two alike: each modality, short and long, all of a length that is known in advance."""
    made: list[dict[str, Any]] = []
    for index, modalities in enumerate([["text"], ["text", "audio"], ["audio"], ["text", "audio"]] * 2):
        tokens, frames = [(12, 8), (70, 40)][index // 4]
        made.append(
            {
                "model": "nano",
                "messages": [{"role": "user", "content": f"Again, {'and again, ' * index}please."}],
                "modalities": modalities,
                "seed": index,
                "max_tokens": tokens,
                "ignore_eos": True,
                "sampling_params_list": [{}, {"ignore_eos": True, "max_tokens": frames}],
            }
            | ({"audio": {"format": "pcm16"}} if "audio" in modalities else {})
        )
    return made


def speaks(request: dict[str, Any]) -> bool:
    return "audio" in request["modalities"]


@dataclass
class Outcome:
    """How one request ended for its client: right, wrong, error or left. `at` is when."""

    kind: str
    request: dict[str, Any]
    began: float
    at: float = field(default_factory=time.monotonic)
    message: str = ""


class Crowd:
    """Clients that know what they should be answered."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.answers: list[tuple[str, bytes]] = []
        self.outcomes: list[Outcome] = []  # of the current run, as they come

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.server.url, timeout=LOAD_S)

    async def learn(self) -> None:
        async with self.client() as client:
            for index, request in enumerate(requests()):
                said, error = await self.ask(client, request | {"stream": index % 2 == 0})
                assert not error, error
                self.answers.append(said)
        assert len(set(self.answers)) == len(self.answers)
        assert [len(audio) > 0 for _, audio in self.answers] == [speaks(request) for request in requests()]

    async def ask(self, client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[tuple[str, bytes], str]:
        """What was said, and the error if it ended in one."""
        text, audio = "", b""
        if not request["stream"]:
            answer = await client.post("/v1/chat/completions", json=request)
            if answer.status_code != 200:
                return (text, audio), f"{answer.status_code} {answer.json()['error']['message']}"
            message = answer.json()["choices"][0]["message"]
            spoken = message.get("audio") or {}
            return (message["content"] or spoken["transcript"], base64.b64decode(spoken.get("data", ""))), ""
        async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
            lines = [line async for line in answer.aiter_lines()]
        if answer.status_code != 200:
            return (text, audio), f"{answer.status_code} {''.join(lines)}"
        for chunk in sse_events(lines):
            if "error" in chunk:
                assert "data: [DONE]" not in lines, "an answer that failed must not end as if all were well"
                return (text, audio), chunk["error"]["message"]
            for choice in chunk["choices"]:
                spoken = choice["delta"].get("audio") or {}
                text += choice["delta"].get("content") or (
                    "" if "text" in request["modalities"] else spoken.get("transcript", "")
                )
                audio += base64.b64decode(spoken.get("data", ""))
        assert "data: [DONE]" in lines
        return (text, audio), ""

    async def visit(self, client: httpx.AsyncClient, index: int, leave_after_s: float | None) -> Outcome:
        """Request number `index`, whose client may leave before the end."""
        which = index % len(self.answers)
        request = requests()[which] | {"stream": index // len(self.answers) % 2 == 0}
        began = time.monotonic()
        try:
            async with asyncio.timeout(leave_after_s):
                said, error = await self.ask(client, request)
        except TimeoutError:
            return Outcome("left", request, began)
        if error:
            return Outcome("error", request, began, message=error)
        if said != self.answers[which]:
            return Outcome("wrong", request, began, message=repr(said)[:200])
        return Outcome("right", request, began)

    async def run(self, count: int, concurrency: int, leavers: dict[int, float] | None = None) -> list[Outcome]:
        room = asyncio.Semaphore(concurrency)
        self.outcomes = []

        async def one(index: int) -> None:
            async with room:
                self.outcomes.append(await self.visit(client, index, (leavers or {}).get(index)))

        async with self.client() as client:
            await asyncio.gather(*map(one, range(count)))
        return self.outcomes

    async def until_served(self, count: int) -> None:
        """Wait until so many spoken answers of the current run are complete."""
        while sum(outcome.kind == "right" and speaks(outcome.request) for outcome in self.outcomes) < count:
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "deploy.yaml").write_text(DEPLOY, encoding="utf-8")
    with LiveServer(nano, log=folder / "log", deploy=folder / "deploy.yaml") as server:
        yield server


@pytest.fixture(scope="module")
def crowd(server: LiveServer) -> Crowd:
    crowd = Crowd(server)
    asyncio.run(crowd.learn())
    return crowd


def memory(server: LiveServer) -> dict[int, int]:
    """Bytes of its own, by process id: pages of files (libraries) come and go as the kernel likes.

    Without the media worker: nobody here sends media, and it loads what it needs in the background.
    """
    pids = [process.pid for process in (server.process, *server.children())]
    return {pid: anonymous(pid) for pid in pids if "triptych.media.worker" not in command(pid)}


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")


def anonymous(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    [kibibytes] = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kibibytes) * 1024


def show_picture(server: LiveServer) -> None:
    picture = base64.b64encode(image_file(Image.fromarray(noise(40, 60)))).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    body = {"model": "nano", "messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def check_at_rest(server: LiveServer) -> None:
    """Nothing is held by anyone; what the stages say of themselves is as old as a heartbeat."""
    wait_until(lambda: not server.held(), 3 * HEARTBEAT_S, server.held)
    assert [trace for trace in server.traces() if trace.startswith("/dev/shm")] == []


async def test_a_long_mixed_crowd_is_served_evenly_and_leaves_memory_flat(server: LiveServer, crowd: Crowd) -> None:
    await crowd.run(16, 16)  # warm
    before = memory(server)
    outcomes = await crowd.run(64, 16)
    assert Counter(outcome.kind for outcome in outcomes) == {"right": 64}, outcomes
    took = [outcome.at - outcome.began for outcome in outcomes]
    assert max(took) < 10 * statistics.median(took)
    check_at_rest(server)
    for pid, size in memory(server).items():
        assert size - before[pid] < GROWTH, f"process {pid} grew from {before[pid]} to {size} bytes"


@pytest.mark.parametrize("stage", ["talker", "thinker"])
async def test_a_stage_that_is_killed_in_a_crowd_takes_only_what_needs_it(
    server: LiveServer, crowd: Crowd, stage: str
) -> None:
    chance = random.Random(stage)
    leavers = {index: chance.uniform(0.01, 1.0) for index in chance.sample(range(64), 16)}
    victim = server.child(PROCESSES[stage])
    restarts = server.metrics()["process_restarts_total"][PROCESSES[stage]]
    before = memory(server)
    running = asyncio.create_task(crowd.run(64, 32, leavers))
    await asyncio.wait_for(crowd.until_served(8), LOAD_S)
    victim.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    outcomes = await running

    seen = Counter((outcome.kind, speaks(outcome.request)) for outcome in outcomes)
    assert not [outcome for outcome in outcomes if outcome.kind == "wrong"]
    errors = [outcome for outcome in outcomes if outcome.kind == "error"]
    assert errors, f"nothing was under way when {stage} was killed: {seen}"
    for outcome in errors:
        assert outcome.message.count(f"stage {stage}") == 1, outcome.message
        assert "went down: it was ended by SIGKILL" in outcome.message or "restarting" in outcome.message
        assert outcome.at - max(killed, outcome.began) < ERROR_S, outcome
        assert stage == "thinker" or speaks(outcome.request), "a request that needs no Talker was lost with it"
    if stage == "talker":
        assert seen["right", False] + seen["left", False] == 16, seen
        late = [outcome for outcome in outcomes if outcome.kind == "right" and outcome.at > killed]
        assert any(not speaks(outcome.request) for outcome in late), "text should go on while the Talker is away"

    wait_until(server.ready, RESTART_S)
    assert server.metrics()["process_restarts_total"][PROCESSES[stage]] == restarts + 1
    check_at_rest(server)
    again = await crowd.run(16, 16)
    assert Counter(outcome.kind for outcome in again) == {"right": 16}, again
    check_at_rest(server)
    for pid, size in memory(server).items():
        if pid in before:
            assert size - before[pid] < GROWTH, f"process {pid} grew from {before[pid]} to {size} bytes"


async def test_a_server_that_is_killed_leaves_no_process_and_no_shared_memory(server: LiveServer, crowd: Crowd) -> None:
    show_picture(server)
    assert any("-media-" in trace for trace in server.traces())  # decoded, and kept for whoever sends it again
    children = server.children()
    assert len(children) == 4
    running = asyncio.create_task(crowd.run(32, 32))
    await asyncio.wait_for(crowd.until_served(4), LOAD_S)
    os.kill(server.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(httpx.TransportError):
        await running
    server.process.wait(5)
    wait_until(lambda: all(map(is_gone, children)), 5, lambda: children)
    wait_until(lambda: not server.traces(), 5, server.traces)
    assert time.monotonic() - killed < 5
