"""The streaming client against canned replies on loopback: both shapes of audio, every way to fail, loads."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import statistics
import wave
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from triptych.bench.arrival import arrival_times
from triptych.bench.client import Client
from triptych.bench.driver import Load, drive, warm_up
from triptych.bench.measure import Measurement
from triptych.bench.outcome import Outcome
from triptych.bench.target import Target, find_target
from triptych.bench.workload import RandomWorkload, Reply
from triptych.errors import ConfigError, TriptychError

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
PCM = (np.sin(np.arange(12_000) / 5) * 16000).astype("<i2").tobytes()  # half a second
USAGE = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": {"text_tokens": 2, "audio_tokens": 7}}

Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": fields, "finish_reason": finish_reason}]


def wav(pcm: bytes) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 24_000, 0, "NONE", ""))
        writer.writeframes(pcm)
    return base64.b64encode(file.getvalue()).decode()


def data(pcm: bytes) -> str:
    return base64.b64encode(pcm).decode()


OURS = b"".join(
    [
        event(choices=delta(role="assistant", content=""), usage=None, system_fingerprint="triptych-1"),
        event(choices=delta(content="Hel", audio={"id": "audio_1", "transcript": "Hel"}), usage=None),
        event(choices=delta(audio={"data": data(PCM[:8000])}), usage=None),
        event(choices=delta(content="lo", audio={"transcript": "lo"}), usage=None),
        event(choices=delta(audio={"data": data(PCM[8000:])}), usage=None),
        event(choices=delta(audio={"expires_at": 1}), usage=None),
        event(choices=delta(finish_reason="stop"), usage=None),
        event(choices=[], usage=USAGE),
        DONE,
    ]
)
# Another server's: audio in `content`, a whole file a piece, marked by `modality`; two choices; no usage.
THEIRS = b"".join(
    [
        event(modality="text", choices=delta(content="Hel")),
        event(modality="text", choices=delta(content="lo", finish_reason="stop")),
        event(modality="audio", choices=delta(content=wav(PCM[:8000]))),
        event(modality="audio", choices=delta(content=wav(PCM[8000:]), finish_reason="stop")),
        DONE,
    ]
)


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[str]:
    """A server that hands each request's body to `handler` and closes the connection after it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b"{}"
            await handler(json.loads(body), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left first, as some tests want it to
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def says(*pieces: bytes) -> Handler:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return handler


async def ask(handler: Handler, *, speaks: bool = True, timeout_s: float = 20) -> Outcome:
    async with answering(handler) as url, Client(url, timeout_s=timeout_s) as client:
        return await client.ask(b"{}", speaks=speaks)


# --- what is read ---


@pytest.mark.parametrize(("stream", "tokens", "usage"), [(OURS, 2, True), (THEIRS, 2, False)], ids=["ours", "theirs"])
async def test_both_shapes_of_audio_are_read(stream: bytes, tokens: int, usage: bool) -> None:
    outcome = await ask(says(STREAM + stream))
    assert outcome.failure is None, outcome.detail
    assert "".join(outcome.text) == "Hello" and len(outcome.text_times) == 2
    assert outcome.playout.audio_s == pytest.approx(0.5) and not outcome.audio.silent
    assert outcome.text_tokens == tokens and outcome.counted_by_server is usage
    assert outcome.finish_reason == "stop"
    assert outcome.ttft_s is not None and outcome.ttfp_s is not None
    assert 0 < outcome.ttft_s <= outcome.ttfp_s <= outcome.e2el_s


async def test_usage_and_fingerprint_are_the_servers() -> None:
    outcome = await ask(says(STREAM + OURS))
    assert outcome.prompt_tokens == 5 and outcome.usage == USAGE and outcome.fingerprint == "triptych-1"


class Pieces(httpx.AsyncByteStream):
    def __init__(self, stream: bytes, size: int) -> None:
        self.pieces = [stream[at : at + size] for at in range(0, len(stream), size)]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


async def ask_pieces(stream: bytes, size: int) -> Outcome:
    """The outcome of a reply whose bytes arrive `size` at a time."""

    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Pieces(stream, size))

    async with Client("http://omni", transport=httpx.MockTransport(reply)) as client:
        return await client.ask(b"{}", speaks=True)


