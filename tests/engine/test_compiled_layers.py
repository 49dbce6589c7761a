"""The compiled layers: what their eager twin computes, and no row by anything but the positions before it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.stage_bench import Bench
from triptych.config.sampling import SamplingParams
from triptych.engine.batch import ScheduledBatch, ScheduledRow
from triptych.engine.inputs import build_inputs
from triptych.engine.request import EngineRequest
from triptych.layers.compiled_decoder import compiled_code
from triptych.layers.decoder import BetweenLayers
from triptych.layers.moe import SparseMoE
from triptych.layers.quantized_weight import quantize
from triptych.models.qwen3_omni.backbone import Backbone
from triptych.models.qwen3_omni.config import DecoderConfig

pytestmark = pytest.mark.skipif(compiled_code() is None, reason="there is no C compiler here")

LENGTHS = (1, 2, 7, 33, 70, 150)
Span = tuple[int, int, int]  # rows [start, end) of request i


def decoder(**changes: Any) -> DecoderConfig:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
    }
    return msgspec.convert(sizes | changes, DecoderConfig)


MIXTURE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
CONFIGS = {
    "dense": decoder(),
    "one-key-head": decoder(num_attention_heads=6, num_key_value_heads=1, head_dim=64),
    "heads-of-their-own": decoder(num_attention_heads=3, num_key_value_heads=3, head_dim=80),
    "odd": decoder(hidden_size=31, head_dim=10, intermediate_size=45),
    "mixture": decoder(**MIXTURE),
    "shared": decoder(**MIXTURE, shared_expert_intermediate_size=48, norm_topk_prob=True, mlp_only_layers=[1]),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def backbone(
    config: DecoderConfig,
    *,
    eager: bool,
    exact: bool = True,
    dtype: torch.dtype = torch.float32,
    change: Callable[[SparseMoE], None] | None = None,
    in_int8: bool = False,
) -> Backbone:
    """With random weights, the same each time, and mixtures as `change` has them; `exact`: those of bfloat16."""
    torch.manual_seed(0)
    model = Backbone(config)
    for name, weight in model.named_parameters():
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
        if "norm" in name:
            weight.data.add_(1.0)
        weight.data = (weight.data.bfloat16() if exact else weight.data).to(dtype)
    for part in model.modules():
        if change is not None and isinstance(part, SparseMoE):
            change(part)
        for name in getattr(part, "projections", ()) if in_int8 else ():
            weight = getattr(part, name).data
            delattr(part, name)
            setattr(part, name, quantize(weight, "int8"))
    model.prepare(4, eager=eager)
    assert (model.compiled is None) == eager
    return model


class Run:
    """Requests of LENGTHS rows each, their caches, and what the steps so far gave for their rows.

    Their blocks lie as `seed` has it, and hold what others left there.
    """

    def __init__(self, model: Backbone, *, block_size: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0):
        config, dice = model.config, random.Random(seed)
        self.model, self.block_size = model, block_size
        needed = [-(-length // block_size) for length in LENGTHS]
        ids = dice.sample(range(1, sum(needed) + 9), sum(needed))
        shape = (sum(needed) + 9, block_size, 2 * config.num_key_value_heads, config.head_dim)
        self.caches = [torch.randn(shape).mul_(9).to(dtype) for _ in range(config.num_hidden_layers)]
        torch.manual_seed(1)
        self.inputs = [torch.randn(length, config.hidden_size).to(dtype) for length in LENGTHS]
        self.outputs = [torch.full((length, config.hidden_size), torch.nan, dtype=dtype) for length in LENGTHS]
        self.requests = []
        for index, (length, count) in enumerate(zip(LENGTHS, needed, strict=True)):
            request = EngineRequest(request_id=str(index), num_prompt_tokens=length, params=SamplingParams())
            request.block_ids, ids = ids[:count], ids[count:]
            self.requests.append(request)

    @torch.inference_mode()
    def step(self, spans: Iterable[Span], between: BetweenLayers | None = None) -> None:
        rows = tuple(ScheduledRow(self.requests[at], start, end - start, False) for at, start, end in spans)
        inputs = build_inputs(
            ScheduledBatch(rows),
            block_size=self.block_size,
            device=torch.device("cpu"),
            batch_invariant=True,
            by_row=self.model.compiled is not None,
        )
        places = [(int(row.request.request_id), row.start, row.start + row.num_tokens) for row in inputs.rows]
        packed = torch.cat([self.inputs[at][start:end] for at, start, end in places])
        x = torch.nn.functional.pad(packed, (0, 0, 0, inputs.num_rows - packed.shape[0]))
        out = self.model(x, inputs.positions, self.caches, inputs.metadata, between)
        assert out.shape == x.shape and out.dtype == x.dtype
        for at, start, end in places:
            self.outputs[at][start:end], out = out[: end - start], out[end - start :]


def whole(model: Backbone, **options: Any) -> list[Tensor]:
    """Each request as one prefill, alone."""
    run = Run(model, **options)
    for at, length in enumerate(LENGTHS):
        run.step([(at, 0, length)])
    return run.outputs


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
        assert torch.equal(one, other), index


@configs
@pytest.mark.parametrize(
    ("dtype", "exact", "in_int8", "tolerance"),
    [
        (torch.float32, True, False, 1e-4),
        (torch.float32, False, False, 1e-4),
        (torch.float32, False, True, 1e-4),
        (torch.bfloat16, True, False, 0.15),
    ],
)
def test_they_compute_what_their_eager_twin_does(
    config: DecoderConfig, dtype: torch.dtype, exact: bool, in_int8: bool, tolerance: float
) -> None:
    models = [backbone(config, eager=eager, exact=exact, dtype=dtype, in_int8=in_int8) for eager in (False, True)]
    runs = [Run(model, dtype=dtype) for model in models]
    for run in runs:
        for at, length in enumerate(LENGTHS):
            run.step([(at, 0, max(1, length - 2))])
        for back in (2, 1):
            run.step([(at, length - back, length - back + 1) for at, length in enumerate(LENGTHS) if length > 2])
    for at, length in enumerate(LENGTHS):
        ours, eagers = (run.outputs[at][: 1 if length < 3 else length].float() for run in runs)
        # In bfloat16 a row may choose another expert where two are near.
        close = (ours - eagers).abs().amax(dim=1) < tolerance
        assert close.all() if dtype is torch.float32 else close.float().mean() > 0.8


@configs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_the_same_however_it_is_computed(config: DecoderConfig, dtype: torch.dtype, seed: int) -> None:
    """Cut anywhere, beside any others, prefill or decode, over blocks that lie anywhere."""
    model, dice = backbone(config, eager=False, exact=seed == 0, dtype=dtype, in_int8=seed == 2), random.Random(seed)
    run = Run(model, dtype=dtype, seed=seed + 1)
    done = [0] * len(LENGTHS)
    while any(end < length for end, length in zip(done, LENGTHS, strict=True)):
        spans: list[Span] = []
        for at in dice.sample(range(len(LENGTHS)), dice.randint(1, len(LENGTHS))):
            if (left := LENGTHS[at] - done[at]) > 0:
                end = done[at] + dice.choice([1, 1, min(3, left), dice.randint(1, left)])
                spans.append((at, done[at], end))
                done[at] = end
        if spans:
            run.step(spans)
    assert_same(run.outputs, whole(model, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 4, 12, 16, 20, 64])
def test_a_row_does_not_depend_on_the_size_of_blocks(block_size: int) -> None:
    model = backbone(CONFIGS["one-key-head"], eager=False)
    assert_same(whole(model, block_size=block_size), whole(model))


@configs
def test_a_row_that_is_not_finite_spoils_no_other_request(config: DecoderConfig) -> None:
    model = backbone(config, eager=False)
    expected, run = whole(model), Run(model)
    run.inputs[3][5:] = torch.nan
    run.inputs[1][1, 0], run.inputs[0][0, 3] = torch.inf, -torch.inf
    run.step([(at, 0, length) for at, length in enumerate(LENGTHS)])
    assert_same([run.outputs[3][:5], *run.outputs[4:]], [expected[3][:5], *expected[4:]])
    run.inputs[3][5:] = 1.0
    run.step([(at, 0, length) for at, length in enumerate(LENGTHS) if at not in (0, 1, 3)])
    assert_same([run.outputs[2], *run.outputs[4:]], [expected[2], *expected[4:]])


def test_of_experts_that_are_equally_likely_the_first_are_taken() -> None:
    """torch.topk takes any of them."""

    def change(mixture: SparseMoE) -> None:
        mixture.router.data.zero_()
        mixture.down.data[3:] = torch.nan

    for output in whole(backbone(decoder(**MIXTURE), eager=False, change=change)):
        assert output.isfinite().all()


class Recorded:
    """Between layers: what each gave, and one number added to all."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        self.seen.append((layer, x.clone()))
        return x + 1.0 if layer == 0 else x.add_(1.0)


@configs
def test_what_is_done_between_layers_is_done(config: DecoderConfig) -> None:
    between = [Recorded(), Recorded()]
    models = [backbone(config, eager=eager) for eager in (False, True)]
    outputs = []
    for model, record in zip(models, between, strict=True):
        run = Run(model)
        run.step([(4, 0, LENGTHS[4])], record)
        outputs.append(run.outputs[4])
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0.0)
    for ours, eagers in zip(between[0].seen, between[1].seen, strict=True):
        assert ours[0] == eagers[0]
        torch.testing.assert_close(ours[1][: LENGTHS[4]], eagers[1][: LENGTHS[4]], atol=1e-4, rtol=1e-4)


def test_a_backbone_without_a_compiled_twin_says_so(nano: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bench = Bench(nano, enforce_eager=False, dtype="float16")
    assert [record.message for record in caplog.records if "compiled form" in record.message] == [
        f"{part}: its layers have no compiled form in torch.float16; their eager twin runs, which is slower"
        for part in ("Thinker", "Talker")
    ]
    assert bench.thinker.model.backbone.compiled is bench.talker.model.backbone.compiled is None
    bench.submit("a", bench.prompt(40, 41))
    bench.run()
    assert bench.replies["a"].done and bench.replies["a"].failure is None
