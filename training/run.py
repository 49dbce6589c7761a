"""From nothing to the checkpoint: every stage of the tiny voice in turn, each going on where it was stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from training import (
    evaluate_codec,
    export,
    train_codec,
    train_ears,
    train_eyes,
    train_senses,
    train_talker,
    train_thinker,
)
from training.speech import speech_store

STAGES = ("speech", "codec", "thinker", "eyes", "ears", "senses", "talker", "export")
STEPS = {"codec": 6000, "thinker": 6000, "eyes": 6000, "ears": 3000, "senses": 6000, "talker": 12_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of data, states and logs; several GB")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint; WORK/checkpoint when not given")
    parser.add_argument("--only", choices=STAGES, help="run one stage alone")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, steps in STEPS.items():
        parser.add_argument(f"--{name}-steps", type=int, default=steps)
    arguments = parser.parse_args()
    work: Path = arguments.work
    torch.set_num_threads(arguments.threads)

    def codec() -> None:
        train_codec.train(work, arguments.codec_steps)
        print(json.dumps(evaluate_codec.evaluate(work, 60), indent=1), flush=True)

    stages: dict[str, Callable[[], object]] = {
        "speech": lambda: [speech_store(work, split) for split in ("train", "held_out")],
        "codec": codec,
        "thinker": lambda: train_thinker.train(work, arguments.thinker_steps),
        "eyes": lambda: train_eyes.train(work, arguments.eyes_steps),
        "ears": lambda: train_ears.train(work, arguments.ears_steps),
        "senses": lambda: train_senses.train(work, arguments.senses_steps),
        "talker": lambda: train_talker.train(work, arguments.talker_steps),
        "export": lambda: export.export(work, arguments.out or work / "checkpoint"),
    }
    for name in [arguments.only] if arguments.only else STAGES:
        print(f"== {name}", flush=True)
        stages[name]()


if __name__ == "__main__":
    main()
