"""Looks at a server while it works: what its stages have counted, and the memory of its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from triptych.bench.driver import until
from triptych.bench.machine import memory_by_process
from triptych.bench.roofline import Scrape, scrape
from triptych.bench.server import Server
from triptych.errors import TriptychError

HEARTBEAT_S = 1.0  # a stage tells what it has counted once in this time; looking more often shows nothing new
TOLD_S = 30.0  # for the stages to tell of the last step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """`memory_mib` is by the process's name in the deploy config, and `server`."""

    stages: Scrape
    memory_mib: dict[str, float]

    @property
    def total_mib(self) -> float:
        return sum(self.memory_mib.values())

    @property
    def kv_blocks(self) -> dict[str, float]:
        """Blocks that requests hold, by stage, over its replicas."""
        held: dict[str, float] = {}
        for (stage, _), counted in self.stages.items():
            if counted.kv_blocks:
                held[stage] = held.get(stage, 0.0) + counted.kv_usage * counted.kv_blocks
        return held


async def look(server: Server) -> Look:
    return Look(await scrape(server.url), memory_by_process(server.pid))


async def settled(server: Server) -> Look:
    """Of a server that does nothing: every stage has told of its last step."""
    await until(asyncio.get_running_loop().time() + 1.25 * HEARTBEAT_S)
    return await look(server)


async def observed(
    work: Coroutine[Any, Any, T], server: Server, told: Callable[[Look, Look], bool]
) -> tuple[T, Sequence[Look]]:
    """The result of `work`, and looks from before it to when the stages have `told(before, now)` of all of it.

    Raises TriptychError if they never do.
    """
    looks = [await look(server)]
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=HEARTBEAT_S)
            looks.append(await look(server))
        result = task.result()
        try:
            async with asyncio.timeout(TOLD_S):
                while not told(looks[0], looks[-1]):
                    await until(asyncio.get_running_loop().time() + HEARTBEAT_S / 4)
                    looks.append(await look(server))
        except TimeoutError:
            raise TriptychError(
                f"the stages of {server.url} have not told of all their steps in {TOLD_S:g} s"
            ) from None
    finally:
        task.cancel()
    return result, looks
