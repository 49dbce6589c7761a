"""What stages count: buckets, sums, the way over the wire, and the sum over processes that follow one another."""

from __future__ import annotations

import random

import pytest

from triptych.connectors.wire import Heartbeat, StageStats, decode_to_server, encode
from triptych.pipeline.stage_totals import StageTotals
from triptych.telemetry.histogram import Histogram
from triptych.telemetry.stage_counts import StageCounts, TransferCounts
from triptych.telemetry.work import Work

BOUNDS = (1.0, 2.0, 5.0)


def filled(*values: float) -> Histogram:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    return histogram


def counted(dice: random.Random) -> StageCounts:
    """Something of everything."""
    counts = StageCounts(tokens=dice.randrange(100), failed=dice.randrange(9), preemptions=dice.randrange(9))
    for _ in range(dice.randrange(1, 50)):
        counts.step_time_s.observe(dice.expovariate(100))
        counts.batch_size.observe(dice.randrange(1, 400))
        counts.queue_wait_s.observe(dice.expovariate(1))
        counts.worked(Work(dice.randrange(1 << 40), dice.randrange(1 << 50)))
    transfers = counts.transfers["talker"] = TransferCounts()
    transfers.size_bytes.observe(dice.randrange(1 << 20))
    return counts


def test_a_bound_belongs_to_its_bucket_and_what_is_above_all_is_counted_too() -> None:
    histogram = filled(0, 1, 1.5, 2, 5, 5.1, 1e9)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.count == 7 and histogram.total == pytest.approx(0 + 1 + 1.5 + 2 + 5 + 5.1 + 1e9)


def test_the_sum_of_two_is_one_that_saw_both() -> None:
    assert filled(0.5, 3) + filled(1, 9) == filled(0.5, 3, 1, 9)
    with pytest.raises(ValueError, match="cannot be added"):
        filled() + Histogram((1.0,))


def test_no_two_stages_share_a_bucket() -> None:
    one, other = StageCounts(), StageCounts()
    one.step_time_s.observe(1)
    one.transfers["talker"] = TransferCounts()
    assert other == StageCounts() and other.step_time_s.count == 0 and not other.transfers


def test_counts_travel_whole_with_a_heartbeat() -> None:
    stats = StageStats(stage="thinker", replica=1, running=2, counts=counted(random.Random(1)))
    heartbeat = Heartbeat(process="text", stages=(stats,))
    assert decode_to_server(encode(heartbeat)) == heartbeat


def test_the_work_of_years_still_travels() -> None:
    counts = StageCounts()
    counts.worked(Work(1e23, 1e25))  # more than 64 bits of each
    heartbeat = Heartbeat(process="text", stages=(StageStats(stage="thinker", counts=counts),))
    assert decode_to_server(encode(heartbeat)) == heartbeat


def test_the_sum_of_counts_has_every_field() -> None:
    dice = random.Random(2)
    one, other = counted(dice), counted(dice)
    total = one + other
    assert total.tokens == one.tokens + other.tokens and total.failed == one.failed + other.failed
    assert total.step_time_s == one.step_time_s + other.step_time_s
    assert total.moved_bytes == one.moved_bytes + other.moved_bytes > 0
    assert total.flops == one.flops + other.flops > 0
    assert total.transfers["talker"].size_bytes.count == 2
    assert (one + StageCounts()) == one == (StageCounts() + one)


def test_counts_of_processes_that_follow_one_another_add_up_and_never_fall() -> None:
    dice, totals = random.Random(3), StageTotals()
    expected, last = StageCounts(), 0
    for _ in range(5):
        counts = counted(dice)
        for _ in range(3):  # the same heartbeat again is not more
            totals.heard([StageStats(stage="talker", running=4, counts=counts)])
            stats = totals.stats()["talker"]
            assert stats.running == 4 and stats.counts == expected + counts
            assert stats.counts.step_time_s.count >= last
            last = stats.counts.step_time_s.count
        expected = expected + counts
        for _ in range(2):  # and a death is one, however often it is told
            totals.ended()
            [stats] = totals.stats().values()
            assert stats == StageStats(stage="talker", counts=expected), "a stage that is down holds nothing"


def test_a_process_that_dies_before_its_first_heartbeat_changes_nothing() -> None:
    totals = StageTotals()
    totals.ended()
    assert totals.stats() == {}
    totals.heard([StageStats(stage="thinker", counts=StageCounts(tokens=3))])
    totals.ended()
    totals.ended()
    assert totals.stats()["thinker"].counts.tokens == 3
