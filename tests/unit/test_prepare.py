"""Preparation merges defaults, overrides and seeds by stage, and refuses what cannot run."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from triptych.config.schema import DeployConfig, StageConfig
from triptych.errors import ContextLengthError, RequestError
from triptych.models.qwen3_omni.config import OmniConfig, parse_config
from triptych.models.qwen3_omni.processor import Processor
from triptych.models.qwen3_omni.synthetic_tokenizer import build_tokenizer, write_tokenizer
from triptych.pipeline.prepare import prepare
from triptych.pipeline.request import GenerationRequest

DECODER = {
    "vocab_size": 1500,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
}
RAW: dict[str, Any] = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {"text_config": DECODER},
    "talker_config": {
        "text_config": DECODER,
        "code_predictor_config": DECODER,
        "speaker_id": {"Chelsie": 1, "Ethan": 2},
    },
    "code2wav_config": {},
}
DEPLOY = DeployConfig(
    stages=(
        StageConfig(
            stage_id=0,
            stage="thinker",
            process="a",
            max_model_len=128,
            default_sampling_params={"temperature": 0.0, "max_tokens": 100},
        ),
        StageConfig(
            stage_id=1,
            stage="talker",
            process="a",
            default_sampling_params={"temperature": 0.9, "top_k": 50, "max_tokens": 1024},
        ),
        StageConfig(stage_id=2, stage="code2wav", process="a"),
    )
)
TEXT_ONLY = msgspec.structs.replace(DEPLOY, stages=DEPLOY.stages[:1])


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(build_tokenizer(1500, seed=7), folder)
    return Processor(folder)


@pytest.fixture(scope="module")
def config() -> OmniConfig:
    return parse_config(RAW)


def ask(processor: Processor, config: OmniConfig, deploy: DeployConfig = DEPLOY, **options: Any) -> GenerationRequest:
    values: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "speak": False, "request_id": "r"}
    return prepare(processor=processor, config=config, deploy=deploy, **(values | options))


def test_text_overrides_never_touch_the_talker(processor: Processor, config: OmniConfig) -> None:
    request = ask(processor, config, speak=True, thinker={"temperature": 0.0, "top_k": 1, "max_tokens": 7})
    assert request.thinker.temperature == 0.0 and request.thinker.max_tokens == 7
    assert request.talker is not None
    assert (request.talker.temperature, request.talker.top_k, request.talker.max_tokens) == (0.9, 50, 1024)


def test_overrides_of_the_talker_win_over_its_defaults(processor: Processor, config: OmniConfig) -> None:
    request = ask(processor, config, speak=True, talker={"temperature": 0.5})
    assert request.talker is not None
    assert (request.talker.temperature, request.talker.top_k) == (0.5, 50)
    assert request.thinker.temperature == 0.0


def test_text_only_has_no_talker(processor: Processor, config: OmniConfig) -> None:
    request = ask(processor, config)
    assert request.talker is None and not request.speaks
    assert request.prompt_token_ids == processor.encode([{"role": "user", "content": "hi"}])


def test_seed_reaches_both_stages(processor: Processor, config: OmniConfig) -> None:
    request = ask(processor, config, speak=True, seed=42)
    assert request.talker is not None
    assert request.thinker.seed == request.talker.seed == 42


def test_without_a_seed_one_fresh_seed_serves_both_stages(processor: Processor, config: OmniConfig) -> None:
    first, second = (ask(processor, config, speak=True) for _ in range(2))
    assert first.talker is not None
    assert first.thinker.seed is not None
    assert first.thinker.seed == first.talker.seed != second.thinker.seed
    assert 0 <= first.thinker.seed < 2**63


def test_request_seed_wins_over_the_deploy_file_and_a_stage_override_over_both(
    processor: Processor, config: OmniConfig
) -> None:
    thinker = msgspec.structs.replace(DEPLOY.stages[0], default_sampling_params={"seed": 7})
    deploy = msgspec.structs.replace(DEPLOY, stages=(thinker, *DEPLOY.stages[1:]))
    assert ask(processor, config, deploy).thinker.seed == 7
    assert ask(processor, config, deploy, seed=8).thinker.seed == 8
    assert ask(processor, config, deploy, seed=8, thinker={"seed": 9}).thinker.seed == 9


@pytest.mark.parametrize(("voice", "expected"), [("ETHAN", "ethan"), ("chelsie", "chelsie"), (None, None)])
def test_voice_is_case_insensitive(
    processor: Processor, config: OmniConfig, voice: str | None, expected: str | None
) -> None:
    assert ask(processor, config, speak=True, voice=voice).voice == expected


def test_unknown_voice_lists_the_voices(processor: Processor, config: OmniConfig) -> None:
    with pytest.raises(RequestError, match="'alloy' is not one of this model's voices: chelsie, ethan") as caught:
        ask(processor, config, speak=True, voice="alloy")
    assert (caught.value.param, caught.value.code) == ("audio.voice", "invalid_value")


def test_speech_without_speech_stages_is_refused(processor: Processor, config: OmniConfig) -> None:
    mute = parse_config(json.loads(json.dumps(RAW)) | {"enable_audio_output": False})
    for arguments in ((config, TEXT_ONLY), (mute, DEPLOY)):
        with pytest.raises(RequestError, match="no speech stages"):
            ask(processor, *arguments, speak=True)


def test_default_answer_length_shrinks_to_the_room_but_a_wanted_one_stays(
    processor: Processor, config: OmniConfig
) -> None:
    messages = [{"role": "user", "content": "? " * 30}]
    request = ask(processor, config, messages=messages)
    assert request.thinker.max_tokens == 128 - len(request.prompt_token_ids) < 100
    assert ask(processor, config, messages=messages, thinker={"max_tokens": 100}).thinker.max_tokens == 100
    too_long = [{"role": "user", "content": "? " * 200}]
    assert ask(processor, config, messages=too_long).thinker.max_tokens == 100


def test_a_prompt_far_too_long_is_refused_without_tokenising_it(
    processor: Processor, config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "encode", lambda messages: pytest.fail("it was tokenised"))
    with pytest.raises(ContextLengthError, match=r"[0-9]+ tokens or more, and this model's context of 128 tokens"):
        ask(processor, config, messages=[{"role": "user", "content": "hello " * 10_000}])


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        ({"temperature": -1}, "thinker.temperature"),
        ({"stop": ["x"] * 17}, "thinker.stop"),
        ({"stop": "x" * 1025}, "thinker.stop"),
        ({"stop_token_ids": [5] * 1501}, "stop_token_ids"),
        ({"logit_bias": {1500: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"seed": 2**70}, "thinker.seed"),
    ],
)
def test_bad_override_is_a_request_error(
    processor: Processor, config: OmniConfig, overrides: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(processor, config, thinker=overrides)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


def test_an_unknown_override_is_named_with_those_there_are(processor: Processor, config: OmniConfig) -> None:
    with pytest.raises(RequestError, match=r"did you mean 'min_p'\? Allowed: frequency_penalty, .*top_p") as caught:
        ask(processor, config, thinker={"min_pp": 1})
    assert (caught.value.param, caught.value.code) == ("thinker.min_pp", "unknown_parameter")


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        ({"temperature": -1}, "talker.temperature"),
        ({"logit_bias": {1500: 1.0}}, "talker.logit_bias"),
        ({"stop": ["x"]}, "talker.stop"),
        ({"logprobs": 1}, "talker.logprobs"),
    ],
)
def test_bad_override_of_the_speech_is_a_request_error(
    processor: Processor, config: OmniConfig, overrides: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(processor, config, speak=True, talker=overrides)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}], "messages.0.content.1"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ],
)
def test_bad_messages_name_the_place(
    processor: Processor, config: OmniConfig, messages: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(processor, config, messages=messages)
    assert caught.value.param == param
