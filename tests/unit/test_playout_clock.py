"""When a listener runs out of audio, and what a step costs: deadlines and estimates by numbers alone."""

from __future__ import annotations

import math
import random

import pytest

from triptych.bench.playout import Playout
from triptych.config.sampling import SamplingParams
from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.request import EngineRequest
from triptych.engine.step_cost import UNLIMITED, StepCost
from triptych.stages.cadence import Cadence
from triptych.stages.playout_clock import FRAME_S, HEADROOM_S, TRIM_S, PlayoutClock

CADENCE = Cadence(4, 25)


def test_audio_starts_with_the_first_whole_chunk() -> None:
    clock = PlayoutClock(CADENCE, start_by=7.0)
    clock.hand_out(3, now=5.0)
    assert (clock.runs_out_at, clock.chunk_due_at) == (None, 7.0)
    clock.hand_out(1, now=6.0)
    assert clock.chunk_due_at == clock.runs_out_at == pytest.approx(6.0 + 4 * FRAME_S - TRIM_S)


def test_frames_of_a_chunk_that_lacks_some_are_no_audio_yet() -> None:
    clock = PlayoutClock(CADENCE)
    clock.hand_out(4, now=0.0)
    before = clock.runs_out_at
    clock.hand_out(3, now=0.1)
    assert clock.runs_out_at == before
    clock.hand_out(1, now=0.2)
    assert clock.runs_out_at == pytest.approx(8 * FRAME_S - TRIM_S)


def test_after_a_silence_audio_lasts_from_when_it_came() -> None:
    clock = PlayoutClock(CADENCE)
    clock.hand_out(4, now=0.0)
    clock.hand_out(4, now=3.0)
    assert clock.runs_out_at == pytest.approx(3.0 + 4 * FRAME_S)


def test_a_frame_is_due_so_early_that_the_rest_of_its_chunk_can_still_be_made() -> None:
    clock = PlayoutClock(CADENCE)
    clock.hand_out(4, now=0.0)
    ends = 4 * FRAME_S - TRIM_S
    due = [clock.frame_due_at(0.0, step_s=0.05)]
    for _ in range(3):
        clock.hand_out(1, now=0.0)
        due.append(clock.frame_due_at(0.0, step_s=0.05))
    assert due == pytest.approx([ends - missing * 0.05 - HEADROOM_S for missing in (4, 3, 2, 1)])


def test_a_stream_that_has_not_started_is_due_when_it_should_start_and_then_before_all_others() -> None:
    clock = PlayoutClock(CADENCE, start_by=2.0)
    assert clock.frame_due_at(1.9, step_s=0.05) == 2.0
    assert clock.frame_due_at(2.0, step_s=0.05) == -math.inf
    clock.hand_out(4, now=2.1)
    assert clock.frame_due_at(2.1, step_s=0.05) > 2.1


@pytest.mark.parametrize("cadence", [Cadence(1, 1), Cadence(4, 25), Cadence(10, 25)])
def test_the_clock_of_a_stage_agrees_with_a_listener(cadence: Cadence) -> None:
    """Handed out frame by frame, or in the chunks that the listener gets: the same time, whatever the delays."""
    dice = random.Random(0)
    clock, chunks, listener, now, made, audible = PlayoutClock(cadence), PlayoutClock(cadence), Playout(), 0.0, 0, 0
    for _ in range(400):
        now += dice.choice([0.01, 0.05, 0.2])
        clock.hand_out(1, now)
        made += 1
        if made == audible + (size := cadence.size(audible)):
            chunks.hand_out(size, now)
            listener.arrive(now, size * FRAME_S - (0 if audible else TRIM_S))
            audible = made
            assert clock.runs_out_at == chunks.runs_out_at == pytest.approx(listener.runs_out_at)
    assert listener.silent_s > 0


# -- what a step costs -------------------------------------------------------------------------------------------------


def batch(decodes: int, prefill: int = 0) -> ScheduledBatch:
    def row(num_tokens: int) -> ScheduledRow:
        request = EngineRequest(request_id="a", num_prompt_tokens=1, params=SamplingParams())
        return ScheduledRow(request, 0, num_tokens, samples=False)

    return ScheduledBatch((*(row(1) for _ in range(decodes)), *([row(prefill)] if prefill else [])))


def test_any_prefill_fits_until_one_has_run() -> None:
    cost = StepCost()
    assert cost.prefill_rows(now=0.0, due_at=0.0) == UNLIMITED
    cost.observe(batch(4), 0.05)
    assert (cost.decode_s, cost.prefill_rows(now=0.0, due_at=0.0)) == (0.05, UNLIMITED)


def test_what_steps_take_is_learnt_and_learnt_anew() -> None:
    cost = StepCost()
    for decode_s, row_s in ((0.04, 0.0005), (0.06, 0.002)):
        for _ in range(100):
            cost.observe(batch(8), decode_s)
            cost.observe(batch(8, prefill=200), decode_s + 200 * row_s)
        assert cost.decode_s == pytest.approx(decode_s, rel=0.01)
        assert cost.prefill_rows(now=3.0, due_at=3.1) == pytest.approx(0.1 / row_s, rel=0.02)


def test_nothing_fits_beside_a_row_that_is_late() -> None:
    cost = StepCost()
    cost.observe(batch(0, prefill=100), 0.1)
    assert [cost.prefill_rows(now=1.0, due_at=due) for due in (0.5, 1.0, 1.0505)] == [0, 0, 50]


def test_a_hiccup_of_one_step_is_soon_forgotten() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(batch(8), 0.05)
    cost.observe(batch(8), 2.0)
    for _ in range(50):
        cost.observe(batch(8), 0.05)
    assert cost.decode_s == pytest.approx(0.05, rel=0.05)
