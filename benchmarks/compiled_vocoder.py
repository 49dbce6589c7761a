"""Code2Wav, eager and compiled: milliseconds of CPU time a frame by chunk and number of streams, alternating.

python benchmarks/compiled_vocoder.py --model bench --repeats 15
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import Code2WavConfig, load_config
from triptych.models.qwen3_omni.synthetic_cache import ensure_checkpoint
from triptych.models.qwen3_omni.synthetic_config import SIZES
from triptych.models.registry import EMBEDDED
from triptych.models.weights import load_weights
from triptych.streaming.state import StreamState

CHUNKS = (1, 4, 25)
STREAMS = (1, 8, 32)


def loaded(folder: Path, *, eager: bool) -> Code2Wav:
    config = load_config(folder).code2wav
    assert config is not None
    with torch.device("meta"):
        model = Code2Wav(config)
    load_weights(model, model.placements, folder, prefixes=model.prefixes, dtype=torch.float32)
    model.prepare(eager=eager)
    return model


def random_weights(*, eager: bool) -> Code2Wav:
    """Of the published sizes."""
    with torch.device("meta"):
        model = Code2Wav(Code2WavConfig())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.normal_(std=0.1 if weight.ndim < 2 else 0.5 * weight[0].numel() ** -0.5)
    model.prepare(eager=eager)
    return model


class Side:
    """One of the two, with streams that have begun."""

    def __init__(self, model: Code2Wav, streams: int, together: bool) -> None:
        self.model, self.together = model, together
        self.state = StreamState(model, streams, device="cpu", dtype=torch.float32)
        self.slots = torch.arange(streams)
        self.times: list[float] = []

    def decode(self, codes: Tensor, *, first: bool) -> Tensor:
        started = time.thread_time()
        if self.together:
            samples: Tensor = self.model(codes, self.state, self.slots, first=first)
        else:  # as a stage does that has `batch_invariant`
            pairs = zip(torch.split(codes, 1), torch.split(self.slots, 1), strict=True)
            samples = torch.cat([self.model(one, self.state, slot, first=first) for one, slot in pairs])
        self.times.append(1000 * (time.thread_time() - started) / (codes.shape[0] * codes.shape[2]))
        return samples


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(*SIZES, *EMBEDDED, "published"), default="bench")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--together", action="store_true", help="all streams in one call, as without batch_invariant")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model == "published":
        models = [random_weights(eager=eager) for eager in (True, False)]
    else:
        folder = EMBEDDED.get(arguments.model) or ensure_checkpoint(arguments.model)
        models = [loaded(folder, eager=eager) for eager in (True, False)]
    if models[1].compiled is None:
        raise SystemExit("there is no compiled side to measure, see the log")
    config = models[0].config
    print("| frames | streams | eager, ms a frame | compiled, ms a frame | ratio | largest difference |")
    print("|---|---|---|---|---|---|")
    for frames in arguments.chunks:
        for streams in arguments.streams:
            sides = [Side(model, streams, arguments.together) for model in models]
            worst = 0.0
            for repeat in range(arguments.repeats + 1):
                codes = torch.randint(config.codebook_size, (streams, config.num_quantizers, frames))
                eager, compiled = (side.decode(codes, first=repeat == 0) for side in sides)
                worst = max(worst, float((eager - compiled).abs().max()))
            slow, fast = (statistics.median(side.times[1:]) for side in sides)
            print(f"| {frames} | {streams} | {slow:.3f} | {fast:.3f} | {slow / fast:.1f} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    main()
