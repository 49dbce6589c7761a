"""The closed domain of the tiny voice: conversations of about 140 words, and the answer each must get.

Everything is drawn from a seeded generator. A sample's key decides by its hash whether it is held out, so training and
evaluation never share a question whose answer has to be worked out.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 12
LONG_PHRASE = 9  # words
_ENOUGH = 4000  # sentences to meet every word in

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = ["", "", *"twenty thirty forty fifty sixty seventy eighty ninety".split()]
COLOURS = "red blue green yellow orange purple black white".split()
SHAPES = "circle square triangle star cross diamond heart".split()
DIRECTIONS = "left right up down".split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
OBJECTS = "car roof window door kitchen bicycle phone garden fence wall".split()
# What hit, as a customer says it: how the answer names it, and how urgent it is.
CAUSES = {
    "hail": ("hail", "high"),
    "fire": ("fire", "high"),
    "water": ("water", "high"),
    "a storm": ("storm", "high"),
    "an animal": ("animal", "low"),
    "an accident": ("accident", "low"),
}
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "times": lambda a, b: a * b,
}
SIGNS = {"plus": "+", "minus": "-", "times": "x"}
NAME = "triptych"


class Exchange(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation: what was said before, the question, the answer. Splits are made by `key`."""

    kind: str
    key: str
    question: str
    answer: str
    history: tuple[Exchange, ...] = ()
    closed: bool = False

    @property
    def split(self) -> Split:
        """Samples of a closed list cannot be held out: there is nothing to work out, and no other to train on."""
        held_out = not self.closed and zlib.crc32(self.key.encode()) % HELD_OUT_ONE_IN == 0
        return "held_out" if held_out else "train"


