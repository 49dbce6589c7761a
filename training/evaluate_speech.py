"""Evaluate a whole checkpoint by ear: held-out questions through the pipeline, the replies transcribed and scored."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from training.domain import Sample, samples, styled
from training.recogniser import transcribe
from training.scoring import errors, fold, word_error_rate
from training.teacher import SAMPLE_RATE, Waveform, speak
from training.tiny_config import SPEAKERS
from triptych import Omni, OmniOutput

_LOWEST_PITCH, _HIGHEST_PITCH = 70, 300  # Hz
_FRAMES_PER_WORD = (2.0, 12.0)  # fewer: cut short; more: running on


def pitch(waveform: Waveform) -> float:
    """The median pitch of the voiced windows in Hz, by autocorrelation; 0 where nothing is voiced."""
    size, hop = 1200, 600
    shortest, longest = SAMPLE_RATE // _HIGHEST_PITCH, SAMPLE_RATE // _LOWEST_PITCH
    found = []
    for start in range(0, len(waveform) - size, hop):
        window = waveform[start : start + size] - waveform[start : start + size].mean()
        energy = float(window @ window)
        if energy < size * 1e-3:
            continue
        correlation = np.correlate(window, window, "full")[size - 1 :]
        lag = shortest + int(correlation[shortest:longest].argmax())
        if correlation[lag] > 0.4 * energy:
            found.append(SAMPLE_RATE / lag)
    return float(np.median(found)) if found else 0.0


def messages(sample: Sample, rng: random.Random) -> list[dict[str, str]]:
    """A sample as chat messages, its questions in some style of typing."""
    turns: list[dict[str, str]] = []
    for exchange in sample.history:
        turns.append({"role": "user", "content": styled(rng, exchange.question)})
        turns.append({"role": "assistant", "content": exchange.answer})
    return [*turns, {"role": "user", "content": styled(rng, sample.question)}]


def evaluate(checkpoint: Path, count: int, deploy: str = "tiny_cpu") -> dict[str, Any]:
    """Text answers, word error rates against the text and of the teacher, lengths and voices over `count` replies."""
    rng = random.Random(0)
    asked = samples(count, "held_out", seed=2)
    boundary = float(np.sqrt(np.prod([pitch(speak("what is your number", voice)) for voice in SPEAKERS.values()])))
    replies: list[tuple[Sample, str, OmniOutput]] = []
    with Omni(str(checkpoint), deploy_config=deploy, platform="cpu") as omni:
        for index, speaker in enumerate(SPEAKERS):
            mine = asked[index :: len(SPEAKERS)]
            outputs = omni.generate(
                [messages(sample, rng) for sample in mine], modalities=("text", "audio"), voice=speaker, seed=index
            )
            replies += [(sample, speaker, output) for sample, output in zip(mine, outputs, strict=True)]
    texts, heard, taught = [], [], []
    right = lengths = voices = words = found = 0
    low = min(SPEAKERS, key=lambda name: pitch(speak("what is your number", SPEAKERS[name])))
    for sample, speaker, output in replies:
        if output.error is not None or output.audio is None:
            raise RuntimeError(f"{sample.question!r} gave no speech: {output.error}")
        texts.append(output.text)
        heard.append(transcribe(output.audio))
        taught.append(transcribe(speak(output.text, SPEAKERS[speaker])) if output.text else "")
        right += output.text == sample.answer
        voices += (pitch(output.audio) < boundary) == (speaker == low)
        spoken = fold(output.text)
        words += len(spoken)
        found += max(0, len(spoken) - errors(output.text, heard[-1]))
        frames = output.audio_frames / max(1, len(spoken))
        lengths += output.finish_reason == "stop" and _FRAMES_PER_WORD[0] <= frames <= _FRAMES_PER_WORD[1]
        if output.text != sample.answer or errors(output.text, heard[-1]):
            print(f"  {sample.question!r} -> {output.text!r}, heard ({speaker}) {heard[-1]!r}", flush=True)
    total = len(replies)
    return {
        "replies": total,
        "text_right": round(right / total, 4),
        "wer": round(100 * word_error_rate(texts, heard), 2),
        "wer_teacher": round(100 * word_error_rate(texts, taught), 2),
        "words_right": round(found / max(1, words), 4),
        "lengths_right": round(lengths / total, 4),
        "voices_right": round(voices / total, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=200)
    arguments = parser.parse_args()
    print(json.dumps(evaluate(arguments.checkpoint, arguments.count), indent=1))


if __name__ == "__main__":
    main()
