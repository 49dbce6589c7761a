"""The layers of Thinker and Talker, eager and compiled: milliseconds of CPU time of a step's forward, alternating.

Decode steps of so many streams with `--context` positions each, then one prefill of `--rows`, on one thread.

python benchmarks/compiled_layers.py --model bench --repeats 15
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from triptych.config.sampling import SamplingParams
from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.inputs import build_inputs
from triptych.engine.kv_cache import KVCache
from triptych.engine.request import EngineRequest
from triptych.models.qwen3_omni.backbone import Backbone
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.synthetic_cache import ensure_checkpoint
from triptych.models.qwen3_omni.synthetic_config import SIZES
from triptych.models.qwen3_omni.talker import Talker
from triptych.models.qwen3_omni.thinker import Thinker
from triptych.models.weights import load_weights

CPU = torch.device("cpu")
STREAMS = (1, 8, 32)
BLOCK = 16


def loaded(folder: Path, kind: type[Thinker] | type[Talker], *, eager: bool) -> Backbone:
    config = load_config(folder)
    with torch.device("meta"):
        model = kind(config)
    load_weights(model, model.placements, folder, prefixes=model.prefixes, dtype=torch.float32)
    model.prepare(eager=eager)
    return model.backbone


class Step:
    """One forward of the layers over `streams` requests, the last `rows` of the `context` positions of each."""

    def __init__(self, model: Backbone, *, streams: int, rows: int, context: int) -> None:
        decoder, blocks = model.config, -(-context // BLOCK)
        self.model = model
        self.cache = KVCache(
            layers=decoder.num_hidden_layers,
            num_blocks=streams * blocks + 1,
            block_size=BLOCK,
            kv_heads=decoder.num_key_value_heads,
            head_dim=decoder.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        scheduled = []
        for index in range(streams):
            request = EngineRequest(
                request_id=str(index), num_prompt_tokens=context, params=SamplingParams(), single_from=context - 1
            )
            request.block_ids = list(range(1 + index * blocks, 1 + (index + 1) * blocks))
            scheduled.append(ScheduledRow(request, context - rows, rows, True))
        self.inputs = build_inputs(
            ScheduledBatch(tuple(scheduled)), block_size=BLOCK, device=CPU, batch_invariant=True, by_row=model.by_row
        )
        torch.manual_seed(0)
        self.x = torch.randn(self.inputs.num_rows, decoder.hidden_size)

    def __call__(self) -> float:
        x = self.x.clone()
        started = time.thread_time()
        self.model(x, self.inputs.positions, self.cache.layers, self.inputs.metadata)
        return 1000 * (time.thread_time() - started)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="bench")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--rows", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = ensure_checkpoint(arguments.model)
    print("| stage | step | eager, ms | compiled, ms | ratio |\n|---|---|---|---|---|")
    for kind in (Thinker, Talker):
        models = [loaded(folder, kind, eager=eager) for eager in (True, False)]
        if not models[1].by_row:
            raise SystemExit("there is no compiled side to measure, see the log")
        steps = [(f"{n} of {arguments.context}", n, 1, arguments.context) for n in arguments.streams]
        for name, streams, rows, context in (*steps, (f"prefill of {arguments.rows}", 1, *[arguments.rows] * 2)):
            sides = [Step(model, streams=streams, rows=rows, context=context) for model in models]
            taken = [[side() for side in sides] for _ in range(arguments.repeats + 1)][1:]
            slow, fast = (statistics.median(side) for side in zip(*taken, strict=True))
            print(f"| {kind.__name__} | {name} | {slow:.2f} | {fast:.2f} | {fast / slow:.3f} |", flush=True)


if __name__ == "__main__":
    main()
