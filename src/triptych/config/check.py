"""What a deploy config may say: names and types layer by layer, then what must hold between its parts."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from triptych.config.sampling import sampling_params
from triptych.config.schema import DeployConfig, StageConfig, StageKind
from triptych.config.units import parse_bytes
from triptych.errors import ConfigError, UnknownNameError

PIPELINE: tuple[StageKind, ...] = ("thinker", "talker", "code2wav")
_SOURCES: dict[StageKind, StageKind] = {"talker": "thinker", "code2wav": "talker"}
_DEVICE = re.compile(r"auto|cpu|cuda|(cuda:)?[0-9]{1,3}")
_PROCESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # a part of file names, of addresses and of a command line
# Keys that only some stages have a use for; the others take nothing but their default.
_USED_BY: dict[str, tuple[StageKind, ...]] = {
    "max_num_batched_tokens": ("thinker", "talker"),
    "quantization": ("thinker", "talker"),
    "block_size": ("thinker", "talker"),
    "num_kv_blocks": ("thinker", "talker"),
    "kv_cache_bytes": ("thinker", "talker"),
    "encoder_budget": ("thinker",),
    "encoder_cache_bytes": ("thinker",),
    "frames_per_text_token": ("talker",),
    "extra_frames": ("talker",),
    "scheduling_policy": ("talker", "code2wav"),
}
_FRACTIONS = ("gpu_memory_utilization",)
_MOST = 2**31 - 1
MOST_REPLICAS = 64
_RANGES: dict[str, tuple[float, float]] = {  # other counts: 1 to _MOST; other durations: above 0
    "stage_id": (0, _MOST),
    "threads": (1, 1024),
    "num_replicas": (1, MOST_REPLICAS),
    "max_num_seqs": (1, 4096),
    "max_model_len": (0, _MOST),
    "num_kv_blocks": (0, _MOST),
    "kv_cache_bytes": (1, 2**62),
    "extra_frames": (0, _MOST),
    "max_queued_requests": (0, _MOST),
    "max_stage_restarts": (0, _MOST),
    "heartbeat_timeout_s": (2, 10**9),  # a process sends a heartbeat each second
    "inline_bytes": (0, _MOST),
    "encoder_cache_bytes": (0, 2**62),
    "workers": (1, 256),
    "worker_memory_bytes": (512 * 1024**2, 2**62),
    "max_waiting": (0, _MOST),
    "max_bytes": (1, 2**62),
    "max_body_bytes": (1, 2**62),
    "max_redirects": (0, 20),
    "cache_bytes": (0, 2**62),
    "skip_steps": (0, _MOST),
    "max_steps": (1, 1024),  # a step of a large model is a megabyte of trace
}


def check_shape(value: Any, kind: type[msgspec.Struct], path: str, also: Iterable[str] = ()) -> dict[str, Any]:
    """Hold one layer (a file, a platform block, an override) to the names and types of `kind`; nothing is required.

    `also` names further keys that the caller has dealt with. Returns plain values with sizes such as "64 MiB" as
    numbers. Raises ConfigError with the dotted path of the first unknown name or wrong type.
    """
    check_mapping(value, path)
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    checked: dict[str, Any] = {}
    for key, item in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise UnknownNameError(str(key), [*fields, *also], where)
        checked[key] = _check_value(key, item, fields[key], where)
    return checked


def check_mapping(value: Any, path: str) -> None:
    """Raise ConfigError unless `value` is a mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected a mapping of names to values, got {shown(value)}", path or None)


