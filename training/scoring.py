"""Scoring of speech by its transcript: words as the domain spells them, and their error rate.

A recogniser writes "42", "$40", "color" or "equals" where the domain says "forty two", "forty dollars", "colour" and
"is". Both sides are folded to the domain's words first. A numeral is read in whichever way fits the reference best: the
sounds of "1119" may have been "eleven nineteen" as well as "one one one nine".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import product

from training.domain import ONES, number

SAME = {
    "color": "colour", "colors": "colour", "colours": "colour", "grey": "gray", "equals": "is", "equal": "is",
    "ok": "okay", "ill": "i will", "im": "i am", "its": "it is", "youre": "you are", "oh": "zero",
}  # fmt: skip
_SIGNS = {"+": "plus", "=": "is", "\u00d7": "times", "*": "times", "\u2013": "-", "\u2212": "-"}
_LONGEST = 12  # digits: a longer numeral is read digit by digit

Reading = tuple[str, ...]


def fold(text: str) -> list[str]:
    """Words of a transcript, each numeral read in the first way that `lattice` finds."""
    return [word for readings in lattice(text) for word in readings[0]]


def lattice(text: str) -> list[tuple[Reading, ...]]:
    """A transcript as places in turn, each with the ways in which it can be read: words in one, numerals in several."""
    text = text.lower()
    for sign, word in _SIGNS.items():
        text = text.replace(sign, word if word == "-" else f" {word} ")
    text = re.sub(r"(\d),(?=\d{3}\b)", r"\1", text)
    text = re.sub(r"(\d+)(?:st|nd|rd|th)\b", r"\1", text)
    text = re.sub(r"(?<=\d)\s*x\s*(?=\d)", " times ", text).replace("'", "").replace("\u2019", "")
    text = re.sub(r"(?<=\d)\s*-\s*(?=\d)", " - ", text).replace("good bye", "goodbye")
    text = text.replace("hundred and ", "hundred ")
    found: list[tuple[Reading, ...]] = []
    for part in re.findall(r"[a-z]+|\d+|(?<=\d )-(?= \d)", text):
        if part == "-":
            found.append((("minus",), ()))
        elif part.isdecimal():
            found.append(_readings(part))
        else:
            found += [((word,),) for word in SAME.get(part, part).split()]
    return found


@cache
def _readings(numeral: str) -> tuple[Reading, ...]:
    """Every way to say a numeral: as one number, digit by digit, or as numbers of one to three digits in turn."""
    digits = tuple(ONES[int(digit)] for digit in numeral)
    if len(numeral) > _LONGEST:
        return (digits,)
    found: dict[Reading, None] = {}
    if len(numeral) < 4 and (numeral[0] != "0" or numeral == "0"):
        found[tuple(number(int(numeral)).split())] = None
    found[digits] = None
    for cuts in product((False, True), repeat=len(numeral) - 1):
        ends = [index + 1 for index, cut in enumerate(cuts) if cut] + [len(numeral)]
        parts = [numeral[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if all(len(part) < 4 and (part[0] != "0" or part == "0") for part in parts):
            found[tuple(word for part in parts for word in number(int(part)).split())] = None
    return tuple(found)


def distance(reference: Sequence[object], heard: Sequence[object]) -> int:
    """Edits between two sequences (Levenshtein 1966)."""
    row = list(range(len(reference) + 1))
    for item in heard:
        row = _extended(row, reference, item)
    return row[-1]


def _extended(row: list[int], reference: Sequence[object], item: object) -> list[int]:
    """The edits from each beginning of the reference to what was heard, with one item more of it."""
    following = [row[0] + 1]
    for index, wanted in enumerate(reference, 1):
        following.append(min(row[index] + 1, following[-1] + 1, row[index - 1] + (wanted != item)))
    return following


def errors(reference: str, heard: str) -> int:
    """Word errors of one transcript, each of its numerals read in the way that fits the reference best."""
    words = fold(reference)
    row = list(range(len(words) + 1))
    for readings in lattice(heard):
        rows = []
        for reading in readings:
            end = row
            for word in reading:
                end = _extended(end, words, word)
            rows.append(end)
        row = [min(costs) for costs in zip(*rows, strict=True)]
    return row[-1]


def word_error_rate(references: Sequence[str], transcripts: Sequence[str]) -> float:
    """Errors of all transcripts over the words of all references."""
    total = sum(len(fold(reference)) for reference in references)
    return sum(errors(*pair) for pair in zip(references, transcripts, strict=True)) / total
