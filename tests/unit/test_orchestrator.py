"""The parts of the orchestrator that need no process: admission, request state, stream, restart budget."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest

from tests.fake_stages import CONFIG, PROMPT, deploy_config, generation_request
from triptych.config.sampling import SamplingParams
from triptych.connectors.wire import AudioOutput, SpeechOutput, SubmitCodec, SubmitSpeech, SubmitText, TextOutput
from triptych.errors import ContextLengthError, RequestError, StageError
from triptych.pipeline.admission import admit
from triptych.pipeline.request import AudioDelta, Done, Event, GenerationRequest, TextDelta
from triptych.pipeline.request_state import RequestState
from triptych.pipeline.restarts import WINDOW_S, RestartBudget
from triptych.pipeline.stream import RequestStream
from triptych.pipeline.warm_up import warm_up_request

DEPLOY = deploy_config()
TEXT_ONLY = deploy_config(processes=("text",))


def prompt_of(length: int) -> tuple[int, ...]:
    """A prompt of that many tokens, all of them in the user's turn and the header of the answer."""
    return (1, 4, *[9] * (length - 6), 2, 1, 5, 9)


def sized(length: int, *, max_tokens: int | None = None, speak: bool = False) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return GenerationRequest(
        request_id="r", prompt_token_ids=prompt_of(length), thinker=params, talker=params if speak else None
    )


# --- admission ---


def test_consumers_are_announced_before_producers() -> None:
    admission = admit(generation_request("r"), DEPLOY, CONFIG)
    assert admission.stages == ("code2wav", "talker", "thinker")
    codec, speech, text = (message for _, message in admission.messages)
    assert isinstance(codec, SubmitCodec) and codec.credit == 16
    assert isinstance(speech, SubmitSpeech) and speech.speaker_id == 11
    assert isinstance(text, SubmitText) and text.speak
    assert {message.request_id for _, message in admission.messages} == {"r"}


def test_text_only_needs_the_thinker_alone() -> None:
    assert admit(generation_request("r", speak=False), DEPLOY, CONFIG).stages == ("thinker",)


def test_a_prompt_may_fill_the_context_but_for_one_token() -> None:
    text = admit(sized(4095), DEPLOY, CONFIG).messages[0][1]
    assert isinstance(text, SubmitText) and text.params.max_tokens == 1
    with pytest.raises(ContextLengthError, match=r"4096 tokens.*context of 4096"):
        admit(sized(4096), DEPLOY, CONFIG)


def test_max_tokens_beyond_the_context_are_refused_with_the_number_that_fits() -> None:
    admit(sized(4000, max_tokens=96), DEPLOY, CONFIG)
    with pytest.raises(
        ContextLengthError, match=r"4000 prompt tokens and max_tokens 97 make 4097.*at most 96"
    ) as caught:
        admit(sized(4000, max_tokens=97), DEPLOY, CONFIG)
    assert caught.value.param == "max_tokens" and caught.value.code == "context_length_exceeded"


def test_the_talker_context_is_checked_too_and_its_length_clipped() -> None:
    # The Talker's prompt has six rows more than its ids: nine for the answer in place of the header's three.
    speech = admit(sized(4089, max_tokens=1, speak=True), DEPLOY, CONFIG).messages[1][1]
    assert isinstance(speech, SubmitSpeech) and speech.params.max_tokens == 1
    with pytest.raises(ContextLengthError, match="4096 positions for the speech stage, whose context of 4096"):
        admit(sized(4090, max_tokens=1, speak=True), DEPLOY, CONFIG)
    admit(sized(4090, max_tokens=1), DEPLOY, CONFIG)


def test_an_unknown_voice_lists_the_voices_and_case_does_not_matter() -> None:
    with pytest.raises(RequestError, match="unknown voice 'nope'; voices of this model: chelsie, ethan") as caught:
        admit(generation_request("r", voice="nope"), DEPLOY, CONFIG)
    assert caught.value.param == "audio.voice"
    speech = admit(generation_request("r", voice="ETHAN"), DEPLOY, CONFIG).messages[1][1]
    assert isinstance(speech, SubmitSpeech) and speech.speaker_id == 12


def test_speech_without_speech_stages_is_refused() -> None:
    with pytest.raises(RequestError, match="no speech stages") as caught:
        admit(generation_request("r"), TEXT_ONLY, CONFIG)
    assert caught.value.param == "modalities"


