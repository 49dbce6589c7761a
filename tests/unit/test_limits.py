"""What a deployment cannot serve is refused before a process starts, with the key and what would do."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from triptych.config.sampling import SamplingParams
from triptych.connectors.wire import SubmitSpeech
from triptych.engine.kv_budget import bytes_per_block
from triptych.errors import ConfigError
from triptych.pipeline.admission import admit
from triptych.pipeline.launch import plan
from triptych.pipeline.request import GenerationRequest
from triptych.stages.build import wait_idly_if_crowded


@pytest.mark.parametrize(
    ("stage", "override", "path", "message"),
    [
        (0, {"max_num_batched_tokens": 126}, "stages[0].max_num_batched_tokens", "126 is too few: .* make 127"),
        (1, {"max_num_seqs": 1, "max_num_batched_tokens": 63}, "stages[1].max_num_batched_tokens", "make 64"),
        (0, {"max_model_len": 12}, "stages[0].max_model_len", "12 is less than 13, the least that the thinker can"),
        (1, {"max_model_len": 8}, "stages[1].max_model_len", "8 is less than 16, the least that the talker can serve"),
        (0, {"kv_cache_bytes": 1000}, "stages[0]", "one context of 16384 needs 1025; raise kv_cache_bytes"),
        (1, {"max_model_len": 512, "num_kv_blocks": 32}, "stages[1]", "gets 32 blocks .* needs 33"),
        (0, {"num_kv_blocks": 2_000_000_000}, "stages[0]", "of this machine; lower num_kv_blocks"),
        (0, {"max_model_len": 10**6}, "stages[0].max_model_len", "more than the 16384 positions"),
        (
            0,
            {"default_sampling_params": {"stop_token_ids": [5000]}},
            "stages[0].default_sampling_params.stop_token_ids",
            "5000 is not between 0 and 1023",
        ),
        (
            1,
            {"default_sampling_params": {"logit_bias": {5000: 1.0}}},
            "stages[1].default_sampling_params.logit_bias",
            "5000 is not between 0 and 1279",
        ),
    ],
)
def test_what_no_stage_could_load_is_refused(
    nano: Path, stage: int, override: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(str(nano), deploy_config="tiny_cpu", platform="cpu", stage_overrides={str(stage): override})
    assert caught.value.path == path
    assert "(in tiny_cpu" in str(caught.value)


def test_quantization_without_torchao_names_the_extra(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = {"1": {"quantization": "int8"}}
    assert plan(str(nano), platform="cpu", stage_overrides=override).deploy.stages[1].quantization == "int8"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plan(str(nano), platform="cpu").deploy.stages[1].quantization is None
    with pytest.raises(ConfigError, match=r"'int8' needs torchao, .* install triptych\[quantization\]") as caught:
        plan(str(nano), platform="cpu", stage_overrides=override)
    assert caught.value.path == "stages[1].quantization"


def test_the_caches_of_all_replicas_must_fit_the_machine(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = plan(str(nano), platform="cpu")
    assert launch.config.talker is not None
    block_bytes = bytes_per_block(launch.deploy.stages[1], launch.config.talker.text, itemsize=4)
    monkeypatch.setattr(os, "sysconf", lambda name: 3 * 2**28 if name == "SC_PHYS_PAGES" else 1)
    override = {"num_kv_blocks": 2**29 // block_bytes}
    plan(str(nano), platform="cpu", stage_overrides={"1": override})
    with pytest.raises(ConfigError, match=r"in each of 2 replicas takes 1\.0 GiB, .* 768\.0 MiB.*or num_replicas"):
        plan(str(nano), platform="cpu", stage_overrides={"1": override | {"num_replicas": 2}})


def test_the_least_that_can_be_served_is_accepted(nano: Path) -> None:
    for override in ({"max_num_batched_tokens": 127}, {"max_model_len": 512, "num_kv_blocks": 33}):
        overrides = {"0": override, "1": override}
        plan(str(nano), deploy_config="tiny_cpu", platform="cpu", stage_overrides=overrides)
    free = {"batch_invariant": False, "max_num_seqs": 1, "max_num_batched_tokens": 1}
    plan(str(nano), deploy_config="tiny_cpu", platform="cpu", stage_overrides={"0": free})


def test_a_small_checkpoint_gets_the_small_profile_wherever_it_lies(nano: Path) -> None:
    assert plan(str(nano), platform="cpu").profile == "tiny_cpu"


def test_speech_is_no_longer_than_the_context_of_code2wav(nano: Path) -> None:
    launch = plan(str(nano), platform="cpu", stage_overrides={"2": {"max_model_len": 5}})
    config = launch.config
    header = (config.im_start_token_id, config.assistant_token_id, config.user_token_id)
    user = (config.im_start_token_id, config.user_token_id, 7, 8, config.im_end_token_id, 7)
    params = SamplingParams(seed=1)
    request = GenerationRequest(request_id="r", prompt_token_ids=user + header, thinker=params, talker=params)
    [speech] = [message for _, message in admit(request, launch.deploy, config).messages if _ == "talker"]
    assert isinstance(speech, SubmitSpeech)
    assert speech.params.max_tokens == 5


def test_threads_wait_idly_only_where_cores_are_short(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deploy = plan(str(nano), platform="cpu").deploy  # two processes of one thread
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    wait_idly_if_crowded(deploy)
    assert "OMP_WAIT_POLICY" not in os.environ
    threads = tuple(msgspec.structs.replace(stage, threads=2) for stage in deploy.stages)
    monkeypatch.setenv("OMP_WAIT_POLICY", "mine")
    wait_idly_if_crowded(msgspec.structs.replace(deploy, stages=threads))
    assert os.environ["OMP_WAIT_POLICY"] == "mine"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    wait_idly_if_crowded(msgspec.structs.replace(deploy, stages=threads))
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
