"""Real stage processes with fake stages: streams, aborts, deaths, restarts, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests.fake_stages import COMMAND, CONFIG, FRAMES_PER_WORD, SAMPLES_PER_FRAME, deploy_config, generation_request
from triptych.config.schema import StageKind
from triptych.connectors.wire import LoadProgress
from triptych.errors import CapacityError, CheckpointError, DeadlineError, RequestError, StageError
from triptych.pipeline.orchestrator import Orchestrator
from triptych.pipeline.request import AudioDelta, Done, Event, TextDelta
from triptych.pipeline.stream import RequestStream

shared_loop = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def pipeline(
    *, knobs: dict[str, Any] | None = None, on_progress: Any = None, **deploy: Any
) -> AsyncIterator[Orchestrator]:
    orchestrator = await Orchestrator.start(
        deploy=deploy_config(**deploy),
        model=json.dumps({"pace_s": 0.002} | (knobs or {})),
        config=CONFIG,
        log_level="warning",
        on_progress=on_progress,
        command=COMMAND,
    )
    try:
        yield orchestrator
    finally:
        await orchestrator.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Orchestrator]:
    """One pipeline for the tests that leave it as they found it."""
    async with pipeline() as orchestrator:
        yield orchestrator


async def eventually(condition: Callable[[], bool], timeout: float) -> float:
    """Wait until the condition holds; the seconds it took. Fails the test when it never does."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout, "this never came true"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def read(stream: RequestStream) -> list[Event]:
    return [event async for event in stream]


def check_whole(events: list[Event], *, words: int, seed: int, speak: bool = True) -> None:
    """Every word and every sample came, once, in order, and they are this request's own."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert text == f"{seed} " * words
    audio = np.frombuffer(b"".join(event.samples for event in events if isinstance(event, AudioDelta)), "<f4")
    frames = words * FRAMES_PER_WORD if speak else 0
    assert audio.shape == (frames * SAMPLES_PER_FRAME,) and (audio == seed).all()
    assert events[-1] == Done(finish_reason="stop", prompt_tokens=10, text_tokens=words, audio_frames=frames)
    assert sum(isinstance(event, Done) for event in events) == 1


async def check_serves(orchestrator: Orchestrator, request_id: str = "check", *, speak: bool = True) -> None:
    events = await asyncio.wait_for(
        read(orchestrator.submit(generation_request(request_id, words=5, seed=3, speak=speak))), 5
    )
    check_whole(events, words=5, seed=3, speak=speak)


def held(orchestrator: Orchestrator) -> int:
    """Requests that the stages said they hold, in their latest heartbeats."""
    return sum(stats.running for stats in orchestrator.health().stages.values())


def steps(orchestrator: Orchestrator) -> dict[StageKind, int]:
    """Steps of each stage by its latest heartbeat, those of processes before its own included."""
    return {kind: stats.counts.step_time_s.count for kind, stats in orchestrator.health().stages.items()}


def pid_of(orchestrator: Orchestrator, process: str) -> int:
    pid = orchestrator.health().processes[process].pid
    assert pid is not None
    return pid


def traces(pid: int) -> set[str]:
    """Shared memory, folders and processes of the server with that process id."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    files = {str(path) for place in places for path in place.iterdir() if f"triptych-{pid}x" in path.name}
    children = psutil.Process(pid).children() if psutil.pid_exists(pid) else []
    return files | {f"process {child.pid}" for child in children}


def gone(process: psutil.Process) -> bool:
    """Whether it has exited; when its parent has died too, it may wait a while to be reaped."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No test leaves anything behind."""
    before = traces(os.getpid())
    yield
    assert traces(os.getpid()) == before


# --- streams ---


async def test_a_request_streams_all_its_text_and_audio_and_ends_once() -> None:
    progress: list[Any] = []
    async with pipeline(on_progress=progress.append) as orchestrator:
        assert orchestrator.health().ready
        stream = orchestrator.submit(generation_request("a", words=40, seed=123))
        events = await read(stream)
        check_whole(events, words=40, seed=123)
        kinds = [type(event) for event in events]
        assert kinds.index(AudioDelta) < len(kinds) - 1 - kinds[::-1].index(TextDelta), "audio waits for the whole text"
        assert {item.stage for item in progress if isinstance(item, LoadProgress)} == {"thinker", "talker", "code2wav"}


