"""The engine's theorems for prompts with images, clips and videos: nothing depends on timing, batch or memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.bench_media import Medium, clip, picture, video
from tests.engine.test_engine_exactness import assert_same
from tests.stage_bench import Bench, MediaPrompt, Reply
from triptych.config.sampling import SamplingParams
from triptych.connectors import segments
from triptych.engine.request import RequestStatus

COUNT = 9


def prompts(bench: Bench) -> list[MediaPrompt]:
    """Every kind alone, mixes in random order, and a prompt of text only."""
    rng = random.Random(5)
    film = video(3, frames=26, height=96, width=64)
    talkie = video(4, frames=20, height=64, width=96, sound=clip(5, 430))
    kinds: list[Medium] = [picture(1, 128, 96), clip(2, 930), film, talkie]
    mixes = [[medium] for medium in kinds] + [rng.sample(kinds, 3) for _ in range(COUNT - 5)] + [[]]
    chats = []
    for media in mixes:
        words = [[rng.randrange(30, 230) for _ in range(rng.randrange(1, 40))] for _ in range(len(media) + 1)]
        parts = [*words[0], *(part for medium, text in zip(media, words[1:], strict=True) for part in (medium, *text))]
        chats.append(bench.media_prompt(*parts))
    return chats


def submit(bench: Bench, name: str, prompt: MediaPrompt, index: int, *, speak: bool = True) -> None:
    text = SamplingParams(temperature=1.0, max_tokens=5 + index, seed=100 + index)
    speech = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=8 + index, seed=index)
    bench.submit(name, prompt.token_ids, media=prompt.items, thinker=text, talker=speech, speak=speak)


def answer(bench: Bench, name: str, prompt: MediaPrompt, index: int) -> Reply:
    submit(bench, name, prompt, index)
    bench.run()
    return bench.replies[name]


def assert_nothing_is_held(bench: Bench) -> None:
    for stage in (bench.thinker, bench.talker):
        assert stage.scheduler.pool.num_used == 0
        assert not stage.requests
    assert bench.thinker.media is not None
    assert not bench.thinker.media._prompts and not bench.thinker.media._clients
    assert bench.thinker.media._line.cache.pinned_bytes == 0
    assert not bench.thinker.media.has_work()


@pytest.fixture(scope="module")
def reference(nano: Path, eager: bool) -> list[Reply]:
    bench = Bench(nano, enforce_eager=eager)
    replies = [answer(bench, f"alone-{index}", prompt, index) for index, prompt in enumerate(prompts(bench))]
    assert sum(reply.frames > 5 for reply in replies) >= 4
    return replies


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param({}, id="whole-prefill"),
        pytest.param({"max_num_batched_tokens": 128}, id="chunked-prefill"),
        pytest.param({"max_num_seqs": 3}, id="three-at-a-time"),
        pytest.param({"num_kv_blocks": 68, "max_num_seqs": 9}, id="few-blocks"),
        pytest.param({"async_chunk": False}, id="barrier"),
        pytest.param({"window": 1}, id="back-pressure"),
    ],
)
def test_batched_equals_alone(
    nano: Path, eager: bool, reference: list[Reply], stage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.stages.thinker_stage.PIECE_ROWS", 7)
    bench = Bench(nano, enforce_eager=eager, **stage)
    for index, prompt in enumerate(prompts(bench)):
        submit(bench, f"batch-{index}", prompt, index)
    bench.run()
    for index in range(COUNT):
        assert_same(bench.replies[f"batch-{index}"], reference[index])
    assert_nothing_is_held(bench)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param({"encoder_cache_bytes": 0}, id="encoded-again"),
        pytest.param({}, id="encodings-kept"),
        pytest.param({"enable_prefix_caching": True, "encoder_cache_bytes": 0}, id="cached-prefix"),
        pytest.param({"async_chunk": False}, id="barrier"),
        pytest.param({"window": 1}, id="back-pressure"),
    ],
)
def test_preemption_at_any_moment_changes_nothing(
    nano: Path, eager: bool, reference: list[Reply], stage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.stages.thinker_stage.PIECE_ROWS", 50)
    bench = Bench(nano, enforce_eager=eager, max_num_batched_tokens=128, **stage)
    rng = random.Random(2)
    for index, prompt in enumerate(prompts(bench)):
        submit(bench, f"batch-{index}", prompt, index)
    for _ in range(150):
        for stage_ in bench.stages:
            stage_.poll_inputs()
            if stage_.has_work():
                stage_.step()
        for scheduler in (bench.thinker.scheduler, bench.talker.scheduler):
            if scheduler._running and rng.random() < 0.4:
                scheduler._preempt(rng.choice(scheduler._running), [])
    bench.run()
    for index in range(COUNT):
        assert_same(bench.replies[f"batch-{index}"], reference[index])
    assert min(bench.thinker.scheduler.num_preemptions, bench.talker.scheduler.num_preemptions) > 5
    assert_nothing_is_held(bench)


def test_bfloat16_states_arrive_as_they_are(nano: Path, eager: bool) -> None:
    alone, together = (
        Bench(nano, enforce_eager=eager, dtype="bfloat16"),
        Bench(nano, enforce_eager=eager, dtype="bfloat16", async_chunk=False),
    )
    chats = prompts(alone)
    for index in (0, 3, 6):
        submit(together, f"r-{index}", chats[index], index)
    together.run()
    for index in (0, 3, 6):
        assert_same(together.replies[f"r-{index}"], answer(alone, f"r-{index}", chats[index], index))


def test_requests_that_come_while_others_are_encoded_change_nothing(
    nano: Path, eager: bool, reference: list[Reply]
) -> None:
    bench = Bench(nano, enforce_eager=eager, encoder_budget=4096, max_num_batched_tokens=192)
    rng = random.Random(1)
    order = list(enumerate(prompts(bench)))
    rng.shuffle(order)
    for index, prompt in order:
        submit(bench, f"late-{index}", prompt, index)
        for _ in range(rng.randrange(4)):
            for stage in bench.stages:
                stage.poll_inputs()
                if stage.has_work():
                    stage.step()
    bench.run()
    for index in range(COUNT):
        assert_same(bench.replies[f"late-{index}"], reference[index])


def test_cached_prefix_equals_cold_and_is_not_encoded_again(nano: Path, eager: bool, reference: list[Reply]) -> None:
    """Not even without a cache of the encoders: the Talker's hidden states are found with the prefix."""
    bench = Bench(nano, enforce_eager=eager, enable_prefix_caching=True, encoder_cache_bytes=0)
    chats = prompts(bench)
    for index, prompt in enumerate(chats):
        assert_same(answer(bench, f"cold-{index}", prompt, index), reference[index])
    # A tail of text, so that the hit, which ends with a whole cell, covers all media.
    chats = [
        MediaPrompt([*prompt.token_ids[:-3], *range(40, 140), *prompt.token_ids[-3:]], prompt.items, prompt.media)
        for prompt in chats
    ]
    other = Bench(nano, enforce_eager=eager)
    cold = [answer(other, f"long-{index}", prompt, index) for index, prompt in enumerate(chats)]
    for index, prompt in enumerate(chats):
        assert_same(answer(bench, f"first-{index}", prompt, index), cold[index])
    assert bench.thinker.media is not None
    line = bench.thinker.media._line
    line.submit = lambda *_: pytest.fail("media that the prefix cache holds was sent to the encoders")  # type: ignore
    hits = bench.thinker.scheduler.pool.num_hit_tokens
    for index, prompt in enumerate(chats):
        submit(bench, f"again-{index}", prompt, index)
    bench.run()
    for index in range(COUNT):
        assert_same(bench.replies[f"again-{index}"], cold[index])
    assert bench.thinker.scheduler.pool.num_hit_tokens > hits
    assert_nothing_is_held(bench)


