"""The engine's theorems on real tiny stages: what must not depend on timing, batch or memory does not, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.stage_bench import Bench, Reply
from triptych.config.sampling import SamplingParams

SAMPLED = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=24, seed=11)
TEXT = SamplingParams(temperature=1.0, max_tokens=16, seed=11, ignore_eos=True)


def prompts(bench: Bench, count: int) -> list[list[int]]:
    """Chats of unequal lengths, from one word to several prefill cells."""
    lengths = [1 + (37 * index) % 150 for index in range(count)]
    return [bench.prompt(*(30 + (index * 7 + step) % 200 for step in range(n))) for index, n in enumerate(lengths)]


def params(index: int) -> tuple[SamplingParams, SamplingParams]:
    text = SamplingParams(temperature=1.0, max_tokens=6 + index % 9, seed=100 + index)
    speech = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=10 + index, seed=100 + index)
    return text, speech


def alone(bench: Bench, prompt: list[int], index: int) -> Reply:
    text, speech = params(index)
    bench.submit(f"alone-{index}", prompt, thinker=text, talker=speech)
    bench.run()
    return bench.replies[f"alone-{index}"]


def assert_same(ours: Reply, reference: Reply) -> None:
    assert ours.done and reference.done
    assert (ours.failure, reference.failure) == (None, None)
    assert (ours.text, ours.text_reason) == (reference.text, reference.text_reason)
    assert (ours.frames, ours.speech_reason) == (reference.frames, reference.speech_reason)
    np.testing.assert_array_equal(ours.audio, reference.audio)


@pytest.fixture(scope="module")
def reference(nano: Path, eager: bool) -> dict[int, Reply]:
    bench = Bench(nano, enforce_eager=eager)
    return {index: alone(bench, prompt, index) for index, prompt in enumerate(prompts(bench, 12))}


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param({}, id="whole-prefill"),
        pytest.param({"max_num_batched_tokens": 128}, id="chunked-prefill"),
        pytest.param({"max_num_seqs": 3}, id="three-at-a-time"),
        pytest.param({"num_kv_blocks": 66, "max_num_seqs": 12}, id="preempted"),
        pytest.param({"async_chunk": False}, id="barrier"),
        pytest.param({"window": 1}, id="back-pressure"),
        pytest.param({"scheduling_policy": "fcfs", "max_num_seqs": 3}, id="first-come"),
    ],
)
def test_batched_equals_alone(nano: Path, eager: bool, reference: dict[int, Reply], stage: dict[str, int]) -> None:
    bench = Bench(nano, enforce_eager=eager, **stage)  # type: ignore[arg-type]
    for index, prompt in enumerate(prompts(bench, 12)):
        text, speech = params(index)
        bench.submit(f"batch-{index}", prompt, thinker=text, talker=speech)
    bench.run()
    for index in range(12):
        assert_same(bench.replies[f"batch-{index}"], reference[index])
    if "num_kv_blocks" in stage:
        assert bench.thinker.scheduler.num_preemptions + bench.talker.scheduler.num_preemptions > 0
    for stage_ in (bench.thinker, bench.talker):
        assert stage_.scheduler.pool.num_used == 0
    check_counts(bench, 12)


def test_the_order_of_service_changes_no_byte(nano: Path, eager: bool) -> None:
    """By clocks that jump: listeners seem to run dry, prompts are held back, and blocks are taken from anyone."""
    dice = random.Random(0)
    now = 0.0

    def jump() -> float:
        nonlocal now
        now += dice.choice([0.0, 0.001, 0.05, 0.4])
        return now

    quiet = Bench(nano, enforce_eager=eager)
    bench = Bench(nano, enforce_eager=eager, talker={"max_model_len": 256, "num_kv_blocks": 24})
    bench.talker.engine.clock = bench.codec._clock = jump
    for index, prompt in enumerate(prompts(bench, 5)[1:]):
        text, speech = params(index)
        speech = msgspec.structs.replace(speech, ignore_eos=True, max_tokens=40 + index)
        quiet.submit(f"r-{index}", prompt, thinker=text, talker=speech)
        quiet.run()
        bench.submit(f"r-{index}", prompt, thinker=text, talker=speech)
    bench.run()
    for index in range(4):
        assert_same(bench.replies[f"r-{index}"], quiet.replies[f"r-{index}"])
    assert bench.talker.scheduler.num_preemptions > 0
    assert not bench.talker.playouts
    check_counts(bench, 4)


@pytest.mark.parametrize(
    ("changes", "by_slack"), [({}, True), ({"scheduling_policy": "fcfs"}, False), ({"async_chunk": False}, False)]
)
def test_the_talker_keeps_clocks_where_listeners_can_run_dry(
    nano: Path, changes: dict[str, Any], by_slack: bool
) -> None:
    bench = Bench(nano, **changes)
    bench.submit("a", bench.prompt(40, 41), talker=SAMPLED)
    assert list(bench.talker.playouts) == (["a"] if by_slack else [])
    bench.talker.abort("a")
    assert not bench.talker.playouts


def check_counts(bench: Bench, num_requests: int) -> None:
    """What the stages say that they did is what they gave, however the requests were scheduled."""
    thinker, talker, code2wav = (stage.stats().counts for stage in bench.stages)
    for counts in (thinker, talker, code2wav):
        assert counts.step_time_s.count == counts.batch_size.count == counts.step_tokens.count > 0
        assert counts.gen_time_s.count == num_requests
        assert 0 < counts.step_time_s.total and counts.batch_size.total >= counts.batch_size.count
        assert (counts.failed, counts.aborted) == (0, 0)
    # Without any text the Talker is done without a step.
    spoken = sum(reply.frames > 0 for reply in bench.replies.values())
    assert thinker.queue_wait_s.count == code2wav.queue_wait_s.count == num_requests
    assert spoken <= talker.queue_wait_s.count <= num_requests
    frames = sum(reply.frames for reply in bench.replies.values())
    assert thinker.tokens == sum(reply.num_tokens for reply in bench.replies.values())
    assert talker.tokens == code2wav.tokens == code2wav.step_tokens.total == frames
    sizes = talker.transfers["code2wav"].size_bytes
    assert sizes.total == 4 * bench.talker.model.num_code_groups * frames
    assert sizes.count == talker.transfers["code2wav"].tx_s.count >= num_requests
    assert 0 < thinker.transfers["talker"].size_bytes.total <= 4 * thinker.tokens
    assert talker.preemptions == bench.talker.scheduler.num_preemptions


def test_text_that_comes_late_equals_text_that_comes_at_once(
    nano: Path, eager: bool, reference: dict[int, Reply]
) -> None:
    """The Talker steps once for every time that the Thinker does, or starts when all text is there."""
    bench = Bench(nano, enforce_eager=eager)
    prompt = prompts(bench, 12)[5]
    text, speech = params(5)
    bench.submit("late", prompt, thinker=text, talker=speech)
    bench.run(only=(bench.thinker,))
    bench.run()
    assert_same(bench.replies["late"], reference[5])


def test_cached_prefix_equals_cold(nano: Path, eager: bool, reference: dict[int, Reply]) -> None:
    bench = Bench(nano)
    warm = Bench(nano, enforce_eager=eager, enable_prefix_caching=True)
    index = max(range(12), key=lambda i: len(prompts(bench, 12)[i]))
    prompt = prompts(bench, 12)[index]
    assert_same(alone(warm, prompt, index), reference[index])
    text, speech = params(index)
    warm.submit("again", prompt, thinker=text, talker=speech)
    warm.run()
    assert_same(warm.replies["again"], reference[index])
    counts = warm.thinker.stats().counts
    assert 0 < counts.prefix_hits < counts.prefix_queries == 2 * len(prompt)


def test_a_conversation_that_goes_on_equals_the_same_one_cold(nano: Path, eager: bool) -> None:
    """Compiled layers compute a row of an answer as one of a prompt, so it is found again."""
    warm, cold = Bench(nano, enforce_eager=eager, enable_prefix_caching=True), Bench(nano, enforce_eager=eager)
    first, said = warm.prompt(*range(40, 70)), list[int]()
    take = warm.thinker._take
    warm.thinker._take = lambda request, token, logprob: (said.append(token), take(request, token, logprob))[1]  # type: ignore
    text = SamplingParams(temperature=1.0, max_tokens=120, seed=4, ignore_eos=True)
    warm.submit("first", first, thinker=text, speak=False)
    warm.run()
    assert len(said) == 120
    longer = [*first, *said, *range(30, 50)]
    for bench in (warm, cold):
        bench.submit("second", longer, thinker=TEXT, talker=SAMPLED, speak=False)
        bench.run()
    assert warm.replies["second"].text == cold.replies["second"].text != ""
    assert (warm.thinker.scheduler.pool.num_hit_tokens > len(first)) == (not eager)


def test_same_seed_same_audio_other_seed_other_audio(nano: Path) -> None:
    bench = Bench(nano)
    prompt = bench.prompt(40, 41, 42)
    audio = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        speech = SamplingParams(temperature=0.9, top_k=50, max_tokens=12, seed=seed)
        bench.submit(name, prompt, thinker=TEXT, talker=speech)
        bench.run()
        audio[name] = bench.replies[name].audio
    np.testing.assert_array_equal(audio["a"], audio["b"])
    assert audio["a"].shape != audio["c"].shape or not np.array_equal(audio["a"], audio["c"])


def test_a_temperature_of_next_to_nothing_is_greedy_in_every_codebook(nano: Path) -> None:
    bench = Bench(nano)
    for name, temperature, seed in (("none", 0.0, 1), ("next", 1e-6, 2)):
        speech = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, seed=seed)
        bench.submit(name, bench.prompt(40, 41, 42), thinker=TEXT, talker=speech)
        bench.run()
    assert_same(bench.replies["next"], bench.replies["none"])


def test_a_request_without_finite_logits_spoils_no_blocks_for_those_after_it(nano: Path, eager: bool) -> None:
    bench = Bench(nano, enforce_eager=eager)
    text = SamplingParams(temperature=0.0, max_tokens=4, seed=0, ignore_eos=True)
    bad, good = bench.prompt(*[40] * 60), bench.prompt(41, 42)
    table = bench.thinker.model.embed_tokens
    kept = table[40].clone()
    with torch.inference_mode():
        bench.submit("before", good, speak=False, thinker=text)
        bench.run()
        table[40] = torch.nan
        bench.submit("bad", bad, speak=False, thinker=text)
        bench.run()
        table[40] = kept
        bench.submit("after", good, speak=False, thinker=text)
        bench.run()
    assert bench.replies["bad"].failure == "the model gave no finite logits"
    assert bench.replies["after"] == bench.replies["before"]


def test_abort_frees_everything_and_disturbs_nobody(nano: Path, eager: bool, reference: dict[int, Reply]) -> None:
    bench = Bench(nano, enforce_eager=eager)
    for index, prompt in enumerate(prompts(bench, 12)):
        text, speech = params(index)
        bench.submit(f"r-{index}", prompt, thinker=text, talker=speech)
    for _ in range(4):
        for stage in bench.stages:
            stage.poll_inputs()
            if stage.has_work():
                stage.step()
    for index in (1, 4, 7):
        for stage in bench.stages:
            stage.abort(f"r-{index}")
            stage.abort(f"r-{index}")
    bench.run()
    for index in set(range(12)) - {1, 4, 7}:
        assert_same(bench.replies[f"r-{index}"], reference[index])
    for index in (1, 4, 7):
        assert not bench.replies[f"r-{index}"].done
    for stage in bench.stages:
        stats = stage.stats()
        assert (stats.running, stats.waiting, stats.parked, stats.kv_blocks_used) == (0, 0, 0, 0)
        counts = stats.counts
        assert counts.aborted + counts.gen_time_s.count == 12 and counts.aborted <= 3, "each request counts once"


def test_runaway_speech_ends_with_length(nano: Path) -> None:
    bench = Bench(nano, frames_per_text_token=2, extra_frames=5)
    never_ends = {bench.talker.model.talker_config.codec_eos_token_id: -100.0}
    text = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0)
    speech = SamplingParams(temperature=0.9, max_tokens=500, seed=3, logit_bias=never_ends)
    bench.submit("runaway", bench.prompt(40, 41), thinker=text, talker=speech)
    bench.run()
    reply = bench.replies["runaway"]
    assert (reply.frames, reply.speech_reason) == (2 * 4 + 5, "length")
    assert bench.talker.runaways == 1


def test_speech_that_ignores_its_end_has_exactly_the_frames_it_may_have(nano: Path) -> None:
    bench = Bench(nano)
    text = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0)
    for seed in range(4):
        speech = SamplingParams(temperature=0.9, max_tokens=60, ignore_eos=True, seed=seed)
        bench.submit(f"long-{seed}", bench.prompt(40, 41), thinker=text, talker=speech)
    bench.run()
    assert [
        (bench.replies[f"long-{seed}"].frames, bench.replies[f"long-{seed}"].speech_reason) for seed in range(4)
    ] == [(60, "length")] * 4


def test_an_answer_without_text_has_no_audio(nano: Path) -> None:
    bench = Bench(nano)
    everything = tuple(range(bench.config.thinker.vocab_size))
    text = SamplingParams(temperature=0.0, max_tokens=4, stop_token_ids=everything, seed=0)
    bench.submit("mute", bench.prompt(40), thinker=text, talker=SAMPLED)
    bench.run()
    reply = bench.replies["mute"]
    assert (reply.text, reply.text_reason, reply.frames, reply.done) == ("", "stop", 0, True)
    assert reply.audio.size == 0


def test_aborting_a_refused_request_closes_its_edges(nano: Path) -> None:
    """Its text may be on the way when the Talker refuses it."""
    bench = Bench(nano, talker={"max_model_len": 16})
    bench.submit("long", bench.prompt(*range(40, 80)), talker=SAMPLED)
    assert bench.replies["long"].failure is not None
    for stage in bench.stages:
        stage.abort("long")
    assert "long" in bench.text_edge.closed and "long" in bench.code_edge.closed
