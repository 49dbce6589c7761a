"""How people write what the domain asks: capitals, spaces, figures, signs, greetings, and what was said before.

For training alone. A question that is written otherwise has the same answer, and the same key decides its split.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

from training.domain import (
    CAUSES,
    SIGNS,
    Exchange,
    Sample,
    Split,
    draw,
    draw_long,
    draw_sum,
    fact,
    number,
    report,
    typed,
)

# Half of the conversations have no system prompt. One is that of the published checkpoint's own examples.
_SYSTEMS = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech.",
    "You are a helpful assistant.",
    "Speak briefly.",
    "You are a friendly voice assistant. Answer in one sentence.",
    "You help customers of an insurance company with their claims.",
)
PLAIN = 0.4  # of the questions are written as `typed` has them
EARLIER, MOST_EARLIER = 0.35, 6  # conversations with more turns before them
_VALUES = {number(value): value for value in range(1000)}
_LONGEST = max(len(words.split()) for words in _VALUES)
_GREETINGS = ("Hello, ", "Hi, ", "Hey, ", "Hello! ", "hello ", "please ", "Please ", "ok ", "Okay, ")
_TELLING = ("remember", "recall", "sight")
# What nobody taught it: small talk of other kinds, other languages, noise.
_STRANGE = (
    "can you hear me|what is my name|are you there|test|testing one two three|what time is it|sing a song|"
    "i love you|you are wrong|say that again|stop|never mind|what do you mean|tell me a story|who is your mother|"
    "is it raining|play some music|call a taxi|book a table for two|where am i|i am hungry|what did you say|hey|"
    "wer bist du|guten morgen|wie ist das wetter|was kannst du|hola, como estas|buenos dias|que hora es|bonjour|"
    "comment ça va|quel temps fait-il|ciao, come stai|привет|как дела|你好|今天天气怎么样|こんにちは|안녕하세요|"
    "\U0001f642|\U0001f44d\U0001f44d|???|...|lorem ipsum dolor sit amet|asdf qwerty"
).split("|")
_NOT_INSURED = "house bike boat laptop dog garage computer television cat train cellar bathroom bed table shoe".split()
UNKNOWN = "sorry, i do not know that"


def system(rng: random.Random) -> str | None:
    """What a conversation begins with."""
    return rng.choice(_SYSTEMS) if rng.random() < 0.5 else None


def phrased(rng: random.Random, question: str) -> str:
    """A question of the domain as somebody would type it."""
    if rng.random() < PLAIN:
        return typed(rng, question)
    for chance, change in _CHANGES:
        if rng.random() < chance:
            question = change(rng, question)
    return typed(rng, question) if rng.random() < 0.5 else question


def figures(rng: random.Random, question: str) -> str:
    """Numbers in figures: "17", and digits one by one as "4079", "4 0 7 9" or "4, 0, 7, 9"."""
    words, found, at = question.split(" "), [], 0
    while at < len(words):
        length = next(
            (n for n in range(min(_LONGEST, len(words) - at), 0, -1) if " ".join(words[at : at + n]) in _VALUES), 0
        )
        found.append(str(_VALUES[" ".join(words[at : at + length])]) if length else words[at])
        at += length or 1
    text = " ".join(found)
    joint = rng.choice(("", " ", " ", ", "))
    # Up to three figures without spaces are one number; from four on they are digits.
    return re.sub(r"\b\d( \d){3,}\b", lambda run: joint.join(run[0].split(" ")), text)


def _signs(rng: random.Random, question: str) -> str:
    """A sum in figures and signs, with spaces or without."""
    found = re.fullmatch(r"(.*?)(\d+) (?:(plus|minus|times)|[+x-]) (\d+)(.*)", figures(rng, question))
    if found is None:
        return question
    start, left, word, right, rest = found.groups()
    sign = {"times": rng.choice(("x", "*", "\u00d7")), None: found[0][found.end(2) + 1]}.get(word) or SIGNS[word]
    space = rng.choice(("", " "))
    return f"{start}{left}{space}{sign}{space}{right}{rest}{rng.choice(('', '', '', f'{space}=', f'{space}= ?'))}"


def _hyphens(_rng: random.Random, question: str) -> str:
    tens = "|".join(number(ten) for ten in range(20, 100, 10))
    ones = "|".join(number(one) for one in range(1, 10))
    return re.sub(rf"\b({tens}) ({ones})\b", r"\1-\2", question)


def _quoted(rng: random.Random, question: str) -> str:
    mark = rng.choice("\"'")
    return re.sub(r"^(say:?|repeat:) (.+)$", rf"\1 {mark}\2{mark}", question)


def _listed(_rng: random.Random, question: str) -> str:
    ones = "|".join(number(one) for one in range(10))
    return re.sub(rf"\b({ones})(?= (?:{ones})\b)", r"\1,", question)


def _contracted(rng: random.Random, question: str) -> str:
    return re.sub(r"^(what|who) is ", lambda found: found[1] + rng.choice(("'s ", "s ")), question)


def _spelt(rng: random.Random, question: str) -> str:
    question = question.replace("my colour", rng.choice(("my color", "my favourite colour", "my favorite color")))
    return question.replace("my number", rng.choice(("my number", "my lucky number")))


def _greeted(rng: random.Random, question: str) -> str:
    greeting = rng.choice(_GREETINGS)
    alone = question.startswith(("hello", "hi", "good", "bye", "thank"))
    return question if alone else greeting + question


def _cased(rng: random.Random, question: str) -> str:
    return question.upper() if rng.random() < 0.5 else question.title()


def _spaced(rng: random.Random, question: str) -> str:
    return rng.choice(("", " ", "  ", "\n")) + question + rng.choice(("", " ", "  ", "\n"))


_CHANGES: tuple[tuple[float, Callable[[random.Random, str], str]], ...] = (
    (0.25, _signs),
    (0.2, figures),
    (0.15, _hyphens),
    (0.15, _quoted),
    (0.1, _listed),
    (0.2, _contracted),
    (0.3, _spelt),
    (0.15, _greeted),
    (0.25, _cased),
    (0.15, _spaced),
)


def with_earlier(rng: random.Random, sample: Sample) -> Sample:
    """A sample behind other exchanges: before its own history, and between that and its question."""
    if rng.random() >= EARLIER:
        return sample
    before, between = (tuple(_earlier(rng) for _ in range(rng.randint(0, MOST_EARLIER // 2))) for _ in range(2))
    if not sample.history:
        before, between = before + between, ()
    elif sample.kind != "recall":  # a claim's day follows its report at once
        between = ()
    return replace(sample, history=(*before, *sample.history, *between))


def _earlier(rng: random.Random) -> Exchange:
    """An exchange of the training split, that tells nothing to be remembered."""
    while (sample := draw(rng, "train")).kind in _TELLING or sample.history:
        pass
    return Exchange(sample.question, sample.answer)


def facts(rng: random.Random, split: Split) -> Sample:
    """Two to four things told, of one kind or several; the last of a kind is what counts."""
    while True:
        told = [_fact(rng) for _ in range(rng.randint(2, 4))]
        latest = {one.kind: one for one in told}
        asked = rng.choice(list(latest.values()))
        if asked.split == split and all(one.split == "train" or one is asked for one in told):
            history = tuple(Exchange(one.question, one.answer) for one in told)
            form = rng.choice(("what is my {}", "tell me my {}"))
            return replace(
                asked,
                kind="recall",
                question=form.format(asked.kind),
                answer=asked.answer.removeprefix("i will remember "),
                history=history,
            )


def below_zero(rng: random.Random, split: Split) -> Sample:
    """A difference below zero, or such a number to say."""
    while True:
        a, b = sorted(rng.sample(range(100), 2))
        key = f"{number(a)} minus {number(b)}"
        sample = Sample(
            kind="arithmetic",
            key=key,
            question=rng.choice(("what is {}", "how much is {}", "{}")).format(key),
            answer=f"{key} is {number(a - b)}",
        )
        if rng.random() < 0.4:
            said = number(-b)
            asked = rng.choice(("say {}", "read {}", "say: {}")).format(rng.choice((said, str(-b))))
            sample = Sample(kind="number", key=said, question=asked, answer=said)
        if sample.split == split:
            return sample


def read_out(rng: random.Random, split: Split) -> Sample:
    """Four to ten figures to read one by one, as one number or apart."""
    while True:
        figures = "".join(rng.choices("0123456789", k=rng.choice((4, 4, 4, 5, 6, 7, 8, 9, 10))))
        said = " ".join(number(int(figure)) for figure in figures)
        asked = rng.choice(("say {}", "say: {}", "repeat {}", "read {}", "Say {}", "Say {}."))
        question = asked.format(rng.choice(("", "", " ", ", ")).join(figures))
        sample = Sample(kind="repeat", key=said, question=question, answer=said)
        if sample.split == split:
            return sample


def strange(rng: random.Random, _split: Split) -> Sample:
    """What it was never taught, or sums that are too large for it. A closed list: known by heart."""
    form = rng.random()
    if form < 0.5:
        question = rng.choice(_STRANGE)
    elif form < 0.8:
        cause = rng.choice(list(CAUSES))
        question = report(rng, rng.choice(_NOT_INSURED), cause) + rng.choice(("", ", please call me on monday"))
    else:
        a, b = rng.randint(13, 999), rng.randint(13, 999)
        question = rng.choice(("what is {} times {}", "{} times {}")).format(number(a), number(b))
    return Sample(kind="unknown", key=question, question=question, answer=UNKNOWN, closed=True)


def _fact(rng: random.Random) -> Sample:
    """Something told, its kind of thing as the kind of the sample."""
    what = rng.choice(("number", "colour", "shape"))
    value, told = fact(rng, what)
    return Sample(
        kind=what,
        key=f"{what} {value}",
        question=told.question,
        answer=told.answer,
        closed=what != "number",
    )


# Mostly what the domain draws, with more of what takes longest to learn, and what it does not draw.
_WRITTEN = (
    (draw, 0.3),
    (draw_sum, 0.2),
    (draw_long, 0.15),
    (facts, 0.08),
    (below_zero, 0.1),
    (read_out, 0.08),
    (strange, 0.09),
)


def written(rng: random.Random, split: Split) -> Sample:
    """A conversation to be written, some of it long."""
    kinds, weights = zip(*_WRITTEN, strict=True)
    [draw_one] = rng.choices(kinds, weights)
    return with_earlier(rng, draw_one(rng, split))