def test_behind_a_cached_part_of_a_video_only_the_rest_is_encoded(
    nano: Path, eager: bool, reference: list[Reply]
) -> None:
    """A hit ends with a whole cell, so it may end within a video: the question after it is short."""
    bench = Bench(nano, enforce_eager=eager, enable_prefix_caching=True, encoder_cache_bytes=0, encoder_budget=64)
    cold = Bench(nano, enforce_eager=eager, encoder_budget=64)
    talkie = bench.media_prompt(40, video(4, frames=40, height=64, width=96, sound=clip(5, 430)), 41, 42)
    expected = answer(cold, "cold", talkie, 3)
    assert_same(answer(bench, "first", talkie, 3), expected)
    assert bench.thinker.media is not None
    encoders, calls = bench.thinker.media._line.encoders, []
    encode = encoders.encode_vision
    encoders.encode_vision = lambda patches, grids: calls.append(patches.shape[0]) or encode(patches, grids)  # type: ignore
    submit(bench, "again", talkie, 3)
    bench.thinker.poll_inputs()
    engine = bench.thinker.requests["again"].engine
    in_video = bench.thinker.scheduler.num_hit_tokens(engine)
    assert talkie.items[0].start < in_video < talkie.items[0].end
    bench.run()
    assert_same(bench.replies["again"], expected)
    assert 0 < sum(calls) < 20 * 24  # patches of the whole video
    assert_nothing_is_held(bench)