@pytest.mark.parametrize("size", [1, 7, 100, 5000, 10**6])
async def test_what_is_read_does_not_depend_on_how_the_bytes_come(size: int) -> None:
    outcome = await ask_pieces(OURS, size)
    assert outcome.failure is None and "".join(outcome.text) == "Hello" and len(outcome.text_times) == 2
    assert outcome.playout.audio_s == pytest.approx(0.5) and outcome.usage == USAGE


async def test_an_event_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.bench.client.MOST_EVENT_BYTES", 1000)
    outcome = await ask_pieces(b"data: " + b"x" * 2000, 100)
    assert outcome.failure == "malformed event" and "more than 1000 bytes" in outcome.detail


async def test_carriage_returns_and_comments_are_part_of_no_event() -> None:
    stream = b": hello\r\n\r\n" + OURS.replace(b"\n", b"\r\n")
    outcome = await ask(says(STREAM + stream))
    assert outcome.failure is None and "".join(outcome.text) == "Hello"


async def test_words_that_are_only_spoken_are_text() -> None:
    stream = event(choices=delta(audio={"transcript": "Hi"})) + event(choices=delta(audio={"data": data(PCM)})) + DONE
    outcome = await ask(says(STREAM + stream))
    assert "".join(outcome.text) == "Hi" and outcome.ttft_s is not None


async def test_a_time_is_that_of_the_arrival() -> None:
    """The second piece of audio is held back until a second has passed: a second of silence less what was ahead."""

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + event(choices=delta(audio={"data": data(PCM)})))
        await writer.drain()
        await asyncio.sleep(0.8)
        writer.write(event(choices=delta(audio={"data": data(PCM)})) + DONE)

    outcome = await ask(handler)
    assert 0.29 < outcome.playout.silent_s < 2 and outcome.playout.longest_gap_s == outcome.playout.silent_s
    assert outcome.ttfp_s is not None and outcome.ttfp_s < outcome.e2el_s - 0.75
    assert outcome.rtf is not None and outcome.rtf > 0.8


async def test_no_audio_is_no_failure_of_one_request() -> None:
    outcome = await ask(says(STREAM + event(choices=delta(content="Hi")) + DONE))
    assert outcome.failure is None and not outcome.has_audio and outcome.ttfp_s is None


# --- what fails ---

ERROR = json.dumps({"error": {"message": "the queue is full", "type": "overloaded", "code": None}}).encode()


def http(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@pytest.mark.parametrize(
    ("reply", "reason", "detail"),
    [
        (http(b"429 Too Many Requests", ERROR), "http 429", "the queue is full"),
        (http(b"502 Bad Gateway", b"<html>nobody home</html>"), "http 502", "nobody home"),
        (http(b"400 Bad Request", b"[1, 2]"), "http 400", "[1, 2]"),
        (http(b"200 OK", b"{}"), "not a stream", "application/json"),
        (STREAM + OURS[: -len(DONE)], "cut off", "[DONE]"),
        (STREAM, "cut off", "[DONE]"),
        (STREAM + event(error={"message": "talker died"}), "error event", "talker died"),
        (STREAM + event(object="error", message="talker died"), "error event", "talker died"),
        (STREAM + b"data: {\n\n", "malformed event", ""),
        (STREAM + b"data: [1]\n\n", "malformed event", ""),
        (STREAM + event(choices=[1]), "malformed event", ""),
        (STREAM + event(choices=delta(content=["Hi"])), "malformed event", ""),
        (STREAM + event(choices=delta(audio={"data": "***"})), "malformed event", ""),
        (STREAM + event(choices=delta(audio={"data": data(b"RIFF0000WAVE")})), "malformed event", "WAV"),
        (STREAM + event(choices=delta(audio={"data": data(bytes(4800))})) + DONE, "silent audio", "rms"),
        (b"nonsense\r\n\r\n", "connection: RemoteProtocolError", ""),
        (b"", "connection: RemoteProtocolError", ""),
    ],
    ids=lambda value: value[:12].decode() if isinstance(value, bytes) else str(value),
)
async def test_every_failure_has_a_reason_and_none_is_raised(reply: bytes, reason: str, detail: str) -> None:
    outcome = await ask(says(reply))
    assert outcome.failure == reason and detail in outcome.detail
    assert outcome.ended_at >= outcome.started_at > 0


async def test_a_request_ends_at_its_time_limit() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + event(choices=delta(content="Hi")))
        await writer.drain()
        await asyncio.sleep(30)

    outcome = await ask(handler, timeout_s=0.3)
    assert outcome.failure == "timeout after 0.3 s" and 0.3 <= outcome.e2el_s < 10


