"""The sampler: rows that do not feel each other, penalties, log probabilities, faults that stay in their row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from triptych.config.sampling import LARGEST_TOP_K, SamplingParams
from triptych.engine.compiled_draw import compiled_draw
from triptych.engine.draw import Cuts, draw_top, token_weights
from triptych.engine.random_stream import CODEBOOK0, TEXT, uniforms
from triptych.engine.sampler import Sampler
from triptych.errors import RequestError

GREEDY = SamplingParams(temperature=0.0, seed=0)
NewSampler = Callable[..., Sampler]
needs_compiler = pytest.mark.skipif(compiled_draw(8) is None, reason="there is no C compiler here")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[True, False], ids=["eager", "compiled"])
def new_sampler(request: pytest.FixtureRequest) -> NewSampler:
    return partial(Sampler, device="cpu", eager=request.param)


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.9, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 50, 300, 5000]),
        top_p=rng.choice([1.0, 1.0, 0.8, 0.3, 1e-4]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.05, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7, -0.4]),
        logit_bias={rng.randrange(vocab): rng.choice([-100.0, 2.0, 5.0])} if rng.random() < 0.3 else {},
        logprobs=rng.choice([None, None, 0, 3]),
        seed=rng.randrange(2**64),
    )


@pytest.mark.parametrize(("vocab", "dtype"), [(3072, torch.bfloat16), (1999, torch.float32), (1024, torch.bfloat16)])
def test_a_row_alone_equals_the_row_in_any_batch(new_sampler: NewSampler, vocab: int, dtype: torch.dtype) -> None:
    """bfloat16 logits are full of ties; an odd vocabulary moves rows off the vector width."""
    rng = random.Random(vocab)
    torch.manual_seed(vocab)
    slots = 12
    together = new_sampler(num_slots=slots, vocab_size=vocab, suppress=[3, 7])
    alone = [new_sampler(num_slots=2, vocab_size=vocab, suppress=[3, 7]) for _ in range(slots)]
    for slot in range(slots):
        params = random_params(rng, vocab)
        prompt = [rng.randrange(vocab) for _ in range(20)]
        together.admit(slot, params, prompt)
        alone[slot].admit(1, params, prompt)
    drawn = [0] * slots
    for _ in range(120):
        rows = rng.sample(range(slots), rng.randint(1, slots))
        logits = (torch.randn(len(rows), vocab) * 3).to(dtype)
        positions = [drawn[slot] for slot in rows]
        batch = together.sample(logits, rows, positions, TEXT)
        for i, slot in enumerate(rows):
            one = alone[slot].sample(logits[i : i + 1], [1], [drawn[slot]], TEXT)
            assert one.token_ids.item() == batch.token_ids[i].item()
            assert (one.logprobs or [None])[0] == (batch.logprobs or [None] * len(rows))[i]
            drawn[slot] += 1


@pytest.mark.parametrize(("vocab", "top_k"), [(2048, 50), (1999, 50), (2048, 0), (2048, 1), (2048, 700)])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draw_top_is_the_same_for_a_row_alone_and_in_a_batch(vocab: int, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(96, vocab) * 3).bfloat16()
    u = torch.rand(96, dtype=torch.float64)

    def draw(rows: slice) -> list[int]:
        drawn: list[int] = draw_top(logits[rows], u[rows], temperature=0.9, top_k=top_k, top_p=top_p).tolist()
        return drawn

    whole = draw(slice(None))
    for size in (1, 2, 7, 17, 33):
        assert [token for start in range(0, 96, size) for token in draw(slice(start, start + size))] == whole


def test_sums_of_weights_are_exact_in_any_order() -> None:
    """What makes a draw independent of how a kernel splits its sums: over the largest vocabulary, none rounds."""
    torch.manual_seed(0)
    x = torch.randn(1, 2**18) * torch.tensor([[0.01], [1.0], [4.0]])
    weights = token_weights(x, x.amax(-1, keepdim=True), 1.0)
    exact = [sum(int(weight) for weight in row) for row in weights.tolist()]
    for _ in range(3):
        shuffled = weights[:, torch.randperm(2**18)]
        assert shuffled.cumsum(-1, dtype=torch.float64)[:, -1].tolist() == exact
        assert shuffled.sum(-1, dtype=torch.float64).tolist() == exact


def test_the_sampler_and_draw_top_agree(new_sampler: NewSampler) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 2048) * 3
    sampler = new_sampler(num_slots=64, vocab_size=2048)
    for slot in range(64):
        sampler.admit(slot, SamplingParams(temperature=0.9, top_k=50, top_p=0.8, seed=slot))
    u = torch.from_numpy(uniforms(torch.arange(64).numpy().astype("uint64"), CODEBOOK0, 5))
    ours = sampler.sample(logits, range(64), [5] * 64, CODEBOOK0).token_ids
    assert torch.equal(ours, draw_top(logits, u, temperature=0.9, top_k=50, top_p=0.8))


def test_a_draw_depends_on_seed_stream_and_position_only(new_sampler: NewSampler) -> None:
    logits = torch.zeros(1, 4096)
    sampler = new_sampler(num_slots=3, vocab_size=4096)

    def draw(slot: int, seed: int, position: int, stream: int = TEXT) -> int:
        sampler.admit(slot, SamplingParams(seed=seed))
        return int(sampler.sample(logits, [slot], [position], stream).token_ids.item())

    assert draw(0, 1, 9) == draw(2, 1, 9)
    assert len({draw(0, 1, 9), draw(0, 2, 9), draw(0, 1, 8), draw(0, 1, 9, CODEBOOK0)}) == 4


def test_the_largest_top_k_keeps_every_token(new_sampler: NewSampler) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 100)
    sampler = new_sampler(num_slots=2, vocab_size=100)
    for slot, top_k in enumerate((0, LARGEST_TOP_K)):
        sampler.admit(slot, SamplingParams(top_k=top_k, seed=5))
    drawn = [sampler.sample(logits[:1].expand(2, -1), [0, 1], [at] * 2, TEXT).token_ids.tolist() for at in range(20)]
    assert all(every == largest for every, largest in drawn)


def test_no_seed_draws_afresh(new_sampler: NewSampler) -> None:
    sampler = new_sampler(num_slots=1, vocab_size=4096)
    seen = set()
    for _ in range(4):
        sampler.admit(0, SamplingParams())
        seen.add(sampler.sample(torch.zeros(1, 4096), [0], [0], TEXT).token_ids.item())
    assert len(seen) > 1


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(new_sampler: NewSampler) -> None:
    torch.manual_seed(0)
    params = SamplingParams(
        temperature=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        top_k=40,
        seed=11,
    )
    logits = torch.randn(40, 1, 64)

    def run(preempt_at: int | None) -> list[int]:
        sampler = new_sampler(num_slots=2, vocab_size=64)
        sampler.admit(0, params, [1, 2, 3])
        slot, out = 0, list[int]()
        for position in range(40):
            if position == preempt_at:
                sampler.release(0)
                slot = 1
                sampler.admit(slot, params, [1, 2, 3], out)
            out.append(int(sampler.sample(logits[position], [slot], [position], TEXT).token_ids.item()))
        return out

    assert run(None) == run(17)


def test_greedy_takes_the_first_largest_logit_alone_and_beside_sampled_rows(new_sampler: NewSampler) -> None:
    logits = torch.zeros(2, 100)
    logits[:, 40] = logits[:, 60] = 1e-7
    sampler = new_sampler(num_slots=2, vocab_size=100)
    sampler.admit(0, GREEDY)
    sampler.admit(1, SamplingParams(seed=1))
    assert sampler.sample(logits[:1], [0], [0], TEXT).token_ids.tolist() == [40]
    assert sampler.sample(logits, [0, 1], [0, 0], TEXT).token_ids.tolist()[0] == 40
    assert draw_top(logits, torch.full((2,), 0.99), temperature=0.0, top_k=50, top_p=0.8).tolist() == [40, 40]


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53, 1.0])
@pytest.mark.parametrize("top_k", [0, 4])
def test_the_ends_of_the_interval_draw_tokens_that_were_kept(u: float, top_k: int) -> None:
    logits = torch.full((1, 512), -torch.inf)
    logits[0, 5:9] = torch.tensor([1.0, 3.0, 2.0, 0.0])
    token = draw_top(logits, torch.tensor([u], dtype=torch.float64), temperature=1.0, top_k=top_k, top_p=1.0)
    assert token.item() == (5 if u == 0.0 else 8)


def test_penalties_count_what_was_drawn(new_sampler: NewSampler) -> None:
    """Greedy on fixed logits: a token leads until its penalties exceed its advantage."""
    logits = torch.tensor([[2.0, 1.0, -5.0, -5.0]])
    sampler = new_sampler(num_slots=1, vocab_size=4)

    def run(params: SamplingParams, steps: int, prompt: Sequence[int] = ()) -> list[int]:
        sampler.admit(0, params, prompt)
        return [int(sampler.sample(logits, [0], [i], TEXT).token_ids.item()) for i in range(steps)]

    assert run(SamplingParams(temperature=0.0, frequency_penalty=0.4), 5) == [
        0,
        0,
        0,
        1,
        0,
    ]  # 2 - 1.2 < 1; then 1 - 0.4
    assert run(SamplingParams(temperature=0.0, presence_penalty=1.5), 4) == [0, 1, 0, 0]  # once only
    assert run(SamplingParams(temperature=0.0, presence_penalty=1.5), 1, prompt=[0]) == [0]  # the prompt does not count
    assert run(SamplingParams(temperature=0.0, repetition_penalty=3.0), 3) == [0, 1, 0]
    assert run(SamplingParams(temperature=0.0, repetition_penalty=3.0), 1, prompt=[0]) == [1]  # here it does
    assert run(GREEDY, 3) == [0, 0, 0]  # and the next request in the slot starts clean


def test_a_request_without_a_repetition_penalty_is_clean_of_the_one_before_it_beside_a_row_that_has_one(
    new_sampler: NewSampler,
) -> None:
    logits = torch.tensor([[2.0, 1.0, -5.0, -5.0]] * 2)
    sampler = new_sampler(num_slots=2, vocab_size=4)
    sampler.admit(0, SamplingParams(temperature=0.0, repetition_penalty=3.0), [0])
    sampler.release(0)
    sampler.admit(0, GREEDY, [0])
    sampler.admit(1, SamplingParams(temperature=0.0, repetition_penalty=3.0))
    assert sampler.sample(logits, [0, 1], [0, 0], TEXT).token_ids.tolist() == [0, 0]


def test_logit_bias_moves_and_suppression_wins(new_sampler: NewSampler) -> None:
    sampler = new_sampler(num_slots=1, vocab_size=8, suppress=[6])
    sampler.admit(0, SamplingParams(temperature=0.0, logit_bias={2: 5.0, 6: 100.0}))
    logits = torch.zeros(1, 8)
    assert sampler.sample(logits, [0], [0], TEXT).token_ids.item() == 2
    assert torch.equal(logits, torch.zeros(1, 8))  # the caller's logits are left as they are


def test_what_does_not_fit_the_vocabulary_is_refused_by_name(new_sampler: NewSampler) -> None:
    sampler = new_sampler(num_slots=1, vocab_size=8)
    with pytest.raises(RequestError, match=r"token id 8 is not in 0\.\.7") as caught:
        sampler.admit(0, SamplingParams(logit_bias={8: 1.0}))
    assert caught.value.param == "logit_bias"
    with pytest.raises(ValueError, match=r"token id -1 is not in 0\.\.7"):
        sampler.admit(0, SamplingParams(repetition_penalty=2.0), [-1])
    with pytest.raises(ValueError, match="slot 0 holds no request"):
        sampler.sample(torch.zeros(1, 8), [0], [0], TEXT)
    with pytest.raises(ValueError, match="vocab_size"):
        new_sampler(num_slots=1, vocab_size=2**18 + 1)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(top_k=50, top_p=0.8, seed=1),
        SamplingParams(top_p=0.8, min_p=0.1, repetition_penalty=1.1, frequency_penalty=0.1, seed=1),
    ],
)
def test_a_row_of_invalid_logits_is_reported_and_leaves_the_others_alone(
    new_sampler: NewSampler, poison: float, params: SamplingParams
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 2048)
    sick = logits.clone()
    sick[4] = poison

    def draw(rows: Tensor) -> tuple[list[int], list[int]]:
        sampler = new_sampler(num_slots=9, vocab_size=2048)
        for slot in range(9):
            sampler.admit(slot, params)
        sampled = sampler.sample(rows, range(9), [0] * 9, TEXT)
        return sampled.token_ids.tolist(), sampled.bad

    healthy, none = draw(logits)
    drawn, bad = draw(sick)
    assert (none, bad) == ([], [4])
    assert 0 <= drawn[4] < 2048
    assert drawn[:4] + drawn[5:] == healthy[:4] + healthy[5:]
    u = torch.full((9,), 0.5)
    assert 0 <= int(draw_top(sick, u, temperature=1.0, top_k=50, top_p=0.8)[4]) < 2048
    assert 0 <= int(draw_top(sick, u, temperature=1.0, top_k=0, top_p=0.8)[4]) < 2048


def test_logprobs_are_those_of_the_raw_logits_best_first(new_sampler: NewSampler) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    logits[1, 10] = logits[1, 11] = 9.0  # a tie is listed by id
    sampler = new_sampler(num_slots=3, vocab_size=50, suppress=[11])
    for slot, wanted in enumerate([None, 2, 0]):
        sampler.admit(slot, SamplingParams(temperature=0.3, logit_bias={0: -5.0}, logprobs=wanted, seed=slot))
    sampled = sampler.sample(logits, [0, 1, 2], [0, 0, 0], TEXT)
    assert sampled.logprobs is not None
    first, second, third = sampled.logprobs
    expected = logits.log_softmax(-1)
    assert first is None
    assert second is not None
    assert third is not None
    assert second.token_id == 10
    assert [token for token, _ in second.top] == [10, 11]
    assert second.logprob == second.top[0][1] == pytest.approx(float(expected[1, 10]))
    assert third.top == ()
    assert third.logprob == pytest.approx(float(expected[2, third.token_id]))


def test_no_logprobs_are_computed_when_no_row_asks(new_sampler: NewSampler) -> None:
    sampler = new_sampler(num_slots=1, vocab_size=8)
    sampler.admit(0, GREEDY)
    assert sampler.sample(torch.zeros(1, 8), [0], [0], TEXT).logprobs is None


def test_a_draw_from_the_best_alone_is_the_draw_from_all() -> None:
    """A few rows take another way to the same tokens, ties at the cut included."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(300):
        logits = torch.randn(8, 512, generator=generator) * 3
        if trial % 3 == 0:
            logits = (logits * 2).round() / 2  # many ties
        uniforms = torch.rand(8, generator=generator, dtype=torch.float64)
        together = draw_top(logits, uniforms, temperature=0.8, top_k=50, top_p=(1.0, 0.8, 0.3)[trial % 3])
        for size in (1, 2, 4):
            apart = [
                draw_top(
                    logits[row : row + size],
                    uniforms[row : row + size],
                    temperature=0.8,
                    top_k=50,
                    top_p=(1.0, 0.8, 0.3)[trial % 3],
                )
                for row in range(0, 8, size)
            ]
            assert torch.equal(torch.cat(apart), together)


