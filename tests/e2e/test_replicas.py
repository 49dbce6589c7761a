"""Stages with replicas: the bytes of a stage without, work on all of them, and a dead one missed by its own alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.e2e.test_supervision import (
    check_serves,
    check_whole,
    eventually,
    held,
    pid_of,
    pipeline,
    read,
    traces,
)
from tests.fake_stages import generation_request
from tests.live_server import wait_until
from triptych import Omni
from triptych.errors import CapacityError, StageError
from triptych.pipeline.omni import OmniOutput
from triptych.pipeline.orchestrator import Orchestrator


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No test leaves anything behind."""
    before = traces(os.getpid())
    yield
    assert traces(os.getpid()) == before


def state(orchestrator: Orchestrator, process: str) -> str:
    return orchestrator.health().processes[process].state


def steps(orchestrator: Orchestrator) -> dict[str, int]:
    """How many steps each replica said that it has made."""
    return {name: stats.counts.step_time_s.count for name, stats in orchestrator.health().stages.items()}


# --- fake stages in real processes ---


@pytest.mark.parametrize(
    ("processes", "replicas"),
    [
        (("text", "speech", "wave"), (2, 2, 2)),
        (("text", "speech", "text"), (1, 3, 1)),
        (("one", "one", "one"), (2, 2, 2)),
    ],
)
async def test_requests_never_mix_and_every_replica_works(
    processes: tuple[str, ...], replicas: tuple[int, ...]
) -> None:
    async with pipeline(processes=processes, replicas=replicas, window=2) as orchestrator:
        streams = [
            orchestrator.submit(generation_request(f"r{seed}", words=20 + seed % 7, seed=seed, speak=seed % 4 > 0))
            for seed in range(24)
        ]
        for seed, events in enumerate(await asyncio.gather(*map(read, streams))):
            check_whole(events, words=20 + seed % 7, seed=seed, speak=seed % 4 > 0)
        health = orchestrator.health()
        assert (health.running, health.queued, health.freeing) == (0, 0, 0)
        names = [
            kind if count == 1 else f"{kind}:{index}"
            for kind, count in zip(("thinker", "talker", "code2wav"), replicas, strict=True)
            for index in range(count)
        ]
        assert sorted(name for process in health.processes.values() for name in process.stages) == sorted(names)
        # A warm-up alone makes four or five steps.
        await eventually(lambda: all(steps(orchestrator).get(name, 0) >= 15 for name in names), 5)


async def test_a_killed_replica_fails_only_its_own_requests_while_the_others_take_new_ones() -> None:
    async with pipeline(replicas=(1, 2, 1)) as orchestrator:
        streams = [orchestrator.submit(generation_request(f"r{index}", words=400, seed=index)) for index in range(4)]
        first = [await anext(stream) for stream in streams]
        old = pid_of(orchestrator, "speech:1")
        os.kill(old, signal.SIGKILL)
        for lost in streams[1::2]:
            with pytest.raises(StageError, match=r"stage talker \(process 'speech:1'\) went down: .*SIGKILL") as caught:
                await asyncio.wait_for(read(lost), 10)
            assert (caught.value.stage, caught.value.status) == ("talker", 503)
        assert state(orchestrator, "speech:1") == "restarting" and orchestrator.health().ready
        await check_serves(orchestrator)
        for index in (0, 2):
            check_whole([first[index], *await asyncio.wait_for(read(streams[index]), 30)], words=400, seed=index)
        await eventually(lambda: state(orchestrator, "speech:1") == "ready", 20)
        health = orchestrator.health()
        assert {name: process.restarts for name, process in health.processes.items()} == {
            "text": 0,
            "speech:0": 0,
            "speech:1": 1,
            "wave": 0,
        }
        after = [orchestrator.submit(generation_request(f"after{seed}", words=20, seed=seed)) for seed in range(4)]
        for seed, events in enumerate(await asyncio.gather(*map(read, after))):
            check_whole(events, words=20, seed=seed)
        await eventually(lambda: steps(orchestrator).get("talker:1", 0) >= 15, 5)  # a warm-up alone makes four or five
        assert orchestrator.health().stages["talker:1"].replica == 1
        assert orchestrator.health().freeing == 0


async def test_only_when_all_replicas_of_a_stage_are_down_is_it_missed() -> None:
    async with pipeline(replicas=(1, 2, 1)) as orchestrator:
        spoken = [orchestrator.submit(generation_request(f"r{index}", words=3000)) for index in range(2)]
        for stream in spoken:
            await anext(stream)
        for process in ("speech:0", "speech:1"):
            os.kill(pid_of(orchestrator, process), signal.SIGKILL)
        for result in await asyncio.gather(*map(read, spoken), return_exceptions=True):
            assert isinstance(result, StageError)
        assert not orchestrator.health().ready
        with pytest.raises(CapacityError, match="stage talker is restarting") as refused:
            orchestrator.submit(generation_request("refused"))
        assert refused.value.status == 503
        await check_serves(orchestrator, speak=False)
        await eventually(lambda: all(state(orchestrator, f"speech:{index}") == "ready" for index in (0, 1)), 20)
        await asyncio.gather(*(check_serves(orchestrator, f"after{index}") for index in range(4)))


async def test_a_replica_that_is_given_up_leaves_its_work_to_the_others() -> None:
    async with pipeline(replicas=(1, 1, 2), max_stage_restarts=0) as orchestrator:
        os.kill(pid_of(orchestrator, "wave:0"), signal.SIGKILL)
        await eventually(lambda: state(orchestrator, "wave:0") == "failed", 5)
        assert orchestrator.health().ready
        await asyncio.gather(*(check_serves(orchestrator, f"r{index}") for index in range(4)))
        os.kill(pid_of(orchestrator, "wave:1"), signal.SIGKILL)
        await eventually(lambda: state(orchestrator, "wave:1") == "failed", 5)
        with pytest.raises(CapacityError, match="code2wav died too often"):
            orchestrator.submit(generation_request("a"))
        await check_serves(orchestrator, speak=False)


