"""Sends requests as a load asks for: a number at a time (closed loop), at a rate (open loop), or both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.bench.arrival import arrival_times
from triptych.bench.client import Client
from triptych.bench.outcome import Outcome
from triptych.errors import TriptychError


@dataclass(frozen=True, slots=True)
class Load:
    """`request_rate` is requests a second, infinite for all at once; `max_concurrency` None for no limit. With both, a
    request that is due waits for a place, and its own times start when it is sent."""

    max_concurrency: int | None = None
    request_rate: float = math.inf
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """`outcomes` in the order of the requests; `duration_s` from the first request sent to the last reply's end."""

    outcomes: list[Outcome]
    duration_s: float

    @property
    def fingerprints(self) -> list[str]:
        """Every `system_fingerprint` that the server gave; more than one if it was replaced meanwhile."""
        return sorted({outcome.fingerprint for outcome in self.outcomes if outcome.fingerprint})


async def drive(
    client: Client,
    bodies: Sequence[bytes],
    load: Load,
    *,
    speaks: bool,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> Run:
    """Send every body once and wait for all replies. `on_end` is told each outcome when it is known."""
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(load.max_concurrency or len(bodies) or 1)
    start = loop.time()

    async def one(body: bytes, due: float) -> Outcome:
        async with places:
            # In a closed loop a request is due when its turn comes.
            delay = 0.0 if math.isinf(load.request_rate) else max(0.0, loop.time() - due)
            outcome = await client.ask(body, speaks=speaks)
        outcome.send_delay_s = delay
        on_end(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for body, after in zip(bodies, arrival_times(len(bodies), load.request_rate, load.seed), strict=True):
            if after:
                await until(start + after)
            tasks.append(group.create_task(one(body, start + after)))
    outcomes = [task.result() for task in tasks]
    if not outcomes:
        return Run([], 0.0)
    first = min(outcome.started_at for outcome in outcomes)
    return Run(outcomes, max(outcome.ended_at for outcome in outcomes) - first)


async def warm_up(client: Client, bodies: Sequence[bytes], load: Load, *, speaks: bool) -> None:
    """Send requests that are not measured, as many at a time as will be later. Raises TriptychError if all fail."""
    at_once = Load(load.max_concurrency or 1)
    outcomes = (await drive(client, bodies, at_once, speaks=speaks)).outcomes
    if outcomes and all(outcome.failure for outcome in outcomes):
        last = outcomes[-1]
        raise TriptychError(f"every warm-up request failed; the last one: {last.failure}: {last.detail or '-'}")


async def until(when: float) -> None:
    """Return at the time `when` of the loop's clock."""
    loop = asyncio.get_running_loop()
    due = loop.create_future()
    timer = loop.call_at(when, due.set_result, None)
    try:
        await due
    finally:
        timer.cancel()