async def test_nobody_there_is_a_failure() -> None:
    async with answering(says(b"")) as url:
        pass
    async with Client(url) as client:
        assert (await client.ask(b"{}", speaks=False)).failure == "connection: ConnectError"


async def test_a_reset_connection_is_a_failure() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + event(choices=delta(content="Hi")))
        await writer.drain()
        writer.transport.abort()

    outcome = await ask(handler)
    assert outcome.failure is not None and outcome.failure.startswith(("connection:", "cut off"))


# --- loads ---


async def run(handler: Handler, bodies: Sequence[bytes], load: Load) -> list[Outcome]:
    async with answering(handler) as url, Client(url, timeout_s=20) as client:
        return (await drive(client, bodies, load, speaks=False)).outcomes


async def test_a_closed_loop_keeps_so_many_under_way_and_no_more() -> None:
    under_way = most = 0
    full = asyncio.Condition()

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        async with full:
            under_way += 1
            most = max(most, under_way)
            full.notify_all()
            await full.wait_for(lambda: most == 3)  # the first three wait for each other
        await asyncio.sleep(0.005)
        under_way -= 1  # before the client can know
        writer.write(STREAM + event(choices=delta(content=str(body["n"]))) + DONE)

    outcomes = await run(handler, [b'{"n": %d}' % n for n in range(12)], Load(max_concurrency=3))
    assert most == 3
    assert ["".join(outcome.text) for outcome in outcomes] == [str(n) for n in range(12)], "in the order asked"
    assert all(outcome.failure is None and outcome.send_delay_s == 0 for outcome in outcomes)


async def test_an_open_loop_does_not_wait_for_replies() -> None:
    everyone = asyncio.Barrier(6)

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await everyone.wait()
        writer.write(STREAM + DONE)

    load = Load(request_rate=100, seed=3)
    outcomes = await run(handler, [b"{}"] * 6, load)
    assert all(outcome.failure is None for outcome in outcomes)
    sent = [outcome.started_at - outcomes[0].started_at for outcome in outcomes]
    for at, due in zip(sent, arrival_times(6, 100, 3), strict=True):
        assert at >= due - 0.02, "never before it is due"


async def test_an_open_loop_without_a_free_place_says_how_late_it_sent() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(STREAM + DONE)

    outcomes = await run(handler, [b"{}"] * 3, Load(max_concurrency=1, request_rate=1000))
    assert outcomes[0].send_delay_s < 0.1 < outcomes[2].send_delay_s
    assert outcomes[2].e2el_s < outcomes[2].send_delay_s + 0.1, "its own time starts when it is sent"


