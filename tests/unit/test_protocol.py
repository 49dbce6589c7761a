"""Every field of a chat request is honoured, refused by name, or on the documented list of those without effect."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from triptych.config.json_value import cut
from triptych.config.sampling import sampling_params
from triptych.errors import RequestError
from triptych.media.contract import MediaOptions
from triptych.server import protocol
from triptych.server.message import MOST_MESSAGES
from triptych.server.protocol import ChatCompletionRequest, parse_chat_request

BASE: dict[str, Any] = {"model": "omni", "messages": [{"role": "user", "content": "hi"}]}
PYTHONS_WORDS = re.compile(r"\b(None|True|False|Input|List|Dictionary|validation|valid|instance)\b")
SPOKEN = {"modalities": ["text", "audio"]}
WITHOUT_EFFECT = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}


IMAGE = {"type": "image_url", "image_url": {"url": "https://x"}}


def parse(**fields: Any) -> ChatCompletionRequest:
    return parse_chat_request(json.dumps(BASE | fields).encode())


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param and caught.value.param.split(".")[-1] in str(caught.value)
    assert caught.value.code and not PYTHONS_WORDS.search(str(caught.value)), caught.value
    return caught.value


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_default_is_text_alone() -> None:
    request = parse()
    assert request.wants_text and not request.wants_audio
    assert request.overrides() == ({}, {})
    assert not request.includes_usage and request.speaker_name is None


@pytest.mark.parametrize(
    ("modalities", "text", "audio"),
    [(None, True, False), (["text"], True, False), (["audio"], False, True), (["audio", "text"], True, True)],
)
def test_modalities_say_what_comes_back(modalities: list[str] | None, text: bool, audio: bool) -> None:
    request = parse(modalities=modalities)
    assert (request.wants_text, request.wants_audio) == (text, audio)


def test_null_is_the_same_as_absent_for_every_optional_field() -> None:
    optional = set(ChatCompletionRequest.model_fields) - {"model", "messages"}
    assert parse(**dict.fromkeys(optional)) == parse()


def test_every_field_is_honoured_refused_or_documented_as_without_effect() -> None:
    fields = set(ChatCompletionRequest.model_fields)
    refused_fields = {name for name in fields if "BeforeValidator" in repr(ChatCompletionRequest.model_fields[name])}
    refused_fields = {
        name for name in refused_fields if ChatCompletionRequest.model_fields[name].annotation is type(None)
    }
    for name in refused_fields:
        assert refused(**{name: "x"}).code == "unsupported_parameter"
    for name in WITHOUT_EFFECT:
        assert f"`{name}" in (protocol.__doc__ or "")
    honoured = fields - refused_fields - set(WITHOUT_EFFECT)
    assert honoured == {
        *("model", "messages", "modalities", "audio", "speaker", "voice", "stream", "stream_options", "n"),
        *("response_format", "max_completion_tokens", "logprobs", "top_logprobs", "seed", "sampling_params_list"),
        *("mm_processor_kwargs", "use_audio_in_video"),
        *protocol._THINKER_FIELDS,
    }


def test_fields_without_effect_are_accepted() -> None:
    assert parse(**WITHOUT_EFFECT).overrides() == parse().overrides()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling_params_list": [{"foo": 1}]}, "sampling_params_list.0.foo"),
        ({"sampling_params_list": [{}, {"n": 1}]}, "sampling_params_list.1.n"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"max_token": 1}, "max_token"),
        ({"audio": {"voice": "a", "speed": 2}, **SPOKEN}, "audio.speed"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (user([{"type": "text", "text": "a", "cache_control": {}}]), "messages.0.content.0.cache_control"),
        ({"messages": [{"role": "user", "content": "a", "mood": "good"}]}, "messages.0.mood"),
    ],
)
def test_unknown_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param and error.code == "unknown_parameter"


@pytest.mark.parametrize("name", ["(x)", "[key]", "", "a.b", "\n", "k" * 10_000])
def test_unknown_field_is_named_however_odd(name: str) -> None:
    with pytest.raises(RequestError, match="unknown field") as caught:
        parse(**{name: 1})
    assert caught.value.code == "unknown_parameter" and caught.value.param == cut(name)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * 1000},
        {"messages": [{}] * 1000},
        user([1] * 1000),
        {f"x{number}": 1 for number in range(1000)},
        {"messages": [{f"x{number}": 1 for number in range(1000)}]},
        {"logit_bias": {f"x{number}": 1 for number in range(1000)}},
        {"logit_bias": dict.fromkeys(map(str, range(1000)), "x")},
        {"metadata": dict.fromkeys(map(str, range(1000)), 1)},
        {"stop": [1] * 1000},
        {"stop_token_ids": ["x"] * 1000},
        {"modalities": ["x"] * 1000},
    ],
    ids=itertools.count(),
)
def test_validation_ends_soon_after_the_first_error(fields: dict[str, Any]) -> None:
    """Pydantic would collect them all: a small body full of errors took gigabytes."""
    cause = refused(**fields).__cause__
    assert isinstance(cause, ValidationError) and cause.error_count() < 5


def test_more_messages_than_any_context_holds_are_refused_unread() -> None:
    assert refused(messages=[{"role": "user", "content": ""}] * (MOST_MESSAGES + 1)).param == "messages"


@pytest.mark.parametrize(
    ("fields", "param", "written"),
    [
        ({"top_k": 4}, "thinker.top_k", "top_k"),
        ({"sampling_params_list": [{"top_k": 4}]}, "thinker.top_k", "sampling_params_list.0.top_k"),
        ({"sampling_params_list": [{}, {"top_k": 4}]}, "talker.top_k", "sampling_params_list.1.top_k"),
        ({"max_tokens": 4}, "max_tokens", "max_tokens"),
        ({"max_completion_tokens": 4}, "max_tokens", "max_completion_tokens"),
        ({"sampling_params_list": [{"max_tokens": 4}]}, "max_tokens", "sampling_params_list.0.max_tokens"),
        ({"speaker": "a", **SPOKEN}, "audio.voice", "speaker"),
        ({"audio": {"voice": "a"}, "voice": "a", **SPOKEN}, "audio.voice", "audio.voice"),
        ({}, "messages", "messages"),
        ({}, None, None),
    ],
)
def test_a_field_is_named_as_the_client_wrote_it(
    fields: dict[str, Any], param: str | None, written: str | None
) -> None:
    assert parse(**fields).written(param) == written


def test_an_empty_voice_is_not_the_default_one() -> None:
    assert parse(**SPOKEN, audio={"voice": ""}).speaker_name == parse(**SPOKEN, speaker="").speaker_name == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": True}, "seed"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"store": True}, "store"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 3}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logit_bias": {" 5": 1}}, "logit_bias. 5"),
        ({"logit_bias": {"5.0": 1}}, "logit_bias.5.0"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias.5"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"modalities": []}, "modalities"),
        ({"modalities": ["text", "text"]}, "modalities"),
        ({"modalities": ["video"]}, "modalities.0"),
        ({"modalities": "audio"}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"speaker": "a"}, "speaker"),
        ({"audio": {"format": "ogg"}, **SPOKEN}, "audio.format"),
        ({"audio": {"voice": {"id": "voice_1"}}, **SPOKEN}, "audio.voice"),
        ({"audio": {"voice": "a"}, "speaker": "b", **SPOKEN}, "speaker"),
        ({"speaker": "a", "voice": "b", **SPOKEN}, "voice"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        (user(None), "messages.0.content"),
        (user(3), "messages.0.content"),
        (user([]), "messages.0.content"),
        (user(["hi"]), "messages.0.content.0"),
        (user([{"type": "text"}]), "messages.0.content.0.text"),
        (user([{"type": "image_url"}]), "messages.0.content.0.image_url"),
        (user([{"type": "image_url", "image_url": 5}]), "messages.0.content.0.image_url"),
        (user([{"type": "image_url", "image_url": ""}]), "messages.0.content.0.image_url.url"),
        (user([{"type": "image_url", "image_url": {}}]), "messages.0.content.0.image_url.url"),
        (
            user([{"type": "image_url", "image_url": {"url": "https://x", "detail": "medium"}}]),
            "messages.0.content.0.image_url.detail",
        ),
        (
            user([{"type": "video_url", "video_url": {"url": "https://x", "detail": "low"}}]),
            "messages.0.content.0.video_url.detail",
        ),
        (user([{"type": "audio_url", "input_audio": {"data": "AA=="}}]), "messages.0.content.0.input_audio"),
        (user([{"type": "input_audio", "input_audio": {"format": "wav"}}]), "messages.0.content.0.input_audio.data"),
        (
            user([{"type": "input_audio", "input_audio": {"data": "AA==", "format": 3}}]),
            "messages.0.content.0.input_audio.format",
        ),
        (
            user([{"type": "input_audio", "input_audio": {"data": "https://x/a.wav", "format": "wav"}}]),
            "messages.0.content.0.input_audio.data",
        ),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "messages.0.content.1",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "audio": {}}]}, "messages.0.audio.id"),
        ({"messages": [{"role": "assistant", "audio": {"id": ""}}]}, "messages.0.audio.id"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "audio_1"}}]}, "messages.0.audio"),
        ({"use_audio_in_video": "yes"}, "use_audio_in_video"),
        ({"mm_processor_kwargs": []}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"size": 5}}, "mm_processor_kwargs.size"),
        ({"mm_processor_kwargs": {"fps": "2"}}, "mm_processor_kwargs.fps"),
        (
            {"mm_processor_kwargs": {"use_audio_in_video": False}, "use_audio_in_video": True},
            "mm_processor_kwargs.use_audio_in_video",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"user": 5}, "user"),
        ({"user": {"a": [None, True, float("nan")]}}, "user"),
        ({"temperature": None, "top_p": {"a": False}}, "top_p"),
        ({"modalities": ["text", "audio", "text"]}, "modalities"),
        ({"logit_bias": []}, "logit_bias"),
        ({"metadata": {"a": None}}, "metadata.a"),
        ({"mm_processor_kwargs": {"fps": True}}, "mm_processor_kwargs.fps"),
        ({"messages": [{"role": "user", "content": "x", "name": "Bob"}]}, "messages.0.name"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"model": None}, "model"),
        ({"sampling_params_list": [{}, {}, {}, {}]}, "sampling_params_list"),
        ({"sampling_params_list": [{"temperature": -1}]}, "sampling_params_list.0.temperature"),
        ({"sampling_params_list": [{"stop": ["x", 3]}]}, "sampling_params_list.0.stop.1"),
        ({"sampling_params_list": [{"stop_token_ids": [True]}]}, "sampling_params_list.0.stop_token_ids.0"),
        ({"sampling_params_list": [{"logit_bias": [5]}]}, "sampling_params_list.0.logit_bias"),
        ({"sampling_params_list": [{"logit_bias": {"5": True}}]}, "sampling_params_list.0.logit_bias.5"),
        ({"sampling_params_list": [{"ignore_eos": 0}]}, "sampling_params_list.0.ignore_eos"),
        ({"sampling_params_list": [{"top_k": 4.0}]}, "sampling_params_list.0.top_k"),
        ({"sampling_params_list": [{"temperature": 10**400}]}, "sampling_params_list.0.temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_k": -1.0}, "top_k"),
        ({"max_tokens": 10**4299}, "max_tokens"),
        ({"max_completion_tokens": 10**4299}, "max_completion_tokens"),
        ({"sampling_params_list": [{"max_tokens": 10**4299}]}, "sampling_params_list.0.max_tokens"),
        ({"top_k": True}, "top_k"),
        ({"stop": ["a", "b" * 1025]}, "stop.1"),
        ({"sampling_params_list": [{"temperature": "1"}]}, "sampling_params_list.0.temperature"),
        ({"sampling_params_list": [{"logit_bias": {"5": float("inf")}}]}, "sampling_params_list.0.logit_bias.5"),
        ({"sampling_params_list": [{"stop": ["x"] * 17}]}, "sampling_params_list.0.stop"),
        ({"sampling_params_list": [{"stop": "x" * 1025}]}, "sampling_params_list.0.stop"),
        ({"sampling_params_list": [{}, {"stop": ["x"]}]}, "sampling_params_list.1.stop"),
        ({"sampling_params_list": [{}, {"stop_token_ids": [5]}]}, "sampling_params_list.1.stop_token_ids"),
        ({"sampling_params_list": [{}, {"logprobs": 0}]}, "sampling_params_list.1.logprobs"),
        ({"sampling_params_list": [{}, {}, {"temperature": 1}]}, "sampling_params_list.2"),
        ({"sampling_params_list": [{"top_p": 0.5}], "top_p": 0.6}, "sampling_params_list.0.top_p"),
        ({"sampling_params_list": [{"seed": 5}], "seed": 6}, "sampling_params_list.0.seed"),
    ],
)
def test_wrong_value_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "'model': should be a string; got null"),
        ({"store": True}, "'store': should be false; got true"),
        ({"n": 2}, "'n': should be 1; got 2"),
        ({"n": 10**29}, f"'n': should be 1; got {10**29}"),
        ({"temperature": float("nan")}, "'temperature': should be a number, which NaN and Infinity are not; got NaN"),
        ({"top_k": 10**29}, f"'top_k': should be at most 2147483648; got {10**29}"),
        ({"stop": "b" * 1025}, f"'stop.0': takes at most 1024 characters, has 1025; got \"{'b' * 80}...\""),
        (
            {"sampling_params_list": [{}, {"max_tokens": True}]},
            "sampling_params_list.1.max_tokens: should be a whole number; got true",
        ),
        (
            {"sampling_params_list": [{"logit_bias": {"x": 1}}]},
            'sampling_params_list.0.logit_bias.x: a key should be a token id; got "x", with the value 1',
        ),
        (
            {"sampling_params_list": [{"temperature": float("nan")}]},
            "sampling_params_list.0.temperature: should be a number, which NaN and Infinity are not; got NaN",
        ),
        (
            user([{"type": 3, "text": "x"}]),
            "'messages.0.content.0.type': should be one of text, image_url, audio_url, video_url, input_audio; got 3",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            '\'response_format.type\' is not supported: the format "json_schema"; only "text" works here',
        ),
        ({"stream": "yes"}, "'stream': should be true or false; got \"yes\""),
        ({"seed": 0.5}, "'seed': should be a whole number; got 0.5"),
        ({"top_p": "x"}, "'top_p': should be a number; got \"x\""),
        ({"top_p": 0}, "'top_p': should be above 0; got 0"),
        ({"temperature": -1}, "'temperature': should be at least 0; got -1"),
        ({"temperature": 3}, "'temperature': should be at most 2; got 3"),
        ({"stop_token_ids": None, "stop": {}}, "'stop': should be an array; got {}"),
        ({"stop": ["a"] * 17}, "'stop': takes at most 16 items, has 17; got [" + '"a", ' * 6 + "...]"),
        ({"stop": [""]}, "'stop.0': needs at least 1 character, has 0; got \"\""),
        ({"messages": []}, "'messages': needs at least 1 item, has 0; got []"),
        ({"modalities": ["text", "picture"]}, '\'modalities.1\': should be "text" or "audio"; got "picture"'),
        ({"mm_processor_kwargs": True}, "'mm_processor_kwargs': should be an object; got true"),
        ({"audio": None, "stream_options": [None]}, "'stream_options': should be an object; got [null]"),
        (user(5), "'messages.0.content': should be a string or an array of parts; got 5"),
    ],
)
def test_messages_are_in_the_words_of_json(fields: dict[str, Any], message: str) -> None:
    assert str(refused(**fields)) == message


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"sampling_params_list": [{"min_pp": 1}]}, "did you mean 'min_p'? Allowed: frequency_penalty, ignore_eos, "),
        ({"sampling_params_list": [{"x" * 10**6: 1}]}, "Allowed: frequency_penalty, ignore_eos, "),
    ],
)
def test_an_unknown_parameter_is_named_with_those_there_are(fields: dict[str, Any], names: str) -> None:
    error = refused(**fields)
    assert error.code == "unknown_parameter" and names in str(error) and len(str(error)) < 600


@pytest.mark.parametrize("value", [True, False, 0, 1, 0.0, 1.0, -0.0])
def test_a_field_of_one_value_takes_that_and_no_other_type(value: Any) -> None:
    """Python takes 1, 1.0 and True for the same, and with it pydantic's Literal."""
    fields: dict[str, tuple[dict[str, Any], Any]] = {
        "n": ({"n": value}, 1),
        "store": ({"store": value}, False),
        "include_obfuscation": ({"stream": True, "stream_options": {"include_obfuscation": value}}, False),
    }
    plain = [name for name, field in iterate_fields(ChatCompletionRequest) if has_plain_literal(field)]
    assert sorted(plain) == sorted(fields)
    for given, allowed in fields.values():
        if type(value) is type(allowed) and value == allowed:
            parse(**given)
        else:
            assert refused(**given).code == "invalid_value"


