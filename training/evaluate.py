"""Evaluate a whole checkpoint as its users meet it: held-out questions through the server, streamed, sixteen at a time.

Written questions (text, speech, length, voice), spoken ones, pictures, short videos, and many at once that must each be
answered by their own number in their own voice.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import openai

from training.domain import ONES, samples, typed
from training.media import MediaSample, picture_sample, spoken_sample
from training.pictures import Picture
from training.pitch import voice_of
from training.reading import read
from training.recogniser import transcribe
from training.scoring import errors, fold, word_error_rate
from training.teacher import FRAME, Waveform, speak, write_waveform
from training.tiny_config import SPEAKERS
from triptych.bench.server import served

CONCURRENCY = 16
VIDEO_RATE = 2  # frames a second, as sampled
_LOAD_S, _ANSWER_S = 120, 300
_FRAMES_PER_WORD = (2.0, 12.0)  # fewer: cut short; more: running on


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    audio: Waveform
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One conversation for the server, the answer it must get, and the voice (None: text only)."""

    kind: str
    messages: list[dict[str, Any]]
    answer: str
    voice: str | None = None


def wav_part(waveform: Waveform) -> dict[str, Any]:
    """Speech at 24 kHz as a content part."""
    file = io.BytesIO()
    write_waveform(file, waveform)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def picture_part(pictures: Sequence[Picture], *, video: bool) -> dict[str, Any]:
    """A picture as PNG, or the frames of a video as an MP4 file of two frames a second."""
    file = io.BytesIO()
    if not video:
        pictures[0].image.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": url}}
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=VIDEO_RATE, options={"qscale": "2"})
        stream.width, stream.height = pictures[0].image.size
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture.image)))
        container.mux(stream.encode(None))
    url = "data:video/mp4;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def _conversation(history: Sequence[tuple[str, str]], last: Any) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for question, answer in history:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*turns, {"role": "user", "content": last}]


def written(count: int) -> list[Asked]:
    rng, names = random.Random(0), list(SPEAKERS)
    return [
        Asked(
            "written",
            _conversation([(typed(rng, q), a) for q, a in sample.history], typed(rng, sample.question)),
            sample.answer,
            names[index % len(names)],
        )
        for index, sample in enumerate(samples(count, "held_out", seed=2))
    ]


def spoken(count: int) -> list[Asked]:
    rng, voices = random.Random(3), list(SPEAKERS.values())
    found = []
    for index in range(count):
        sample = spoken_sample(rng, "held_out")
        said = wav_part(speak(sample.spoken, voices[index % len(voices)]).samples)
        found.append(Asked("spoken", _conversation(sample.history, [said]), sample.answer))
    return found


def seen(count: int) -> list[Asked]:
    rng = random.Random(4)
    found = []
    for _ in range(count):
        sample: MediaSample = picture_sample(rng, "held_out")
        parts = [
            picture_part(sample.pictures, video=sample.is_video),
            {"type": "text", "text": typed(rng, sample.question)},
        ]
        found.append(
            Asked("video" if sample.is_video else "image", _conversation(sample.history, parts), sample.answer)
        )
    return found


def digits(count: int) -> list[Asked]:
    """Each its own four digits, in one of the voices."""
    rng, names = random.Random(5), list(SPEAKERS)
    numbers = rng.sample(range(10_000), count)
    said = [" ".join(ONES[int(digit)] for digit in f"{number:04d}") for number in numbers]
    return [
        Asked("digits", _conversation([], f"say: {words}"), words, names[index % len(names)])
        for index, words in enumerate(said)
    ]


async def ask(client: openai.AsyncOpenAI, asked: Asked, seed: int) -> Reply:
    """One streamed answer. Raises RuntimeError when it ends without a finish reason."""
    request: dict[str, Any] = {"model": "tiny", "messages": asked.messages, "stream": True, "seed": seed}
    if asked.voice is not None:
        request |= {"modalities": ["text", "audio"], "audio": {"voice": asked.voice, "format": "pcm16"}}
    text, audio, reason = "", b"", ""
    async with await client.chat.completions.create(**request) as stream:
        async for chunk in stream:
            for choice in chunk.choices:
                delta = choice.delta.to_dict()
                text += str(delta.get("content") or "")
                spoken_part: Any = delta.get("audio") or {}
                audio += base64.b64decode(spoken_part.get("data") or "")
                reason = choice.finish_reason or reason
    if not reason:
        raise RuntimeError(f"the answer to {asked.messages[-1]} has no end")
    return Reply(text, np.frombuffer(audio, dtype="<i2").astype(np.float32) / 32768, reason)


