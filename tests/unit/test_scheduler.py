"""The scheduler, as integers: each rule by itself, then all of them under random operations against a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest

from triptych.config.sampling import SamplingParams
from triptych.engine.batch import ScheduledBatch
from triptych.engine.request import EngineRequest, FinishReason, RequestStatus
from triptych.engine.scheduler import Scheduler
from triptych.engine.scheduler_config import SchedulerConfig
from triptych.errors import ConfigError, ContextLengthError, RequestError

PARAMS = SamplingParams()


def scheduler(
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    block_size: int = 4,
    num_blocks: int = 100,
    prefill_alignment: int = 1,
    enable_prefix_caching: bool = False,
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            prefill_alignment=prefill_alignment,
            enable_prefix_caching=enable_prefix_caching,
        )
    )


def text(name: str, prompt: int, single_from: int | None = None, first_token: int | None = None) -> EngineRequest:
    """A request whose whole prompt is known. Prompts differ unless `first_token` is given."""
    token_ids = [sum(map(ord, name)) if first_token is None else first_token, *range(1, prompt)]
    return EngineRequest(
        request_id=name,
        params=PARAMS,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        token_ids=token_ids,
        single_from=single_from,
    )


def rows(batch: ScheduledBatch | None) -> list[tuple[str, int, int, bool]]:
    """(request, start, end, samples) of each row."""
    assert batch is not None
    return [(row.request.request_id, row.start, row.start + row.num_tokens, row.samples) for row in batch.rows]


def step(engine: Scheduler, extend: bool = True) -> list[tuple[str, int, int, bool]]:
    """One turn of an engine. `extend`: a drawn token is a known row at once, as in the Thinker."""
    batch = engine.schedule()
    assert batch is not None
    engine.update(batch)
    for row in batch.rows:
        if row.samples:
            engine.sampled(row.request)
            if extend:
                engine.extend(row.request, 7)
    return rows(batch)


def blocks(engine: Scheduler, name: str) -> list[int]:
    request = engine.get(name)
    assert request is not None
    return request.block_ids


# -- one counter, one budget ------------------------------------------------------------------------------------------


def test_a_request_decodes_one_row_a_step_after_its_prompt() -> None:
    engine = scheduler()
    engine.add(text("a", 5))
    assert [step(engine) for _ in range(3)] == [[("a", 0, 5, True)], [("a", 5, 6, True)], [("a", 6, 7, True)]]


def test_a_prefill_is_cut_by_the_budget_and_draws_only_at_its_end() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    engine.add(text("a", 20))
    assert [step(engine) for _ in range(4)] == [
        [("a", 0, 8, False)],
        [("a", 8, 16, False)],
        [("a", 16, 20, True)],
        [("a", 20, 21, True)],
    ]


def test_cuts_by_the_budget_land_on_multiples_of_the_alignment() -> None:
    engine = scheduler(max_num_batched_tokens=15, prefill_alignment=4)
    engine.add(text("a", 21))
    engine.add(text("b", 9))
    assert step(engine) == [("a", 0, 12, False)]
    assert step(engine) == [("a", 12, 21, True), ("b", 0, 4, False)]
    assert step(engine) == [("a", 21, 22, True), ("b", 4, 9, True)]


def test_a_prompt_cut_by_its_arrival_is_aligned_too() -> None:
    engine = scheduler(prefill_alignment=4)
    request = text("a", 9)
    request.num_tokens = 3
    engine.add(request)
    assert not engine.has_work()
    for _ in range(3):
        engine.extend(request)
    assert step(engine) == [("a", 0, 4, False)]
    assert not engine.has_work()
    for _ in range(3):
        engine.extend(request)
    assert step(engine) == [("a", 4, 9, True)]


def test_decode_rows_come_first_and_the_rest_of_the_budget_goes_to_prefill() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    engine.add(text("a", 3))
    step(engine)
    engine.add(text("long", 30))
    engine.add(text("b", 2))
    assert step(engine) == [("a", 3, 4, True), ("long", 0, 7, False)]
    assert step(engine) == [("a", 4, 5, True), ("long", 7, 14, False)]


def test_newer_decodes_are_not_starved_by_an_older_prefill_nor_the_other_way_round() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    late = text("late", 40)
    late.num_tokens = 1
    engine.add(late)
    for name in "bcd":
        engine.add(text(name, 1))
    step(engine)
    for _ in range(39):
        engine.extend(late)
    for turn in range(7):
        assert [row[:3] for row in step(engine)] == [
            ("b", turn + 1, turn + 2),
            ("c", turn + 1, turn + 2),
            ("d", turn + 1, turn + 2),
            ("late", 1 + 5 * turn, 6 + 5 * turn),
        ]


def test_one_row_pieces_stand_before_longer_ones_whoever_came_first() -> None:
    engine = scheduler()
    engine.add(text("long", 5))
    engine.add(text("one", 1))
    assert [row[0] for row in step(engine)] == ["one", "long"]
    batch = engine.schedule()
    assert batch is not None
    assert batch.is_decode_only
    assert batch.num_tokens == 2


def test_a_new_prefill_that_lacks_budget_is_not_overtaken_by_a_shorter_one() -> None:
    engine = scheduler(max_num_batched_tokens=13, prefill_alignment=8)
    for name, prompt in (("a", 3), ("b", 20), ("c", 2)):
        engine.add(text(name, prompt))
    assert step(engine) == [("a", 0, 3, True), ("b", 0, 8, False)]
    assert step(engine) == [("a", 3, 4, True), ("b", 8, 20, True)]
    assert step(engine) == [("a", 4, 5, True), ("b", 20, 21, True), ("c", 0, 2, True)]


def test_a_running_prefill_that_lacks_budget_is_not_overtaken_by_a_shorter_one() -> None:
    engine = scheduler(max_num_batched_tokens=13, prefill_alignment=8)
    long, short = text("long", 32), text("short", 11)
    for request in (long, short):
        request.num_tokens = 8
        engine.add(request)
    step(engine)
    step(engine)
    for request in (long, short):
        while request.num_tokens < request.num_prompt_tokens:
            engine.extend(request)
    engine.add(text("new", 2))
    assert step(engine) == [("long", 8, 16, False)]
    assert step(engine) == [("long", 16, 24, False)]
    assert step(engine) == [("long", 24, 32, True), ("short", 8, 11, True), ("new", 0, 2, True)]


# -- rows that are not there yet ---------------------------------------------------------------------------------------


def test_a_request_without_rows_is_idle_and_does_not_block_the_others() -> None:
    engine = scheduler(max_num_seqs=2)
    empty = text("empty", 4)
    empty.num_tokens = 0
    engine.add(empty)
    engine.add(text("b", 2))
    assert step(engine) == [("b", 0, 2, True)]
    for _ in range(4):
        engine.extend(empty)
    assert step(engine) == [("b", 2, 3, True), ("empty", 0, 4, True)]


def test_a_row_draws_once_while_the_next_one_has_not_arrived() -> None:
    engine = scheduler()
    request = text("speech", 5)
    engine.add(request)
    assert step(engine, extend=False) == [("speech", 0, 5, True)]
    assert not engine.has_work()
    assert engine.schedule() is None
    assert (engine.num_running, engine.num_waiting) == (1, 0)
    engine.extend(request)
    assert step(engine, extend=False) == [("speech", 5, 6, True)]


def test_a_preempted_row_that_has_drawn_is_recomputed_without_drawing_again() -> None:
    engine = scheduler(max_num_seqs=2, max_model_len=16, num_blocks=5)
    older, speech = text("older", 7), text("speech", 7)
    engine.add(older)
    engine.add(speech)
    step(engine, extend=False)
    engine.extend(older)
    step(engine)
    batch = engine.schedule()  # the ninth row of `older` takes the blocks of `speech`
    assert batch is not None
    assert rows(batch) == [("older", 8, 9, True)]
    assert batch.preempted == (speech,)
    assert (speech.num_sampled, speech.num_computed_tokens, speech.num_tokens) == (1, 0, 7)
    engine.update(batch)
    engine.finish(older, FinishReason.STOP)
    assert step(engine) == [("speech", 0, 7, False)]
    engine.extend(speech)
    assert step(engine) == [("speech", 7, 8, True)]


def test_rows_and_tokens_cannot_be_counted_out_of_order() -> None:
    engine = scheduler()
    request = text("a", 3)
    engine.add(request)
    with pytest.raises(RuntimeError, match="the token of row 3 is not drawn yet"):
        engine.extend(request)
    batch = engine.schedule()
    assert batch is not None
    engine.update(batch)
    with pytest.raises(RuntimeError, match="call update once after each schedule"):
        engine.update(batch)
    engine.sampled(request)
    with pytest.raises(RuntimeError, match="no row left to draw"):
        engine.sampled(request)
    engine.extend(request, 11)
    assert request.token_ids[-1] == 11
    engine.finish(request, FinishReason.STOP)
    with pytest.raises(RuntimeError, match="has finished"):
        engine.extend(request)


def test_rows_from_single_from_on_run_one_a_step_also_when_recomputed() -> None:
    engine = scheduler(max_num_seqs=2, max_model_len=16, num_blocks=5)
    older, single = text("older", 6), text("single", 4, single_from=3)
    engine.add(older)
    engine.add(single)
    assert step(engine) == [("older", 0, 6, True), ("single", 0, 3, False)]
    assert step(engine) == [("older", 6, 7, True), ("single", 3, 4, True)]
    assert step(engine) == [("older", 7, 8, True), ("single", 4, 5, True)]
    assert step(engine) == [("older", 8, 9, True)]
    assert single.num_preemptions == 1
    engine.finish(older, FinishReason.STOP)
    assert [step(engine) for _ in range(4)] == [
        [("single", 0, 3, False)],
        [("single", 3, 4, False)],
        [("single", 4, 5, False)],
        [("single", 5, 6, True)],
    ]


def test_a_parked_request_keeps_its_place_and_runs_nothing() -> None:
    engine = scheduler()
    request = text("a", 3)
    engine.add(request)
    engine.add(text("b", 2))
    step(engine)
    engine.park("a")
    assert (engine.num_running, engine.num_parked) == (2, 1)
    assert step(engine) == [("b", 2, 3, True)]
    engine.abort("b")
    assert not engine.has_work()
    assert engine.schedule() is None
    assert request.block_ids
    assert request.slot == 0
    engine.unpark("a")
    assert step(engine) == [("a", 3, 4, True)]
    engine.finish(request, FinishReason.STOP)
    engine.park("a")
    engine.unpark("a")
    assert engine.num_parked == 0


# -- admission, slots, the end -----------------------------------------------------------------------------------------


def test_admission_is_first_come_first_served_up_to_max_num_seqs() -> None:
    engine = scheduler(max_num_seqs=2)
    for name in "abc":
        engine.add(text(name, 2))
    assert [row[0] for row in step(engine)] == ["a", "b"]
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    engine.abort("a")
    assert [row[0] for row in step(engine)] == ["b", "c"]


def test_a_request_takes_the_smallest_free_slot_and_gives_it_back() -> None:
    engine = scheduler(max_num_seqs=3)
    requests = {name: text(name, 2) for name in "abcde"}
    for request in requests.values():
        engine.add(request)
    step(engine)
    assert [requests[name].slot for name in "abcde"] == [0, 1, 2, -1, -1]
    engine.abort("b")
    engine.abort("a")
    step(engine)
    assert [requests[name].slot for name in "abcde"] == [-1, -1, 2, 0, 1]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_frees_blocks_and_slot_at_once_and_only_once(reason: FinishReason) -> None:
    engine = scheduler()
    request = text("a", 9)
    engine.add(request)
    step(engine)
    assert engine.pool.num_used == 3
    for _ in range(2):
        engine.finish(request, reason)
        assert (engine.pool.num_used, engine.num_running, request.slot, request.block_ids) == (0, 0, -1, [])
        assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, reason)
    engine.finish(request, FinishReason.STOP)
    assert request.finish_reason is reason


def test_a_waiting_request_can_be_aborted_and_its_id_used_again() -> None:
    engine = scheduler(max_num_seqs=1)
    engine.add(text("a", 2))
    engine.add(text("b", 2))
    step(engine)
    waiting = engine.get("b")
    assert engine.abort("b") is waiting
    assert waiting is not None
    assert waiting.finish_reason is FinishReason.ABORT
    assert engine.abort("b") is None
    assert engine.num_waiting == 0
    engine.add(text("b", 2))


def test_update_passes_over_a_request_that_was_aborted_meanwhile() -> None:
    engine = scheduler()
    engine.add(text("a", 2))
    batch = engine.schedule()
    assert batch is not None
    request = engine.abort("a")
    engine.update(batch)
    assert request is not None
    assert request.num_computed_tokens == 0
    assert not engine.has_work()


def test_a_duplicate_id_is_refused() -> None:
    engine = scheduler()
    engine.add(text("a", 2))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(text("a", 3))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty prompt"):
        scheduler().add(EngineRequest(request_id="a", params=PARAMS, num_prompt_tokens=0))


def test_rows_beyond_max_model_len_are_refused() -> None:
    engine = scheduler(max_model_len=8)
    with pytest.raises(ContextLengthError, match="has 9 tokens; max_model_len is 8"):
        engine.add(text("long", 9))
    request = text("a", 8)
    engine.add(request)
    step(engine, extend=False)
    with pytest.raises(ContextLengthError, match="8 tokens, all that max_model_len allows"):
        engine.extend(request)


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"max_num_batched_tokens": 6, "prefill_alignment": 4}, "max_num_batched_tokens", "raise max_num_batched_tok"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens", "max_num_seqs 4 - 1 .* make 4;"),
        ({"num_blocks": 16}, "num_kv_blocks", "64: that takes 17, .* lower max_model_len to 60"),
        ({"num_blocks": 0}, "num_kv_blocks", "lower max_model_len to 0"),
        ({"max_num_seqs": 0}, "max_num_seqs", "0 is not at least 1"),
        ({"block_size": 0}, "block_size", "0 is not at least 1"),
    ],
)
def test_limits_that_cannot_serve_a_request_are_refused(changes: dict[str, int], key: str, message: str) -> None:
    build: Callable[..., Scheduler] = scheduler
    with pytest.raises(ConfigError, match=message) as error:
        build(**changes)
    assert error.value.path == key


def test_the_smallest_pool_and_budget_that_are_accepted_serve_a_longest_request() -> None:
    engine = scheduler(max_num_seqs=2, max_num_batched_tokens=5, prefill_alignment=4, num_blocks=17)
    requests = [text("a", 30), text("b", 30)]
    for request in requests:
        engine.add(request)
    for _ in range(200):
        for request in requests:
            if request.num_sampled == 64 - 30:
                engine.finish(request, FinishReason.LENGTH)
        if not engine.has_work():
            break
        step(engine)
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 2


# -- blocks and preemption ---------------------------------------------------------------------------------------------


def test_admission_waits_until_all_known_rows_and_one_more_have_blocks() -> None:
    engine = scheduler(max_model_len=16, num_blocks=6, max_num_batched_tokens=4)
    engine.add(text("a", 4))
    step(engine)  # holds 1 block of 5, needs a second one next
    engine.add(text("b", 12))
    engine.add(text("c", 1))
    assert step(engine) == [("a", 4, 5, True)]  # b would fill the pool and leave no room for its first token
    engine.abort("a")
    assert step(engine) == [("b", 0, 4, False)]
    assert len(blocks(engine, "b")) == 3  # for the whole prompt: a prefill never waits half done


def test_the_newest_running_request_is_preempted_to_the_front_and_keeps_its_slot() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=7)
    a, b, c, d = (text(name, 7) for name in "abcd")
    for request in (a, b, c, d):
        engine.add(request)
    step(engine)
    step(engine)
    batch = engine.schedule()
    assert batch is not None
    assert rows(batch) == [("a", 8, 9, True), ("b", 8, 9, True)]
    assert batch.preempted == (c,)
    assert (c.status, c.block_ids, c.slot, c.num_computed_tokens) == (RequestStatus.WAITING, [], 2, 0)
    assert (c.num_preemptions, engine.num_preemptions) == (1, 1)
    engine.update(batch)
    engine.abort("a")  # d has waited, but c is served first: in its own slot
    assert step(engine) == [("c", 0, 9, True)]
    assert (c.slot, d.slot) == (2, -1)


def test_nobody_new_is_admitted_while_a_preempted_request_waits() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=5)
    a, b = text("a", 7), text("b", 7)
    engine.add(a)
    engine.add(b)
    for _ in range(3):
        step(engine)
    assert b.num_preemptions == 1
    engine.add(text("small", 1))
    assert step(engine) == [("a", 9, 10, True)]
    engine.abort("b")
    assert [row[0] for row in step(engine)] == ["a", "small"]


@pytest.mark.parametrize("older_is_idle", [False, True])
def test_an_older_request_loses_its_blocks_only_while_it_is_idle(older_is_idle: bool) -> None:
    engine = scheduler(max_num_seqs=2, max_model_len=16, num_blocks=5)
    older, newer = text("older", 7), text("newer", 7)
    engine.add(older)
    engine.add(newer)
    step(engine, extend=False)
    engine.extend(newer)
    step(engine, extend=False)
    engine.extend(newer)  # its ninth row, and no block is free
    if not older_is_idle:
        engine.extend(older)
    (row,) = step(engine, extend=False)
    assert row[0] == ("newer" if older_is_idle else "older")
    assert (older.num_preemptions, newer.num_preemptions) == (int(older_is_idle), 0)


def test_a_request_that_finds_no_block_waits_for_older_ones_and_loses_nothing() -> None:
    engine = scheduler(max_num_seqs=2, max_model_len=16, num_blocks=5)
    older, newer = text("older", 6), text("newer", 7)
    engine.add(older)
    engine.add(newer)
    step(engine)
    step(engine)
    assert step(engine) == [("older", 7, 8, True)]
    assert (newer.num_computed_tokens, newer.num_tokens, newer.num_preemptions) == (8, 9, 0)
    engine.finish(older, FinishReason.STOP)
    assert step(engine) == [("newer", 8, 9, True)]


def test_when_nothing_else_can_run_parked_requests_yield_their_blocks() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=5)
    slow = text("slow", 12)
    engine.add(slow)
    step(engine)
    engine.add(text("b", 8))
    engine.park("slow")
    assert engine.has_work()
    batch = engine.schedule()
    assert batch is not None
    assert rows(batch) == [("b", 0, 8, True)]
    assert batch.preempted == (slow,)


def test_parked_requests_keep_their_blocks_while_others_run() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=5)
    slow = text("slow", 7)
    engine.add(slow)
    engine.add(text("b", 4))
    step(engine)
    engine.park("slow")
    engine.add(text("c", 4))
    assert step(engine) == [("b", 4, 5, True)]
    assert slow.num_preemptions == 0


def test_blocks_hit_in_a_parked_request_are_not_counted_twice() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=5, enable_prefix_caching=True)
    slow, idle = text("slow", 7, first_token=0), text("idle", 6)
    engine.add(slow)
    engine.add(idle)
    step(engine, extend=False)  # two blocks each
    engine.park("slow")
    engine.add(text("b", 9, first_token=0))  # three blocks, one of them a hit in `slow`: without `slow` two are free
    assert not engine.has_work()
    assert engine.schedule() is None
    engine.abort("idle")
    assert step(engine) == [("b", 4, 9, True)]
    assert slow.num_preemptions == 0


def test_a_new_request_does_not_take_the_blocks_that_a_running_one_waits_for() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=5)
    older, late = text("older", 5), text("late", 12)
    late.num_tokens = 3
    engine.add(older)
    engine.add(late)
    step(engine)
    while late.num_tokens < 12:
        engine.extend(late)
    engine.add(text("new", 1))
    assert step(engine) == [("older", 5, 6, True)]  # `late` needs two blocks and one is free: `new` must not take it
    engine.abort("older")
    assert step(engine) == [("new", 0, 1, True), ("late", 3, 12, True)]


def test_an_idle_request_keeps_its_blocks_from_one_that_waits() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=5)
    idle = text("idle", 12)
    engine.add(idle)
    step(engine, extend=False)
    engine.add(text("b", 8))
    assert not engine.has_work()
    assert engine.schedule() is None
    engine.extend(idle)
    assert step(engine) == [("idle", 12, 13, True)]


# -- who is due first --------------------------------------------------------------------------------------------------


def decoding(engine: Scheduler, *due: tuple[str, float]) -> list[EngineRequest]:
    """Requests of those names that decode, due at those times."""
    requests = [text(name, 1) for name, _ in due]
    for request, (_, due_at) in zip(requests, due, strict=True):
        request.due_at = due_at
        engine.add(request)
    step(engine)
    return requests


def lengths(batch: ScheduledBatch | None) -> dict[str, int]:
    assert batch is not None
    return {row.request.request_id: row.num_tokens for row in batch.rows}


def test_a_prefill_takes_only_what_the_decode_that_is_due_first_can_spare() -> None:
    engine = scheduler(prefill_alignment=4)
    decoding(engine, ("a", 8.0), ("b", 7.0))
    new = text("new", 30)
    new.due_at = 9.0
    engine.add(new)
    asked: list[float] = []

    def spare(due_at: float) -> int:
        asked.append(due_at)
        return [0, 3, 11, 1000][len(asked) - 1]

    taken = []
    for _ in range(4):
        batch = engine.schedule(spare)
        assert batch is not None
        assert lengths(batch).keys() >= {"a", "b"}
        taken.append(lengths(batch).get("new", 0))
        engine.update(batch)
        for row in batch.rows:
            if row.samples:
                engine.sampled(row.request)
                engine.extend(row.request, 7)
    assert taken == [0, 0, 8, 22]  # whole pieces of the alignment
    assert asked == [7.0] * 4


@pytest.mark.parametrize("due_at", [6.0, -inf])
def test_a_prefill_that_is_due_before_every_decode_has_the_whole_budget(due_at: float) -> None:
    engine = scheduler()
    decoding(engine, ("a", 7.0), ("b", 8.0))
    new, later = text("new", 30), text("later", 20)
    new.due_at, later.due_at = due_at, 9.0
    engine.add(new)
    engine.add(later)
    # What it takes is no longer there to be spared.
    assert lengths(engine.schedule(lambda due: 35)) == {"a": 1, "b": 1, "new": 30, "later": 5}


def test_prefills_that_are_due_later_share_what_is_spared_in_their_order() -> None:
    engine = scheduler()
    decoding(engine, ("a", 7.0))
    late = [text(name, 30) for name in ("x", "y")]
    for request, due_at in zip(late, (9.0, 8.0), strict=True):
        request.num_tokens, request.due_at = 2, due_at
        engine.add(request)
    step(engine)
    for request in late:
        engine.arrived(request, 30)
    assert lengths(engine.schedule(lambda due: 30)) == {"a": 1, "y": 28, "x": 2}


def test_a_stream_that_should_have_started_is_not_held_back_by_one_that_is_being_computed_again() -> None:
    engine = scheduler()
    decoding(engine, ("a", 7.0))
    again, new = text("again", 30), text("new", 10)
    again.num_tokens, again.due_at, new.due_at = 2, 8.0, -inf
    engine.add(again)
    step(engine)
    engine.arrived(again, 30)
    engine.add(new)
    assert lengths(engine.schedule(lambda due: 0)) == {"a": 1, "new": 10}


def test_a_stream_that_should_have_started_passes_one_that_was_preempted_and_is_held_back() -> None:
    engine = scheduler(max_num_seqs=4, max_model_len=16, num_blocks=7)
    a, again, c = (text(name, 7) for name in ("a", "again", "c"))
    for request, due_at in ((a, 1.0), (again, 9.0), (c, 2.0)):
        request.due_at = due_at
        engine.add(request)
    while not again.num_preemptions:
        step(engine)
    engine.finish(c, FinishReason.STOP)
    new = text("new", 2)
    new.due_at = -inf
    engine.add(new)
    assert lengths(engine.schedule(lambda due: 0)) == {"a": 1, "new": 2}


def test_a_decode_that_should_have_started_holds_no_prefill_back() -> None:
    engine = scheduler()
    decoding(engine, ("a", -inf))
    engine.add(text("new", 30))
    assert lengths(engine.schedule(lambda due: 0)) == {"a": 1, "new": 30}


def test_without_decodes_a_prefill_has_the_whole_budget_whatever_is_spared() -> None:
    engine = scheduler()
    engine.add(text("new", 30))
    assert lengths(engine.schedule(lambda due: 0)) == {"new": 30}


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_the_request_that_is_due_last_loses_its_blocks_whoever_came_first(victim: str) -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=7)
    requests = {name: text(name, 7) for name in "abc"}
    for request in requests.values():
        engine.add(request)
    step(engine)
    step(engine)
    for index, request in enumerate(requests.values()):
        request.due_at = 9.0 if request.request_id == victim else index
    batch = engine.schedule()
    assert batch is not None
    assert [request.request_id for request in batch.preempted] == [victim]
    assert lengths(batch).keys() == {"a", "b", "c"} - {victim}


def test_of_preempted_requests_the_one_that_is_due_first_comes_back_first() -> None:
    engine = scheduler(max_num_seqs=3, max_model_len=16, num_blocks=5)
    a, b, c = text("a", 4), text("b", 4), text("c", 4)
    for request, due_at in ((a, 1.0), (b, 3.0), (c, 2.0)):
        request.due_at = due_at
        engine.add(request)
    step(engine)
    while not (b.num_preemptions and c.num_preemptions):
        step(engine)
    engine.finish(a, FinishReason.STOP)
    batch = engine.schedule()
    assert batch is not None
    assert batch.rows[0].request is c


# -- prefix caching ----------------------------------------------------------------------------------------------------


def test_a_prefix_hit_starts_where_the_cached_rows_end() -> None:
    engine = scheduler(enable_prefix_caching=True)
    engine.add(text("a", 10, first_token=0))
    step(engine)
    b = text("b", 11, first_token=0)
    engine.add(b)
    assert step(engine) == [("a", 10, 11, True), ("b", 8, 11, True)]
    assert (b.num_cached_tokens, engine.pool.num_hit_tokens) == (8, 8)
    assert blocks(engine, "a")[:2] == b.block_ids[:2]


def test_rows_of_the_same_step_are_no_hit() -> None:
    engine = scheduler(enable_prefix_caching=True)
    engine.add(text("a", 10, first_token=0))
    engine.add(text("b", 10, first_token=0))
    assert step(engine) == [("a", 0, 10, True), ("b", 0, 10, True)]
    assert not set(blocks(engine, "a")) & set(blocks(engine, "b"))


def test_a_hit_never_covers_the_last_row() -> None:
    engine = scheduler(enable_prefix_caching=True)
    engine.add(text("a", 8, first_token=0))
    step(engine)
    engine.add(text("b", 8, first_token=0))
    assert step(engine)[1] == ("b", 4, 8, True)


@pytest.mark.parametrize(("alignment", "start"), [(1, 16), (8, 16), (6, 12), (20, 0)])
def test_hits_are_rounded_down_to_the_alignment(alignment: int, start: int) -> None:
    engine = scheduler(enable_prefix_caching=True, prefill_alignment=alignment)
    engine.add(text("a", 19, first_token=0))
    step(engine)
    engine.add(text("b", 19, first_token=0))
    engine.abort("a")
    assert step(engine) == [("b", start, 19, True)]


def test_hits_end_before_single_from() -> None:
    engine = scheduler(enable_prefix_caching=True)
    engine.add(text("a", 19, first_token=0))
    step(engine)
    engine.abort("a")
    engine.add(text("b", 19, single_from=9, first_token=0))
    assert step(engine) == [("b", 8, 9, False)]


def test_a_preempted_request_comes_back_on_its_own_cached_rows() -> None:
    engine = scheduler(max_num_seqs=2, max_model_len=16, num_blocks=6, enable_prefix_caching=True)
    older, newer = text("older", 6), text("newer", 11)
    engine.add(older)
    engine.add(newer)
    while not newer.num_preemptions:
        step(engine)
    engine.finish(older, FinishReason.STOP)
    (row,) = step(engine)
    assert row == ("newer", 8, newer.num_tokens - 1, True)
    assert newer.num_cached_tokens == 0  # its prompt was computed cold


def test_a_preempted_request_whose_rows_were_forgotten_registers_them_again() -> None:
    engine = scheduler(max_num_seqs=2, max_model_len=16, num_blocks=5, enable_prefix_caching=True)
    older, newer = text("older", 7), text("newer", 7, first_token=0)
    engine.add(older)
    engine.add(newer)
    while older.num_tokens < 16:
        step(engine)
    step(engine, extend=False)  # `older` has every block
    engine.finish(older, FinishReason.LENGTH)
    assert step(engine)[0][:2] == ("newer", 0)
    engine.abort("newer")
    engine.add(text("c", 7, first_token=0))
    assert step(engine) == [("c", 4, 7, True)]


def test_shared_blocks_are_not_counted_against_an_admission() -> None:
    engine = scheduler(max_model_len=16, num_blocks=6, enable_prefix_caching=True)
    engine.add(text("a", 14, first_token=0))
    step(engine)
    engine.add(text("b", 14, first_token=0))
    assert step(engine) == [("a", 14, 15, True), ("b", 12, 14, True)]
    assert engine.pool.num_free == 0


def test_other_media_behind_the_same_placeholders_is_no_hit() -> None:
    engine = scheduler(enable_prefix_caching=True)
    for name, key in (("a", b"cat"), ("b", b"dog"), ("c", b"cat")):
        request = text(name, 14, first_token=0)
        request.content_keys = {5: key}
        engine.add(request)
        assert step(engine)[-1][:2] == (name, {"a": 0, "b": 4, "c": 12}[name])


def test_a_request_whose_inputs_are_not_at_hand_is_passed_over_until_they_are() -> None:
    engine = scheduler(max_num_seqs=2)
    media = text("media", 9)
    media.absent_end = 6
    engine.add(media)
    engine.add(text("b", 2))
    assert step(engine) == [("b", 0, 2, True)]
    assert (media.slot, media.block_ids) == (-1, [])
    media.absent_end = 0
    assert step(engine) == [("b", 2, 3, True), ("media", 0, 9, True)]


@pytest.mark.parametrize(("absent_end", "starts"), [(8, True), (9, False)])
def test_a_hit_stands_in_for_inputs_only_when_it_covers_them_all(absent_end: int, starts: bool) -> None:
    engine = scheduler(enable_prefix_caching=True)
    engine.add(text("a", 11, first_token=0))
    step(engine)
    engine.abort("a")
    again = text("again", 11, first_token=0)
    again.absent_end = absent_end
    engine.add(again)
    assert engine.num_hit_tokens(again) == 8
    assert engine.has_work() == starts
    assert (engine.schedule() is not None) == starts
    assert again.num_computed_tokens == (8 if starts else 0)


def test_rows_of_a_prompt_arrive_many_at_a_time_and_never_leave() -> None:
    engine = scheduler()
    late = text("late", 9)
    late.num_tokens = 2
    engine.add(late)
    assert step(engine) == [("late", 0, 2, False)]
    engine.arrived(late, 7)
    assert step(engine) == [("late", 2, 7, False)]
    for wrong in (6, 10):
        with pytest.raises(RuntimeError, match=f"knows 7 rows of a prompt of 9: {wrong} is not between"):
            engine.arrived(late, wrong)


# -- everything at once ------------------------------------------------------------------------------------------------


@dataclass
class Client:
    """What the world does with one request: how many tokens it draws, and which rows have arrived so far."""

    request: EngineRequest
    prompt: list[int]
    max_tokens: int
    streams: bool  # rows past the prompt need one more arrival each, as in the Talker
    arrived: int  # rows whose other half has come
    drawn: dict[int, int] = field(default_factory=dict)  # row -> token

    def content(self, row: int) -> tuple[int, ...]:
        """What the cache must hold for a row: it depends on every token before it."""
        return (*self.prompt, *(self.drawn[r] for r in sorted(self.drawn)))[: row + 1]


class World:
    """Runs a scheduler against a model of the KV cache in which each cell holds the whole prefix it was made from."""

    def __init__(self, seed: int, config: SchedulerConfig, streams: bool, by_slack: bool) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.scheduler = Scheduler(config)
        self.streams = streams
        self.by_slack = by_slack
        self.clients: dict[str, Client] = {}
        self.computed: dict[str, int] = {}
        self.cells: dict[int, tuple[int, ...]] = {}
        self.num_added = self.num_finished = self.num_steps = 0

    def add(self) -> None:
        rng, limit = self.random, self.config.max_model_len
        length = rng.randint(1, limit * 2 // 3)
        shared = rng.randrange(3)
        prompt = [shared] * min(length, rng.randrange(limit)) + [rng.randrange(3) for _ in range(length)]
        prompt = prompt[:length]
        name = f"r{self.num_added}"
        self.num_added += 1
        known = rng.randint(0, length) if self.streams else length
        request = EngineRequest(
            request_id=name,
            params=PARAMS,
            num_prompt_tokens=length,
            num_tokens=known,
            token_ids=prompt[:known] if self.config.enable_prefix_caching else [],
            single_from=rng.choice([None, length, max(0, length - 2)]),
            absent_end=rng.choice([0, rng.randint(0, length)]),
        )
        client = Client(request, prompt, rng.randint(1, limit - length + 1), self.streams, known)
        self.clients[name] = client
        self.computed[name] = 0
        self.scheduler.add(request)

    def arrive(self, client: Client) -> None:
        client.arrived += 1
        self.extend(client)

    def extend(self, client: Client) -> None:
        """Make known what can be: prompt rows that arrived, then drawn rows (whose other half arrived)."""
        request = client.request
        while True:
            row = request.num_tokens
            if row < request.num_prompt_tokens:
                if row >= client.arrived:
                    return
                token = client.prompt[row]
            else:
                if row - 1 not in client.drawn or (client.streams and row >= client.arrived):
                    return
                token = client.drawn[row - 1]
            self.scheduler.extend(request, token if self.config.enable_prefix_caching else None)

    def bring(self, client: Client) -> None:
        """The inputs of rows are at hand, or, once the rows are computed, no longer."""
        request = client.request
        request.absent_end = self.random.randint(0, request.num_computed_tokens)

    def forget(self, name: str) -> None:
        del self.clients[name]
        self.num_finished += 1

    def step(self) -> bool:
        if self.by_slack and self.clients:  # what is due when changes all the time
            client = self.random.choice(list(self.clients.values()))
            client.request.due_at = self.random.choice([-inf, *range(10)])
        promised = self.scheduler.has_work()
        spares = self.random.choice([None, 0, 5, 100]) if self.by_slack else None
        before = {name: (c.request.num_computed_tokens, list(c.request.block_ids)) for name, c in self.clients.items()}
        batch = self.scheduler.schedule(None if spares is None else lambda due_at: spares)
        assert promised == (batch is not None)
        if batch is None:
            return False
        self.num_steps += 1
        self.check(batch, before)
        self.scheduler.update(batch)
        for row in batch.rows:
            if row.samples:
                self.draw(row.request, row.start + row.num_tokens - 1)
        return True

    def draw(self, request: EngineRequest, row: int) -> None:
        client = self.clients[request.request_id]
        assert row >= request.num_prompt_tokens - 1
        assert row not in client.drawn
        client.drawn[row] = self.random.randrange(3)
        assert len(client.drawn) == row - request.num_prompt_tokens + 2  # no row was skipped
        if len(client.drawn) == client.max_tokens:
            self.scheduler.finish(request, FinishReason.LENGTH)
            self.forget(request.request_id)
        else:
            self.scheduler.sampled(request)
            self.extend(client)

    def check(self, batch: ScheduledBatch, before: dict[str, tuple[int, list[int]]]) -> None:
        config, size = self.config, self.config.block_size
        for request in batch.preempted:
            assert before[request.request_id][1]
            assert request.block_ids == []
            self.computed[request.request_id] = 0
        scheduled = [row.request.request_id for row in batch.rows]
        assert len(set(scheduled)) == len(scheduled)
        assert not set(scheduled) & {request.request_id for request in batch.preempted}
        assert 0 < batch.num_tokens <= config.max_num_batched_tokens
        lengths = [row.num_tokens for row in batch.rows]
        assert lengths == sorted(lengths, key=lambda n: n > 1)
        holders: dict[int, int] = {}
        slots = [client.request.slot for client in self.clients.values() if client.request.slot >= 0]
        assert len(set(slots)) == len(slots) <= config.max_num_seqs
        for client in self.clients.values():
            for block_id in client.request.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        assert 0 not in holders
        assert len(holders) == self.scheduler.pool.num_used

        for row in batch.rows:  # what a row writes is its own; the whole batch is written before it is read
            request, end = row.request, row.start + row.num_tokens
            name, client = request.request_id, self.clients[row.request.request_id]
            assert not request.parked
            assert len(request.block_ids) * size >= end
            assert 0 <= request.slot < config.max_num_seqs
            if row.start != self.computed[name]:  # only a prefix hit starts elsewhere
                assert config.enable_prefix_caching
                assert self.computed[name] == 0 and not before[name][1]
                assert row.start % size == row.start % config.prefill_alignment == 0
            if not before[name][1]:
                assert row.start >= request.absent_end
            assert end <= request.num_tokens
            single_from = request.single_from
            if single_from is not None:
                assert row.start < single_from >= end or row.num_tokens == 1
            whole = (
                request.num_tokens >= request.num_prompt_tokens and end == request.num_tokens
            ) or end == single_from
            assert whole or row.num_tokens == 1 or end % config.prefill_alignment == 0
            self.computed[name] = end
            for position in range(row.start, end):
                block_id = request.block_ids[position // size]
                assert holders[block_id] == 1
                self.cells[block_id * size + position % size] = client.content(position)
        for row in batch.rows:
            request, client = row.request, self.clients[row.request.request_id]
            for position in range(row.start + row.num_tokens):
                cell = request.block_ids[position // size] * size + position % size
                assert self.cells[cell] == client.content(position)

    def operate(self) -> None:
        rng = self.random
        clients = list(self.clients.values())
        action = rng.random()
        if action < 0.12 and len(clients) < 10:
            self.add()
        elif action < 0.14 and clients:
            name = rng.choice(clients).request.request_id
            assert self.scheduler.abort(name) is not None
            self.forget(name)
        elif action < 0.20 and clients:
            self.scheduler.park(rng.choice(clients).request.request_id)
        elif action < 0.30 and clients:
            self.scheduler.unpark(rng.choice(clients).request.request_id)
        elif action < 0.55 and clients and self.streams:
            self.arrive(rng.choice(clients))
        elif action < 0.62 and clients:
            self.bring(rng.choice(clients))
        else:
            self.step()

    def drain(self) -> None:
        """Credit and rows keep coming: everyone finishes."""
        for _ in range(3000):
            for client in list(self.clients.values()):
                self.scheduler.unpark(client.request.request_id)
                if not client.request.block_ids and self.random.random() < 0.5:
                    self.bring(client)
                if client.streams and self.random.random() < 0.5:
                    self.arrive(client)
            self.step()
            if not self.clients:
                break
        assert self.num_finished == self.num_added
        assert not self.scheduler.has_work()
        assert self.scheduler.schedule() is None
        assert self.scheduler.pool.num_used == 0
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.num_parked) == (0, 0, 0)


@pytest.mark.parametrize(("streams", "by_slack"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("alignment", "num_blocks"), [(1, 10), (1, 40), (8, 10), (6, 14)])
def test_random_operations_keep_every_promise(
    streams: bool, by_slack: bool, caching: bool, alignment: int, num_blocks: int
) -> None:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=alignment + 7,
        max_model_len=32,
        block_size=4,
        num_blocks=num_blocks,
        prefill_alignment=alignment,
        enable_prefix_caching=caching,
    )
    num_preemptions = num_hits = 0
    for seed in range(4):
        world = World(seed, config, streams, by_slack)
        for _ in range(600):
            world.operate()
        world.drain()
        num_preemptions += world.scheduler.num_preemptions
        num_hits += world.scheduler.pool.num_hit_tokens
    if num_blocks == 10:
        assert num_preemptions > 0
    assert (num_hits > 0) == caching
