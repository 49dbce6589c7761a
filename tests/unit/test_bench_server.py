"""A server as a child of a benchmark, with a script in its place: ready, late, dead, deaf."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from triptych.bench import server
from triptych.bench.server import resolved_config, served
from triptych.errors import ConfigError, TriptychError

READY = "echo '12:00 INFO loading' >&2; echo 'ready in 0.1 s at http://127.0.0.1:9' >&2"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is run instead of `python -m triptych`."""
    path = tmp_path / "python"
    path.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def says(script: Path, *lines: str) -> None:
    script.write_text("\n".join(["#!/bin/sh", *lines]))


async def test_a_server_is_there_from_ready_to_the_end(script: Path, tmp_path: Path) -> None:
    says(script, f'echo "$*" > {tmp_path}/arguments', READY, "exec sleep 60")
    async with served("nano", "--text-only") as running:
        assert running.url == "http://127.0.0.1:9" and running.start_up_s > 0
        assert psutil.Process(running.pid).is_running()
    assert not psutil.pid_exists(running.pid)
    assert (tmp_path / "arguments").read_text().split() == [
        "-m",
        "triptych",
        "serve",
        "nano",
        "--text-only",
        "--port",
        "0",
    ]


async def test_what_goes_wrong_inside_stops_the_server_and_comes_out(script: Path) -> None:
    says(script, READY, "exec sleep 60")
    with pytest.raises(ZeroDivisionError):
        async with served("nano") as running:
            raise ZeroDivisionError
    assert not psutil.pid_exists(running.pid)


async def test_a_server_that_does_not_start_is_an_error_with_its_last_line(script: Path) -> None:
    says(script, "echo 'loading' >&2; echo '│ No such option: --nope │' >&2; echo '╰──────╯' >&2; exit 2")
    with pytest.raises(TriptychError, match=r"of nano did not start; the last it said: No such option: --nope$"):
        async with served("nano", "--nope"):
            pytest.fail("it was never ready")


async def test_a_server_that_is_not_ready_in_time_is_stopped(script: Path) -> None:
    says(script, "echo 'loading thinker' >&2; exec sleep 60")
    with pytest.raises(TriptychError, match=r"not ready within 0\.5 s; the last it said: loading thinker"):
        async with served("nano", start_s=0.5):
            pytest.fail("it was never ready")


async def test_a_server_that_ends_by_itself_is_an_error(script: Path) -> None:
    says(script, READY, "echo 'out of memory' >&2; exit 3")
    with pytest.raises(TriptychError, match="ended with status 3; the last it said: out of memory"):
        async with served("nano") as running, asyncio.timeout(20):
            while psutil.pid_exists(running.pid):  # until it is reaped
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)


async def test_a_server_that_does_not_stop_is_killed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.3)
    says(script, "trap '' TERM", READY, "exec sleep 20")
    async with served("nano") as running:
        pass
    assert not psutil.pid_exists(running.pid)


async def test_the_config_is_what_a_dry_run_prints(script: Path) -> None:
    says(script, "echo 'log' >&2; echo 'async_chunk: true'")
    assert await resolved_config("nano") == {"async_chunk": True}
    says(script, "echo 'triptych: no stage has stage_id 9' >&2; exit 2")
    with pytest.raises(ConfigError, match="triptych serve nano --x: no stage has stage_id 9"):
        await resolved_config("nano", "--x")