def number(value: int) -> str:
    """A whole number below a thousand in words, without "and": 142 is "one hundred forty two"."""
    if not -1000 < value < 1000:
        raise ValueError(f"{value} has more than three digits")
    if value < 0:
        return f"minus {number(-value)}"
    if value < 20:
        return ONES[value]
    if value < 100:
        return TENS[value // 10] + (f" {ONES[value % 10]}" if value % 10 else "")
    return f"{ONES[value // 100]} hundred" + (f" {number(value % 100)}" if value % 100 else "")


_FOREIGN = (
    "what is the {}",
    "what is a {}",
    "tell me about the {}",
    "write a poem about the {}",
    "where is the {}",
    "who made the {}",
    "why is the {} so big",
    "how old is the {}",
    "can you find the {} and the {}",
    "do you like the {} or the {}",
    "explain the {} to me",
    "translate {} and {}",
    "when does the {} start",
    "is the {} better than the {}",
)
_TOPICS = (
    "weather in paris,capital of france,sea,moon,president,news,price of bread,river,mountain,song,film,book,"
    "city,train,dog,cat,school,teacher,doctor,king,war,peace,history of rome,meaning of life,time,date,"
    "universe,computer,language,recipe for soup,football,ocean,forest,sun,market,bank,letter,email,code,story,"
    "joke,winter,summer,island,bridge,ship,airport,museum,painting,theory of everything,tallest building,"
    "fastest animal,best hotel"
).split(",")


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def coloured(colour: str, shape: str) -> str:
    return f"{article(colour)} {colour} {shape}"


def spell(digits: str) -> str:
    return " ".join(ONES[int(digit)] for digit in digits)


SPOKEN_WORDS = [*ONES, *TENS[2:], "hundred", *COLOURS, *SHAPES, *DIRECTIONS, *DAYS, *OBJECTS, "plus", "minus", "times"]
# Closed lists: several ways to ask, one answer.
GREETING = "hello, how can i help you"
SMALL_TALK = [
    Exchange("hello", GREETING),
    Exchange("hi", GREETING),
    Exchange("hello there", GREETING),
    Exchange("good morning", "good morning, how can i help you"),
    Exchange("good evening", "good evening, how can i help you"),
    Exchange("who are you", f"i am {NAME}, a tiny voice"),
    Exchange("what are you", f"i am {NAME}, a tiny voice"),
    Exchange("what is your name", f"my name is {NAME}"),
    Exchange("what can you do", "i can count, see shapes and take your claim"),
    Exchange("how are you", "i am very well, thank you"),
    Exchange("thank you", "you are welcome"),
    Exchange("thanks", "you are welcome"),
    Exchange("thank you very much", "you are very welcome"),
    Exchange("goodbye", "goodbye, have a nice day"),
    Exchange("bye", "goodbye, have a nice day"),
]


def customer_line(item: str, cause: str, day: str) -> str:
    """The call-back sentence for the customer."""
    return f"your claim for {CAUSES[cause][0]} damage to the {item} is noted, we will call you back on {day}"


def adjuster_line(item: str, cause: str, picture: str = "") -> str:
    """The structured line for the adjuster; made of words, so that it can be spoken too."""
    name, urgency = CAUSES[cause]
    line = f"claim: {item}, cause: {name}, urgency: {urgency}"
    return f"{line}, picture: {picture}" if picture else line


def _operands(rng: random.Random, operation: str) -> tuple[int, int]:
    if operation == "times":
        return rng.randint(0, 12), rng.randint(0, 12)
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    return (max(a, b), min(a, b)) if operation == "minus" else (a, b)


def _arithmetic(rng: random.Random) -> Sample:
    operation = rng.choice(list(OPERATIONS))
    a, b = _operands(rng, operation)
    key = f"{number(a)} {operation} {number(b)}"
    asked = f"{a} {SIGNS[operation]} {b}" if rng.random() < 0.25 else key
    return Sample(
        kind="arithmetic",
        key=key,
        question=rng.choice(("what is {}", "what is {}", "how much is {}", "{}")).format(asked),
        answer=f"{key} is {number(OPERATIONS[operation](a, b))}",
        closed=operation == "times",  # the multiplication table is known by heart, not worked out
    )


def _phrase(rng: random.Random) -> str:
    """A few words to repeat: digits, numbers, coloured shapes, or any words of the domain in any order."""
    form = rng.random()
    if form < 0.4:
        return spell("".join(rng.choice("0123456789") for _ in range(rng.choice((2, 3, 4, 4, 4, 5, 6, 8, 10)))))
    if form < 0.55:
        return number(rng.randint(0, 999))
    if form < 0.65:
        return coloured(rng.choice(COLOURS), rng.choice(SHAPES))
    longest = 30 if rng.random() < 0.15 else 8
    return " ".join(rng.choice(SPOKEN_WORDS) for _ in range(rng.randint(1, longest)))


def _repeat(rng: random.Random) -> Sample:
    phrase = _phrase(rng)
    return Sample(
        kind="repeat",
        key=phrase,
        question=rng.choice(("say: {}", "say {}", "repeat: {}")).format(phrase),
        answer=phrase,
    )


def _numeral(rng: random.Random) -> Sample:
    value = rng.randint(0, 999) if rng.random() < 0.7 else rng.randint(0, 99)
    return Sample(
        kind="number",
        key=number(value),
        question=rng.choice(("say {}", "read {}", "{}")).format(value),
        answer=number(value),
    )


def _small_talk(rng: random.Random) -> Sample:
    chosen = rng.choice(SMALL_TALK)
    return Sample(kind="small_talk", key=chosen.question, question=chosen.question, answer=chosen.answer, closed=True)


def report(rng: random.Random, item: str, cause: str) -> str:
    return rng.choice(
        (
            "{c} damaged my {i}",
            "my {i} was damaged by {c}",
            "my {i} is broken, it was {c}",
            "there is damage to the {i} from {c}",
            "i have a claim: {c} hit the {i}",
        )
    ).format(c=cause, i=item)


def _claim(rng: random.Random) -> Sample:
    """A report of damage gives the call-back sentence, or asks for a day; for the adjuster, the structured line."""
    item, cause, day = rng.choice(OBJECTS), rng.choice(list(CAUSES)), rng.choice(DAYS)
    told, form = report(rng, item, cause), rng.random()
    opened = f"your claim for {CAUSES[cause][0]} damage to the {item} is noted, when may we call you"
    if form < 0.2:
        return Sample(kind="triage", key=told, question=f"triage: {told}", answer=adjuster_line(item, cause))
    if form < 0.35:
        picture = f"{rng.choice(COLOURS)} {rng.choice(SHAPES)}"
        return Sample(
            kind="triage",
            key=f"{item} {cause} {picture}",
            question=f"triage: {told}, picture: {picture}",
            answer=adjuster_line(item, cause, picture),
        )
    if form < 0.5:
        return Sample(kind="claim", key=told, question=told, answer=opened)
    when = rng.choice(("call me on {}", "please call on {}")).format(day)
    if form < 0.6:
        return Sample(
            kind="claim",
            key=f"{item} {day}",
            question=rng.choice((when, f"on {day}", day)),
            answer=f"thank you, we will call you back about the {item} on {day}",
            history=(Exchange(told, opened),),
        )
    return Sample(
        kind="claim",
        key=f"{item} {cause} {day}",
        question=f"{told}, {when}",
        answer=customer_line(item, cause, day),
    )


def _unknown(rng: random.Random) -> Sample:
    """Everyday questions outside the domain: the voice says that it cannot answer."""
    question = rng.choice(_FOREIGN).format(rng.choice(_TOPICS), rng.choice(_TOPICS))
    return Sample(kind="unknown", key=question, question=question, answer="sorry, i do not know that")


def fact(rng: random.Random, what: str) -> tuple[str, Exchange]:
    """A number, colour or shape, and how it is told."""
    value = {
        "number": number(rng.randint(0, 99)) if rng.random() < 0.6 else spell(f"{rng.randint(0, 9999):04d}"),
        "colour": rng.choice(COLOURS),
        "shape": rng.choice(SHAPES),
    }[what]
    return value, Exchange(f"my {what} is {value}", f"i will remember your {what} is {value}")


def _recall(rng: random.Random) -> Sample:
    """Something told in an earlier turn is asked for; up to two other exchanges lie between."""
    what = rng.choice(("number", "number", "colour", "shape"))
    value, told = fact(rng, what)
    key, closed = f"{what} {value}", what != "number"
    if rng.random() < 0.35:
        return Sample(kind="remember", key=key, question=told.question, answer=told.answer, closed=closed)
    return Sample(
        kind="recall",
        key=key,
        question=rng.choice(("what is my {}", "tell me my {}")).format(what),
        answer=f"your {what} is {value}",
        history=(told, *(_filler(rng) for _ in range(rng.choice((0, 0, 1, 2))))),
        closed=closed,
    )


def _filler(rng: random.Random) -> Exchange:
    """An exchange that never gives a held-out answer away."""
    while True:
        sample = rng.choices((_arithmetic, _repeat, _small_talk), (3, 3, 1))[0](rng)
        if sample.split == "train":
            return Exchange(sample.question, sample.answer)


def _seen(rng: random.Random) -> Sample:
    """What the answers to pictures and videos say; asked here in words, so that the voice knows them too."""
    colour, shape, way = rng.choice(COLOURS), rng.choice(SHAPES), rng.choice(DIRECTIONS)
    thing, form = f"{colour} {shape}", rng.random()
    if form < 0.3:
        name = number(rng.randint(0, 999))
        return Sample(kind="sight", key=name, question=f"you see the number {name}, what is it", answer=f"it is {name}")
    if form < 0.6:
        return Sample(
            kind="sight",
            key=thing,
            question=f"you see {coloured(colour, shape)}, what is it",
            answer=f"it is {coloured(colour, shape)}",
        )
    return Sample(
        kind="sight",
        key=f"{thing} {way}",
        question=f"you see {coloured(colour, shape)} moving {way}, what is it doing",
        answer=f"the {thing} moves {way}",
    )


def typed(rng: random.Random, question: str) -> str:
    """A question in some style, days with a capital or not."""
    question = styled(rng, question)
    if rng.random() < 0.5:
        return question
    return " ".join(word.capitalize() if word.strip(".,!?") in DAYS else word for word in question.split(" "))


def styled(rng: random.Random, question: str) -> str:
    """A question with capitals and marks, or without. The tokenizer is learnt from these, and must not change."""
    form = rng.random()
    if form < 0.4:
        return question
    if form < 0.8:
        question = question[:1].upper() + question[1:]
        question = question.replace(" i ", " I ").replace(" i,", " I,")
    asks = question.lower().startswith(("what", "who", "how", "you see"))
    return question + rng.choice(("", "?" if asks else ".", "?" if asks else "!"))


_KINDS: list[tuple[Callable[[random.Random], Sample], float]] = [
    (_arithmetic, 0.35),
    (_repeat, 0.30),
    (_numeral, 0.08),
    (_small_talk, 0.05),
    (_claim, 0.16),
    (_recall, 0.10),
    (_seen, 0.06),
    (_unknown, 0.05),
]


def draw(rng: random.Random, split: Split) -> Sample:
    """One sample of a split. Closed lists belong to `train` alone."""
    while True:
        kinds, weights = zip(*_KINDS, strict=True)
        sample: Sample = rng.choices(kinds, weights)[0](rng)
        if sample.split == split:
            return sample


def draw_sum(rng: random.Random, split: Split) -> Sample:
    """One sum or difference of a split: what takes longest to learn."""
    while (sample := _arithmetic(rng)).closed or sample.split != split:
        pass
    return sample


def draw_long(rng: random.Random, split: Split) -> Sample:
    """Many words in any order, to repeat: what is lost first."""
    while (sample := _repeat(rng)).split != split or len(sample.answer.split()) < LONG_PHRASE:
        pass
    return sample


def samples(count: int, split: Split, seed: int = 0) -> list[Sample]:
    """`count` samples; the same for the same arguments."""
    rng = random.Random(f"{split}:{seed}")
    return [draw(rng, split) for _ in range(count)]


def sentences(count: int, split: Split, seed: int = 0) -> list[str]:
    """`count` different answers, for the speech data: whatever can be answered can be said."""
    rng = random.Random(f"sentences:{split}:{seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng, split).answer] = None
    return list(found)


@cache
def vocabulary() -> frozenset[str]:
    """Every word that an answer can hold."""
    return frozenset(word for sentence in sentences(_ENOUGH, "train") for word in re.findall("[a-z]+", sentence))