@needs_compiler
def test_compiled_code_draws_what_its_eager_twin_does() -> None:
    """From the same logits, the token that both draw: at any temperature and cut, between ties, beside other rows."""
    rng, vocab = random.Random(0), 1999
    torch.manual_seed(0)
    eager, compiled = (Sampler(num_slots=8, vocab_size=vocab, device="cpu", eager=twin) for twin in (True, False))
    for trial in range(150):
        rows = rng.randint(1, 8)
        logits = torch.randn(rows, vocab) * rng.choice([0.1, 1.0, 4.0])
        if trial % 3 == 0:
            logits = (logits * 2).round() / 2
        for slot in range(rows):
            params = random_params(rng, vocab)
            eager.admit(slot, params)
            compiled.admit(slot, params)
        ours = compiled.sample(logits, range(rows), [trial] * rows, TEXT)
        theirs = eager.sample(logits, range(rows), [trial] * rows, TEXT)
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert ours.logprobs == theirs.logprobs


@needs_compiler
@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53, 1.0])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.999)])
def test_compiled_code_draws_what_was_kept_at_the_ends_of_the_interval(u: float, params: SamplingParams) -> None:
    draw = compiled_draw(512)
    assert draw is not None
    logits = torch.full((1, 512), -torch.inf)
    logits[0, 5:9] = torch.tensor([1.0, 3.0, 2.0, 0.0])
    token = draw(logits, torch.tensor([u], dtype=torch.float64), Cuts.of([params], 512))
    assert token.item() == (5 if u == 0.0 else 8)
