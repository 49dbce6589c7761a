"""Evaluate the codec on held-out sentences: word error rate of the teacher's speech and of its reconstruction."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from training.checkpoints import load_state
from training.codec import Codec
from training.recogniser import DOMAIN, transcribe
from training.scoring import errors, word_error_rate
from training.spectra import log_mel
from training.speech import speech_store
from training.teacher import VOICES
from training.tiny_config import HIDDEN, QUANTIZERS


def load_codec(work: Path) -> tuple[Codec, int]:
    """The trained codec under `work`, its code table folded, and the steps it was trained for."""
    state = load_state(work / "codec" / "state.pt")
    if state is None:
        raise FileNotFoundError(f"{work / 'codec' / 'state.pt'} does not exist; train the codec first")
    codec = Codec()
    codec.load_state_dict(state["model"])
    codec.eval().fold()
    return codec, int(state["step"])


@torch.no_grad()
def evaluate(work: Path, count: int, depth: int = QUANTIZERS) -> dict[str, object]:
    """Error rates in percent over the first `count` held-out utterances, with the first `depth` codebooks alone.

    Heard twice: by a recogniser that expects words of the domain, and (`_open`) by one that expects any English.
    """
    codec, step = load_codec(work)
    codec.decoder.code_embedding.weight.view(QUANTIZERS, -1, HIDDEN)[depth:] = 0
    store = speech_store(work, "held_out")
    references: list[str] = []
    voices: list[str] = []
    mels: list[float] = []
    heard: dict[str, list[str]] = {"teacher": [], "codec": [], "teacher_open": [], "codec_open": []}
    for index in range(min(count, len(store))):
        utterance = store.utterances[index]
        speech = torch.from_numpy(store.waveform(index))
        output = codec.decoder(codec.encode(speech).T[None])[0, 0]
        whole = len(output) // 240 * 240
        mels.append(float((log_mel(output[None, :whole]) - log_mel(speech[None, :whole])).abs().mean()))
        references.append(utterance.sentence)
        voices.append(utterance.voice)
        for name, prompt in (("", DOMAIN), ("_open", None)):
            heard[f"teacher{name}"].append(transcribe(speech.numpy(), prompt))
            heard[f"codec{name}"].append(transcribe(output.numpy(), prompt))
        if wrong := errors(references[-1], heard["codec"][-1]):
            print(f"  {wrong} ({voices[-1]}) {references[-1]!r} -> {heard['codec'][-1]!r}", flush=True)

    def rate(transcripts: list[str], voice: str | None = None) -> float:
        pairs = [
            pair
            for pair, who in zip(zip(references, transcripts, strict=True), voices, strict=True)
            if voice in (None, who)
        ]
        return round(100 * word_error_rate(*map(list, zip(*pairs, strict=True))), 2)

    report: dict[str, object] = {"step": step, "depth": depth, "utterances": len(references)}
    report["log_mel"] = round(sum(mels) / len(mels), 4)
    for voice in (None, *VOICES):
        for name, transcripts in heard.items():
            report[f"wer_{name}_{voice or 'all'}"] = rate(transcripts, voice)
    with (work / "codec" / "evaluation.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--depth", type=int, default=QUANTIZERS, help="decode with the first codebooks alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(evaluate(arguments.work, arguments.count, arguments.depth), indent=1))


if __name__ == "__main__":
    main()