@pytest.mark.parametrize("processes", [("one", "one", "one"), ("text", "speech", "text")])
async def test_concurrent_requests_never_mix_in_any_layout_of_processes(processes: tuple[str, ...]) -> None:
    async with pipeline(processes=processes, window=2) as orchestrator:
        streams = [
            orchestrator.submit(generation_request(f"r{seed}", words=10 + seed % 7, seed=seed, speak=seed % 3 > 0))
            for seed in range(32)
        ]
        for seed, events in enumerate(await asyncio.gather(*map(read, streams))):
            check_whole(events, words=10 + seed % 7, seed=seed, speak=seed % 3 > 0)
        health = orchestrator.health()
        assert (health.running, health.queued, health.freeing) == (0, 0, 0)


async def test_a_text_only_deployment_serves_text_and_refuses_speech() -> None:
    async with pipeline(processes=("text",)) as orchestrator:
        await check_serves(orchestrator, speak=False)
        with pytest.raises(RequestError, match="no speech stages"):
            orchestrator.submit(generation_request("a"))


@shared_loop
async def test_text_only_never_touches_the_speech_stages(shared: Orchestrator) -> None:
    await eventually(lambda: len(shared.health().stages) == 3, 3)
    await asyncio.sleep(1.1)
    before = steps(shared)
    await check_serves(shared, speak=False)
    await eventually(lambda: steps(shared)["thinker"] > before["thinker"], 3)
    after = steps(shared)
    assert (after["talker"], after["code2wav"]) == (before["talker"], before["code2wav"])


@shared_loop
async def test_one_id_may_not_run_twice_at_a_time(shared: Orchestrator) -> None:
    stream = shared.submit(generation_request("a", words=100))
    with pytest.raises(RequestError, match="'a' is in use"):
        shared.submit(generation_request("a"))
    await stream.aclose()


# --- back-pressure and bounds ---


@shared_loop
async def test_a_slow_reader_parks_alone_and_misses_nothing(shared: Orchestrator) -> None:
    slow = shared.submit(generation_request("slow", words=300, seed=1))
    first = await anext(slow)
    for number in range(3):
        await check_serves(shared, f"quick{number}")
    await asyncio.sleep(0.3)
    waiting = [event for event in slow._events if isinstance(event, AudioDelta)]
    assert len(waiting) <= 16, "audio is sent without credit"
    assert shared.health().running == 1, "the slow request should be parked, not finished"
    check_whole([first, *await asyncio.wait_for(read(slow), 10)], words=300, seed=1)


async def test_a_full_queue_refuses_with_429_and_recovers() -> None:
    async with pipeline(max_num_seqs=2, max_queued_requests=2) as orchestrator:
        streams = [orchestrator.submit(generation_request(f"r{index}", words=30)) for index in range(4)]
        assert (orchestrator.health().running, orchestrator.health().queued) == (2, 2)
        with pytest.raises(CapacityError, match="max_queued_requests 2") as caught:
            orchestrator.submit(generation_request("r4"))
        assert caught.value.status == 429 and caught.value.retry_after >= 1
        for events in await asyncio.gather(*map(read, streams)):
            check_whole(events, words=30, seed=7)
        await check_serves(orchestrator)


async def test_a_request_that_hangs_ends_at_its_deadline_naming_the_stage() -> None:
    async with pipeline(request_timeout_s=0.6) as orchestrator:
        for kind in ("thinker", "talker", "code2wav"):
            started = time.monotonic()
            with pytest.raises(DeadlineError, match=rf"longer than 0.6 s; it waited for stage {kind}") as caught:
                await read(orchestrator.submit(generation_request(f"hang-{kind}", words=5)))
            assert caught.value.stage == kind and 0.5 < time.monotonic() - started < 2
            await eventually(lambda: orchestrator.health().freeing == 0, 1)
            await check_serves(orchestrator)


# --- leaving ---


@shared_loop
async def test_a_consumer_that_leaves_frees_every_stage_within_a_second(shared: Orchestrator) -> None:
    async for event in shared.submit(generation_request("a", words=3000)):
        if isinstance(event, AudioDelta):
            break
    await asyncio.sleep(0)
    assert await eventually(lambda: shared.health().running + shared.health().freeing == 0, 1) < 1
    await eventually(lambda: held(shared) == 0, 2)


@shared_loop
async def test_cancel_ends_the_stream_with_one_abort(shared: Orchestrator) -> None:
    stream = shared.submit(generation_request("a", words=3000))
    await anext(stream)
    shared.cancel("a")
    shared.cancel("a")
    rest = await asyncio.wait_for(read(stream), 1)
    assert len(rest) == 1 and isinstance(rest[0], Done) and rest[0].finish_reason == "abort"
    await eventually(lambda: shared.health().freeing == 0, 1)


