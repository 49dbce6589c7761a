"""The arithmetic of the roofline: by hand, against the models' own sizes, and against the products that a run makes."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.engine import Engine
from triptych.engine.request import EngineRequest
from triptych.models.qwen3_omni.backbone import projections
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import Code2WavConfig, DecoderConfig, OmniConfig, load_config
from triptych.models.qwen3_omni.talker import Talker
from triptych.models.qwen3_omni.thinker import Thinker
from triptych.stages.decoder_work import DecoderWork, talker_work, thinker_work
from triptych.stages.vocoder_work import VocoderWork
from triptych.streaming.state import StreamState
from triptych.telemetry.work import Work

SMALL = DecoderConfig(
    vocab_size=8,
    hidden_size=2,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=4,
)
MANY_ROWS = 10_000  # touch every expert


def batch(*rows: tuple[int, int, bool]) -> ScheduledBatch:
    """(rows that are held already, new rows, whether a token is drawn), for each request."""
    made = []
    for start, count, samples in rows:
        request = EngineRequest(
            request_id="r",
            num_prompt_tokens=start + count,
            params=SamplingParams(seed=0),
            token_ids=[],
            num_tokens=start + count,
            single_from=None,
        )
        made.append(ScheduledRow(request=request, start=start, num_tokens=count, samples=samples))
    return ScheduledBatch(rows=tuple(made))


def numel(*modules: torch.nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.fixture(scope="module")
def config(nano: Path) -> OmniConfig:
    return load_config(nano)


def test_a_step_that_was_computed_by_hand() -> None:
    # Weights: attention 2 (2 + 2 x 2) + 2 x 2 = 16, feed-forward 3 x 2 x 4 = 24, norms 2 (2 + 2) + 2 = 10; head 8 x 2.
    work = thinker_work(SMALL, weight_bytes=2, element_bytes=4)(batch((5, 1, True), (0, 3, False)))
    cached = 5 + 4  # rows whose keys and values are read, and those written; 2 + 2 elements each
    assert work.moved_bytes == 2 * (16 + 24 + 10 + 16) + 4 * 4 * cached + 4 * 4 * 2
    pairs = (5 + 1) + (1 + 2 + 3)  # rows that the new rows see
    assert work.flops == 4 * 2 * (16 + 24) + 4 * 2 * pairs + 2 * 16
    nothing_drawn = thinker_work(SMALL, weight_bytes=2, element_bytes=4)(batch((5, 1, False), (0, 3, False)))
    assert work.flops - nothing_drawn.flops == 2 * 16 and work.moved_bytes - nothing_drawn.moved_bytes == 2 * 16


def test_experts_are_exact_for_one_row_the_mean_of_random_routing_and_a_bound_for_any_other() -> None:
    dice, experts, chosen, rows = random.Random(1), 16, 4, 5
    config = msgspec.structs.replace(SMALL, num_experts=experts, num_experts_per_tok=chosen)
    work = DecoderWork(config, weight_bytes=1, element_bytes=1)
    assert work.experts(1) == chosen and work.experts(MANY_ROWS) == pytest.approx(experts)

    def mean_touched(pool: int) -> float:
        touched = [
            len({expert for _ in range(rows) for expert in dice.sample(range(pool), chosen)}) for _ in range(3000)
        ]
        return sum(touched) / len(touched)

    assert mean_touched(experts) == pytest.approx(work.experts(rows), rel=0.01)
    assert mean_touched(8) < work.experts(rows), "a router that never takes half of them"


def test_quantised_projections_are_read_in_a_byte_and_nothing_else_is(config: OmniConfig) -> None:
    assert config.talker is not None
    with torch.device("meta"):
        talker = Talker(config)
    quantised = sum(talker.get_parameter(name).numel() for name in projections(talker))
    work = DecoderWork(config.talker.text, weight_bytes=4, element_bytes=4, projection_bytes=1)
    moved = quantised + 4 * (numel(talker.backbone) - quantised)
    assert work.weight_traffic(MANY_ROWS) == pytest.approx(moved, abs=1e-6)
    plain = DecoderWork(config.talker.text, weight_bytes=4, element_bytes=4)
    assert plain.weight_traffic(MANY_ROWS) == pytest.approx(4 * numel(talker.backbone), abs=1e-6)


def test_weights_are_those_of_the_models(config: OmniConfig) -> None:
    assert config.talker is not None
    with torch.device("meta"):
        thinker, talker = Thinker(config), Talker(config)
    for decoder, found in (
        (config.thinker, numel(thinker.backbone)),
        (config.talker.text, numel(talker.backbone)),
        (config.talker.code_predictor, numel(talker.code_predictor.layers, talker.code_predictor.norm)),
    ):
        work = DecoderWork(decoder, weight_bytes=4, element_bytes=4)
        assert work.weights(MANY_ROWS) == pytest.approx(found, abs=1e-6)
    head = DecoderWork(config.thinker, weight_bytes=4, element_bytes=4).head(1)
    assert head.moved_bytes == 4 * thinker.lm_head.numel()
    heads = DecoderWork(config.talker.code_predictor, weight_bytes=1, element_bytes=1).head(1, heads=15)
    assert heads.moved_bytes == talker.code_predictor.heads.numel()


def test_the_frames_of_a_talker_step_are_counted_position_by_position(config: OmniConfig) -> None:
    assert config.talker is not None
    text, predictor = config.talker.text, config.talker.code_predictor
    sizes = {"weight_bytes": 2, "element_bytes": 4}
    step = talker_work(config.talker, **sizes)(batch((9, 1, True), (20, 1, True)))
    decoder, codes = DecoderWork(text, **sizes), DecoderWork(predictor, **sizes)
    frames, hidden = 2, predictor.hidden_size
    bytes_, flops = 0.0, 0.0
    seen = 0  # positions in the cache of one frame
    for index in range(config.talker.num_code_groups - 1):
        new = 1 if index else 2
        bytes_ += 2 * (codes.weights(frames) + predictor.vocab_size * hidden)
        bytes_ += codes.cache_bytes(frames * (seen + new)) + 4 * frames * hidden
        flops += frames * (new * codes.row_flops + 2 * predictor.vocab_size * hidden)
        flops += codes.attention_flops(frames * sum(seen + row + 1 for row in range(new)))
        seen += new
    assert seen == config.talker.num_code_groups
    bytes_ += 2 * (decoder.weights(2) + text.vocab_size * text.hidden_size)
    bytes_ += decoder.cache_bytes(9 + 20 + 2) + 4 * 2 * text.hidden_size * 17
    flops += 2 * decoder.row_flops + decoder.attention_flops(10 + 21) + 2 * 2 * text.vocab_size * text.hidden_size
    assert step.moved_bytes == pytest.approx(bytes_) and step.flops == pytest.approx(flops)


@contextmanager
def watched(engine: Engine) -> Iterator[list[ScheduledBatch]]:
    """Every batch that the engine runs."""
    batches: list[ScheduledBatch] = []
    own = engine.work

    def work(batch: ScheduledBatch) -> Work:
        batches.append(batch)
        return own(batch)

    engine.work = work
    yield batches
    engine.work = own


def test_a_run_multiplies_as_often_as_the_arithmetic_says(nano: Path, config: OmniConfig) -> None:
    assert config.talker is not None
    bench = Bench(nano, batch_invariant=False)  # no padding
    for name in ("a", "b", "c"):
        bench.submit(name, bench.prompt(5, 6, 7))
    with (
        watched(bench.thinker.engine) as written,
        watched(bench.talker.engine) as spoken,
        FlopCounterMode(display=False) as counter,
    ):
        bench.run(only=(bench.thinker, bench.talker))
    products = sum(
        flops for operator, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(operator)
    )
    sizes = {"weight_bytes": 4, "element_bytes": 4}
    expected = 0.0
    for batches, decoder in ((written, config.thinker), (spoken, config.talker.text)):
        work = DecoderWork(decoder, **sizes)
        for one in batches:
            expected += one.num_tokens * work.row_flops + work.head(sum(row.samples for row in one.rows)).flops
    frames = sum(row.samples for one in spoken for row in one.rows)
    residual = DecoderWork(config.talker.code_predictor, **sizes)
    groups = config.talker.num_code_groups
    expected += frames * groups * residual.row_flops + residual.head(frames * (groups - 1)).flops
    assert len(written) > 3 and frames > 20
    assert products == pytest.approx(expected, rel=1e-9)
    for stage, batches in ((bench.thinker, written), (bench.talker, spoken)):
        assert stage.counts.flops == pytest.approx(sum(stage.engine.work(one).flops for one in batches))
        assert stage.counts.moved_bytes == pytest.approx(sum(stage.engine.work(one).moved_bytes for one in batches))


# --- the vocoder ---


def vocoder(config: OmniConfig) -> Code2WavConfig:
    assert config.code2wav is not None
    return config.code2wav


def test_the_vocoders_weights_and_history_are_those_of_the_model(config: OmniConfig) -> None:
    with torch.device("meta"):
        model = Code2Wav(vocoder(config))
    work = VocoderWork(vocoder(config), element_bytes=4)
    assert work.weights == numel(model) - model.code_embedding.numel()
    state = StreamState(model, 3, device="meta", dtype=torch.float32)
    assert 4 * (3 + 1) * work.history == state.nbytes


def test_the_bytes_of_a_chunk_are_weights_state_rows_and_samples(config: OmniConfig) -> None:
    shape = vocoder(config)
    with torch.device("meta"):
        model = Code2Wav(shape)
    work = VocoderWork(shape, element_bytes=2)
    for first, passes in ((True, 1), (False, 2)):
        rows = 25 * shape.num_quantizers * shape.hidden_size
        samples = model.num_samples(25, first=first)
        expected = 2 * (work.weights + 3 * (passes * work.history + rows)) + 3 * 4 * samples
        assert work(3, 25, first=first).moved_bytes == expected


def in_place_flops(total: Any, left: tuple[int, ...], right: tuple[int, ...], **shapes: Any) -> int:
    """Of the pointwise convolutions, `total.baddbmm_(left, right)`: torch counts only what makes a new tensor."""
    return 2 * math.prod(left) * right[-1]


@pytest.mark.parametrize("first", [True, False])
def test_the_vocoder_multiplies_as_often_as_the_arithmetic_says(config: OmniConfig, first: bool) -> None:
    shape, frames = vocoder(config), 40
    with torch.device("meta"):
        model = Code2Wav(shape)
        model.prepare()
    state = StreamState(model, 2, device="meta", dtype=torch.float32)
    codes = torch.zeros(2, shape.num_quantizers, frames, dtype=torch.int64, device="meta")
    slots = torch.zeros(2, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: in_place_flops})
    with torch.inference_mode(), counter:
        model(codes, state, slots, first=first)
    found = counter.get_flop_counts()["Global"]
    products = sum(flops for operator, flops in found.items() if operator is not torch.ops.aten.bmm)  # attention
    work = VocoderWork(shape, element_bytes=4)
    seen = sum(range(1, frames + 1)) if first else frames * shape.sliding_window
    attention = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * seen * 2
    # A transposed convolution computes what the trim takes away too.
    assert work(2, frames, first=first).flops - attention == pytest.approx(products, rel=1e-3)


def test_the_arithmetic_needs_no_torch() -> None:
    script = (
        "import sys, triptych.stages.decoder_work, triptych.stages.vocoder_work\n"
        "sys.exit('torch' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