def _check_value(key: str, value: Any, kind: Any, path: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return check_shape(value, kind, path)
    arguments = get_args(kind)
    if get_origin(kind) is tuple and issubclass(arguments[0], msgspec.Struct):
        if not isinstance(value, list):
            raise ConfigError(f"expected a list, got {shown(value)}", path)
        return [check_shape(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(value)]
    if get_origin(kind) is dict and isinstance(arguments[1], type) and issubclass(arguments[1], msgspec.Struct):
        check_mapping(value, path)
        return {str(name): check_shape(item, arguments[1], f"{path}.{name}") for name, item in value.items()}
    if get_origin(kind) is Literal:
        if value not in arguments:
            allowed = ", ".join("null" if argument is None else repr(argument) for argument in arguments)
            raise ConfigError(f"{reprlib.repr(value)} is not one of {allowed}", path)
        return value
    if key == "devices" and type(value) is int:
        return str(value)
    if key.endswith("_bytes") and isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ConfigError(str(error), path) from error
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error} ({reprlib.repr(value)})", path) from error


def shown(value: Any) -> str:
    """A value and its type in an error; long ones are cut."""
    return "nothing" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"


def check_deploy(deploy: DeployConfig) -> None:
    """Raise ConfigError for the first thing that cannot work: a range, an order, a name without its partner."""
    _check_numbers(deploy, "")
    _check_numbers(deploy.media, "media")
    _check_numbers(deploy.profile, "profile")
    if deploy.media.min_audio_s > deploy.media.max_audio_s:
        raise ConfigError(f"{deploy.media.min_audio_s} is more than max_audio_s", "media.min_audio_s")
    _check_pipeline(deploy.stages)
    for name, connector in deploy.connectors.items():
        path = f"connectors.{name}.extra"
        _check_numbers(connector.extra, path)
        if connector.extra.initial_codec_chunk_frames > connector.extra.codec_chunk_frames:
            raise ConfigError(
                f"{connector.extra.initial_codec_chunk_frames} is larger than codec_chunk_frames "
                f"({connector.extra.codec_chunk_frames}); the first chunk is the small one",
                f"{path}.initial_codec_chunk_frames",
            )
    for index, stage in enumerate(deploy.stages):
        _check_stage(stage, f"stages[{index}]")
        _check_inputs(stage, deploy, f"stages[{index}].input_connectors")
    _check_sharing(deploy.stages)


def _check_numbers(value: msgspec.Struct, path: str) -> None:
    """Every number of a config is a count, a size, a duration or a fraction, and in its range."""
    for field in msgspec.structs.fields(type(value)):
        number = getattr(value, field.name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        where = f"{path}.{field.name}" if path else field.name
        if field.name in _FRACTIONS:
            if not 0 < number <= 1:
                raise ConfigError(f"{number} is not a fraction in (0, 1]", where)
        elif field.type is float and field.name not in _RANGES:
            if not 0 < number < float("inf"):
                raise ConfigError(f"{number} is not a positive number of seconds", where)
        else:
            low, high = _RANGES.get(field.name, (1, _MOST))
            if not low <= number <= high:
                raise ConfigError(f"{number} is not between {low} and {high}", where)


def _check_pipeline(stages: tuple[StageConfig, ...]) -> None:
    ids = [stage.stage_id for stage in stages]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"stage_id must be unique, got {ids}", "stages")
    kinds = tuple(stage.stage for stage in stages)
    if kinds not in (PIPELINE, PIPELINE[:1]):
        raise ConfigError(
            f"{', '.join(kinds) or 'no stage'}: in the order of stage_id the stages must be thinker, talker, code2wav, "
            "or thinker alone (text only)",
            "stages",
        )


def _check_stage(stage: StageConfig, path: str) -> None:
    _check_numbers(stage, path)
    if _PROCESS.fullmatch(stage.process) is None:
        raise ConfigError(
            f"{reprlib.repr(stage.process)} is no name for a process: write up to 64 ASCII letters, digits, '.', '_' "
            "and '-', with a letter or a digit first",
            f"{path}.process",
        )
    if stage.enable_prefix_caching and stage.stage != "thinker":
        raise ConfigError(
            f"{stage.stage} has no prefix cache (its rows belong to one request); write false, or leave the key out",
            f"{path}.enable_prefix_caching",
        )
    for field in msgspec.structs.fields(StageConfig):
        used_by = _USED_BY.get(field.name, PIPELINE)
        if stage.stage not in used_by and getattr(stage, field.name) != field.default:
            raise ConfigError(
                f"{stage.stage} has no use for it, only {' and '.join(used_by)}; leave the key out",
                f"{path}.{field.name}",
            )
    _check_devices(stage, f"{path}.devices")
    if stage.quantization == "fp8" and stage.replica(0).devices == "cpu":
        raise ConfigError(
            f"'fp8' is for CUDA devices, and the {stage.stage} is on the CPU; write int8, or leave the key out",
            f"{path}.quantization",
        )
    where = f"{path}.default_sampling_params"
    if stage.stage == "code2wav":
        if stage.default_sampling_params:
            raise ConfigError("code2wav samples nothing; remove the key", where)
        return
    sampling_params(stage.default_sampling_params, where, speech=stage.stage == "talker")


def _check_devices(stage: StageConfig, path: str) -> None:
    """One device for each replica, all of a kind, and none given more of its memory than it has."""
    devices = stage.devices.split(",")
    for device in devices:
        if _DEVICE.fullmatch(device) is None:
            among = f" (in {stage.devices!r})" if len(devices) > 1 else ""
            raise ConfigError(
                f"{device!r} is not one of 'auto', 'cpu', 'cuda', 'cuda:N' or 'N'{among}; replicas have a comma "
                "between their devices, as '0,1'",
                path,
            )
    if len(devices) != stage.num_replicas:
        raise ConfigError(
            f"{stage.devices!r} names {len(devices)}, but num_replicas is {stage.num_replicas}: each "
            f"replica has one device; set num_replicas to {len(devices)}, or list "
            + ("one device" if stage.num_replicas == 1 else f"{stage.num_replicas} devices with commas between"),
            path,
        )
    if len({device == "cpu" for device in devices}) > 1:
        raise ConfigError(
            f"{stage.devices!r} is a mix: the replicas of a stage give the same bytes only if all are on the CPU or "
            "all on CUDA devices; list devices of one kind",
            path,
        )
    share = stage.gpu_memory_utilization
    for device, count in Counter("cuda:0" if device == "cuda" else device for device in devices).items():
        if device != "cpu" and count * share > 1:
            raise ConfigError(
                f"{stage.devices!r} gives {device} to {count} replicas, each with {share} of its memory "
                f"(gpu_memory_utilization); list {count} different devices, or lower gpu_memory_utilization to at most "
                f"{1000 // count / 1000}",
                path,
            )


def _check_sharing(stages: tuple[StageConfig, ...]) -> None:
    """A process is replicated as a whole, so its stages have as many replicas each."""
    for index, stage in enumerate(stages):
        for other in stages[:index]:
            if other.process == stage.process and other.num_replicas != stage.num_replicas:
                raise ConfigError(
                    f"{stage.num_replicas}, but {other.stage} has {other.num_replicas} and shares process "
                    f"{stage.process!r} with {stage.stage}: the stages of a process are replicated together; give "
                    "both the same num_replicas, or one of them a process of its own",
                    f"stages[{index}].num_replicas",
                )


def _check_inputs(stage: StageConfig, deploy: DeployConfig, path: str) -> None:
    source_kind = _SOURCES.get(stage.stage)
    wanted = {source_kind} if source_kind else set()
    if set(stage.input_connectors) != wanted:
        needs = f"exactly one input, from {source_kind!r}" if source_kind else "no input"
        raise ConfigError(f"{stage.stage} takes {needs}; got {dict(stage.input_connectors)}", path)
    for source, name in stage.input_connectors.items():
        connector = deploy.connectors.get(name)
        if connector is None:
            known = ", ".join(map(repr, deploy.connectors)) or "none"
            raise ConfigError(f"no connector is named {name!r}; connectors: {known}", f"{path}.{source}")
        peer = next(other for other in deploy.stages if other.stage == source)
        if connector.kind == "inproc" and peer.process != stage.process:
            raise ConfigError(
                f"connector {name!r} is inproc, but {source} runs in process {peer.process!r} and {stage.stage} in "
                f"{stage.process!r}; use kind: shm, or give both stages the same process",
                f"{path}.{source}",
            )
        if connector.kind == "inproc" and stage.num_replicas > 1:
            raise ConfigError(
                f"connector {name!r} is inproc, but {stage.stage} has {stage.num_replicas} replicas, and each gets "
                f"work from every replica of {source}, in other processes too; use kind: shm",
                f"{path}.{source}",
            )