async def test_a_failure_stops_no_other_request() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + DONE if body["n"] % 2 else http(b"500 Oh", ERROR))

    seen: list[Outcome] = []
    async with answering(handler) as url, Client(url) as client:
        bodies = [b'{"n": %d}' % n for n in range(6)]
        measured = await drive(client, bodies, Load(2), speaks=False, on_end=seen.append)
    assert [outcome.failure for outcome in measured.outcomes] == ["http 500", None] * 3
    assert len(seen) == 6 and measured.duration_s > 0


async def test_warm_up_ends_a_run_that_can_only_fail() -> None:
    async with answering(says(http(b"404 Not Found", ERROR))) as url, Client(url) as client:
        with pytest.raises(TriptychError, match="http 404: the queue is full"):
            await warm_up(client, [b"{}"] * 2, Load(2), speaks=False)
        await warm_up(client, [], Load(2), speaks=False)


async def test_warm_up_that_works_in_part_goes_on() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + DONE if body["n"] else http(b"500 Oh", ERROR))

    async with answering(handler) as url, Client(url) as client:
        await warm_up(client, [b'{"n": 0}', b'{"n": 1}'], Load(2), speaks=False)


async def test_warm_up_comes_first_and_asks_nothing_that_is_measured() -> None:
    asked: list[Any] = []

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(body["messages"])
        writer.write(STREAM + DONE)

    workload = RandomWorkload(input_len=3)
    measurement = Measurement(workload, Reply(), Load(1), num_prompts=4, num_warmups=2, seed=5)
    async with answering(handler) as url:
        measured = await measurement.take(Target(url, "m", {}))
    assert len(measured.outcomes) == 4
    assert asked[2:] == [prompt.messages for prompt in workload.prompts(4, seed=5)]
    assert not [messages for messages in asked[:2] if messages in asked[2:]]


# --- arrivals ---


def test_arrivals_are_poisson_and_seeded() -> None:
    times = arrival_times(4001, 5.0, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0 and min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08), "as wide as it is long: exponential"
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    assert times == arrival_times(4001, 5.0, seed=1) and times != arrival_times(4001, 5.0, seed=2)
    assert times[:10] == arrival_times(10, 5.0, seed=1), "more requests do not move the first ones"


def test_rates_without_gaps_and_without_sense() -> None:
    assert arrival_times(3, math.inf, 0) == [0.0] * 3 and arrival_times(0, 1.0, 0) == []
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="a rate of"):
            arrival_times(3, rate, 0)


# --- the server itself ---

MODELS = http(b"200 OK", json.dumps({"data": [{"id": "a", "max_model_len": 5}, {"id": "b"}, 3]}).encode())


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_first_model_is_the_default(suffix: str) -> None:
    async with answering(says(MODELS)) as url:
        target = await find_target(url + suffix, "/v1/chat/completions", None, None)
        assert (target.model, target.about["max_model_len"]) == ("a", 5)
        assert target.url == f"{url}/v1/chat/completions"
        assert (await find_target(url, "/chat", "b", None)).url == f"{url}/chat"


async def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    async with answering(says(MODELS)) as url:
        with pytest.raises(ConfigError, match=r"'c' is not served at .*; it serves a, b"):
            await find_target(url, "/v1/chat/completions", "c", None)


async def test_a_server_that_lists_no_models_needs_a_name() -> None:
    async with answering(says(http(b"404 Not Found", b"{}"))) as url:
        with pytest.raises(ConfigError, match=r"status 404.*give --model"):
            await find_target(url, "/v1/chat/completions", None, None)
        assert (await find_target(url, "/v1/chat/completions", "m", None)).model == "m"


async def test_an_address_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://"):
        await find_target("127.0.0.1:8091", "/v1/chat/completions", None, None)
    with pytest.raises(ConfigError, match="--endpoint"):
        await find_target("http://127.0.0.1:8091", "chat", None, None)
    async with answering(says(b"")) as url:
        pass
    with pytest.raises(TriptychError, match="does not answer"):
        await find_target(url, "/v1/chat/completions", None, None)
