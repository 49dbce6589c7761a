"""The code predictor's frame, eager and compiled: milliseconds of CPU time by the number of streams, alternating.

python benchmarks/compiled_frame.py --model bench --repeats 15
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from triptych.models.qwen3_omni.code_predictor import CodePredictor
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.synthetic_cache import ensure_checkpoint
from triptych.models.qwen3_omni.synthetic_config import SIZES
from triptych.models.qwen3_omni.talker import Talker
from triptych.models.weights import load_weights
from triptych.stages.residual_draw import ResidualDraw

STREAMS = (1, 2, 4, 8, 16, 32, 64)


def loaded(folder: Path, *, eager: bool) -> CodePredictor:
    config = load_config(folder)
    with torch.device("meta"):
        model = Talker(config)
    load_weights(model, model.placements, folder, prefixes=model.prefixes, dtype=torch.float32)
    model.prepare(eager=eager)
    return model.code_predictor


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="bench")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = ensure_checkpoint(arguments.model)
    sides = [loaded(folder, eager=eager) for eager in (True, False)]
    if sides[1].compiled is None:
        raise SystemExit("there is no compiled side to measure, see the log")
    width, residuals = sides[0].config.hidden_size, sides[0].residuals
    print("| streams | eager, ms | compiled, ms | ratio | frames alike |\n|---|---|---|---|---|")
    for streams in arguments.streams:
        hidden, first = torch.randn(2, streams, width)
        draw = ResidualDraw.of(torch.rand(streams, residuals, dtype=torch.float64), [False] * streams)
        eager, compiled = (side(hidden, first, draw) for side in sides)
        alike = int((eager == compiled).all(dim=1).sum())
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(arguments.repeats):
            for side, times in zip(sides, taken, strict=True):
                started = time.thread_time()
                side(hidden, first, draw)
                times.append(1000 * (time.thread_time() - started))
        slow, fast = map(statistics.median, taken)
        print(f"| {streams} | {slow:.1f} | {fast:.1f} | {fast / slow:.3f} | {alike} of {streams} |", flush=True)


if __name__ == "__main__":
    main()