@shared_loop
async def test_two_hundred_disconnects_at_random_times_leave_nothing(shared: Orchestrator) -> None:
    random.seed(5)

    async def visit(index: int) -> None:
        stream = shared.submit(generation_request(f"v{index}", words=60, speak=index % 4 > 0))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(read(stream), random.uniform(0, 0.15))

    pids = [process.pid for process in shared.health().processes.values()]
    for batch in range(10):
        await asyncio.gather(*(visit(batch * 20 + index) for index in range(20)))
    await eventually(lambda: shared.health().running + shared.health().freeing == 0, 1)
    await eventually(lambda: held(shared) == 0, 2)
    await check_serves(shared)
    assert [process.pid for process in shared.health().processes.values()] == pids


# --- failures of one request ---


@shared_loop
@pytest.mark.parametrize("kind", ["thinker", "talker", "code2wav"])
async def test_a_request_that_fails_in_a_stage_fails_alone(shared: Orchestrator, kind: str) -> None:
    other = shared.submit(generation_request("other", words=50, seed=2))
    for verb in ("fail", "reject"):
        with pytest.raises(StageError, match=f"stage {kind} failed: I was told to {verb}") as caught:
            await asyncio.wait_for(read(shared.submit(generation_request(f"{verb}-{kind}", words=50))), 3)
        assert (caught.value.stage, caught.value.status) == (kind, 500)
        assert caught.value.request_id == f"{verb}-{kind}"
    check_whole(await read(other), words=50, seed=2)
    await eventually(lambda: shared.health().freeing == 0, 1)


# --- deaths ---


