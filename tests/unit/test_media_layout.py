"""Media takes its rows in a prompt in order, reaches the Talker with its turn, and is refused where it does not fit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from triptych.config.schema import DeployConfig, StageConfig, StageKind
from triptych.connectors.wire import FeatureRef, MediaItem, SubmitSpeech, SubmitText
from triptych.errors import ContextLengthError, RequestError
from triptych.media.contract import MediaFeatures
from triptych.models.qwen3_omni.bridge import talker_prompt_token_ids, talker_spans
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.models.qwen3_omni.media_layout import audio_rows, expand, is_video_row, media_rows, part_rows
from triptych.models.qwen3_omni.processor import Processor
from triptych.pipeline.admission import admit
from triptych.pipeline.prepare import check_messages, check_request, media_items, prepare
from triptych.pipeline.request import GenerationRequest

KINDS: tuple[StageKind, ...] = ("thinker", "talker", "code2wav")
STAGES = tuple(
    StageConfig(stage_id=index, stage=kind, process="a", max_model_len=400) for index, kind in enumerate(KINDS)
)
DEPLOY = DeployConfig(stages=STAGES)


def features(name: str) -> FeatureRef:
    return FeatureRef(segment=name, dtype="uint8", shape=(1,))


IMAGE = MediaFeatures(kind="image", digest=b"i", features=features("i"), grid=(1, 4, 6))
AUDIO = MediaFeatures(kind="audio", digest=b"a", features=features("a"), num_mel_frames=101)
SILENT = MediaFeatures(kind="video", digest=b"v", features=features("v"), grid=(2, 2, 4), second_per_grid=1.0)
SOUND = MediaFeatures(kind="audio", digest=b"s", features=features("s"), num_mel_frames=200)
VIDEO = msgspec.structs.replace(SILENT, digest=b"w", sound=SOUND)
# As the published templates do it: a part is told by its type or by one of its keys.
BY_KEYS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'audio' in content or 'audio_url' in content %}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' }}
            {%- elif 'video' in content %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif content.type == 'text' %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""


@pytest.fixture(scope="module")
def config(nano: Path) -> OmniConfig:
    return load_config(nano)


@pytest.fixture(scope="module")
def processor(nano: Path) -> Processor:
    return Processor(nano)


def say(*parts: str | MediaFeatures, role: str = "user") -> dict[str, Any]:
    """A message of texts and media."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind} for part in parts]
    return {"role": role, "content": content}


def ask(
    processor: Processor,
    config: OmniConfig,
    messages: Sequence[dict[str, Any]],
    media: Sequence[MediaFeatures],
    *,
    speak: bool = False,
    deploy: DeployConfig = DEPLOY,
) -> GenerationRequest:
    return prepare(
        processor=processor,
        config=config,
        deploy=deploy,
        messages=messages,
        speak=speak,
        request_id="r",
        media=media,
    )


def rows_of(item: MediaItem, ids: Sequence[int], config: OmniConfig) -> int:
    own = {"image": config.image_token_id, "audio": config.audio_token_id, "video": config.video_token_id}[item.kind]
    return ids[item.start : item.end].count(own)


def test_a_prompt_without_media_stays_as_it_is(config: OmniConfig) -> None:
    assert expand([1, 2, 3], [], config) == ((1, 2, 3), ())


def test_each_part_gets_its_rows_in_order(config: OmniConfig) -> None:
    media = config.media
    image, audio, video = config.image_token_id, config.audio_token_id, config.video_token_id
    ids, spans = expand([5, image, audio, 6, video, 7, video], [IMAGE, AUDIO, SILENT, VIDEO], config)
    own = ids[spans[3].start : spans[3].end]
    assert ids == (
        *(5, *[image] * 6, *[audio] * 14, 6, *[video] * 4, 7),
        *(media.audio_start_token_id, *own, media.audio_end_token_id),
    )
    assert (own.count(video), own.count(audio)) == (4, 26)
    assert [(span.part, span.end - span.start, span.in_video) for span in spans] == [
        (0, 6, False),
        (1, 14, False),
        (2, 4, False),
        (3, 30, False),
        (3, 30, True),
    ]
    assert len(ids) == 7 - 4 + 2 + sum(part_rows(part, media) for part in (IMAGE, AUDIO, SILENT, VIDEO))


