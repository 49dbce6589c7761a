"""Jobs for media workers: in order, bounded, each with a deadline, and none that takes another one down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from triptych.config.schema import MediaConfig
from triptych.connectors import segments
from triptych.connectors.segments import SegmentWriter
from triptych.errors import CapacityError, RequestError
from triptych.media.contract import MediaOptions
from triptych.media.jobs import Decoded, Job, Refused, Setup
from triptych.media.pool import LEAVE_S, WorkerPool

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_media_worker.py"))
TOKEN = f"{os.getpid()}xtest_media_pool"
NAMES = SegmentWriter(TOKEN, "media")


def existing() -> set[str]:
    return {name for name in os.listdir(segments.DIRECTORY) if name.startswith(f"triptych-{TOKEN}-")}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    left = existing()
    segments.sweep(TOKEN)
    assert left == set()
    assert not [child for child in psutil.Process().children() if "fake_media_worker.py" in " ".join(child.cmdline())]


@contextlib.asynccontextmanager
async def pool(
    *, workers: int = 1, decode_timeout_s: float = 30.0, max_waiting: int = 64, command: tuple[str, ...] = FAKE
) -> AsyncIterator[WorkerPool]:
    config = MediaConfig(workers=workers, decode_timeout_s=decode_timeout_s, max_waiting=max_waiting)
    pool = WorkerPool(Setup(model_dir="", config=config), command)
    try:
        yield pool
    finally:
        await pool.close()


def job(data: bytes) -> Job:
    return Job(kind="image", options=MediaOptions(), size=len(data), segment=NAMES.reserve(), max_bytes=10**6)


async def ask(pool: WorkerPool, text: str) -> object:
    data = text.encode()
    answer = await pool.run(job(data), data)
    return int(answer.message) if isinstance(answer, Refused) and answer.message.isdecimal() else answer


async def test_a_worker_starts_when_it_is_needed_and_serves_again() -> None:
    async with pool(workers=2) as workers:
        assert not psutil.Process().children()
        assert await ask(workers, "pid") == await ask(workers, "pid")
        assert len(psutil.Process().children()) == 1


async def test_the_first_worker_may_start_ahead_and_serves_what_comes_meanwhile() -> None:
    async with pool() as workers:
        workers.warm()
        first = await ask(workers, "pid")
        assert [child.pid for child in psutil.Process().children()] == [first]
        assert await ask(workers, "pid") == first


async def test_a_pool_closes_while_its_first_worker_starts() -> None:
    async with pool(command=(sys.executable, "-c", "import time; time.sleep(60)")) as workers:
        workers.warm()
        await until(lambda: len(psutil.Process().children()) == 1)
    assert not psutil.Process().children()


async def test_a_worker_that_cannot_start_ahead_is_tried_again_by_the_first_job() -> None:
    async with pool(command=("/nonexistent",)) as workers:
        workers.warm()
        with pytest.raises(CapacityError, match="no worker can be started"):
            await ask(workers, "pid")


async def test_no_more_workers_than_allowed(tmp_path: Path) -> None:
    async with pool(workers=2) as workers:
        tasks = [asyncio.create_task(ask(workers, f"wait {tmp_path}/go")) for _ in range(6)]
        await until(lambda: len(psutil.Process().children()) == 2)
        (tmp_path / "go").touch()
        await asyncio.gather(*tasks)
        assert len(psutil.Process().children()) == 2
    segments.sweep(TOKEN)


async def test_first_come_first_served(tmp_path: Path) -> None:
    done: list[int] = []

    async def one(number: int) -> None:
        await ask(workers, "pid" if number else f"wait {tmp_path}/go")
        done.append(number)

    async with pool() as workers:
        tasks = [asyncio.create_task(one(number)) for number in range(6)]
        await until(lambda: len(psutil.Process().children()) == 1)
        tasks[3].cancel()
        (tmp_path / "go").touch()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 1, 2, 4, 5]
    segments.sweep(TOKEN)


async def test_a_job_that_hangs_is_ended_at_its_deadline_and_the_next_is_served() -> None:
    async with pool(decode_timeout_s=0.3) as workers:
        first = await ask(workers, "pid")
        with pytest.raises(RequestError, match=r"took longer than 0\.3 seconds.*media\.decode_timeout_s"):
            await ask(workers, "hang")
        assert isinstance(first, int) and not psutil.pid_exists(first)
        assert await ask(workers, "pid") != first


@pytest.mark.parametrize("how", ["crash", "write-and-crash", "noise"])
def test_a_crash_costs_that_job_alone(how: str) -> None:
    async def run() -> None:
        async with pool() as workers:
            waiting = asyncio.create_task(ask(workers, how))
            behind = asyncio.create_task(ask(workers, "pid"))
            with pytest.raises(RequestError, match="the image could not be decoded: the decoder crashed"):
                await waiting
            assert isinstance(await behind, int)

    asyncio.run(run())


async def test_a_worker_that_died_at_rest_is_replaced() -> None:
    async with pool() as workers:
        first = await ask(workers, "pid")
        assert isinstance(first, int)
        os.kill(first, 9)
        await until(lambda: psutil.Process(first).status() == "zombie" if psutil.pid_exists(first) else True)
        await asyncio.sleep(0.05)
        assert await ask(workers, "pid") != first


async def test_a_worker_that_says_it_is_its_last_is_replaced() -> None:
    async with pool() as workers:
        first = await ask(workers, "last")
        assert isinstance(first, int) and not psutil.pid_exists(first)
        assert await ask(workers, "pid") != first


async def test_too_many_that_wait_are_sent_away_with_503(tmp_path: Path) -> None:
    async with pool(max_waiting=2) as workers:
        tasks = [asyncio.create_task(ask(workers, f"wait {tmp_path}/go")) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(CapacityError) as refused:
            await ask(workers, "pid")
        assert refused.value.status == 503 and refused.value.retry_after > 0
        (tmp_path / "go").touch()
        for made in await asyncio.gather(*tasks):
            assert isinstance(made, Decoded)
        segments.sweep(TOKEN)


async def test_who_leaves_while_waiting_takes_the_place_along(tmp_path: Path) -> None:
    async with pool(max_waiting=1) as workers:
        running = asyncio.create_task(ask(workers, f"wait {tmp_path}/go"))
        waiting = asyncio.create_task(ask(workers, "ok"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        after = asyncio.create_task(ask(workers, "pid"))  # one may wait again
        (tmp_path / "go").touch()
        await running
        assert isinstance(await after, int)
        segments.sweep(TOKEN)


async def test_a_long_job_whose_caller_left_is_ended_and_leaves_no_segment(tmp_path: Path) -> None:
    async with pool() as workers:
        first = await ask(workers, "pid")
        running = asyncio.create_task(ask(workers, f"write-and-hang {tmp_path}/written"))
        await until((tmp_path / "written").exists)
        assert existing()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        start = asyncio.get_running_loop().time()
        assert await ask(workers, "pid") != first
        assert asyncio.get_running_loop().time() - start < LEAVE_S + 5
        assert not existing()


async def test_a_short_job_whose_caller_left_keeps_its_worker_and_leaves_no_segment(tmp_path: Path) -> None:
    async with pool() as workers:
        first = await ask(workers, "pid")
        running = asyncio.create_task(ask(workers, f"wait {tmp_path}/go"))
        await asyncio.sleep(0.05)
        running.cancel()
        (tmp_path / "go").touch()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await ask(workers, "pid") == first
        assert not existing()


async def test_closing_ends_all_workers_whatever_they_do(tmp_path: Path) -> None:
    async with pool(workers=2) as workers:
        hanging = asyncio.create_task(ask(workers, f"write-and-hang {tmp_path}/written"))
        assert isinstance(await ask(workers, "pid"), int)
        await until((tmp_path / "written").exists)
        await workers.close()
        await workers.close()
        assert not psutil.Process().children() and not existing()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        with pytest.raises(CapacityError, match="stopping"):
            await ask(workers, "pid")


@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "pass")])
async def test_where_no_worker_can_start_the_caller_may_try_again(command: tuple[str, ...]) -> None:
    async with pool(command=command) as workers:
        for _ in range(2):
            with pytest.raises(CapacityError, match="no worker can be started"):
                await ask(workers, "pid")


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