@pytest.mark.parametrize(("prompt", "reason"), [((), "empty"), ((1, 1000), "1000 is not in"), ((-1, 5), "not in")])
def test_a_prompt_outside_the_vocabulary_is_refused(prompt: tuple[int, ...], reason: str) -> None:
    request = GenerationRequest(request_id="r", prompt_token_ids=prompt, thinker=SamplingParams(seed=1))
    with pytest.raises(RequestError, match=reason):
        admit(request, DEPLOY, CONFIG)


def test_the_warm_up_is_a_request_like_any_other() -> None:
    assert len(admit(warm_up_request("w", CONFIG, speak=True), DEPLOY, CONFIG).messages) == 3
    assert len(admit(warm_up_request("w", CONFIG, speak=False), TEXT_ONLY, CONFIG).messages) == 1


# --- request state ---


def state(*, speak: bool = True, credit: int = 16) -> RequestState:
    stages = admit(generation_request("r", speak=speak), DEPLOY, CONFIG).stages
    return RequestState(request=generation_request("r", speak=speak), stages=stages, credit=credit)


def text(seq: int, finish_reason: str | None = None) -> TextOutput:
    return TextOutput(request_id="r", seq=seq, text="a", num_tokens=1, finish_reason=finish_reason)


def audio(seq: int, *, frames: int = 2, final: bool = False) -> AudioOutput:
    return AudioOutput(request_id="r", seq=seq, num_frames=frames, final=final)


def speech(frames: int, reason: str = "stop") -> SpeechOutput:
    return SpeechOutput(request_id="r", num_frames=frames, finish_reason=reason)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(("text_reason", "speech_reason"), [("stop", "stop"), ("length", "stop"), ("stop", "length")])
def test_a_request_ends_with_the_last_of_its_three_endings(
    order: tuple[int, ...], text_reason: str, speech_reason: str
) -> None:
    one = state()
    endings: list[Callable[[], object]] = [
        lambda: one.on_text(text(0, text_reason)),
        lambda: one.on_speech(speech(2, speech_reason)),
        lambda: one.on_audio(audio(0, final=True), b""),
    ]
    for number, index in enumerate(order):
        assert one.done() is None, number
        endings[index]()
    expected = "length" if "length" in (text_reason, speech_reason) else "stop"
    assert one.done() == Done(finish_reason=expected, prompt_tokens=len(PROMPT), text_tokens=1, audio_frames=2)


@pytest.mark.parametrize("seq", [0, 2])
def test_a_missing_or_doubled_text_is_an_error(seq: int) -> None:
    one = state()
    one.on_text(text(0))
    with pytest.raises(StageError, match=f"sent text {seq} where 1 was next"):
        one.on_text(text(seq))


@pytest.mark.parametrize("seq", [0, 2])
def test_a_missing_or_doubled_audio_chunk_is_an_error(seq: int) -> None:
    one = state()
    one.on_audio(audio(0), b"")
    with pytest.raises(StageError, match=f"sent audio {seq} where 1 was next"):
        one.on_audio(audio(seq), b"")


def test_output_after_the_end_is_an_error() -> None:
    one = state()
    one.on_text(text(0, "stop"))
    one.on_speech(speech(2))
    one.on_audio(audio(0, final=True), b"")
    for late in (lambda: one.on_text(text(1)), lambda: one.on_audio(audio(1), b""), lambda: one.on_speech(speech(2))):
        with pytest.raises(StageError):
            late()


@pytest.mark.parametrize("speech_first", [True, False])
def test_frames_that_the_vocoder_lost_are_an_error(speech_first: bool) -> None:
    one = state()
    steps: list[Callable[[], object]] = [
        lambda: one.on_speech(speech(3)),
        lambda: one.on_audio(audio(0, frames=2, final=True), b""),
    ]
    first, second = steps if speech_first else steps[::-1]
    first()
    with pytest.raises(StageError, match="decoded 2 of 3 frames"):
        second()


def test_audio_without_credit_is_an_error() -> None:
    one = state(credit=1)
    one.on_audio(audio(0), b"")
    with pytest.raises(StageError, match="without credit"):
        one.on_audio(audio(1), b"")


def test_a_dead_stage_matters_until_its_consumer_has_given_everything() -> None:
    one = state()
    assert all(one.needs(kind) for kind in ("thinker", "talker", "code2wav"))
    one.on_text(text(0, "stop"))
    assert one.needs("thinker")  # its last words may not have reached the Talker
    one.on_speech(speech(2))
    assert not one.needs("thinker") and one.needs("talker")
    one.on_audio(audio(0, final=True), b"")
    assert not any(one.needs(kind) for kind in ("thinker", "talker", "code2wav"))


