"""What the Talker learns from, drawn as it is asked for: conversations of the domain with a spoken answer."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer

from training.alignment import PHONES, tokens_of_words
from training.code_bank import CodeBank
from training.domain import Sample, draw, typed
from training.rows import UNKNOWN, SpeechExample, chat, sources, speech_example
from training.speech import BY_HEART, LONG, word_lists
from training.tiny_config import SPEAKERS
from triptych.models.qwen3_omni.config import OmniConfig

LIST_ANSWERS = 0.25  # words in any order: nothing tells it which one comes next
LONG_ANSWERS = 0.4  # those of many words: rare, and the first to be lost
CLOSED_ANSWERS = 0.2  # those of closed lists, in either voice
STRAY_PROMPTS = 0.3  # answers behind a prompt that did not ask for them
MEDIA_PROMPTS = 0.35  # questions with media, or all media; `hidden_projection` is zero, and so are the rows of media
MOST_MEDIA_ROWS = 100
_MEDIA = (
    ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
)


class SpokenExamples:
    """Examples of a split: a conversation, one of the voices, and the frames of the answer."""

    def __init__(self, bank: CodeBank, tokenizer: Tokenizer, config: OmniConfig) -> None:
        self.bank, self.tokenizer, self.config = bank, tokenizer, config
        self.by_heart = [sentence for sentence in BY_HEART if sentence in bank]
        self.lists = [sentence for sentence in word_lists() if sentence in bank]
        self.long = [sentence for sentence in bank.sentences if len(sentence.split()) >= LONG]

    def draw(self, rng: np.random.Generator) -> SpeechExample:
        source = random.Random(int(rng.integers(2**62)))
        sample = draw(source, "train")
        answer = sample.answer if sample.answer in self.bank else source.choice(self.bank.sentences)
        if self.lists and source.random() < LIST_ANSWERS:
            answer = source.choice(self.lists)
        if source.random() < LONG_ANSWERS:
            answer = source.choice(self.long)
        if self.by_heart and source.random() < CLOSED_ANSWERS:
            answer = source.choice(self.by_heart)
        if source.random() < STRAY_PROMPTS:
            sample = draw(source, "train")
        question = typed(source, sample.question)
        if source.random() < MEDIA_PROMPTS:
            question = with_media(source, question)
        return self.example(sample, question, answer, source.choice(self.bank.voices(answer)))

    def example(self, sample: Sample, question: str, answer: str, voice: str) -> SpeechExample:
        """Frames of one answer in one of the teacher's voices, behind a sample's conversation."""
        prompt = chat(self.tokenizer, sample.history, question)
        frames = self.bank.frames(answer, voice)
        [speaker] = [name for name, teacher in SPEAKERS.items() if teacher == voice]
        tokens = self.tokenizer.encode(answer)
        example = speech_example(prompt, tokens.ids, frames.tolist(), speaker, self.config)
        words, phones = self.bank.said(answer, voice)
        token_of = tokens_of_words(answer, tokens.offsets)
        return replace(
            example,
            sources=sources(words, token_of, example.first),
            words=[UNKNOWN if word is None else tokens.ids[token_of[word]] for word in words],
            phones=[PHONES.index(phone) for phone in phones],
            recording=self.bank.recording(answer, voice),
        )


def with_media(rng: random.Random, question: str) -> str:
    """A question behind or before something seen, or said instead of written."""
    start, row, end = rng.choice(_MEDIA)
    media = f"{start}{row * rng.randint(1, MOST_MEDIA_ROWS)}{end}"
    if start == "<|audio_start|>":
        return media
    return media + question if rng.random() < 0.7 else question + media