async def ask_all(url: str, questions: Sequence[Asked], concurrency: int) -> list[Reply]:
    room = asyncio.Semaphore(concurrency)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_ANSWER_S) as client:

        async def one(index: int, asked: Asked) -> Reply:
            async with room:
                return await ask(client, asked, index)

        return list(await asyncio.gather(*(one(index, asked) for index, asked in enumerate(questions))))


def score_text(questions: Sequence[Asked], replies: Sequence[Reply]) -> dict[str, Any]:
    """Share of exact answers."""
    wrong = [(a, r) for a, r in zip(questions, replies, strict=True) if r.text != a.answer]
    for asked, reply in wrong:
        print(f"  {asked.kind}: {reply.text!r} instead of {asked.answer!r}", file=sys.stderr)
    return {"replies": len(replies), "right": round(1 - len(wrong) / len(replies), 4)}


def score_speech(questions: Sequence[Asked], replies: Sequence[Reply]) -> dict[str, Any]:
    """Word errors against the text, words found by a recogniser of any words, lengths and voices."""
    texts, heard = [], []
    words = found = lengths = voices = 0
    for asked, reply in zip(questions, replies, strict=True):
        texts.append(reply.text)
        heard.append(transcribe(reply.audio))
        voices += voice_of(reply.audio) == asked.voice
        spoken_words = len(fold(reply.text))
        missed = errors(reply.text, heard[-1])
        words += spoken_words
        found += max(0, spoken_words - missed)
        frames = len(reply.audio) / FRAME / max(1, spoken_words)
        lengths += reply.finish_reason == "stop" and _FRAMES_PER_WORD[0] <= frames <= _FRAMES_PER_WORD[1]
        if missed:
            print(f"  {asked.voice}: {reply.text!r} heard as {heard[-1]!r}", file=sys.stderr)
    return {
        "wer": round(100 * word_error_rate(texts, heard), 2),
        "words_right": round(found / max(1, words), 4),
        "lengths_right": round(lengths / len(replies), 4),
        "voices_right": round(voices / len(replies), 4),
    }


def score_closed(replies: Sequence[Reply]) -> dict[str, Any]:
    """Words found by a recogniser that has those of the domain alone to choose from; it takes longer."""
    heard = [transcribe(reply.audio, closed=True) for reply in replies]
    return {"words_right_closed": round(1 - word_error_rate([reply.text for reply in replies], heard), 4)}


def score_teacher(questions: Sequence[Asked], replies: Sequence[Reply]) -> dict[str, Any]:
    """Word errors of the teacher, saying the same texts in the same voices."""
    spoken_texts = [
        (reply.text, read(reply.text, SPEAKERS[asked.voice]).samples)
        for asked, reply in zip(questions, replies, strict=True)
        if asked.voice is not None
    ]
    texts = [text for text, _ in spoken_texts]
    taught, closed = ([transcribe(said, closed=only) for _, said in spoken_texts] for only in (False, True))
    return {
        "wer_teacher": round(100 * word_error_rate(texts, taught), 2),
        "words_right_closed_teacher": round(1 - word_error_rate(texts, closed), 4),
    }


async def evaluate(model: str, count: int, stage_overrides: str = "{}") -> dict[str, Any]:
    """Everything, as one JSON object: by kind of question. `stage_overrides` is JSON, as `triptych serve` takes it."""
    report: dict[str, Any] = {}
    options = ("--served-model-name", "tiny", "--stage-overrides", stage_overrides)
    async with served(model, *options, start_s=_LOAD_S) as server:
        url = server.url
        questions = written(count)
        replies = await ask_all(url, questions, CONCURRENCY)
        report["written"] = score_text(questions, replies) | score_speech(questions, replies)
        report["written"] |= score_closed(replies) | score_teacher(questions, replies)
        questions = digits(32)
        replies = await ask_all(url, questions, len(questions))
        report["digits"] = score_text(questions, replies) | score_speech(questions, replies) | score_closed(replies)
        questions = [*spoken(count), *seen(count)]
        replies = await ask_all(url, questions, CONCURRENCY)
        for kind in ("spoken", "image", "video"):
            pairs = [(a, r) for a, r in zip(questions, replies, strict=True) if a.kind == kind]
            report[kind] = score_text([a for a, _ in pairs], [r for _, r in pairs])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint folder, or tiny")
    parser.add_argument("--count", type=int, default=200, help="questions of each kind")
    parser.add_argument("--stage-overrides", default="{}", help="as of triptych serve, for other keys of the stages")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(evaluate(arguments.model, arguments.count, arguments.stage_overrides)), indent=1))


if __name__ == "__main__":
    main()
