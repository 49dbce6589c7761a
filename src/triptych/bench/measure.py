"""One measurement: warm up, send the requests, keep what became of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.bench.client import Client
from triptych.bench.driver import Load, Run, drive, warm_up
from triptych.bench.outcome import Outcome
from triptych.bench.target import Target
from triptych.bench.workload import Reply, Workload


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is asked, how, and how many of it. Warm-up requests are further ones of the same workload, so that they put
    none of the measured prompts into a cache."""

    workload: Workload
    reply: Reply
    load: Load
    num_prompts: int
    num_warmups: int = 1
    seed: int = 0
    timeout_s: float = 600.0

    async def take(
        self,
        target: Target,
        *,
        api_key: str | None = None,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
    ) -> Run:
        """Raises TriptychError if every warm-up request fails; a failure later is in its outcome."""
        prompts = self.workload.prompts(self.num_prompts + self.num_warmups, self.seed)
        bodies = [prompt.body(target.model, self.reply) for prompt in prompts]
        async with Client(target.url, api_key=api_key, timeout_s=self.timeout_s) as client:
            await warm_up(client, bodies[self.num_prompts :], self.load, speaks=self.reply.speaks)
            return await drive(client, bodies[: self.num_prompts], self.load, speaks=self.reply.speaks, on_end=on_end)