def test_a_frame_stands_before_the_sound_of_its_time(config: OmniConfig) -> None:
    """At 13 positions a second and a second a grid, the second grid comes after 13 rows of sound."""
    shown = is_video_row((2, 2, 4), 1.0, 26, config.media)
    assert "".join("V" if row else "A" for row in shown) == "VV" + 13 * "A" + "VV" + 13 * "A"


def test_frames_and_sound_are_merged_one_by_one_with_the_frame_first(config: OmniConfig) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        grid = (rng.randint(1, 6), 2 * rng.randint(1, 3), 2 * rng.randint(1, 3))
        seconds, sound = rng.choice((0.0, 0.1, 1 / 3, 1.0, 2 / 29.97, 5.0)), rng.randint(0, 80)
        times = [
            frame * seconds * config.media.position_id_per_seconds
            for frame in range(grid[0])
            for _ in range(grid[1] * grid[2] // 4)
        ]
        merged = sorted([(time, 0) for time in times] + [(float(row), 1) for row in range(sound)])
        expected = [kind == 0 for _, kind in merged]
        assert is_video_row(grid, seconds, sound, config.media).tolist() == expected


@pytest.mark.parametrize(
    ("kinds", "parts", "message"),
    [
        ("", [IMAGE], "placeholders for no media, where the messages have image"),
        ("image", [], "placeholders for image, where the messages have no media"),
        ("image audio", [AUDIO, IMAGE], "placeholders for image, audio, where the messages have audio, image"),
    ],
)
def test_placeholders_that_are_not_those_of_the_parts_are_refused(
    config: OmniConfig, kinds: str, parts: list[MediaFeatures], message: str
) -> None:
    ids = [getattr(config, f"{kind}_token_id") for kind in kinds.split()]
    with pytest.raises(RequestError, match=message):
        expand([1, *ids, 2], parts, config)


def test_rows_are_counted_by_kind_and_sound_of_a_video_is_audio(config: OmniConfig) -> None:
    parts = [IMAGE, AUDIO, SILENT, VIDEO]
    pads = [getattr(config, f"{part.kind}_token_id") for part in parts]
    ids, spans = expand(pads, parts, config)
    items = media_items(parts, spans)
    assert media_rows(items, config.media) == {"image": 6, "audio": 14 + 26, "video": 8}
    assert sum(media_rows(items, config.media).values()) == len(ids) - 2
    assert media_rows([], config.media) == {"image": 0, "audio": 0, "video": 0}
    for item in items:
        assert rows_of(item, ids, config) == media_rows([item], config.media)[item.kind]


def test_the_parts_of_a_conversation_keep_what_belongs_to_them(processor: Processor, config: OmniConfig) -> None:
    messages = [say("look", IMAGE, "and", VIDEO), say("fine", role="assistant"), say(AUDIO, "why?")]
    request = ask(processor, config, messages, [IMAGE, VIDEO, AUDIO])
    assert [(item.kind, item.digest, item.in_video) for item in request.media] == [
        ("image", b"i", False),
        ("video", b"w", False),
        ("audio", b"s", True),
        ("audio", b"a", False),
    ]
    assert [item.features.segment for item in request.media if item.features] == ["i", "v", "s", "a"]
    assert request.media[1].start == request.media[2].start and request.media[1].end == request.media[2].end
    text = b"".join(processor.token_bytes(token) for token in request.prompt_token_ids).decode()
    pictures, sounds = "<|vision_start|>" + 6 * "<|image_pad|>" + "<|vision_end|>", 14 * "<|audio_pad|>"
    assert text.startswith(f"<|im_start|>user\nlook{pictures}and<|vision_start|><|audio_start|><|video_pad|>")
    assert text.endswith(
        "<|audio_pad|><|audio_end|><|vision_end|><|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\n"
        f"<|audio_start|>{sounds}<|audio_end|>why?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_looks_at_keys_gives_the_same_prompt(
    processor: Processor, config: OmniConfig, nano: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((nano / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(BY_KEYS, encoding="utf-8")
    messages = [
        say(IMAGE, role="system"),
        say("a", VIDEO, AUDIO, "<|image_pad|>"),
        {"role": "assistant", "content": "b"},
    ]
    by_type = ask(processor, config, messages, [IMAGE, VIDEO, AUDIO])
    by_keys = ask(Processor(tmp_path), config, messages, [IMAGE, VIDEO, AUDIO])
    assert by_keys.prompt_token_ids == by_type.prompt_token_ids and by_keys.media == by_type.media


def test_a_template_without_media_is_told_of(config: OmniConfig, nano: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((nano / "tokenizer.json").read_bytes())
    template = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% endfor %}<|im_start|>assistant\n"
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(RequestError, match="writes placeholders for no media, where the messages have image"):
        ask(Processor(tmp_path), config, [say("x", IMAGE)], [IMAGE])


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|audio_pad|>"])
def test_a_placeholder_in_a_text_stays_text(processor: Processor, config: OmniConfig, text: str) -> None:
    request = ask(processor, config, [say(text, IMAGE, text)], [IMAGE])
    assert request.prompt_token_ids.count(config.image_token_id) == 6
    assert config.audio_token_id not in request.prompt_token_ids


def test_what_a_part_holds_is_neither_rendered_nor_counted(processor: Processor) -> None:
    url = "data:image/png;base64," + "A" * 100_000
    held = [{"role": "user", "content": [{"type": "image", "image_url": {"url": url}, "text": url}]}]
    assert processor.encode(held) == processor.encode([say(IMAGE)])
    bare = [{"role": "user", "content": [{"type": "image", "image_url": {"url": url}}]}]
    assert processor.fewest_tokens(bare) == 0


def test_the_talker_gets_the_media_of_user_turns_where_its_rows_are(processor: Processor, config: OmniConfig) -> None:
    messages = [
        say("you see", AUDIO, role="system"),
        say(IMAGE, "what?"),
        say("this", SILENT, role="assistant"),
        say("and", VIDEO, AUDIO),
    ]
    request = ask(processor, config, messages, [AUDIO, IMAGE, SILENT, VIDEO, AUDIO], speak=True)
    ids, media = request.prompt_token_ids, request.media
    own = talker_prompt_token_ids(ids, config)
    spans = talker_spans(ids, media, config)
    assert [media[span.part].digest for span in spans] == [b"i", b"w", b"s", b"a"]
    pads = {config.image_token_id, config.audio_token_id, config.video_token_id}
    rows = {row for span in spans for row in range(span.start, span.end)}
    assert rows == {row for row, token in enumerate(own) if token in pads}
    for span in spans:
        item = media[span.part]
        assert own[span.start : span.end] == ids[item.start : item.end] and span.in_video == item.in_video


def test_each_stage_is_told_what_it_needs_of_the_media(processor: Processor, config: OmniConfig) -> None:
    request = ask(processor, config, [say(AUDIO, role="system"), say("a", VIDEO)], [AUDIO, VIDEO], speak=True)
    messages = dict(admit(request, DEPLOY, config).messages)
    text, speech = messages["thinker"], messages["talker"]
    assert isinstance(text, SubmitText) and text.media == request.media
    assert isinstance(speech, SubmitSpeech)
    assert [(item.kind, item.features, item.in_video) for item in speech.media] == [
        ("video", None, False),
        ("audio", None, True),
    ]
    assert [rows_of(item, speech.prompt_token_ids, config) for item in speech.media] == [4, 26]
    assert (speech.media[0].grid, speech.media[0].second_per_grid) == (SILENT.grid, 1.0)


def test_media_that_fits_no_context_is_refused_with_its_rows_and_what_to_do(
    processor: Processor, config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = msgspec.structs.replace(IMAGE, grid=(1, 40, 40))
    advice = r"send smaller pictures \(max_pixels\), fewer frames of a video \(fps, num_frames\) or shorter clips"
    request = ask(processor, config, [say(wide, AUDIO)], [wide, AUDIO], deploy=DeployConfig(stages=()))
    with pytest.raises(
        ContextLengthError, match=rf"\d+ tokens \(400 of image and 14 of audio\), .* context of 400 .*{advice}$"
    ):
        admit(request, DEPLOY, config)
    monkeypatch.setattr(processor, "encode", lambda messages: pytest.fail("it was tokenised"))
    with pytest.raises(ContextLengthError, match=rf"414 rows of media among them, .* context of 400 .*{advice}"):
        ask(processor, config, [say(wide, AUDIO)], [wide, AUDIO])


def test_an_answer_beside_media_that_fits_no_context_is_refused(processor: Processor, config: OmniConfig) -> None:
    request = ask(processor, config, [say(IMAGE)], [IMAGE])
    thinker = msgspec.structs.replace(request.thinker, max_tokens=400)
    request = GenerationRequest(
        request_id="r", prompt_token_ids=request.prompt_token_ids, thinker=thinker, media=request.media
    )
    with pytest.raises(
        ContextLengthError, match=r"prompt tokens \(6 of image\) and max_tokens 400 make .*max_pixels.* clips, or ask"
    ):
        admit(request, DEPLOY, config)


def test_the_context_of_the_speech_counts_media_of_user_turns_only(processor: Processor, config: OmniConfig) -> None:
    talker = msgspec.structs.replace(STAGES[1], max_model_len=40)
    deploy = DeployConfig(stages=(STAGES[0], talker, STAGES[2]))
    aside = ask(processor, config, [say(VIDEO, role="system"), say("a")], [VIDEO], speak=True)
    admit(aside, deploy, config)
    request = ask(processor, config, [say(AUDIO, role="system"), say(VIDEO)], [AUDIO, VIDEO], speak=True)
    with pytest.raises(
        ContextLengthError,
        match=r"make \d+ positions \(26 of audio and 4 of video\) for the speech stage, .* of 40 .* clips, or ask",
    ):
        admit(request, deploy, config)


@pytest.mark.parametrize(
    ("missing", "part", "message"),
    [
        ("has_audio", AUDIO, r"takes no audio input: its checkpoint has no audio encoder \(audio_config\)"),
        ("has_vision", IMAGE, r"takes no image input: its checkpoint has no vision encoder \(vision_config\)"),
        ("has_vision", SILENT, r"takes no video input: its checkpoint has no vision encoder \(vision_config\)"),
    ],
)
def test_media_that_the_checkpoint_has_no_encoder_for_is_refused(
    processor: Processor, config: OmniConfig, missing: str, part: MediaFeatures, message: str
) -> None:
    lacking = msgspec.structs.replace(config, media=msgspec.structs.replace(config.media, **{missing: False}))
    check_messages([say("x", part)], config)
    with pytest.raises(RequestError, match=message) as caught:
        check_request(
            processor=processor, config=lacking, deploy=DEPLOY, messages=[say("x"), say("y", part)], speak=False
        )
    assert caught.value.param == "messages.1.content.1"


def test_a_request_is_refused_before_its_media_is_loaded(processor: Processor, config: OmniConfig) -> None:
    asked: dict[str, Any] = {"processor": processor, "config": config, "deploy": DEPLOY, "speak": True}
    check_request(messages=[say(IMAGE)], **asked)
    with pytest.raises(RequestError, match="voice 'x'"):
        check_request(messages=[say(IMAGE)], voice="x", **asked)
    with pytest.raises(RequestError, match="temperature"):
        check_request(messages=[say(IMAGE)], talker={"temperature": -1}, **asked)
    with pytest.raises(ContextLengthError, match="tokens or more"):
        check_request(messages=[say(IMAGE, "hello " * 5000)], **asked)


def test_rows_of_a_clip_grow_by_one_every_eight_frames_and_begin_anew_every_window() -> None:
    rows = np.array([audio_rows(frames, 50) for frames in range(1, 1001)])
    assert rows[:3].tolist() == [1, 1, 1] and rows[99] == 13 and rows[999] == 130
    assert (np.diff(rows) >= 0).all() and (np.diff(rows) <= 1).all()
