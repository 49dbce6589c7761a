"""`Omni`: many prompts at once, in order, each on its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych import Omni
from triptych.errors import ConfigError, RequestError, TriptychError


@pytest.fixture(scope="module")
def omni(nano: Path) -> Iterator[Omni]:
    with Omni(str(nano), deploy_config="tiny_cpu", platform="cpu") as loaded:
        yield loaded


def test_outputs_keep_the_order_of_prompts_and_equal_those_of_each_alone(omni: Omni) -> None:
    prompts = [f"Say the number {number}." for number in range(6)]
    together = omni.generate(prompts, modalities=("text", "audio"), seed=list(range(6)), thinker={"max_tokens": 8})
    for seed, (prompt, output) in enumerate(zip(prompts, together, strict=True)):
        [alone] = omni.generate(prompt, modalities=("text", "audio"), seed=seed, thinker={"max_tokens": 8})
        assert alone.text == output.text
        assert alone.audio is not None and output.audio is not None
        assert np.array_equal(alone.audio, output.audio)
        assert output.audio.dtype == np.float32 and np.all(np.abs(output.audio) <= 1.0)
        assert output.audio.size == max(0, output.audio_frames * 1920 - 555)
    assert len({output.text for output in together}) > 1
    assert sum(output.audio_frames for output in together) > 0


def test_a_prompt_that_fails_does_so_alone(omni: Omni) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    good, bad, wrong = omni.generate(
        [conversation, [{"role": "user", "content": "far too long " * 5000}], [{"role": "user"}]],
        thinker={"max_tokens": 4},
    )
    assert good.error is None and good.text and good.audio is None and good.finish_reason in ("stop", "length")
    assert isinstance(bad.error, RequestError) and bad.finish_reason is None
    assert isinstance(wrong.error, RequestError) and wrong.error.param == "messages[0]"


def test_a_single_prompt_raises_its_error(omni: Omni) -> None:
    with pytest.raises(RequestError, match="chelsie"):
        omni.generate("Hello.", modalities=("text", "audio"), voice="nope")


def test_arguments_that_are_wrong_for_all_are_refused(omni: Omni) -> None:
    with pytest.raises(RequestError, match="modalities"):
        omni.generate("Hello.", modalities=("video",))
    with pytest.raises(RequestError, match="voice is given"):
        omni.generate("Hello.", voice="chelsie")
    with pytest.raises(RequestError, match="2 seeds for 1 prompts"):
        omni.generate(["Hello."], seed=[1, 2])
    message = {"role": "user", "content": "Hello."}
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("a list in a list", [message], {}),
        ("dict is not a string", message, {}),
        ("NoneType is not a string", None, {}),
        ("modalities 'text' is not a list", "Hello.", {"modalities": "text"}),
        ("1.5 is not a whole number", "Hello.", {"seed": 1.5}),
        ("^seed 18446744073709551616 does not fit 64 bits", "Hello.", {"seed": 2**64}),
        ("'x' is not a whole number", ["Hello."], {"seed": ["x"]}),
        ("not a mapping", "Hello.", {"thinker": [1]}),
        ("5 is not the name of a voice", "Hello.", {"modalities": ["audio"], "voice": 5}),
        ("half a surrogate pair", "\ud800", {}),
        ("half a surrogate pair", "Hello.", {"thinker": {"stop": ["\ud800"]}}),
    ]
    for complaint, prompts, options in wrong:
        with pytest.raises(RequestError, match=complaint):
            omni.generate(prompts, **options)
    assert omni.generate([]) == []


def test_messages_are_those_of_the_chat_api(omni: Omni) -> None:
    user = {"role": "user", "content": "Hello."}
    texts = [
        omni.generate([[{"role": role, "content": "Be brief."}, user]], thinker={"max_tokens": 4})[0].text
        for role in ("system", "developer")
    ]
    assert texts[0] == texts[1] != ""
    [output] = omni.generate([[user | {"tool_calls": []}]])
    assert isinstance(output.error, RequestError)


def test_numpy_integers_are_seeds(omni: Omni) -> None:
    options: dict[str, Any] = {"thinker": {"temperature": 1.0, "max_tokens": 8}}
    prompts = ["Hello."] * 2
    numpy_seeds = [output.text for output in omni.generate(prompts, seed=list(np.arange(2)), **options)]
    assert numpy_seeds == [output.text for output in omni.generate(prompts, seed=[0, 1], **options)]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"platform": "gpu"}, "platform: 'gpu' is not one of cpu, cuda"),
        ({"stage_overrides": [1]}, "stage_overrides: expected a mapping"),
        ({"stage_overrides": {1: None}}, "stage_overrides.1: expected a mapping"),
        ({"deploy_config": ""}, "'' is neither a file nor a profile"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    nano: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Omni(nano, **options)


def test_a_closed_omni_says_so(nano: Path) -> None:
    loaded = Omni(str(nano), deploy_config="tiny_cpu", platform="cpu", text_only=True)
    loaded.close()
    loaded.close()
    with pytest.raises(TriptychError, match="closed"):
        loaded.generate("Hello.")