async def test_a_replica_that_fails_its_warm_up_takes_no_other_with_it(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    async with pipeline(replicas=(1, 2, 2), knobs={"sick": str(sick)}) as orchestrator:
        sick.touch()
        for process in ("speech:1", "wave:1"):
            os.kill(pid_of(orchestrator, process), signal.SIGKILL)
        await eventually(lambda: orchestrator.health().processes["speech:1"].restarts >= 2, 20)
        assert orchestrator.health().ready
        await check_serves(orchestrator)
        sick.unlink()
        await eventually(lambda: all(state(orchestrator, name) == "ready" for name in ("speech:1", "wave:1")), 20)
        restarts = {name: process.restarts for name, process in orchestrator.health().processes.items()}
        assert (restarts["text"], restarts["speech:0"], restarts["wave:0"]) == (0, 0, 0)


async def test_every_replica_of_the_thinker_adds_its_places_while_it_is_up() -> None:
    async with pipeline(replicas=(2, 1, 1), max_num_seqs=2, max_queued_requests=1) as orchestrator:
        streams = [orchestrator.submit(generation_request(f"r{index}", words=50, speak=False)) for index in range(5)]
        assert (orchestrator.health().running, orchestrator.health().queued) == (4, 1)
        with pytest.raises(CapacityError, match=r"max_num_seqs 4 \+ max_queued_requests 1"):
            orchestrator.submit(generation_request("r5"))
        for events in await asyncio.gather(*map(read, streams)):
            check_whole(events, words=50, seed=7, speak=False)


async def test_requests_that_are_left_free_every_replica() -> None:
    random.seed(9)
    async with pipeline(processes=("text", "speech", "text"), replicas=(2, 2, 2)) as orchestrator:

        async def visit(index: int) -> None:
            stream = orchestrator.submit(generation_request(f"v{index}", words=60, speak=index % 4 > 0))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(read(stream), random.uniform(0, 0.2))

        for batch in range(4):
            await asyncio.gather(*(visit(batch * 15 + index) for index in range(15)))
        await eventually(lambda: orchestrator.health().running + orchestrator.health().freeing == 0, 5)
        await eventually(lambda: held(orchestrator) == 0, 5)
        await check_serves(orchestrator)
        assert orchestrator.health().restarts == 0


# --- the nano model ---

PROMPTS = [f"Say the number {number}." + " And more words." * (number % 7) for number in range(24)]
TWO: dict[str, Any] = {"num_replicas": 2}
TWO_OF_EACH = {"0": TWO, "1": TWO, "2": TWO | {"process": "wave"}}


def speak(omni: Omni, max_tokens: int = 20) -> list[OmniOutput]:
    """What is said to PROMPTS, all at once, each with its own seed."""
    outputs: list[OmniOutput] = omni.generate(
        PROMPTS,
        modalities=("text", "audio"),
        seed=list(range(len(PROMPTS))),
        thinker={"max_tokens": max_tokens, "temperature": 0.7},
    )
    return outputs


def check_equal(outputs: Sequence[OmniOutput], expected: Sequence[OmniOutput]) -> None:
    for output, plain in zip(outputs, expected, strict=True):
        assert (output.error, output.text, output.finish_reason) == (None, plain.text, plain.finish_reason)
        assert output.audio is not None and plain.audio is not None
        assert np.array_equal(output.audio, plain.audio)


@pytest.fixture(scope="module")
def expected(nano: Path) -> Sequence[OmniOutput]:
    with Omni(nano, deploy_config="tiny_cpu", platform="cpu") as omni:
        outputs = speak(omni)
    assert not any(output.error for output in outputs)
    assert sum(output.audio_frames for output in outputs) > 200
    assert len({output.text for output in outputs}) > 12
    return outputs


def test_any_replica_gives_the_bytes_of_the_only_one(nano: Path, expected: Sequence[OmniOutput]) -> None:
    with Omni(nano, deploy_config="tiny_cpu", platform="cpu", stage_overrides=TWO_OF_EACH) as omni:
        check_equal(speak(omni), expected)


def test_speech_goes_on_when_a_replica_is_killed(nano: Path, expected: Sequence[OmniOutput]) -> None:
    with Omni(nano, deploy_config="tiny_cpu", platform="cpu", stage_overrides={"1": TWO}) as omni:

        def talker(replica: int) -> psutil.Process:
            children = psutil.Process().children()
            [found] = [child for child in children if child.cmdline()[-2:] == ["--process", f"speech:{replica}"]]
            return found

        spoken: list[OmniOutput] = []
        thread = threading.Thread(target=lambda: spoken.extend(speak(omni)))
        other, killed = talker(0), talker(1)
        killed.suspend()  # so that nothing it was given is done before it is killed, however fast it is
        before = sum(other.cpu_times()[:2])
        thread.start()
        wait_until(lambda: sum(other.cpu_times()[:2]) > before + 0.05, 60)  # they are speaking
        killed.kill()
        thread.join(120)
        lost = [output for output in spoken if output.error is not None]
        kept = [index for index, output in enumerate(spoken) if output.error is None]
        assert 0 < len(lost) <= len(PROMPTS) // 2 and len(spoken) == len(PROMPTS)
        assert all(isinstance(output.error, StageError) and output.error.stage == "talker" for output in lost)
        check_equal([spoken[index] for index in kept], [expected[index] for index in kept])
        check_equal(speak(omni), expected)  # those that were lost too, on whatever is up
