"""Deploy config: precedence, errors with a dotted path, cross checks, resolution against a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from triptych.config.load import load_deploy, parse_stage_overrides, profiles
from triptych.config.platform import Platform, num_cuda_devices
from triptych.config.resolve import resolve, to_yaml
from triptych.config.schema import DeployConfig, StageKind
from triptych.config.units import format_bytes, parse_bytes
from triptych.errors import ConfigError
from triptych.models.registry import FAMILIES
from triptych.pipeline.launch import SMALL_PROFILE

CONTEXTS: dict[StageKind, int] = {"thinker": 65536, "talker": 65536, "code2wav": 8000}


def load(
    path: str | Path,
    platform: Platform = "cpu",
    flags: dict[str, Any] | None = None,
    stages: dict[int, dict[str, Any]] | None = None,
) -> DeployConfig:
    overrides = {str(stage_id): override for stage_id, override in (stages or {}).items()}
    return load_deploy(path, platform=platform, flags=flags or {}, stage_overrides=overrides)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def derived(folder: Path, text: str) -> Path:
    return write(folder, "deploy.yaml", f"base_config: tiny_cpu\n{text}")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", profiles())
def test_every_shipped_profile_loads_and_resolves_on_every_platform(name: str, platform: Platform) -> None:
    deploy = resolve(load(name, platform), contexts=CONTEXTS, dtype="bfloat16")
    assert [stage.stage for stage in deploy.stages] == ["thinker", "talker", "code2wav"]
    assert all(stage.devices.startswith(platform) for stage in deploy.stages)
    assert all(stage.dtype != "auto" and stage.max_model_len > 0 for stage in deploy.stages)


@pytest.mark.parametrize("name", profiles())
def test_stages_on_one_cuda_device_ask_for_no_more_than_all_of_it(name: str) -> None:
    used: dict[str, float] = {}
    for stage in load(name, "cuda").stages:
        used[stage.devices] = used.get(stage.devices, 0.0) + stage.gpu_memory_utilization
    assert all(total <= 1.0 for total in used.values()), used


def test_every_profile_that_the_registry_names_is_shipped() -> None:
    named = {SMALL_PROFILE}
    for family in FAMILIES.values():
        named |= {family.profile("cpu", 0), family.profile("cuda", 1), family.profile("cuda", 4)}
    assert named <= set(profiles())


def test_the_defaults_that_users_know_are_those_of_the_30b_profile() -> None:
    thinker, talker, code2wav = load("qwen3_omni_moe", "cuda").stages
    assert (thinker.max_num_batched_tokens, thinker.max_num_seqs) == (32768, 64)
    assert thinker.default_sampling_params == {"temperature": 0.0, "max_tokens": 2048}
    assert talker.default_sampling_params == {
        "temperature": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.05,
        "max_tokens": 4096,
    }
    assert code2wav.max_num_seqs == 64
    extra = load("qwen3_omni_moe", "cuda").connectors["shm"].extra
    assert (extra.initial_codec_chunk_frames, extra.codec_chunk_frames) == (4, 25)


def test_precedence_default_base_file_platform_flag_override(tmp_path: Path) -> None:
    base = (
        "base_config: tiny_cpu\nmax_queued_requests: 1\nrequest_timeout_s: 1.0\nheartbeat_timeout_s: 11.0\n"
        "stage_init_timeout_s: 1.0\nstages:\n  - {stage_id: 1, max_num_seqs: 1}\n"
    )
    write(tmp_path, "base.yaml", base)
    path = write(
        tmp_path,
        "file.yaml",
        "base_config: base.yaml\nrequest_timeout_s: 2.0\nheartbeat_timeout_s: 12.0\nstage_init_timeout_s: 2.0\n"
        "stages:\n  - {stage_id: 1, max_num_seqs: 2}\n"
        "platforms:\n  cpu: {heartbeat_timeout_s: 13.0, stage_init_timeout_s: 3.0}\n"
        "  cuda: {heartbeat_timeout_s: 9.0}\n",
    )
    deploy = load(path, flags={"stage_init_timeout_s": 4.0, "async_chunk": None}, stages={1: {"max_num_seqs": 5}})
    assert deploy.max_stage_restarts == 5  # schema default
    assert deploy.max_queued_requests == 1  # base
    assert deploy.request_timeout_s == 2.0  # file over base
    assert deploy.heartbeat_timeout_s == 13.0  # platform block over file
    assert deploy.stage_init_timeout_s == 4.0  # flag over platform block
    assert deploy.stages[1].max_num_seqs == 5  # override over all
    assert deploy.async_chunk is True  # a flag that was not given changes nothing


def test_a_file_wins_over_the_platform_block_of_its_base(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "base_config: tiny_cpu\nplatforms: {cpu: {request_timeout_s: 1.0}}\n")
    path = write(tmp_path, "file.yaml", "base_config: base.yaml\nrequest_timeout_s: 2.0\n")
    assert load(path).request_timeout_s == 2.0


def test_stage_lists_merge_by_stage_id_and_mappings_key_by_key(tmp_path: Path) -> None:
    path = derived(
        tmp_path,
        "stages:\n"
        "  - {stage_id: 2, max_num_seqs: 3}\n"
        "  - {stage_id: 1, default_sampling_params: {temperature: 0.5}}\n"
        "connectors: {shm: {extra: {window: 2}}}\n",
    )
    before, after = load("tiny_cpu"), load(path)
    assert after.stages[0] == before.stages[0]
    assert after.stages[1].default_sampling_params == before.stages[1].default_sampling_params | {"temperature": 0.5}
    assert after.stages[2].max_num_seqs == 3
    assert after.connectors["shm"].extra.window == 2
    assert after.connectors["shm"].extra.codec_chunk_frames == before.connectors["shm"].extra.codec_chunk_frames


def test_a_circle_of_base_configs_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "base_config: b.yaml\n")
    write(tmp_path, "b.yaml", "base_config: a.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml -> .*b\.yaml -> .*a\.yaml is a circle"):
        load(tmp_path / "a.yaml")


def test_a_missing_file_names_the_profiles() -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor a profile; profiles: .*tiny_cpu"):
        load("nope.yaml")


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("async_chunks: true", "async_chunks", "did you mean 'async_chunk'"),
        ("stages: [{stage_id: 1, max_num_seq: 4}]", "stages[0].max_num_seq", "did you mean 'max_num_seqs'"),
        ("connectors: {shm: {extra: {chunk: 1}}}", "connectors.shm.extra.chunk", "Allowed: codec_chunk_frames"),
        ("platforms: {gpu: {}}", "platforms.gpu", "Allowed: cpu, cuda, rocm, xpu"),
        ("platforms: {xpu: {asynch: 1}}", "platforms.xpu.asynch", "unknown key"),
        ("platforms: {cpu: {base_config: x}}", "platforms.cpu.base_config", "unknown key"),
        ("stages: [{max_num_seqs: 4}]", "stages[0].stage_id", "missing"),
        ("stages: [{stage_id: 1}, {stage_id: 1}]", "stages[1].stage_id", "already"),
        ("stages: {}", "stages", "expected a list"),
        ("stages: [{stage_id: 1, max_num_seqs: many}]", "stages[0].max_num_seqs", "Expected `int`, got `str`"),
        ("stages: [{stage_id: 1, max_num_seqs: 2.5}]", "stages[0].max_num_seqs", "Expected `int`, got `float`"),
        ("async_chunk: 1", "async_chunk", "Expected `bool`, got `int`"),
        ("connectors: {shm: {kind: tcp}}", "connectors.shm.kind", "'tcp' is not one of 'inproc', 'shm'"),
        ("connectors:", "connectors", "expected a mapping"),
        ("stages: [{stage_id: 1, kv_cache_bytes: 4 parsecs}]", "stages[0].kv_cache_bytes", "not a size"),
        ("base_config: 3", "base_config", "given twice"),
        ("platforms:", "platforms", "expected a mapping"),
        ("platforms: {1: {}}", "platforms.1", "Allowed: cpu, cuda, rocm, xpu"),
        ("heartbeat_timeout_s: 1.0", "heartbeat_timeout_s", "1.0 is not between 2 and"),
        ("request_timeout_s: .nan", "request_timeout_s", "nan is not a positive number of seconds"),
        ("connectors: {shm: {extra: {window: 0}}}", "connectors.shm.extra.window", "0 is not between 1 and"),
        ("stages: [{stage_id: 7, max_num_seqs: 1}]", "stages[3].stage", "no file says it for stage_id 7"),
        ("stages: &a [*a]", "stages[0]", "expected a mapping"),
    ],
)
def test_a_wrong_file_is_refused_with_the_dotted_path(tmp_path: Path, text: str, path: str, message: str) -> None:
    file = derived(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    if message != "given twice":
        assert caught.value.path == path
        assert str(caught.value).startswith(f"{path}: ")


def test_yaml_errors_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: .*bad\.yaml"):
        load(write(tmp_path, "bad.yaml", "async_chunk: true\nstages: [}\n"))
    with pytest.raises(ConfigError, match="expected a mapping"):
        load(write(tmp_path, "list.yaml", "- 1\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no stage: "),
        ("base_config:", "expected a path or the name of a profile, got nothing"),
        ("base_config: ''", "neither a file nor a profile"),
        ("? [a, b]\n: 1", "line 1: a key must be a name"),
        ("max_queued_requests: " + "9" * 5000, "not YAML"),
        ("request_timeout_s: 2020-13-45", "not YAML"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("stages: [{stage_id: 0, stage: thinker}]", "stages[0].process: missing"),
        ("base_config: ~nobody-of-that-name/x.yaml", "cannot be read"),
        ("base_config: " + "x" * 5000, "cannot be read"),
    ],
)
def test_whatever_a_file_holds_the_error_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, "odd.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = "stages:\n  - &first {stage_id: 0, max_num_seqs: 4}\n  - {<<: *first, stage_id: 1}\n"
    deploy = load(derived(tmp_path, text))
    assert [stage.max_num_seqs for stage in deploy.stages] == [4, 4, 64]


@pytest.mark.parametrize(
    ("stage", "override", "path", "message"),
    [
        (1, {"num_replicas": 0}, "stages[1].num_replicas", "0 is not between 1 and 64"),
        (1, {"num_replicas": -2}, "stages[1].num_replicas", "-2 is not between 1 and 64"),
        (1, {"num_replicas": 65}, "stages[1].num_replicas", "65 is not between 1 and 64"),
        (1, {"num_replicas": "two"}, "stage_overrides.1.num_replicas", "Expected `int`"),
        (1, {"num_replicas": 3, "devices": "cpu,cpu"}, "stages[1].devices", "num_replicas is 3"),
        (
            1,
            {"num_replicas": 2, "devices": "0,1"},
            "stages[1].devices",
            "'0' is a CUDA device, but the platform is cpu",
        ),
        (1, {"num_replicas": 2, "devices": "cpu,"}, "stages[1].devices", "'' is not one of 'auto'"),
        (
            0,
            {"num_replicas": 2},
            "stages[2].num_replicas",
            "1, but thinker has 2 and shares process 'text' with code2wav",
        ),
        (1, {"devices": "cpu,cpu"}, "stages[1].devices", "set num_replicas to 2, or list one device"),
        (1, {"devices": "tpu"}, "stages[1].devices", "'tpu' is not one of 'auto', 'cpu', 'cuda', 'cuda:N' or 'N'"),
        (1, {"devices": 1}, "stages[1].devices", "the platform is cpu"),
        (0, {"max_num_seqs": 0}, "stages[0].max_num_seqs", "0 is not between 1 and 4096"),
        (0, {"max_model_len": -1}, "stages[0].max_model_len", "-1 is not between 0 and"),
        (0, {"max_num_seqs": 10**24}, "stages[0].max_num_seqs", "is not between 1 and 4096"),
        (0, {"threads": 100_000_000}, "stages[0].threads", "is not between 1 and 1024"),
        (0, {"process": "../x"}, "stages[0].process", "ASCII letters, digits"),
        (0, {"process": "--help"}, "stages[0].process", "with a letter or a digit first"),
        (0, {"process": "x" * 65}, "stages[0].process", "up to 64"),
        (0, {"devices": "cuda:" + "9" * 20}, "stages[0].devices", "the platform is cpu"),
        (0, {"gpu_memory_utilization": 1.5}, "stages[0].gpu_memory_utilization", "not a fraction"),
        (1, {"enable_prefix_caching": True}, "stages[1].enable_prefix_caching", "no prefix cache"),
        (1, {"input_connectors": {"thinker": "net"}}, "stages[1].input_connectors.thinker", "connectors: 'shm'"),
        (1, {"input_connectors": {"code2wav": "shm"}}, "stages[1].input_connectors", "from 'thinker'"),
        (0, {"input_connectors": {"talker": "shm"}}, "stages[0].input_connectors", "no input"),
        (0, {"stage": "talker"}, "stages", "thinker, talker, code2wav"),
        (2, {"default_sampling_params": {"top_k": 1}}, "stages[2].default_sampling_params", "samples nothing"),
        (
            1,
            {"default_sampling_params": {"top_kk": 1}},
            "stages[1].default_sampling_params.top_kk",
            "did you mean 'top_k'",
        ),
        (
            1,
            {"default_sampling_params": {"top_p": 1.5}},
            "stages[1].default_sampling_params.top_p",
            "1.5 is not between",
        ),
        (
            0,
            {"default_sampling_params": {"temperature": "hot"}},
            "stages[0].default_sampling_params.temperature",
            "should be a number; got ",
        ),
        (
            0,
            {"default_sampling_params": {"logit_bias": {5: float("nan")}}},
            "stages[0].default_sampling_params.logit_bias.5",
            "should be a number, which NaN and Infinity are not; got NaN",
        ),
        (
            1,
            {"default_sampling_params": {"stop": ["x"]}},
            "stages[1].default_sampling_params.stop",
            "speech has no such setting",
        ),
        (0, {"max_num_seqz": 4}, "stage_overrides.0.max_num_seqz", "did you mean 'max_num_seqs'"),
        (0, {"stage_id": 4}, "stage_overrides.0.stage_id", "cannot change"),
        (2, {"block_size": 8}, "stages[2].block_size", "code2wav has no use for it, only thinker and talker"),
        (0, {"extra_frames": 8}, "stages[0].extra_frames", "thinker has no use for it, only talker"),
        (0, {"scheduling_policy": "fcfs"}, "stages[0].scheduling_policy", "only talker and code2wav"),
        (1, {"scheduling_policy": "edf"}, "stage_overrides.1.scheduling_policy", "'edf' is not one of 'slack', 'fcfs'"),
        (7, {}, "stage_overrides.7", "stage ids: 0, 1, 2"),
    ],
)
def test_what_cannot_work_is_refused(stage: int, override: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiny_cpu", stages={stage: override})
    assert caught.value.path == path
    assert message in str(caught.value)


def test_chunk_sizes_must_ramp_up(tmp_path: Path) -> None:
    path = derived(tmp_path, "connectors: {shm: {extra: {initial_codec_chunk_frames: 26}}}\n")
    with pytest.raises(ConfigError, match=r"connectors\.shm\.extra\.initial_codec_chunk_frames: 26 is larger than"):
        load(path)


def test_inproc_is_only_for_stages_that_share_a_process(tmp_path: Path) -> None:
    path = derived(tmp_path, "connectors: {shm: {kind: inproc}}\n")
    with pytest.raises(ConfigError, match=r"stages\[1\]\.input_connectors\.thinker: .*same process"):
        load(path)
    deploy = load(path, stages={1: {"process": "text"}})
    assert list(deploy.processes) == ["text"]


def test_devices_come_out_as_torch_names_them() -> None:
    deploy = load("tiny_cpu", "cuda", stages={0: {"devices": "auto"}, 1: {"devices": 1}, 2: {"devices": "cuda:3"}})
    assert [stage.devices for stage in deploy.stages] == ["cuda", "cuda:1", "cuda:3"]


def test_steps_are_compiled_on_a_cpu_and_eager_on_cuda_unless_asked() -> None:
    assert not any(stage.enforce_eager for stage in load("tiny_cpu").stages)
    assert all(stage.enforce_eager for stage in load("tiny_cpu", "cuda").stages)
    asked = load("tiny_cpu", "cuda", stages={stage: {"enforce_eager": False} for stage in (0, 1, 2)})
    assert not any(stage.enforce_eager for stage in asked.stages)


# --- replicas ---


def test_replicas_have_a_process_and_a_device_each() -> None:
    deploy = load("tiny_cpu", "cuda", stages={1: {"num_replicas": 2, "devices": "1, cuda:2"}})
    assert [stage.devices for stage in deploy.stages] == ["cuda", "cuda:1,cuda:2", "cuda"]
    talkers = deploy.replicas("talker")
    assert {name: (each.process, each.devices, each.num_replicas) for name, each in talkers.items()} == {
        "talker:0": ("speech:0", "cuda:1", 1),
        "talker:1": ("speech:1", "cuda:2", 1),
    }
    assert list(deploy.processes) == ["text", "speech:0", "speech:1"]
    assert [stage.stage for stage in deploy.processes["text"]] == ["thinker", "code2wav"]
    assert deploy.replicas("thinker") == {"thinker": deploy.stages[0]}


def test_stages_of_one_process_are_replicated_together() -> None:
    deploy = load("tiny_cpu", stages={0: {"num_replicas": 2}, 2: {"num_replicas": 2}})
    assert {name: [stage.stage for stage in stages] for name, stages in deploy.processes.items()} == {
        "text:0": ["thinker", "code2wav"],
        "text:1": ["thinker", "code2wav"],
        "speech": ["talker"],
    }


@pytest.mark.parametrize("devices", [{}, {"devices": "auto"}, {"devices": "cpu, cpu,cpu"}])
def test_on_cpu_one_word_stands_for_all_replicas(devices: dict[str, str]) -> None:
    assert load("tiny_cpu", stages={1: {"num_replicas": 3, **devices}}).stages[1].devices == "cpu,cpu,cpu"


def test_a_resolved_config_with_replicas_loads_again_as_it_is(tmp_path: Path) -> None:
    deploy = load("tiny_cpu", stages={1: {"num_replicas": 2}})
    assert load(write(tmp_path, "again.yaml", to_yaml(deploy))) == deploy


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"num_replicas": 2, "devices": "1"}, "'cuda:1' names 1, but num_replicas is 2: each replica has one device"),
        ({"num_replicas": 2}, "set num_replicas to 1, or list 2 devices with commas between"),
        ({"num_replicas": 2, "devices": "0,1,2"}, "'cuda:0,cuda:1,cuda:2' names 3, but num_replicas is 2"),
        ({"num_replicas": 2, "devices": "cpu,0"}, "'cpu,cuda:0' is a mix"),
        (
            {"num_replicas": 3, "devices": "1,1,1", "gpu_memory_utilization": 0.5},
            "gives cuda:1 to 3 replicas, each with 0.5 of its memory (gpu_memory_utilization); list 3 different "
            "devices, or lower gpu_memory_utilization to at most 0.333",
        ),
        ({"num_replicas": 2, "devices": "cuda,0", "gpu_memory_utilization": 0.6}, "gives cuda:0 to 2 replicas"),
    ],
)
def test_devices_that_cannot_hold_the_replicas_are_refused(stage: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("tiny_cpu", "cuda", stages={1: stage})
    assert caught.value.path == "stages[1].devices" and message in str(caught.value)


def test_replicas_may_share_a_cuda_device_within_its_memory() -> None:
    stage = {"num_replicas": 3, "devices": "1,1,1", "gpu_memory_utilization": 0.333}
    assert load("tiny_cpu", "cuda", stages={1: stage}).stages[1].devices == "cuda:1,cuda:1,cuda:1"


def test_replicas_are_joined_through_shared_memory(tmp_path: Path) -> None:
    path = derived(tmp_path, "connectors: {shm: {kind: inproc}}\n")
    replicated = {index: {"process": "one", "num_replicas": 2} for index in range(3)}
    with pytest.raises(ConfigError, match=r"stages\[1\].*is inproc, but talker has 2 replicas.*use kind: shm"):
        load(path, stages=replicated)
    assert list(load("tiny_cpu", stages=replicated).processes) == ["one:0", "one:1"]


def test_a_hidden_device_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_cuda_devices() == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"1": 2}', '"1"'])
def test_stage_overrides_must_be_json_objects_by_stage(text: str) -> None:
    with pytest.raises(ConfigError, match="--stage-overrides"):
        parse_stage_overrides(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"1": {"threads": 2}, "1": {"max_num_seqs": 8}}', "1"),
        ('{"1": {"threads": 2, "threads": 4}}', "threads"),
        ('{"0": {"default_sampling_params": {"seed": 1, "seed": 2}}}', "seed"),
    ],
)
def test_a_stage_override_given_twice_is_named(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{name}' is given twice"):
        parse_stage_overrides(text)


def test_resolve_takes_context_and_dtype_from_the_checkpoint(tmp_path: Path) -> None:
    path = derived(tmp_path, "stages: [{stage_id: 0, max_model_len: 0, dtype: auto}]\n")
    deploy = resolve(load(path), contexts=CONTEXTS | {"thinker": 4321}, dtype="float16")
    assert (deploy.stages[0].max_model_len, deploy.stages[0].dtype) == (4321, "float16")
    with pytest.raises(ConfigError, match=r"stages\[0\]\.dtype: .*'float8'"):
        resolve(load(path), contexts=CONTEXTS, dtype="float8")
    with pytest.raises(ConfigError, match=r"stages\[1\]\.max_model_len: 16384 is more than the 100 positions"):
        resolve(load(path), contexts=CONTEXTS | {"talker": 100}, dtype="float16")


def test_resolve_fills_the_sampling_defaults_one_by_one(tmp_path: Path) -> None:
    loaded = load("tiny_cpu", stages={1: {"default_sampling_params": {"temperature": 0.5}}})
    params = resolve(loaded, contexts=CONTEXTS, dtype="float32").stages[1]
    assert params.default_sampling_params["temperature"] == 0.5
    assert params.default_sampling_params["top_k"] == 50


def test_speech_stages_go_when_the_checkpoint_has_none_or_text_is_all_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent = resolve(load("tiny_cpu"), contexts={"thinker": 16384}, dtype="float32")
    assert [stage.stage for stage in silent.stages] == ["thinker"]
    assert "the checkpoint has no talker" in caplog.text
    assert resolve(load("tiny_cpu"), contexts=CONTEXTS, dtype="float32", text_only=True) == silent


@pytest.mark.parametrize("name", profiles())
def test_the_printed_config_loads_as_itself(name: str, tmp_path: Path) -> None:
    deploy = resolve(load(name), contexts=CONTEXTS, dtype="float32")
    text = to_yaml(deploy)
    assert yaml.safe_load(text)["stages"][0]["stage_id"] == 0
    assert load(write(tmp_path, "printed.yaml", text)) == deploy


def test_sizes_read_and_write() -> None:
    assert parse_bytes("64 MiB") == 64 * 2**20
    assert parse_bytes("1.5gb") == 1_500_000_000
    assert parse_bytes("12") == 12
    assert format_bytes(64 * 2**20) == "64.0 MiB"
    assert format_bytes(12) == "12 B"
    for wrong in ("", "-1", "1 XB", "MiB"):
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(wrong)


@pytest.mark.parametrize("value", ["int8", "fp8", None])
def test_quantization_is_a_key_of_the_decoders(tmp_path: Path, value: str | None) -> None:
    path = derived(tmp_path, f"stages:\n  - {{stage_id: 1, quantization: {value or 'null'}}}\n")
    deploy = load(path, "cuda")
    assert [stage.quantization for stage in deploy.stages] == [None, value, None]
    resolved = resolve(deploy, contexts=CONTEXTS, dtype="float32")
    assert load(write(tmp_path, "printed.yaml", to_yaml(resolved)), "cuda") == resolved


@pytest.mark.parametrize(
    ("stage", "value", "message"),
    [
        (0, "fp8", r"stages\[0\]\.quantization: 'fp8' is for CUDA devices, and the thinker is on the CPU; write int8"),
        (1, "fp8", r"stages\[1\]\.quantization: 'fp8' is for CUDA devices, and the talker is on the CPU"),
        (0, "awq", r"stage_overrides\.0\.quantization: 'awq' is not one of 'int8', 'fp8', null"),
        (2, "int8", r"stages\[2\]\.quantization: code2wav has no use for it, only thinker and talker"),
    ],
)
def test_a_quantization_that_cannot_be_is_named(stage: int, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("tiny_cpu", stages={stage: {"quantization": value}})
