"""A quantised pipeline keeps the engine's theorems, and says what the one in full says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.stage_bench import Bench, Reply
from training.domain import samples
from triptych.config.sampling import SamplingParams
from triptych.config.schema import Quantization
from triptych.layers.attention import PagedMetadata, PrefillPiece
from triptych.layers.product import Int8Product, WidenedProduct, int8_works
from triptych.layers.quantized_weight import STORED
from triptych.models.qwen3_omni.backbone import projections
from triptych.models.qwen3_omni.config import load_config
from triptych.models.qwen3_omni.processor import Processor
from triptych.models.qwen3_omni.thinker import Thinker
from triptych.models.registry import EMBEDDED
from triptych.models.weights import load_weights

TINY = EMBEDDED["tiny"]
QUESTIONS = 20
LENGTHS = (1, 70, 150, 33, 9)


def params(index: int) -> dict[str, SamplingParams]:
    return {
        "thinker": SamplingParams(temperature=1.0, max_tokens=6 + index, seed=100 + index),
        "talker": SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=10, seed=100 + index),
    }


def replies(nano: Path, *, together: bool, **stage: Any) -> list[Reply]:
    """What the requests get, all at once or one after the other."""
    bench = Bench(nano, quantization="int8", **stage)
    for index, length in enumerate(LENGTHS):
        prompt = bench.prompt(*(30 + (index * 7 + step) % 200 for step in range(length)))
        bench.submit(str(index), prompt, **params(index))
        if not together:
            bench.run()
    bench.run()
    return [bench.replies[str(index)] for index in range(len(LENGTHS))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batched_chunked_and_again_equal_alone(nano: Path, dtype: str, eager: bool) -> None:
    stage = {"dtype": dtype, "enforce_eager": eager}
    alone = replies(nano, together=False, **stage)
    assert all(reply.done and reply.failure is None for reply in alone) and sum(reply.frames for reply in alone) > 20
    for others in (
        replies(nano, together=False, **stage),
        replies(nano, together=True, **stage),
        replies(nano, together=True, max_num_batched_tokens=128, **stage),
    ):
        for ours, reference in zip(others, alone, strict=True):
            assert (ours.text, ours.frames) == (reference.text, reference.frames)
            np.testing.assert_array_equal(ours.audio, reference.audio)


def test_projections_of_the_backbones_are_quantised_and_nothing_else(nano: Path) -> None:
    bench = Bench(nano, quantization="int8", dtype="bfloat16")
    expected = Int8Product if int8_works() else WidenedProduct
    for backbone in (bench.thinker.model.backbone, bench.talker.model.backbone):
        for layer in backbone.layers:
            attention: Any = layer.attention
            assert type(attention.into) is type(attention.back) is expected
    spared: list[Any] = [bench.thinker.model.head, bench.talker.model.head, *bench.talker.model.code_predictor.draws]
    for layer in bench.talker.model.code_predictor.layers:
        spared += [layer.attention.into, layer.attention.back, layer.feed_forward.into, layer.feed_forward.back]
    for layer in bench.thinker.model.backbone.layers:
        spared.append(layer.feed_forward.route)
    assert not [product for product in spared if isinstance(product, Int8Product | WidenedProduct)]


def answers(**stage: Any) -> list[str]:
    """What `tiny` writes to held-out questions, greedily."""
    bench, processor = Bench(TINY, **stage), Processor(TINY)
    for index, sample in enumerate(samples(QUESTIONS, "held_out", seed=2)):
        messages: list[dict[str, Any]] = []
        for question, answer in sample.history:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        prompt = processor.encode([*messages, {"role": "user", "content": sample.question}])
        bench.submit(str(index), list(prompt), speak=False, thinker=SamplingParams(temperature=0.0, max_tokens=64))
    bench.run(only=(bench.thinker,))
    return [bench.replies[str(index)].text for index in range(QUESTIONS)]


def test_tiny_answers_as_it_does_in_full() -> None:
    full, quantised = answers(), answers(quantization="int8")
    assert len(set(full)) > QUESTIONS // 2
    different = [(ours, reference) for ours, reference in zip(quantised, full, strict=True) if ours != reference]
    assert len(different) <= 1, different


@pytest.mark.parametrize("method", STORED)
def test_logits_of_tiny_stay_close(method: Quantization) -> None:
    """Of fp8 too, which a deploy file takes only on CUDA: its weights and its arithmetic are the same here."""
    config = load_config(TINY)
    found = []
    for quantized in (None, method):
        with torch.device("meta"):
            thinker = Thinker(config)
        names = dict.fromkeys(projections(thinker), quantized) if quantized is not None else {}
        load_weights(thinker, thinker.placements, TINY, prefixes=thinker.prefixes, dtype=torch.float32, quantized=names)
        thinker.prepare()
        found.append(first_logits(thinker))
    exact, ours = (torch.log_softmax(logits, dim=-1) for logits in found)
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    assert not torch.equal(*found) and divergence.max() < {"int8": 1e-3, "fp8": 1e-2}[method]


def first_logits(thinker: Thinker) -> torch.Tensor:
    """[QUESTIONS, vocab]: what follows each question."""
    processor = Processor(TINY)
    rows = []
    with torch.inference_mode():
        for sample in samples(QUESTIONS, "held_out", seed=2):
            ids = torch.tensor(processor.encode([{"role": "user", "content": sample.question}]))
            rows.append(thinker.logits(hidden_states(thinker, ids)[-1:])[0])
    return torch.stack(rows)


def hidden_states(thinker: Thinker, ids: torch.Tensor) -> torch.Tensor:
    """ids [N] as one prefill -> [N, hidden]."""
    config, count = thinker.config, ids.shape[0]
    caches = [
        torch.zeros(2, count, 2 * config.num_key_value_heads, config.head_dim) for _ in range(config.num_hidden_layers)
    ]
    whole = PrefillPiece(0, count, torch.tensor([1]), torch.ones(count, count, dtype=torch.bool).tril())
    nothing = torch.empty(0, dtype=torch.long)
    metadata = PagedMetadata(count + torch.arange(count), 0, nothing, nothing, (whole,))
    return thinker.backbone.forward(thinker.embed(ids), torch.arange(count).expand(3, -1), caches, metadata)