def test_one_picture_twice_in_a_prompt(nano: Path) -> None:
    bench = Bench(nano)
    same = picture(1)
    prompt = bench.media_prompt(40, same, 41, same, 42)
    expected = answer(bench, "twice", prompt, 0)
    assert expected.failure is None and expected.done
    assert_same(answer(bench, "again", prompt, 0), expected)
    assert_nothing_is_held(bench)


def test_a_silent_answer_leaves_what_a_spoken_one_needs(nano: Path, eager: bool, reference: list[Reply]) -> None:
    bench = Bench(nano, enforce_eager=eager, enable_prefix_caching=True)
    for index, prompt in enumerate(prompts(bench)):
        submit(bench, f"silent-{index}", prompt, index, speak=False)
        bench.run()
        assert bench.replies[f"silent-{index}"].text == reference[index].text
        assert_same(answer(bench, f"spoken-{index}", prompt, index), reference[index])


@pytest.mark.parametrize("num_words", [100, 0])
def test_a_prefix_that_is_forgotten_while_a_request_waits_is_encoded(nano: Path, num_words: int) -> None:
    """It held all of the video, or all but the last rows, for which there is an order already."""
    bench = Bench(nano, enable_prefix_caching=True, max_num_seqs=1, num_kv_blocks=66, encoder_cache_bytes=0)
    film = prompts(bench)[2].media[0]
    longer = bench.media_prompt(40, film, *range(40, 40 + num_words))
    cold = answer(Bench(nano), "cold", longer, 2)
    assert_same(answer(bench, "first", longer, 2), cold)
    text = bench.prompt(*(30 + step % 190 for step in range(950)))
    bench.submit("big", text, speak=False)  # takes every block, and so the cached ones
    submit(bench, "again", longer, 2)
    bench.thinker.poll_inputs()
    engine = bench.thinker.requests["again"].engine
    needed = engine.absent_end
    held = bench.thinker.scheduler.num_hit_tokens(engine)
    assert (0 < needed <= held) if num_words else (0 < held < needed)
    assert bench.thinker.media is not None and bench.thinker.media.has_work() == (num_words == 0)
    bench.run()
    assert_same(bench.replies["again"], cold)
    assert engine.num_cached_tokens < needed
    assert_nothing_is_held(bench)


def test_other_media_behind_the_same_text_is_another_answer(nano: Path) -> None:
    bench = Bench(nano, enable_prefix_caching=True)
    for seed in (1, 2):
        prompt = bench.media_prompt(40, picture(seed, 128, 160), *range(40, 80))
        bench.submit(f"picture-{seed}", prompt.token_ids, media=prompt.items)
        bench.run()
        cold = Bench(nano)
        cold.submit("cold", prompt.token_ids, media=prompt.items)
        cold.run()
        assert_same(bench.replies[f"picture-{seed}"], cold.replies["cold"])


