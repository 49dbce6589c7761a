"""The Talker's scheduling under load, against first come, first served: real policy, made-up clock and step times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from triptych.bench.playout import Playout
from triptych.config.sampling import SamplingParams
from triptych.engine.request import EngineRequest, FinishReason
from triptych.engine.scheduler import Scheduler
from triptych.engine.scheduler_config import SchedulerConfig
from triptych.engine.step_cost import StepCost
from triptych.stages.cadence import Cadence
from triptych.stages.playout_clock import FRAME_S, START_WAIT_S, TRIM_S, PlayoutClock

CADENCE = Cadence(4, 25)
CONFIG = SchedulerConfig(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=2048,
    block_size=16,
    num_blocks=8000,
    prefill_alignment=64,
)
# Seconds of a step, of each decode row in it, and of each prefill row. A step of 25 streams lasts as long as a frame.
STEP_S, ROW_S, PREFILL_S = 0.005, 0.003, 0.0005
MOST_STREAMS = round((FRAME_S - STEP_S) / ROW_S)


@dataclass
class Speech:
    """One stream: what it is, and what became of it."""

    request: EngineRequest
    arrives_at: float
    num_frames: int
    playout: PlayoutClock = field(default_factory=lambda: PlayoutClock(CADENCE))
    listener: Playout = field(default_factory=Playout)
    num_heard: int = 0
    began_at: float | None = None

    def draw(self, now: float) -> bool:
        """One more frame; whole chunks reach the listener at once. Whether it was the last."""
        self.playout.hand_out(1, now)
        ends = self.playout.num_frames == self.num_frames
        if ends or self.playout.num_audible > self.num_heard:
            num_audible = self.num_frames if ends else self.playout.num_audible
            self.listener.arrive(now, (num_audible - self.num_heard) * FRAME_S - (0 if self.num_heard else TRIM_S))
            self.num_heard = num_audible
        return ends


def speeches(load: float, seed: int, seconds: float) -> list[Speech]:
    """Prompts of 64 to 1300 rows and speech of 2 to 30 s that arrive at random.

    At a load of 1 they bring as much work as steps of `MOST_STREAMS` rows can do.
    """
    dice = random.Random(seed)
    found: list[Speech] = []
    mean_rows, mean_frames = 400, 120
    work = mean_frames * FRAME_S / MOST_STREAMS + mean_rows * PREFILL_S
    at = 0.0
    while (at := at + dice.expovariate(load / work)) < seconds:
        rows = min(1300, max(64, int(dice.expovariate(1 / mean_rows))))
        request = EngineRequest(
            request_id=f"r{len(found)}",
            num_prompt_tokens=rows + 1,
            num_tokens=rows + 1,
            params=SamplingParams(),
            single_from=rows,
        )
        num_frames = min(375, 25 + int(dice.expovariate(1 / (mean_frames - 25))))
        found.append(Speech(request, at, num_frames))
    return found


def serve(streams: Sequence[Speech], *, by_slack: bool) -> float:
    """Step the scheduler as the Talker does until all is said. Returns the longest step, in seconds."""
    scheduler, cost = Scheduler(CONFIG), StepCost()
    coming = list(reversed(streams))
    running: dict[str, Speech] = {}
    now = longest = 0.0
    while coming or running:
        while coming and coming[-1].arrives_at <= now:
            speech = coming.pop()
            scheduler.add(speech.request)
            speech.playout.start_by = speech.arrives_at + START_WAIT_S
            running[speech.request.request_id] = speech
        if not running:
            now = coming[-1].arrives_at
            continue
        if by_slack:
            for speech in running.values():
                speech.request.due_at = speech.playout.frame_due_at(now, cost.decode_s)
        batch = scheduler.schedule(partial(cost.prefill_rows, now) if by_slack else None)
        assert batch is not None, "streams wait, and nothing runs"
        for row in batch.rows:
            speech = running[row.request.request_id]
            speech.began_at = now if speech.began_at is None else speech.began_at
        num_decodes = sum(row.num_tokens == 1 for row in batch.rows)
        seconds = STEP_S + ROW_S * num_decodes + PREFILL_S * (batch.num_tokens - num_decodes)
        cost.observe(batch, seconds)
        longest, now = max(longest, seconds), now + seconds
        scheduler.update(batch)
        for row in batch.rows:
            if not row.samples:
                continue
            scheduler.sampled(row.request)
            if running[row.request.request_id].draw(now):
                scheduler.finish(row.request, FinishReason.STOP)
                del running[row.request.request_id]
            else:
                scheduler.extend(row.request)
    assert scheduler.pool.num_used == 0
    return longest


@pytest.mark.parametrize("load", [0.9, 1.0])
def test_under_load_fewer_listeners_hear_silence_than_first_come_first_served(load: float) -> None:
    silent: dict[bool, float] = {}
    broken: dict[bool, int] = {}
    for by_slack in (True, False):
        served: list[Speech] = []
        for seed in range(2):
            streams = speeches(load, seed, seconds=60)
            longest = serve(streams, by_slack=by_slack)
            served += streams
            waits = [speech.began_at - speech.arrives_at for speech in streams if speech.began_at is not None]
            assert len(waits) == len(streams)
            assert max(waits) <= longest * 2 + (START_WAIT_S if by_slack else 0)
        assert all(speech.num_heard == speech.num_frames for speech in served)
        silent[by_slack] = sum(speech.listener.silent_s for speech in served)
        broken[by_slack] = sum(not speech.listener.flows for speech in served)
    assert silent[True] < 0.9 * silent[False]
    assert broken[True] < 0.9 * broken[False]


def test_without_load_nobody_waits_longer_and_nobody_hears_silence() -> None:
    first: dict[bool, list[float | None]] = {}
    for by_slack in (True, False):
        streams = speeches(0.2, seed=0, seconds=60)
        serve(streams, by_slack=by_slack)
        assert all(speech.listener.flows for speech in streams)
        first[by_slack] = [speech.listener.first_at for speech in streams]
    assert len(first[True]) > 10
    assert first[True] == first[False]
