"""The tiny voice's closed domain and its scoring, and the rows its Talker is trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from training.domain import (
    HELD_OUT_ONE_IN,
    SPOKEN_WORDS,
    Exchange,
    Sample,
    number,
    samples,
    sentences,
    spell,
    styled,
    vocabulary,
)
from training.recogniser import closed_words
from training.rows import NO_CODE, SpeechExample, chat, speech_example
from training.schedule import cosine, pooled_batch
from training.scoring import distance, errors, fold, word_error_rate
from training.tiny_config import CODES, QUANTIZERS, SPEAKERS, tiny_config
from training.tokenizer import VOCAB_SIZE, build_tokenizer
from triptych.config.sampling import SamplingParams
from triptych.connectors.wire import SubmitSpeech
from triptych.models.qwen3_omni.bridge import talker_prompt_token_ids
from triptych.models.qwen3_omni.config import OmniConfig, parse_config
from triptych.stages.speech_rows import SpeechRows


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    return samples(4000, "train")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def config(tokenizer: Tokenizer) -> OmniConfig:
    return parse_config(tiny_config(tokenizer))


def words(text: str) -> list[str]:
    return text.replace(",", " ").replace(":", " ").split()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "zero"),
        (17, "seventeen"),
        (40, "forty"),
        (99, "ninety nine"),
        (142, "one hundred forty two"),
        (-7, "minus seven"),
    ],
)
def test_numbers_are_written_in_words(value: int, text: str) -> None:
    assert number(value) == text


def test_every_number_has_its_own_words() -> None:
    assert len({number(value) for value in range(-999, 1000)}) == 1999
    with pytest.raises(ValueError, match="1000 has more than three digits"):
        number(1000)


def test_a_seed_gives_the_same_samples_and_another_seed_others() -> None:
    assert samples(50, "train", 1) == samples(50, "train", 1)
    assert samples(50, "train", 1) != samples(50, "train", 2)


def test_all_kinds_are_drawn_and_only_closed_ones_cannot_be_held_out(drawn: list[Sample]) -> None:
    kinds = {sample.kind for sample in drawn}
    assert kinds == {
        "arithmetic", "repeat", "number", "small_talk", "claim", "triage", "remember", "recall", "sight", "unknown",
    }  # fmt: skip
    held_out = samples(2000, "held_out")
    assert {sample.kind for sample in held_out} == kinds - {"small_talk"}
    assert not any(sample.closed for sample in held_out)


def test_no_held_out_question_is_ever_trained_on(drawn: list[Sample]) -> None:
    held_out = samples(1000, "held_out")
    open_keys = {sample.key for sample in drawn if not sample.closed}
    assert not open_keys & {sample.key for sample in held_out}
    trained = {sample.answer for sample in drawn if sample.kind == "arithmetic"}
    told = {exchange.answer for sample in drawn for exchange in sample.history}
    for sample in held_out:
        if sample.kind == "arithmetic":
            assert sample.answer not in trained | told


def test_about_one_in_twelve_is_held_out() -> None:
    rng = random.Random(0)
    keys = [f"{number(rng.randint(0, 99))} plus {number(rng.randint(0, 99))}" for _ in range(4000)]
    kept = [Sample(kind="arithmetic", key=key, question=key, answer=key).split for key in keys]
    assert 0.7 < kept.count("held_out") * HELD_OUT_ONE_IN / len(keys) < 1.3


def test_sums_are_right_and_restate_the_question(drawn: list[Sample]) -> None:
    values = {number(value): value for value in range(1000)}
    for sample in drawn:
        if sample.kind != "arithmetic":
            continue
        asked, result = sample.answer.split(" is ")
        operation = next(word for word in ("plus", "minus", "times") if f" {word} " in asked)
        a, b = (values[side] for side in asked.split(f" {operation} "))
        assert values[result] == {"plus": a + b, "minus": a - b, "times": a * b}[operation]


def test_what_is_recalled_was_told_in_an_earlier_turn(drawn: list[Sample]) -> None:
    recalled = [sample for sample in drawn if sample.kind == "recall"]
    assert any(len(sample.history) > 1 for sample in recalled)
    for sample in recalled:
        value = sample.answer.split(" is ")[1]
        assert sample.history[0].question.endswith(f" is {value}")


def test_a_repeated_phrase_is_the_question_without_its_command(drawn: list[Sample]) -> None:
    for sample in drawn:
        if sample.kind == "repeat":
            assert sample.question.removeprefix("say").removeprefix("repeat").lstrip(": ") == sample.answer


def test_the_answers_use_about_a_hundred_and_thirty_words(drawn: list[Sample]) -> None:
    spoken = {word for sample in drawn for word in words(sample.answer)}
    assert 110 <= len(spoken) <= 150
    assert set(SPOKEN_WORDS) <= spoken


def test_sentences_are_different_and_belong_to_their_split() -> None:
    found = sentences(500, "held_out")
    assert len(set(found)) == 500
    assert not {s for s in found if " plus " in s and " is " in s} & set(sentences(3000, "train"))


def test_styling_changes_only_capitals_and_the_last_mark() -> None:
    rng = random.Random(0)
    versions = {styled(rng, "what is my number") for _ in range(100)}
    assert len(versions) > 2
    assert all(version.lower().rstrip("?") == "what is my number" for version in versions)


@pytest.mark.parametrize(
    ("reference", "heard"),
    [
        ("forty two", "42."),
        ("four two seven nine", "4,279"),
        ("four two seven nine", "4-2-7-9"),
        ("eight nine zero", "890"),
        ("zero zero seven", "007"),
        ("seventeen plus twenty five is forty two", "17 + 25 = 42"),
        ("three times four is twelve", "3 x 4 equals 12"),
        ("one hundred forty two", "One hundred and forty-two"),
        ("ninety four minus forty nine is forty five", "94-49 is 45"),
        ("wednesday eleven nineteen up", "Wednesday 1119 up"),
        ("blue twenty sixteen wall", "blue, 2016 wall"),
        ("one two thirty hundred", "1-2-30 hundred"),
        ("your colour is green", "Your color is green!"),
        ("i will remember your number is six", "I'll remember your number is 6."),
    ],
)
def test_spellings_of_a_recogniser_are_no_errors(reference: str, heard: str) -> None:
    assert errors(reference, heard) == 0


@pytest.mark.parametrize(
    ("reference", "heard", "count"),
    [
        ("forty two", "52", 1),
        ("four two seven nine", "4278", 1),
        ("a red circle", "", 3),
        ("a red circle", "a red red circle", 1),
        ("forty", "14", 1),
        ("eleven nineteen", "1118", 1),
    ],
)
def test_wrong_words_are_errors(reference: str, heard: str, count: int) -> None:
    assert errors(reference, heard) == count


def test_the_error_rate_counts_words_not_sentences() -> None:
    assert word_error_rate(["forty two", "a red circle on"], ["42", "a red square"]) == pytest.approx(2 / 6)
    assert distance("a b c".split(), "a x c d".split()) == 2
    assert fold("Hello, there!") == ["hello", "there"]


def test_every_spoken_word_in_a_sentence_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    assert all(len(tokenizer.encode(f" {word}").ids) == 1 for word in SPOKEN_WORDS)
    text = "Ça va? 4 < 5 — “ok”\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_rate_rises_then_falls_to_its_share() -> None:
    rates = [cosine(step, 1000, 2.0, warm_up=50) for step in range(1001)]
    assert max(rates) == pytest.approx(2.0, rel=0.02)
    assert rates[0] < 0.1 and rates[1000] == pytest.approx(0.1)
    assert cosine(5000, 1000, 2.0) == pytest.approx(0.1)


def test_a_batch_is_a_function_of_its_step() -> None:
    def batch(step: int) -> list[int]:
        return pooled_batch(step, 7, 4, lambda rng: int(rng.integers(1000)), lambda value: value)

    assert batch(13) == batch(13)
    pool = sorted(value for step in range(8) for value in batch(step))
    spans = [max(batch(step)) - min(batch(step)) for step in range(8)]
    assert sorted(spans)[4] < (pool[-1] - pool[0]) / 4


class CodeRows:
    """Code table whose rows can be read back: row = 1000 * group + code."""

    no_code = -1
    num_code_groups = QUANTIZERS

    def code_rows(self, codes: list[int]) -> list[int]:
        return [1000 * group + code for group, code in enumerate(codes)]


def served_rows(
    prompt: list[int], example_answer: list[int], frames: list[list[int]], config: OmniConfig
) -> SpeechRows:
    """The rows a serving Talker builds when it draws exactly these frames."""
    assert config.talker is not None
    table = CodeRows()
    message = SubmitSpeech(
        request_id="a",
        prompt_token_ids=talker_prompt_token_ids(prompt, config),
        speaker_id=config.talker.speaker_id["ethan"],
        params=SamplingParams(),
    )
    rows = SpeechRows(message, config, table, single=False)
    rows.hear(example_answer, final=True)
    assert rows.next_row()
    for frame in frames:
        rows.add_frame(frame, table.code_rows(frame))
        assert rows.next_row()
    return rows


def histories() -> Iterator[tuple[Exchange, ...]]:
    yield ()
    yield (Exchange("my number is forty", "i will remember your number is forty"), Exchange("hello", "hello"))


@pytest.mark.parametrize("history", list(histories()), ids=("one turn", "three turns"))
@pytest.mark.parametrize("frames_drawn", [1, 6, 40], ids=("shorter than its text", "about its text", "longer"))
def test_training_rows_are_the_rows_of_serving(
    history: tuple[Exchange, ...], frames_drawn: int, tokenizer: Tokenizer, config: OmniConfig
) -> None:
    assert config.talker is not None and config.talker.num_code_groups == CodeRows.num_code_groups
    prompt = chat(tokenizer, history, "what is my number?", system="Speak briefly.")
    answer = tokenizer.encode("your number is forty").ids
    rng = random.Random(1)
    frames = [[rng.randrange(CODES) for _ in range(QUANTIZERS)] for _ in range(frames_drawn)]
    trained: SpeechExample = speech_example(prompt, answer, frames, "ethan", config)
    served = served_rows(prompt, answer, frames, config)
    assert trained.text_ids == served.text_ids

    def as_served(row: list[int]) -> list[int]:
        if row[-1] == NO_CODE:
            return row
        return CodeRows().code_rows(row)

    assert [as_served(row) for row in trained.codes] == served.code_rows
    assert trained.first == served.engine.num_prompt_tokens - 1
    assert trained.frames == frames and len(trained.text_ids) == trained.first + frames_drawn + 1


def test_the_chat_is_that_of_the_checkpoints_template(tokenizer: Tokenizer, config: OmniConfig) -> None:
    ids = chat(tokenizer, [Exchange("hi", "hello")], "who are you")
    assert ids.count(config.im_start_token_id) == 4
    assert ids[-3:] == [config.im_start_token_id, config.assistant_token_id, tokenizer.encode("\n").ids[0]]
    assert talker_prompt_token_ids(ids, config)[1] == config.user_token_id


def test_the_config_names_the_voices(config: OmniConfig) -> None:
    assert config.talker is not None
    assert list(config.talker.speaker_id) == list(SPEAKERS)
    assert config.default_speaker == "chelsie"
    assert spell("42") == "four two"


def test_a_closed_vocabulary_holds_the_words_of_the_domain_and_no_other() -> None:
    closed = closed_words()
    assert closed > vocabulary()
    assert "I'll" in closed
    assert "ill" not in closed  # "I'll" without its apostrophe is another word, and sounds like "hail"
    assert all(vocabulary().issuperset(fold(word)) for word in closed)
