"""How questions are written in training: otherwise, and never with another answer."""

from __future__ import annotations

import random

import pytest

from training.domain import OBJECTS, draw, number
from training.phrasing import UNKNOWN, below_zero, facts, figures, phrased, read_out, strange, with_earlier


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("what is seventeen plus twenty five", "what is 17 plus 25"),
        ("say: one hundred forty two", "say: 142"),
        ("say one two three", "say 1 2 3"),
        ("say: hundred red sixty", "say: hundred red 60"),
        ("hello there", "hello there"),
    ],
)
def test_figures_stand_for_the_words_that_say_them(words: str, written: str) -> None:
    assert figures(random.Random(0), words) == written


def test_four_digits_and_more_may_stand_together() -> None:
    rng = random.Random(0)
    forms = {figures(rng, "my number is four zero seven nine") for _ in range(40)}
    assert forms == {f"my number is {number}" for number in ("4079", "4 0 7 9", "4, 0, 7, 9")}


def test_a_question_keeps_its_words_however_it_is_cased_and_spaced() -> None:
    rng = random.Random(1)
    forms = {phrased(rng, "the red star moves up") for _ in range(400)}
    assert {"THE RED STAR MOVES UP", "The Red Star Moves Up"} <= {form.strip(" \n.!") for form in forms}
    assert all("red star moves up" in form.lower() for form in forms)


def test_the_last_of_what_was_told_counts_and_nothing_held_out_is_told_in_training() -> None:
    rng = random.Random(2)
    for _ in range(300):
        sample = facts(rng, "train")
        kind, value = sample.answer.removeprefix("your ").split(" is ")
        told = [
            turn.question.removeprefix(f"my {kind} is ") for turn in sample.history if f"my {kind} is" in turn.question
        ]
        assert told[-1] == value
        assert sample.question.endswith(f"my {kind}")
        assert sample.split == "train"
    held_out = facts(rng, "held_out")
    assert held_out.split == "held_out" and "number" in held_out.question


def test_other_turns_tell_nothing_that_is_asked_for() -> None:
    rng = random.Random(3)
    longest = 0
    for _ in range(400):
        plain = draw(rng, "train")
        sample = with_earlier(rng, plain)
        added = [turn for turn in sample.history if turn not in plain.history]
        assert not any("my number is" in turn.question or "my colour is" in turn.question for turn in added)
        assert (sample.question, sample.answer) == (plain.question, plain.answer)
        longest = max(longest, len(sample.history))
    assert longest >= 5


def test_differences_below_zero_and_what_was_never_taught_have_answers() -> None:
    rng = random.Random(4)
    answers = {below_zero(rng, "train").answer for _ in range(200)}
    assert all("minus" in answer for answer in answers)
    assert {strange(rng, "train").answer for _ in range(50)} == {"sorry, i do not know that"}


def test_figures_to_read_out_are_those_of_the_answer() -> None:
    rng = random.Random(7)
    forms = set()
    for _ in range(300):
        sample = read_out(rng, "train")
        asked = "".join(letter for letter in sample.question if letter.isdigit())
        assert sample.answer.split() == [number(int(figure)) for figure in asked]
        forms.add(len(asked))
    assert forms == set(range(4, 11))


def test_what_is_not_insured_is_not_known() -> None:
    rng = random.Random(8)
    questions = {sample.question for _ in range(300) if (sample := strange(rng, "train")).answer == UNKNOWN}
    assert any("my house" in question for question in questions)
    assert not any(f"my {item}" in question for question in questions for item in OBJECTS)