async def test_a_killed_process_fails_only_what_needs_it_and_comes_back() -> None:
    async with pipeline() as orchestrator:
        text_only = orchestrator.submit(generation_request("text", words=200, seed=2, speak=False))
        spoken = orchestrator.submit(generation_request("spoken", words=3000))
        await anext(spoken)
        await eventually(lambda: steps(orchestrator).get("talker", 0) > 0, 3)
        before = steps(orchestrator)
        old = pid_of(orchestrator, "speech")
        os.kill(old, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(StageError, match=r"stage talker .*went down: it was ended by SIGKILL") as caught:
            await asyncio.wait_for(read(spoken), 2)
        assert time.monotonic() - killed < 2
        assert (caught.value.stage, caught.value.status, caught.value.request_id) == ("talker", 503, "spoken")
        assert not orchestrator.health().ready
        with pytest.raises(CapacityError, match="stage talker is restarting") as refused:
            orchestrator.submit(generation_request("refused"))
        assert refused.value.status == 503 and refused.value.retry_after >= 1
        await check_serves(orchestrator, speak=False)
        check_whole(await read(text_only), words=200, seed=2, speak=False)
        await eventually(lambda: orchestrator.health().ready, 10)
        assert pid_of(orchestrator, "speech") != old and orchestrator.health().restarts == 1
        await check_serves(orchestrator)
        assert all(now >= before[kind] for kind, now in steps(orchestrator).items()), "a count fell"


async def test_the_first_and_the_last_stage_come_back_too_and_so_do_all_at_once() -> None:
    async with pipeline() as orchestrator:
        for processes in (["text"], ["wave"], ["text", "speech", "wave"]):
            spoken = orchestrator.submit(generation_request("spoken", words=3000))
            await anext(spoken)
            for process in processes:
                os.kill(pid_of(orchestrator, process), signal.SIGKILL)
            with pytest.raises(StageError):
                await asyncio.wait_for(read(spoken), 2)
            await eventually(lambda: orchestrator.health().ready, 10)
            assert orchestrator.health().freeing == 0
            await check_serves(orchestrator)


async def test_a_restarted_process_that_fails_its_warm_up_is_not_ready(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    async with pipeline(knobs={"sick": str(sick)}) as orchestrator:
        sick.touch()
        os.kill(pid_of(orchestrator, "speech"), signal.SIGKILL)
        await eventually(lambda: orchestrator.health().restarts >= 2, 10)
        assert not orchestrator.health().ready
        sick.unlink()
        await eventually(lambda: orchestrator.health().ready, 10)
        await check_serves(orchestrator)


async def test_a_step_that_raises_ends_the_process_with_its_message() -> None:
    async with pipeline() as orchestrator:
        with pytest.raises(StageError, match="went down: RuntimeError: I was told to raise") as caught:
            await asyncio.wait_for(read(orchestrator.submit(generation_request("raise-talker", words=50))), 2)
        assert caught.value.status == 503
        await eventually(lambda: orchestrator.health().ready, 10)


async def test_a_process_without_heartbeat_is_killed_and_started_again() -> None:
    async with pipeline(heartbeat_timeout_s=1.5) as orchestrator:
        os.kill(pid_of(orchestrator, "speech"), signal.SIGSTOP)
        with pytest.raises(StageError, match="no heartbeat"):
            await asyncio.wait_for(read(orchestrator.submit(generation_request("a", words=3000))), 4)
        await eventually(lambda: orchestrator.health().ready, 10)
        await check_serves(orchestrator)


async def test_a_machine_that_stands_still_loses_no_process() -> None:
    async with pipeline(heartbeat_timeout_s=1.5) as orchestrator:
        stream = orchestrator.submit(generation_request("a", words=40, seed=2))
        first = await anext(stream)
        pids = [process.pid for process in orchestrator.health().processes.values() if process.pid is not None]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # in the event loop: the server stands still as well
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        check_whole([first, *await asyncio.wait_for(read(stream), 10)], words=40, seed=2)
        await asyncio.sleep(1.6)
        assert [process.pid for process in orchestrator.health().processes.values()] == pids


async def test_a_process_that_dies_too_often_is_given_up_and_the_rest_serves_on() -> None:
    async with pipeline(max_stage_restarts=1) as orchestrator:
        for _ in range(2):
            await eventually(lambda: orchestrator.health().ready, 10)
            old = pid_of(orchestrator, "wave")
            os.kill(old, signal.SIGKILL)
            await eventually(lambda old=old: orchestrator.health().processes["wave"].pid != old, 2)  # type: ignore[misc]
        assert orchestrator.health().processes["wave"].state == "failed"
        with pytest.raises(CapacityError, match="code2wav died too often") as caught:
            orchestrator.submit(generation_request("a"))
        assert caught.value.status == 503
        await check_serves(orchestrator, speak=False)


# --- start and stop ---


async def test_a_stage_that_cannot_load_says_why_and_leaves_nothing() -> None:
    with pytest.raises(CheckpointError, match="weights of talker are made of cheese"):
        async with pipeline(knobs={"refuse": "talker", "load_s": 5}):
            pytest.fail("it started")


async def test_a_stage_that_dies_while_loading_fails_the_start() -> None:
    with pytest.raises(StageError, match=r"stage talker .*failed while loading: it exited with status 3"):
        async with pipeline(knobs={"die": "talker"}):
            pytest.fail("it started")


async def test_a_load_that_takes_too_long_fails_the_start() -> None:
    started = time.monotonic()
    with pytest.raises(StageError, match="did not load within stage_init_timeout_s = 1"):
        async with pipeline(knobs={"load_s": 60}, stage_init_timeout_s=1.0):
            pytest.fail("it started")
    assert time.monotonic() - started < 5


async def test_a_process_may_connect_before_its_spawn_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = asyncio.create_subprocess_exec

    async def slow_spawn(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        child = await spawn(*command, **options)
        await asyncio.sleep(1)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_spawn)
    async with pipeline() as orchestrator:
        await check_serves(orchestrator)


async def test_a_command_that_does_not_exist_fails_the_start() -> None:
    with pytest.raises(StageError, match="cannot be started"):
        await Orchestrator.start(deploy=deploy_config(), model="{}", config=CONFIG, command=("/no/such/python",))


async def test_close_ends_running_requests_and_is_idempotent() -> None:
    async with pipeline() as orchestrator:
        stream = orchestrator.submit(generation_request("a", words=3000))
        await anext(stream)
        started = time.monotonic()
        await orchestrator.close()
        assert time.monotonic() - started < 5
        with pytest.raises(CapacityError, match="shutting down"):
            await read(stream)
        with pytest.raises(CapacityError, match="shutting down"):
            orchestrator.submit(generation_request("b"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_server_is_the_end_of_everything(number: signal.Signals) -> None:
    server = subprocess.Popen(
        [*COMMAND, "--serve"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.stdout is not None and server.stderr is not None
    with server.stdout, server.stderr:
        children = [psutil.Process(pid) for pid in json.loads(server.stdout.readline())]
        assert len(children) == 3
        # Ctrl-C in a terminal reaches the whole foreground process group.
        (os.killpg if number is signal.SIGINT else os.kill)(server.pid, number)
        ended = time.monotonic()
        server.wait(timeout=5)
        while not (all(map(gone, children)) and not traces(server.pid)):
            assert time.monotonic() - ended < 5, traces(server.pid)
            time.sleep(0.01)
        assert "Traceback" not in server.stderr.read()
    assert server.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 0)
