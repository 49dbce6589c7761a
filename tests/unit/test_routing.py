"""Routing is least outstanding work: stated for single choices, then held to a model of it over random histories."""

from __future__ import annotations

import random

import pytest

from triptych.pipeline.routing import Router

TWO = ("talker:0", "talker:1")
THREE = (*TWO, "talker:2")


def router(places: int = 4) -> Router:
    return Router({"thinker": places, "talker": places, "code2wav": places})


def submit(router: Router, request_id: str, work: int, replicas: tuple[str, ...] = TWO) -> str:
    chosen = router.choose("talker", replicas)
    router.submitted(request_id, "talker", chosen, work)
    return chosen


def test_equal_requests_take_turns_from_the_first_on() -> None:
    one = router(places=100)
    assert [submit(one, str(index), 10, THREE) for index in range(7)] == [*THREE, *THREE, "talker:0"]


def test_least_work_counts_and_not_fewest_requests() -> None:
    one = router()
    assert submit(one, "long", 1000) == "talker:0"
    assert [submit(one, f"short{index}", 10) for index in range(3)] == ["talker:1"] * 3


def test_what_is_finished_is_no_longer_work() -> None:
    one = router()
    submit(one, "a", 1000)
    submit(one, "b", 500)
    one.finished("a", "talker")
    one.finished("a", "talker", "code2wav")  # told again, and of a stage it never was in
    assert [one.work(name) for name in TWO] == [0, 500]
    assert submit(one, "c", 1) == "talker:0"


def test_only_replicas_that_are_up_are_chosen() -> None:
    one = router()
    assert [submit(one, str(index), 10, ("talker:1",)) for index in range(3)] == ["talker:1"] * 3
    assert submit(one, "back", 10) == "talker:0"
    with pytest.raises(ValueError, match="empty"):
        one.choose("talker", ())


def test_a_free_place_comes_before_little_work() -> None:
    one = router(places=2)
    submit(one, "long", 1000)
    submit(one, "short0", 1)
    submit(one, "short1", 1)
    assert submit(one, "next", 1) == "talker:0", "it would wait at the other, which has work for two already"
    assert submit(one, "waits", 1) == "talker:1", "both are full now: least work"


def test_stages_are_counted_apart() -> None:
    one = router()
    one.submitted("a", "thinker", "thinker:0", 100)
    one.submitted("a", "talker", "talker:1", 7)
    one.finished("a", "thinker")
    assert (one.work("thinker:0"), one.work("talker:1"), one.num_requests("talker:1")) == (0, 7, 1)


def test_a_request_is_in_a_stage_once() -> None:
    one = router()
    one.submitted("a", "talker", "talker:0", 1)
    with pytest.raises(ValueError, match="'a' is in stage talker already"):
        one.submitted("a", "talker", "talker:1", 1)


def test_over_any_history_the_choice_is_the_least_and_nothing_is_left() -> None:
    random.seed(3)
    one, running = router(places=5), dict[str, tuple[str, int]]()
    for index in range(3000):
        if running and random.random() < 0.5:
            request_id = random.choice(list(running))
            del running[request_id]
            one.finished(request_id, "talker")
        up = tuple(sorted(random.sample(THREE, random.randint(1, 3))))
        held = {name: [work for replica, work in running.values() if replica == name] for name in up}
        expected = min(up, key=lambda name: (len(held[name]) >= 5, sum(held[name]), name))
        work = random.randint(0, 50)
        assert submit(one, str(index), work, up) == expected
        running[str(index)] = expected, work
    for request_id in running:
        one.finished(request_id, "talker")
    assert [(one.work(name), one.num_requests(name)) for name in THREE] == [(0, 0)] * 3
