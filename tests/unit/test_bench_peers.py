"""Side by side: what the peer runs with, what counts as an answer, and the record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from triptych.bench.ceilings import Setting
from triptych.bench.driver import Run
from triptych.bench.machine import memory_mib
from triptych.bench.metrics import summarise
from triptych.bench.peer_worker import SAMPLES, TEXT_TOKENS
from triptych.bench.peers import check, first_voice, markdown, settings
from triptych.errors import ConfigError, TriptychError

EMPTY = summarise(Run([], 0.0))
GOOD = EMPTY | {"total_output_tokens": 2 * TEXT_TOKENS, "total_audio_duration_s": 2 * SAMPLES / 24_000}


def stage(process: str, threads: int, devices: str = "cpu") -> dict[str, Any]:
    return {"process": process, "threads": threads, "devices": devices, "dtype": "float32"}


def test_the_peer_gets_the_servers_dtype_and_all_its_threads_first() -> None:
    deploy = {"stages": [stage("text", 1), stage("speech", 2), stage("text", 3)]}
    assert settings(deploy) == [
        Setting("float32", 5, "cpu"),
        Setting("float32", 1, "cpu"),
        Setting("bfloat16", 5, "cpu"),
    ]
    assert settings({"stages": [stage("one", 1)]}) == [Setting("float32", 1, "cpu"), Setting("bfloat16", 1, "cpu")]
    assert settings({"stages": [stage("one", 1, "cuda:0")]}) == [Setting("float32", 1, "cuda:0")]


def test_a_reply_that_is_not_whole_is_no_result() -> None:
    check(GOOD, 2, speaks=True)
    for change, reason in (
        ({"failed": 1, "failure_examples": {"http 500": "oh"}}, "1 requests failed: http 500: oh"),
        ({"total_output_tokens": 5}, f"5 text tokens, not 2 x {TEXT_TOKENS}"),
        ({"total_audio_duration_s": 1.0}, f"24000 samples of speech, not 2 x {SAMPLES}"),
    ):
        with pytest.raises(TriptychError, match=reason):
            check(GOOD | change, 2, speaks=True)
    check(GOOD | {"total_audio_duration_s": 0.0}, 2, speaks=False)


def test_a_checkpoint_without_voices_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"talker_config": {"speaker_id": {"ethan": 3, "aiden": 4}}}))
    assert first_voice(tmp_path) == "ethan"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no voices"):
        first_voice(tmp_path)


def test_the_record_names_both_and_every_setting_tried() -> None:
    best = {"dtype": "float32", "threads": 2, "device": "cpu", "load_s": 4.4, "audio_throughput": 1.0}
    best |= {"median_audio_rtf": 0.9, "peak_mib": 575.0, "device_peak_mib": None, "median_ttft_ms": 9000.0}
    rows = [
        GOOD | {"concurrency": level, "median_audio_rtf": 0.18, "audio_throughput": 5.0 * level} for level in (1, 8)
    ]
    ours = {"start_up_s": 2.6, "peak_mib": 700.0, "prompt_tokens": 26.0, "levels": rows}
    content = {"model": "bench", "transformers": {"best": best, "runs": [best]}, "triptych": ours}
    text = markdown(content, command="triptych bench peers bench", machine="A machine.")
    assert "Command: `triptych bench peers bench`" in text and "\n\nA machine.\n\n" in text
    assert "| Transformers, float32 on cpu, 2 threads, one after another | 1.00 | 0.900 | - | 9000 |" in text
    assert "| Triptych, concurrency 8 | 40.00 | 0.180 |" in text
    assert "RTF at concurrency 1: 0.200 of Transformers'" in text
    assert "audio-s/s at concurrency 8: 40.0 times Transformers'" in text
    assert "every setting tried: float32 on cpu, 2 threads: RTF 0.900." in text


def test_memory_of_a_process_that_is_there_and_of_one_that_is_not() -> None:
    assert memory_mib(os.getpid()) > 10
    assert memory_mib(2**22 + 1) == 0