def test_a_text_only_request_does_not_need_the_speech_stages() -> None:
    one = state(speak=False)
    assert one.needs("thinker") and not one.needs("talker") and not one.needs("code2wav")


# --- stream ---


class Consumer:
    """A stream, and what it told the orchestrator."""

    def __init__(self) -> None:
        self.taken = 0
        self.left = 0
        self.stream = RequestStream("r", on_taken=self._take, on_left=self._leave)

    def _take(self) -> None:
        self.taken += 1

    def _leave(self) -> None:
        self.left += 1


def delta(text: str) -> TextDelta:
    return TextDelta(text=text, num_tokens=1)


def chunk(final: bool = False) -> AudioDelta:
    return AudioDelta(samples=b"", num_frames=1, final=final)


DONE = Done(finish_reason="stop", prompt_tokens=1, text_tokens=1, audio_frames=0)


async def test_text_that_waits_is_merged_in_order_and_around_audio() -> None:
    consumer = Consumer()
    for event in (delta("a"), delta("b"), chunk(), delta("c"), DONE):
        consumer.stream.push(event)
    events = [event async for event in consumer.stream]
    assert events == [TextDelta(text="ab", num_tokens=2), chunk(), delta("c"), DONE]


async def test_what_a_slow_reader_holds_is_bounded_by_its_audio_credit() -> None:
    consumer = Consumer()
    for index in range(10_000):
        consumer.stream.push(delta(str(index)))
        if index % 1000 == 0:
            consumer.stream.push(chunk())
    assert len(consumer.stream._events) <= 2 * 10 + 1


async def test_every_chunk_but_the_last_is_granted_as_it_is_taken() -> None:
    consumer = Consumer()
    for event in (chunk(), chunk(), chunk(final=True), DONE):
        consumer.stream.push(event)
    assert consumer.taken == 0
    assert isinstance(await anext(consumer.stream), AudioDelta)
    assert consumer.taken == 1
    assert len([event async for event in consumer.stream]) == 3
    assert consumer.taken == 2


async def test_reading_to_the_end_aborts_nothing() -> None:
    consumer = Consumer()
    consumer.stream.push(DONE)
    assert [event async for event in consumer.stream] == [DONE]
    await consumer.stream.aclose()
    assert consumer.left == 0


async def _break(stream: RequestStream) -> None:
    async for _ in stream:
        break


async def _raise(stream: RequestStream) -> None:
    async for _ in stream:
        raise ValueError("the consumer's own")


async def _wait_for_more(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def _take_by_hand(stream: RequestStream) -> None:
    await anext(stream)
    await anext(stream)


async def _close(stream: RequestStream) -> None:
    async with stream:
        await anext(stream)


@pytest.mark.parametrize("leave", [_break, _raise, _wait_for_more, _take_by_hand, _close])
async def test_leaving_early_in_any_way_aborts_once(leave: object) -> None:
    consumer = Consumer()
    consumer.stream.push(delta("a"))
    task = asyncio.create_task(leave(consumer.stream))  # type: ignore[operator]
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert consumer.left == 1


async def test_a_failure_is_raised_after_what_came_before_it() -> None:
    consumer = Consumer()
    consumer.stream.push(delta("a"))
    consumer.stream.fail(StageError("broken", "talker", "r"))
    events: list[Event] = []
    with pytest.raises(StageError, match="broken"):
        async for event in consumer.stream:
            events.append(event)
    assert events == [delta("a")] and consumer.left == 0


async def test_a_cancelled_request_shows_nothing_but_its_end() -> None:
    consumer = Consumer()
    consumer.stream.push(delta("a"))
    consumer.stream.cut(DONE)
    assert [event async for event in consumer.stream] == [DONE]


# --- restarts ---


def test_restarts_back_off_and_run_out_within_the_window() -> None:
    budget = RestartBudget(4)
    assert [budget.next_delay(now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.0, 0.5, 1.0, 2.0, None]
    assert budget.next_delay(WINDOW_S + 3.5) == 0.0


def test_no_more_than_the_limit_restarts_fall_in_any_window() -> None:
    random.seed(1)
    budget, now, granted = RestartBudget(3), 0.0, []
    for _ in range(300):
        now += random.expovariate(1 / 150)
        if budget.next_delay(now) is not None:
            granted.append(now)
    for start in granted:
        assert sum(start <= other <= start + WINDOW_S for other in granted) <= 3


def test_a_limit_of_zero_never_restarts() -> None:
    assert RestartBudget(0).next_delay(0.0) is None
