"""`triptych serve` as a child process of a benchmark: started, waited for, and always stopped."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import yaml

from triptych.errors import ConfigError, TriptychError

START_S = 900.0  # the server has deadlines of its own for each stage; this one is for all, a download included
STOP_S = 30.0
MOST_LINE_BYTES = 2**20
_READY = re.compile(r"ready in .* at (http\S+)")
_BOX = " \t\r\n│╭╮╰╯─"  # what frames a usage error


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers. `start_up_s` is from the start of the process to the line that says it is ready."""

    url: str
    pid: int
    start_up_s: float


class _Log:
    """What a server writes to stderr, read for as long as it runs: a full pipe would stop it."""

    def __init__(self) -> None:
        self.url: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.last = "nothing"

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Read to the end. `url` is known once the server is ready, and None if it ends before."""
        async for line in stream:
            text = _words(line)
            self.last = text or self.last
            if (found := _READY.fullmatch(text)) and not self.url.done():
                self.url.set_result(found[1])
        if not self.url.done():
            self.url.set_result(None)


@asynccontextmanager
async def served(model: str, *arguments: str, start_s: float = START_S) -> AsyncIterator[Server]:
    """Run `triptych serve MODEL ARGUMENTS` on a free port, without a key, from the moment it is ready to the end.

    Raises TriptychError, with the last line of its log, if it does not start within `start_s` or ends by itself.
    """
    started = time.perf_counter()
    process = await _spawn(model, *arguments, "--port", "0", stdout=DEVNULL)
    assert process.stderr is not None
    log = _Log()
    reading = asyncio.create_task(log.follow(process.stderr))
    try:
        try:
            url = await asyncio.wait_for(log.url, start_s)
        except TimeoutError:
            raise TriptychError(
                f"the server of {model} was not ready within {start_s:g} s; the last it said: {log.last}"
            ) from None
        if url is None:
            raise TriptychError(f"the server of {model} did not start; the last it said: {log.last}")
        yield Server(url, process.pid, time.perf_counter() - started)
        if process.returncode is not None:
            raise TriptychError(
                f"the server of {model} ended with status {process.returncode}; the last it said: {log.last}"
            )
    finally:
        await _stop(process, reading)


async def resolved_config(model: str, *arguments: str) -> dict[str, Any]:
    """The deploy config that `triptych serve MODEL ARGUMENTS` would run with. Raises ConfigError if it refuses them."""
    process = await _spawn(model, *arguments, "--dry-run", stdout=PIPE)
    out, errors = await process.communicate()
    if process.returncode:
        said = [text for line in errors.splitlines() if (text := _words(line))] or [f"status {process.returncode}"]
        raise ConfigError(f"triptych serve {' '.join([model, *arguments])}: {said[-1].removeprefix('triptych: ')}")
    config: dict[str, Any] = yaml.safe_load(out)
    return config


def _words(line: bytes) -> str:
    """A line of a log; empty if it only draws a frame."""
    text = line.decode("utf-8", "replace").strip(_BOX)
    return text if any(map(str.isalnum, text)) else ""


async def _spawn(model: str, *arguments: str, stdout: int) -> Process:
    # In this process's group: Ctrl-C reaches the server as well, even if this process has no time left to stop it.
    environment = {name: value for name, value in os.environ.items() if name != "TRIPTYCH_API_KEY"}
    command = [sys.executable, "-m", "triptych", "serve", model, *arguments]
    return await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=stdout, stderr=PIPE, env=environment, limit=MOST_LINE_BYTES
    )


async def _stop(process: Process, reading: asyncio.Task[None]) -> None:
    """Ask it to end, and see to it that it does. Its stages end with it."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
            await reading
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        reading.cancel()
