"""Every deployment that is accepted gives the same answers: how work is spread and cut is nobody's business."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from triptych import Omni
from triptych.pipeline.omni import OmniOutput

PROMPTS = [f"Say the number {number}." + " And more words." * (5 * number) for number in range(6)]
DECODERS = (0, 1)
SMALL_CACHE = {"max_model_len": 384, "num_kv_blocks": 25}  # one context and the trash block: the rest is preempted


def answers(nano: Path, tmp_path: Path, deploy: dict[str, Any]) -> Sequence[OmniOutput]:
    """What a deployment says to PROMPTS, all at once."""
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"base_config": "tiny_cpu", **deploy}), encoding="utf-8")
    with Omni(nano, deploy_config=file, platform="cpu") as omni:
        outputs = omni.generate(
            PROMPTS, modalities=("text", "audio"), seed=list(range(len(PROMPTS))), thinker={"max_tokens": 24}
        )
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return outputs


def stages(*values: dict[str, Any], of: Sequence[int] = (0, 1, 2), **same: Any) -> list[dict[str, Any]]:
    own = values or ({},) * len(of)
    return [{"stage_id": stage_id, **same, **value} for stage_id, value in zip(of, own, strict=True)]


def connector(**extra: int) -> dict[str, Any]:
    return {"shm": {"extra": extra}}


@pytest.fixture(scope="module")
def expected(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequence[OmniOutput]:
    outputs = answers(nano, tmp_path_factory.mktemp("plain"), {})
    assert sum(output.audio_frames for output in outputs) > 50
    return outputs


DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "a process each, all through shared memory, one handoff at a time": {
        "stages": stages({"process": "a"}, {"process": "b"}, {"process": "c"}),
        "connectors": connector(window=1, inline_bytes=0),
    },
    "one process, by reference, one handoff and one request at a time": {
        "stages": stages(process="one", max_num_seqs=1),
        "connectors": {"shm": {"kind": "inproc", "extra": {"window": 1}}},
    },
    "caches for one context, the smallest steps, whole handoffs": {
        "async_chunk": False,
        "stages": stages(of=DECODERS, max_num_seqs=8, max_num_batched_tokens=71, **SMALL_CACHE),
    },
    "odd blocks, no prefix cache, fewer slots later": {
        "stages": stages({"block_size": 7, "enable_prefix_caching": False}, {"block_size": 128}, {"max_num_seqs": 2}),
    },
}


@pytest.mark.parametrize("deploy", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_a_deployment_gives_the_bytes_of_the_plain_one(
    nano: Path, tmp_path: Path, expected: Sequence[OmniOutput], deploy: dict[str, Any]
) -> None:
    for output, plain in zip(answers(nano, tmp_path, deploy), expected, strict=True):
        assert (output.text, output.finish_reason) == (plain.text, plain.finish_reason)
        assert output.audio is not None and plain.audio is not None
        assert np.array_equal(output.audio, plain.audio)


def test_pieces_of_one_frame_are_the_same_sound(nano: Path, tmp_path: Path, expected: Sequence[OmniOutput]) -> None:
    deploy = {"connectors": connector(initial_codec_chunk_frames=1, codec_chunk_frames=1)}
    for output, plain in zip(answers(nano, tmp_path, deploy), expected, strict=True):
        assert output.text == plain.text
        assert output.audio is not None and plain.audio is not None
        np.testing.assert_allclose(output.audio, plain.audio, rtol=0, atol=2e-5)


def test_the_shortest_contexts_that_are_accepted_serve(nano: Path) -> None:
    shortest = {"0": {"max_model_len": 13}, "1": {"max_model_len": 16}, "2": {"max_model_len": 1}}
    with Omni(nano, platform="cpu", stage_overrides=shortest) as omni:
        output = omni.generate("a", modalities=("text", "audio"), seed=1)[0]
    assert output.error is None and output.text_tokens >= 1
    assert output.audio is not None and output.audio.size == 1365


def test_half_precision_with_more_threads_than_cores_answers_in_time(nano: Path, tmp_path: Path) -> None:
    threads = 2 * len(os.sched_getaffinity(0))
    options: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": False, "threads": min(threads, 16)}
    for output in answers(nano, tmp_path, {"stages": stages(**options)}):
        assert output.text
        assert output.audio is not None
        assert output.audio.size == max(0, output.audio_frames * 1920 - 555)


def test_speech_that_cannot_be_written_is_one_line(nano: Path) -> None:
    command = [sys.executable, "-m", "triptych", "generate", str(nano), "--prompt", "hello", "--out"]
    for out, status, message in (
        ("/dev/full", 1, "/dev/full cannot be written: No space left on device"),
        ("/dev/null/x.wav", 2, "/dev/null is not a folder"),
    ):
        done = subprocess.run(
            [*command, out, "--max-tokens", "3", "--platform", "cpu"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done.stderr
        assert done.stderr.splitlines()[-1].startswith("triptych: ") and message in done.stderr
        assert "Traceback" not in done.stderr