def test_decoding_goes_on_while_a_long_video_is_encoded(nano: Path) -> None:
    bench = Bench(nano, encoder_budget=16)
    bench.submit("talk", bench.prompt(40, 41), thinker=SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
    for _ in range(3):
        bench.thinker.step()
    film = bench.media_prompt(video(9, frames=40), 40)
    bench.submit("film", film.token_ids, media=film.items)
    before = bench.replies["talk"].num_tokens
    turns = 0
    while bench.thinker.requests["film"].engine.status is RequestStatus.WAITING:
        bench.thinker.poll_inputs()
        bench.thinker.step()
        turns += 1
    assert turns >= 20  # temporal patches
    engine = bench.thinker.requests["talk"].engine
    assert engine.num_sampled >= before + turns
    bench.run()
    assert bench.replies["film"].done and bench.replies["talk"].done


def test_a_request_whose_media_is_gone_fails_alone(nano: Path, eager: bool, reference: list[Reply]) -> None:
    bench = Bench(nano, enforce_eager=eager)
    chats = prompts(bench)
    lost = bench.media_prompt(40, picture(77), clip(78))
    for item in lost.items:
        assert item.features is not None
        segments.unlink(item.features.segment)
    submit(bench, "before", chats[0], 0)
    submit(bench, "lost", lost, 1)
    submit(bench, "after", chats[3], 3)
    bench.run()
    assert "cannot be read" in (bench.replies["lost"].failure or "")
    assert_same(bench.replies["before"], reference[0])
    assert_same(bench.replies["after"], reference[3])
    bench.talker.abort("lost")  # as the server does
    assert_nothing_is_held(bench)


def test_features_that_do_not_fit_the_prompt_are_refused(nano: Path) -> None:
    bench = Bench(nano)
    small, large = bench.media_prompt(40, picture(1, 64, 64)), bench.media_prompt(40, picture(1, 64, 96))
    bench.submit("wrong", small.token_ids, media=large.items, speak=False)
    bench.run()
    assert bench.replies["wrong"].failure is not None
    text = bench.prompt(40, 41)
    bench.submit("nowhere", text, media=small.items, speak=False)
    assert "has no rows for its image" in (bench.replies["nowhere"].failure or "")
    assert_nothing_is_held(bench)


def test_abort_frees_media_at_every_moment(nano: Path, eager: bool, reference: list[Reply]) -> None:
    for steps in range(0, 12, 2):
        bench = Bench(nano, enforce_eager=eager, encoder_budget=256, max_num_batched_tokens=128)
        chats = prompts(bench)
        for index in (1, 2, 3, 6):
            submit(bench, f"r-{index}", chats[index], index)
        for _ in range(steps):
            for stage in bench.stages:
                stage.poll_inputs()
                if stage.has_work():
                    stage.step()
        for name in ("r-1", "r-2", "r-3", "r-6"):
            for stage in bench.stages:
                stage.abort(name)
        assert_nothing_is_held(bench)


def test_hidden_states_beyond_those_of_the_prompt_fail_the_request(nano: Path) -> None:
    bench = Bench(nano)
    prompt = bench.media_prompt(40, picture(1), 41)
    submit(bench, "more", prompt, 0)
    hidden = bench.thinker.cache.hidden
    assert hidden is not None
    bench.text_edge.try_put("more", {"hidden": hidden[:7].numpy()})
    bench.talker.poll_inputs()
    assert "7 hidden states came for the 6 media rows" in (bench.replies["more"].failure or "")
    submit(bench, "early", prompt, 0)
    bench.text_edge.try_put("early", {"token_ids": hidden[:1, 0].numpy().astype("int32")})
    bench.talker.poll_inputs()
    assert "the text came after 0 hidden states" in (bench.replies["early"].failure or "")


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(nano: Path, eager: bool, reference: list[Reply]) -> None:
    bench = Bench(nano, enforce_eager=eager)
    chats = prompts(bench)
    submit(bench, "r", chats[0], 0)
    bench.submit("r", chats[1].token_ids, media=chats[1].items, speak=False)
    assert "is in use" in (bench.replies["r"].failure or "")
    bench.replies["r"].failure = None
    bench.run()
    assert_same(bench.replies["r"], reference[0])
    assert_nothing_is_held(bench)
