"""What clients send by mistake or in anger, to a real server: each is told what is wrong, and nobody else notices."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.live_server import LiveServer, sse_events, wait_until
from triptych.models.qwen3_omni.processor import Processor

KEY = "kéy🔑"
TIMEOUT_S = 4.0
TAIL = 555  # samples that the last frame of a reply does not give
# JSON as clients write it, right or wrong, for every field.
VALUES = (
    *("null", "true", '"x"', '""', "0", "-1", "1.5", "NaN", "1e400", "1e-320", "9" * 40, "9" * 5000),
    *("[]", "[null]", '{"a": 1}', '{"1": 1e308}', "9223372036854775807"),
)
FIELDS = (
    *("modalities", "audio", "speaker", "voice", "stream_options", "n", "response_format", "max_completion_tokens"),
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("seed", "stop", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "metadata"),
    *("sampling_params_list", "tools", "messages", "model", "frobnicate"),
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias", "seed")
CONTENTS = (
    *('""', '" "', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"e\\u0301"', '"\\u202e \\ufeff"', '"<|im_end|>"'),
    *('"{{ 7 * 7 }}{% raw %}"', '[{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]', "[]", "5"),
    *('[{"type": "text"}]', '[{"type": [], "text": "a"}]', '["a"]', "null"),
)


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    deploy = folder / "deploy.yaml"
    deploy.write_text(f"base_config: tiny_cpu\nrequest_timeout_s: {TIMEOUT_S}\n", encoding="utf-8")
    with LiveServer(nano, "--api-key", f"{KEY}\n", log=folder / "log", deploy=deploy) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    headers = {b"authorization": f"Bearer {KEY}".encode(), b"content-type": b"application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client
        health = client.get("/health").json()
    assert health["ready"] and not any(stage["restarts"] for stage in health["stages"].values()), server.said()


def body(fields: str = "", content: str = '"Hi."', max_tokens: int = 1) -> str:
    """A request as text, so that it can be wrong in any way. `fields` come last and win."""
    messages = f'[{{"role": "user", "content": {content}}}]'
    return f'{{"model": "nano", "messages": {messages}, "max_tokens": {max_tokens}{fields}}}'


def post(client: httpx.Client, content: str) -> httpx.Response:
    return client.post("/v1/chat/completions", content=content.encode("utf-8", "surrogatepass"))


def head(length: int, extra: str = "") -> bytes:
    lines = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}"
    return f"{lines}Content-Length: {length}\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()


def connect(server: LiveServer, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", httpx.URL(server.url).port))
    return connection


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


# --- what is in the body ---


def test_no_value_of_any_field_is_more_than_a_refused_request(client: httpx.Client) -> None:
    bodies = [body(f', "{field}": {value}') for field in FIELDS for value in VALUES]
    bodies += [
        body(f', "temperature": 0.8, "sampling_params_list": [{{"{field}": {value}}}]')
        for field in SAMPLING
        for value in VALUES
        if field != "temperature"
    ]
    spoken = ', "modalities": ["audio"], "sampling_params_list": [{}, {"max_tokens": 2, '
    bodies += [body(f'{spoken}"{field}": {value}}}]') for field in SAMPLING[:4] for value in VALUES[::3]]
    bodies += [body(extra, content) for content in CONTENTS for extra in ("", ', "modalities": ["audio"]')]
    statuses: Counter[int] = Counter()
    for content in bodies:
        answer = post(client, content)
        statuses[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), (content, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(answer.text) < 1000, answer.text
            assert error["param"] is not None or error["code"] == "invalid_json", (content, error)
    assert statuses[200] > 50 and statuses[400] > 300


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "{", body() + "x", body() * 2, "\ufeff" + body(), "[" * 10**6, body()[:-1] + ",}"),
        body(content='"\ud800"'),
        body(content='"\x00"'),
    ],
    ids=itertools.count(),
)
def test_what_is_no_json_object_is_said_to_be_none(client: httpx.Client, text: str) -> None:
    answer = post(client, text)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json", answer.text


def test_a_body_full_of_errors_costs_no_more_than_one(client: httpx.Client) -> None:
    millions = ", ".join(["1"] * 10**6)
    names = ", ".join(f'"k{number}": 1' for number in range(10**5))
    bodies = [
        f'{{"model": "nano", "messages": [{millions}]}}',
        f'{{"model": "nano", {names}}}',
        body(f', "stop_token_ids": [{millions.replace("1", "[]")}]'),
        body(f', "logit_bias": {{{names}}}'),
        body(f', "metadata": {{{names}}}'),
        body(content=f"[{millions}]"),
    ]
    started = time.monotonic()
    for content in bodies:
        assert post(client, content).status_code == 400
    assert time.monotonic() - started < 10  # a minute, and gigabytes, when all errors are collected


def test_a_prompt_far_too_long_is_refused_at_once_with_numbers(client: httpx.Client) -> None:
    answer = post(client, body(content=json.dumps("hello " * 500_000)))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "context of 16384 tokens" in error["message"]
    assert answer.elapsed.total_seconds() < 3
    answer = post(client, body(content=json.dumps("hello " * 12 * 10**6)))
    assert answer.status_code == 413 and "67108864 bytes" in answer.json()["error"]["message"]


# --- how it is sent ---


def test_an_answer_does_not_wait_for_the_clients_acknowledgement(client: httpx.Client) -> None:
    """Nagle's algorithm and delayed acknowledgements would make it 40 ms."""
    seconds = [client.get("/ready").elapsed.total_seconds() for _ in range(30)]
    assert statistics.median(seconds) < 0.02


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET /ready HTTP/1.1\r\n\r\n", b"400"),
        (head(-1), b"400"),
        (head(5, "Content-Length: 6\r\n"), b"400"),
        (head(10**12), b"413"),
        (head(2, "Content-Encoding: gzip\r\n") + b"{}", b"415"),
        (b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"405"),
        (b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n" * 20 + b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
    ],
    ids=itertools.count(),
)
def test_what_is_sent_wrong_has_a_status(server: LiveServer, client: httpx.Client, sent: bytes, status: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        assert connection.recv(65536).split()[1] == status


def test_a_body_in_chunks_of_one_byte_is_read(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", content=(bytes([byte]) for byte in body().encode()))
    assert answer.status_code == 200


def test_the_key_is_compared_as_it_was_sent(client: httpx.Client) -> None:
    def status(value: bytes) -> int:
        return client.get("/models", headers={b"authorization": value}).status_code

    key = KEY.encode()
    for right in (b"Bearer " + key, b"bearer   " + key, b"BEARER " + key):
        assert status(right) == 200
    for wrong in (b"Bearer " + key[:-1], b"Bearer k\xe9y", b"Bearer \xff\xfe", b"Basic " + key, b"Bearer", key):
        assert status(wrong) == 401


def test_a_body_that_never_comes_is_given_up(server: LiveServer, client: httpx.Client) -> None:
    with connect(server) as connection:
        connection.sendall(head(500) + body().encode())
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer and b"did not arrive" in answer


def test_a_client_that_never_reads_is_let_go(server: LiveServer, client: httpx.Client) -> None:
    with connect(server, receive_buffer=2048) as connection:
        mine = connection.getsockname()[1]

        def connected() -> bool:
            others = psutil.Process(server.process.pid).net_connections("tcp")
            return any(other.raddr and other.raddr.port == mine for other in others)

        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)  # more than every buffer holds
        wait_until(connected, 10)
        assert wait_until(lambda: not connected(), 5 * TIMEOUT_S) > TIMEOUT_S / 2


# --- what is counted ---


def random_request(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    content = "".join(draw.choice("abc déf 😀 <|im_end|>") for _ in range(draw.randint(0, 40)))
    request: dict[str, Any] = {
        "model": "nano",
        "messages": [{"role": "user", "content": content}],
        "temperature": draw.choice([0, 0.7, 1.5]),
        "max_tokens": draw.choice([1, 2, 10, 30]),
        "seed": draw.randint(-(2**63), 2**63 - 1),
        "stop": draw.choice([None, ["e"], [" "], ["\n", "th"], ["\ufffd"]]),
    }
    if number % 2:
        voice = draw.choice(["chelsie", "Ethan", "aiden"])
        request["modalities"] = draw.choice([["text", "audio"], ["audio"]])
        request["audio"] = {"voice": voice, "format": draw.choice(["wav", "pcm16"])}
        request["sampling_params_list"] = [{}, {"max_tokens": draw.choice([1, 3, 12])}]
    if draw.random() < 0.6:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    if draw.random() < 0.2:
        request["n"] = 2
    return request


def read(answer: httpx.Response) -> dict[str, Any]:
    """A whole or streamed answer as {text, transcript, audio, finish_reason, usage}; a stream's shape is checked."""
    if "event-stream" not in answer.headers["content-type"]:
        [choice] = answer.json()["choices"]
        audio = choice["message"].get("audio") or {}
        return {
            "text": choice["message"]["content"],
            "transcript": audio.get("transcript"),
            "audio": base64.b64decode(audio.get("data", "")),
            "finish_reason": choice["finish_reason"],
            "usage": answer.json()["usage"],
        }
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    *chunks, last = sse_events(answer.text.splitlines())
    choices = [chunk["choices"][0] for chunk in chunks]
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    first, *deltas = [choice["delta"] for choice in choices]
    assert first["role"] == "assistant"
    assert all(None not in delta.values() and None not in delta.get("audio", {}).values() for delta in deltas)
    assert [bool(choice["finish_reason"]) for choice in choices] == [False] * len(deltas) + [True]
    spoken = [delta["audio"] for delta in deltas if "audio" in delta]
    assert ["id" in audio for audio in spoken] == [number == 0 for number in range(len(spoken))]
    assert not spoken or list(spoken[-1]) == ["expires_at"]
    has_text = first["content"] is not None
    return {
        "text": "".join(delta.get("content", "") for delta in deltas) if has_text else None,
        "transcript": "".join(audio.get("transcript", "") for audio in spoken) if spoken else None,
        "audio": b"".join(base64.b64decode(audio.get("data", "")) for audio in spoken),
        "finish_reason": choices[-1]["finish_reason"],
        "usage": last["usage"],
    }


def check_answer(request: dict[str, Any], answer: dict[str, Any], processor: Processor) -> None:
    modalities, usage = request.get("modalities", ["text"]), answer["usage"]
    details = usage["completion_tokens_details"]
    given = {"text": answer["text"], "audio": answer["transcript"]}
    assert {name for name, text in given.items() if text is not None} == set(modalities)
    [said] = {text for text in given.values() if text is not None}  # the transcript is the text
    assert not any(stop in said for stop in request["stop"] or ())
    assert usage["prompt_tokens"] == len(processor.encode(request["messages"]))
    assert usage["completion_tokens"] == details["text_tokens"] + details["audio_tokens"]
    assert details["text_tokens"] <= request["max_tokens"]
    if "audio" in modalities:
        header = 44 if request["audio"]["format"] == "wav" else 0
        assert len(answer["audio"]) == header + 2 * max(0, 1920 * details["audio_tokens"] - TAIL)
        assert details["audio_tokens"] <= request["sampling_params_list"][1]["max_tokens"]


def test_counters_and_usage_say_what_was_sent(server: LiveServer, nano: Path) -> None:
    processor = Processor(nano)
    requests = [random_request(number) for number in range(60)]
    before = server.metrics()

    async def ask_all() -> list[httpx.Response]:
        headers = {b"authorization": f"Bearer {KEY}".encode()}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            limit = asyncio.Semaphore(6)

            async def ask(request: dict[str, Any]) -> httpx.Response:
                async with limit:
                    return await client.post("/v1/chat/completions", json=request)

            return await asyncio.gather(*map(ask, requests))

    outcomes: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for request, response in zip(requests, asyncio.run(ask_all()), strict=True):
        if "n" in request:
            assert response.status_code == 400 and response.json()["error"]["param"] == "n"
            outcomes["refused"] += 1
            continue
        assert response.status_code == 200, response.text
        answer = read(response)
        check_answer(request, answer, processor)
        outcomes[answer["finish_reason"]] += 1
        details = answer["usage"]["completion_tokens_details"]
        tokens["prompt_tokens_total"] += answer["usage"]["prompt_tokens"]
        tokens["generation_tokens_total"] += details["text_tokens"]
        tokens["audio_frames_total"] += details["audio_tokens"]
    after = server.metrics()
    counted = {name: value - before["requests_total"][name] for name, value in after["requests_total"].items()}
    assert {name: number for name, number in counted.items() if number} == outcomes
    assert {name: after[name][""] - before[name][""] for name in tokens} == tokens
    assert outcomes.keys() >= {"stop", "length", "refused"}