def iterate_fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Every field of a body and of the bodies inside it."""
    for name, field in model.model_fields.items():
        yield name, field.annotation
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from iterate_fields(inner)


def has_plain_literal(annotation: Any) -> bool:
    """Whether a type is, or holds, a Literal of something else than strings."""
    if get_origin(annotation) is Literal:
        return not all(isinstance(value, str) for value in get_args(annotation))
    return any(has_plain_literal(inner) for inner in get_args(annotation))


@pytest.mark.parametrize("name", protocol._THINKER_FIELDS)
@pytest.mark.parametrize("value", [-(10**30), 10**30, 101, -101, "x" * 1025, ["x"] * 17, {"1": 101}])
def test_what_passes_here_is_in_the_range_of_the_stage(name: str, value: Any) -> None:
    """So no error of the stage, which has names of its own for the fields, meets a client."""
    with contextlib.suppress(RequestError):
        sampling_params(parse(**{name: value}).overrides()[0], "thinker")


def test_a_large_value_is_shown_in_a_short_message() -> None:
    value = {"k" * 200: [{"a": ["x" * 200] * 9}] * 9, **{str(number): number for number in range(9)}}
    assert len(str(refused(user=value))) < 500


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_an_empty_array_of_tools_asks_for_nothing(name: str) -> None:
    assert parse(**{name: []}) == parse()


@pytest.mark.parametrize("name", ["web_search_options", "prediction", "tools", "function_call", "reasoning_effort"])
def test_an_empty_object_may_ask_for_defaults_and_is_refused(name: str) -> None:
    assert refused(**{name: {}}).code == "unsupported_parameter"


@pytest.mark.parametrize("role", ["tool", "function", "narrator"])
def test_an_unknown_role_is_named_before_the_fields_it_brings(role: str) -> None:
    error = refused(messages=[*BASE["messages"], {"role": role, "tool_call_id": "1", "name": "f", "content": "5"}])
    assert (error.param, error.code) == ("messages.1.role", "unsupported_parameter")
    assert f'the role "{role}"; this server takes system, developer, user, assistant' in str(error)


@pytest.mark.parametrize("kind", ["file", "refusal", "image_embeds", "input_image"])
def test_a_part_that_the_model_cannot_take_is_named_with_those_it_takes(kind: str) -> None:
    error = refused(**user([{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "http://x"}}]))
    assert error.param == "messages.0.content.1" and kind in str(error)
    assert "this model takes text, image_url, audio_url, video_url, input_audio" in str(error)


def test_an_assistant_message_as_openai_returns_it_is_accepted() -> None:
    nothing: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    message = {"role": "assistant", "content": "x"} | nothing
    assert parse(messages=[message]).messages[0].for_template() == {"role": "assistant", "content": "x"}


def test_media_parts_are_read_in_their_order_with_their_places() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "https://x/1", "detail": "low"}},
        {"type": "audio_url", "audio_url": {"url": "https://x/2"}},
        {"type": "video_url", "video_url": {"url": "data:,3"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "anything"}},
    ]
    request = parse(messages=[user("hi")["messages"][0], user(parts)["messages"][0], user([IMAGE])["messages"][0]])
    assert [(part.kind, part.param, part.url) for part in request.media()] == [
        ("image", "messages.1.content.1", "https://x/1"),
        ("audio", "messages.1.content.2", "https://x/2"),
        ("video", "messages.1.content.3", "data:,3"),
        ("audio", "messages.1.content.4", "data:;base64,AAAA"),
        ("image", "messages.2.content.0", "https://x"),
    ]
    kinds = [{"type": kind} for kind in ("image", "audio", "video", "audio")]
    assert request.messages[1].for_template()["content"] == [{"type": "text", "text": "a"}, *kinds]


@pytest.mark.parametrize(("detail", "pixels"), [("low", 512 * 512), ("high", None), ("auto", None), (None, None)])
def test_low_detail_is_a_limit_of_pixels_of_that_image(detail: str | None, pixels: int | None) -> None:
    [part] = parse(**user([{"type": "image_url", "image_url": {"url": "https://x", "detail": detail}}])).media()
    assert part.max_pixels == pixels


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_url_may_stand_for_its_object(kind: str) -> None:
    name = f"{kind}_url"
    short, whole = (parse(**user([{"type": name, name: url}])).media() for url in ("https://x", {"url": "https://x"}))
    assert short == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"use_audio_in_video": True},
        {"mm_processor_kwargs": {"use_audio_in_video": True, "fps": None}},
        {"mm_processor_kwargs": {"use_audio_in_video": True}, "use_audio_in_video": True},
    ],
)
def test_the_sound_of_a_video_is_asked_for_in_two_places(fields: dict[str, Any]) -> None:
    assert parse(**fields).media_options() == MediaOptions(use_audio_in_video=True)


def test_a_spoken_answer_stands_for_its_words_unless_the_message_has_its_own() -> None:
    given = {"id": "audio_1", "data": "AAAA", "expires_at": 5, "transcript": "said"}
    silent, worded = parse(
        messages=[{"role": "assistant", "audio": given}, {"role": "assistant", "content": "own", "audio": given}]
    ).messages
    assert silent.spoken_id == "audio_1" and silent.for_template("said")["content"] == "said"
    assert worded.spoken_id is None and worded.for_template()["content"] == "own"


def test_a_body_of_countless_values_is_refused_unread() -> None:
    body = json.dumps(BASE).encode()
    with pytest.raises(RequestError, match="commas and opening brackets") as caught:
        parse_chat_request(body[:-1] + b', "x": [' + b"1," * protocol.MOST_VALUES + b"1]}")
    assert caught.value.status == 413


def test_text_parts_and_developer_messages_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [message] = parse(messages=[{"role": "developer", "content": parts}]).messages
    assert message.for_template() == {"role": "system", "content": parts}


@pytest.mark.parametrize(
    "fields",
    [
        {"audio": {"voice": "Ethan"}},
        {"speaker": "Ethan"},
        {"voice": "Ethan"},
        {"audio": {"voice": "Ethan", "format": "mp3"}, "speaker": "ethan", "voice": "ETHAN"},
    ],
)
def test_voice_has_three_names(fields: dict[str, Any]) -> None:
    name = parse(**SPOKEN, **fields).speaker_name
    assert name is not None and name.lower() == "ethan"


def test_audio_format_defaults_to_wav() -> None:
    assert parse(**SPOKEN).audio_format == parse(**SPOKEN, audio={"voice": "a"}).audio_format == "wav"
    assert parse(**SPOKEN, audio={"format": "opus"}).audio_format == "opus"


@pytest.mark.parametrize(
    ("fields", "thinker"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0, "top_k": -1}, {"temperature": 0.0, "top_k": 0}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"logit_bias": {"7": -1}}, {"logit_bias": {7: -1.0}}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"sampling_params_list": [{"top_k": 4}, {"top_k": 5}, {}], "top_p": 0.5}, {"top_p": 0.5, "top_k": 4}),
        ({"sampling_params_list": [{"top_p": 0.5}], "top_p": 0.5}, {"top_p": 0.5}),
        ({"sampling_params_list": [{"top_p": None}]}, {}),
        ({"sampling_params_list": [{"stop": "x"}]}, {"stop": "x"}),
    ],
)
def test_top_level_fields_are_the_thinkers(fields: dict[str, Any], thinker: dict[str, Any]) -> None:
    own, talker = parse(**fields).overrides()
    assert own == thinker
    assert talker == (fields.get("sampling_params_list", [{}, {}])[1:2] or [{}])[0]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 10_000, b"{}{}"]
)
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=r"not JSON|not a JSON object") as caught:
        parse_chat_request(body)
    assert caught.value.param is None and caught.value.code == "invalid_json"


@pytest.mark.parametrize("half", ["emoji cut \\ud83d", "\\ud83dx", "\\ud83d\\n", "\\ud83d\\u0041", "\\udc00"])
def test_half_an_emoji_is_called_that(half: str) -> None:
    with pytest.raises(RequestError, match=r"half of a surrogate pair, as of an emoji cut in two, at line 1 c"):
        parse_chat_request(f'{{"model": "{half}"}}'.encode())
