"""What the sampler draws from equals what HF's logits processors leave, and the draws follow it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triptych.config.sampling import SamplingParams
from triptych.engine.draw import draw_top
from triptych.engine.random_stream import CODEBOOK0, TEXT, uniforms
from triptych.engine.sampler import Sampler

PROMPT = [1, 5, 5, 17]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hf_probabilities(
    logits: Tensor, params: SamplingParams, input_ids: Tensor | None = None, suppress: tuple[int, ...] = ()
) -> Tensor:
    """softmax of logits [B, V] after HF's processors, in the order of its `generate`.

    In float64, so that the reference's own rounding does not decide which token is the last that top_p keeps.
    """
    steps = LogitsProcessorList()
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if suppress:
        steps.append(SuppressTokensLogitsProcessor(list(suppress), device="cpu"))
    if params.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    ids = torch.zeros((logits.shape[0], 0), dtype=torch.int64) if input_ids is None else input_ids
    probabilities: Tensor = steps(ids, logits.double()).softmax(-1)
    return probabilities


def our_probabilities(
    logits: Tensor, params: SamplingParams, prompt: list[int] | None = None, suppress: tuple[int, ...] = ()
) -> Tensor:
    rows, vocab = logits.shape
    sampler = Sampler(num_slots=rows, vocab_size=vocab, device="cpu", suppress=suppress)
    for slot in range(rows):
        sampler.admit(slot, params, prompt or ())
    return sampler.probabilities(logits, range(rows))


def assert_same(ours: Tensor, theirs: Tensor, fewer: Tensor | None = None, more: Tensor | None = None) -> None:
    """Within 1e-4 and 2^-34, our least weight; a token that HF removed has none at all.

    `fewer` and `more` are HF's probabilities for a top_p a hair smaller and larger: what the rounding of float32 may
    decide lies between them.
    """
    fewer, more = theirs if fewer is None else fewer, theirs if more is None else more
    assert bool((ours[more == 0.0] == 0.0).all())
    assert bool((ours[fewer > 1e-9] > 0.0).all())
    theirs = torch.where((fewer > 0.0) == (more > 0.0), theirs, ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2.0**-34)


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, top_k=50),
    SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.8),
    SamplingParams(top_k=1),
    SamplingParams(top_k=300),
    SamplingParams(top_k=300, top_p=0.95),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.9999),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    SamplingParams(repetition_penalty=0.7, top_p=0.9),
]


@pytest.mark.parametrize("vocab", [1000, 2048, 4096])
@pytest.mark.parametrize("params", CASES, ids=lambda params: repr(params)[15:80])
def test_probabilities_equal_hf(params: SamplingParams, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(9, vocab) * torch.linspace(0.5, 4.0, 9).unsqueeze(1)
    ids = torch.tensor(PROMPT).expand(9, -1)
    suppress = (0, 7, vocab - 1)
    ours = our_probabilities(logits, params, PROMPT, suppress)
    near = [
        hf_probabilities(logits, msgspec.structs.replace(params, top_p=params.top_p + hair), ids, suppress)
        for hair in (0.0, -1e-6, 1e-6)
    ]
    assert_same(ours, *(near if params.top_p < 1.0 else near[:1]))


def test_tokens_tied_at_top_k_are_kept_as_in_hf() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, 2.0, -1.0]])
    for params in (
        SamplingParams(top_k=3),
        SamplingParams(top_k=3, min_p=0.1),
        SamplingParams(temperature=0.5, top_k=2),
    ):
        ours = our_probabilities(logits, params)
        assert int((ours > 0).sum()) == 5
        assert_same(ours, hf_probabilities(logits, params))


@pytest.mark.parametrize("top_k", [0, 3, 64, 300])
def test_bfloat16_logits_full_of_ties_keep_what_hf_keeps(top_k: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(16, 2048) * 3).bfloat16().float()
    params = SamplingParams(temperature=0.9, top_k=top_k)
    assert_same(our_probabilities(logits, params), hf_probabilities(logits, params))


def test_a_tie_at_the_end_of_top_p_is_kept_whole_where_hf_keeps_any_part_of_it() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(16, 2048) * 3).bfloat16().float()
    params = SamplingParams(top_k=50, top_p=0.8)
    ours, theirs = our_probabilities(logits, params) > 0, hf_probabilities(logits, params) > 1e-9
    assert not bool((theirs & ~ours).any())
    for row, extra in enumerate(ours & ~theirs):
        end = logits[row][theirs[row]].min()
        assert bool((logits[row][extra] == end).all())


@pytest.mark.parametrize(
    "params", [SamplingParams(top_p=0.5), SamplingParams(top_k=5, top_p=0.1), SamplingParams(min_p=0.9)]
)
def test_a_lone_survivor_has_all_the_probability(params: SamplingParams) -> None:
    logits = torch.zeros(2, 64)
    logits[:, 9] = 12.0
    ours = our_probabilities(logits, params)
    assert ours[:, 9].tolist() == [1.0, 1.0]
    assert_same(ours, hf_probabilities(logits, params))


def test_the_output_counts_for_the_repetition_penalty_as_in_hf() -> None:
    torch.manual_seed(0)
    params = SamplingParams(temperature=0.9, repetition_penalty=1.5, top_k=20, seed=3)
    sampler = Sampler(num_slots=1, vocab_size=32, device="cpu")
    sampler.admit(0, params, PROMPT)
    ids = list(PROMPT)
    for position in range(20):
        logits = torch.randn(1, 32) * 3
        assert_same(sampler.probabilities(logits, [0]), hf_probabilities(logits, params, torch.tensor([ids])))
        ids.append(int(sampler.sample(logits, [0], [position], TEXT).token_ids.item()))


def test_logit_bias_is_hf_sequence_bias() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 64)
    params = SamplingParams(logit_bias={3: 4.0, 9: -100.0}, top_k=10)
    assert_same(our_probabilities(logits, params), hf_probabilities(logits, params))


def test_presence_and_frequency_penalties_follow_openais_formula() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 16)
    sampler = Sampler(num_slots=1, vocab_size=16, device="cpu")
    sampler.admit(0, SamplingParams(presence_penalty=0.6, frequency_penalty=0.25), PROMPT[:2], [4, 4, 4, 9])
    expected = logits.clone()
    expected[0, 4] -= 0.6 + 3 * 0.25
    expected[0, 9] -= 0.6 + 0.25
    assert_same(sampler.probabilities(logits, [0]), expected.double().softmax(-1))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=8),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("eager", [True, False])
def test_frequencies_of_draws_follow_the_probabilities(params: SamplingParams, eager: bool) -> None:
    torch.manual_seed(1)
    draws, vocab = 40_000, 24
    logits = torch.randn(1, vocab)
    expected = hf_probabilities(logits, params)[0].numpy()
    sampler = Sampler(num_slots=100, vocab_size=vocab, device="cpu", eager=eager)
    for slot in range(100):
        sampler.admit(slot, msgspec.structs.replace(params, seed=slot))
    u = torch.from_numpy(uniforms(5, CODEBOOK0, np.arange(draws)))
    lean = draw_top(
        logits.expand(draws, -1).contiguous(), u, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    counts = [np.bincount(lean.numpy(), minlength=vocab)] if not params.min_p else []
    rows = logits.expand(100, -1)
    tokens = [sampler.sample(rows, range(100), [i] * 100, TEXT).token_ids for i in range(draws // 100)]
    counts.append(np.bincount(torch.cat(tokens).numpy(), minlength=vocab))
    for count in counts:
        assert count[expected < 1e-9].sum() == 0
        mean = expected[expected >= 1e-9] * count.sum()
        chi2 = float(((count[expected >= 1e-9] - mean) ** 2 / mean).sum())
        freedom = max(1, mean.size - 1)
        assert chi2 < freedom + 4 * (2 * freedom) ** 0.5
