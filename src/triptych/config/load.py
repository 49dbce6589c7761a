"""From a deploy file, a platform, flags and overrides to one checked `DeployConfig`.

Precedence, lowest first: schema default, base file, file, the file's block for the platform, CLI flag, stage override.
A base is read like any file (its own base, then itself, then its own platform block) before the file goes on top.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import yaml

from triptych.config.check import MOST_REPLICAS, check_deploy, check_mapping, check_shape, shown
from triptych.config.platform import Platform
from triptych.config.schema import DeployConfig, StageConfig
from triptych.errors import ConfigError

PLATFORMS = ("cpu", "cuda", "rocm", "xpu")  # names a deploy file may use; this version runs on cpu and cuda
PROFILE_DIR = Path(__file__).resolve().parent.parent / "deploy"
_FILE_KEYS = ("base_config", "platforms")


def profiles() -> tuple[str, ...]:
    """Names of the deploy files that come with Triptych."""
    return tuple(sorted(path.stem for path in PROFILE_DIR.glob("*.yaml")))


def load_deploy(
    path_or_profile: str | Path,
    *,
    platform: Platform,
    flags: Mapping[str, Any],
    stage_overrides: Mapping[str, Mapping[str, Any]],
) -> DeployConfig:
    """Read a deploy file, or a profile by its name, and put platform block, flags and overrides on top.

    `flags` are top-level keys of the deploy file; None means "not given". `stage_overrides` is keyed by stage_id.
    Devices come out as "cpu", "cuda" or "cuda:N", one for each replica. Raises ConfigError with the dotted path of what
    is wrong.
    """
    merged = _read(_locate(path_or_profile, Path.cwd()), platform, ())
    given = {name: value for name, value in flags.items() if value is not None}
    merged = _merge(merged, check_shape(given, DeployConfig, ""))
    check_mapping(stage_overrides, "stage_overrides")
    for stage_id, override in stage_overrides.items():
        merged = _merge(merged, {"stages": [_override(merged, str(stage_id), override)]})
    try:
        return _checked(merged, platform)
    except ConfigError as error:
        changed = " with flags" if given else ""
        changed += f" {'and' if changed else 'with'} stage overrides" if stage_overrides else ""
        raise located(error, f"{path_or_profile}{changed}") from error


def _checked(merged: dict[str, Any], platform: Platform) -> DeployConfig:
    """All layers together as one config. Raises ConfigError."""
    merged["stages"] = sorted(merged.get("stages", []), key=lambda stage: int(stage["stage_id"]))
    for index, stage in enumerate(merged["stages"]):
        path = f"stages[{index}]"
        for name in ("stage", "process"):
            if name not in stage:
                raise ConfigError(f"missing; no file says it for stage_id {stage['stage_id']}", f"{path}.{name}")
        stage["devices"] = _devices(stage, platform, f"{path}.devices")
    deploy = msgspec.convert(merged, DeployConfig)
    check_deploy(deploy)
    return deploy


def parse_stage_overrides(text: str) -> dict[str, dict[str, Any]]:
    """The JSON of `--stage-overrides`, e.g. `{"1": {"max_num_seqs": 8}}`. Raises ConfigError."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}", "--stage-overrides") from error
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        raise ConfigError('expected {"<stage_id>": {"<key>": <value>}}', "--stage-overrides")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object with each key once, as in a file: JSON lets the last one win."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ConfigError(f"key {name!r} is given twice", "--stage-overrides")
        values[name] = value
    return values


def _override(merged: Mapping[str, Any], stage_id: str, override: Mapping[str, Any]) -> dict[str, Any]:
    path = f"stage_overrides.{stage_id}"
    check_mapping(override, path)
    known = [str(stage["stage_id"]) for stage in merged.get("stages", [])]
    if stage_id not in known:
        raise ConfigError(f"no stage has stage_id {stage_id!r}; stage ids: {', '.join(known)}", path)
    if "stage_id" in override:
        raise ConfigError("an override is named by its stage_id and cannot change it", f"{path}.stage_id")
    return check_shape(override, StageConfig, path) | {"stage_id": int(stage_id)}


def _devices(stage: Mapping[str, Any], platform: Platform, path: str) -> str:
    """The devices of a stage's replicas, with commas between. A single "cpu" is that of them all."""
    names = [_device(name.strip(), platform, path) for name in stage.get("devices", "auto").split(",")]
    replicas = stage.get("num_replicas", 1)
    return ",".join(names * replicas if names == ["cpu"] and 1 < replicas <= MOST_REPLICAS else names)


def _device(device: str, platform: Platform, path: str) -> str:
    """The device as torch names it: "auto" is the platform's, "1" is "cuda:1"."""
    if device == "auto":
        return platform
    name = f"cuda:{int(device)}" if device.isdecimal() else device
    if platform == "cpu" and name.startswith("cuda"):
        raise ConfigError(
            f"{device!r} is a CUDA device, but the platform is cpu; write devices: cpu (perhaps below platforms.cpu), "
            "or pass --platform cuda if this machine has an NVIDIA device",
            path,
        )
    return name


def _locate(path_or_profile: str | Path, folder: Path) -> Path:
    """A profile's name, or a path (relative to `folder`) of an existing file."""
    if str(path_or_profile) in profiles():
        return PROFILE_DIR / f"{path_or_profile}.yaml"
    try:
        path = folder / Path(path_or_profile).expanduser()
        if path.is_file():
            return path.resolve()
    except (OSError, RuntimeError) as error:  # a folder that may not be entered, a name too long, an unknown ~user
        raise ConfigError(f"{path_or_profile} cannot be read: {error}") from error
    raise ConfigError(
        f"{str(path_or_profile)!r:.200} is neither a file nor a profile; profiles: {', '.join(profiles())}"
    )


def _read(path: Path, platform: Platform, chain: tuple[Path, ...]) -> dict[str, Any]:
    """One file with its base below it and its platform block on top."""
    if path in chain:
        raise ConfigError(" -> ".join(str(link) for link in (*chain, path)) + " is a circle", "base_config")
    try:
        raw = _parse(path)
        merged: dict[str, Any] = {}
        has_base, base = "base_config" in raw, raw.pop("base_config", "")
        blocks = raw.pop("platforms", {})
        own = check_shape(raw, DeployConfig, "", also=_FILE_KEYS)
        _check_stage_ids(own, "")
        check_mapping(blocks, "platforms")
        layers = {name: _platform_block(name, block) for name, block in blocks.items()}
        if not isinstance(base, str):
            raise ConfigError(f"expected a path or the name of a profile, got {shown(base)}", "base_config")
        base_path = _locate(base, path.parent) if has_base else None
    except ConfigError as error:
        raise located(error, path) from error
    if base_path is not None:
        merged = _read(base_path, platform, (*chain, path))
    return _merge(_merge(merged, own), layers.get(platform, {}))


def _platform_block(name: str, block: Any) -> dict[str, Any]:
    if name not in PLATFORMS:
        raise ConfigError(f"{name!r} is no platform. Allowed: {', '.join(PLATFORMS)}", f"platforms.{name}")
    layer = check_shape(block, DeployConfig, f"platforms.{name}")
    _check_stage_ids(layer, f"platforms.{name}.")
    return layer


def _check_stage_ids(layer: Mapping[str, Any], prefix: str) -> None:
    """Stages are merged by stage_id, so each entry of a list needs its own."""
    seen: dict[int, int] = {}
    for index, stage in enumerate(layer.get("stages", [])):
        path = f"{prefix}stages[{index}].stage_id"
        if "stage_id" not in stage:
            raise ConfigError("missing; stages are told apart by it", path)
        if stage["stage_id"] in seen:
            raise ConfigError(f"{stage['stage_id']} is that of stages[{seen[stage['stage_id']]}] already", path)
        seen[stage["stage_id"]] = index


def located(error: ConfigError, where: object) -> ConfigError:
    """The same error, naming the file it is about."""
    return ConfigError(f"{error.reason} (in {where})", error.path)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings key by key, `stages` by stage_id, anything else replaced."""
    merged = dict(below)
    for key, value in above.items():
        if key == "stages":
            stages = {stage["stage_id"]: stage for stage in merged.get("stages", [])}
            for stage in value:
                stages[stage["stage_id"]] = _merge(stages.get(stage["stage_id"], {}), stage)
            merged["stages"] = list(stages.values())
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


class _Keys(Protocol):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any: ...


def _check_keys(loader: _Keys, node: yaml.Node | None, seen: set[int]) -> None:
    """Refuse a key given twice (YAML's own rule; PyYAML lets the last one win) and one that is no plain value."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    keys: set[Any] = set()
    for item in node.value:
        if isinstance(node, yaml.MappingNode):
            name, item = item
            if not isinstance(name, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a name", problem_mark=name.start_mark)
            merges = name.tag == "tag:yaml.org,2002:merge"
            key = name.value if merges else loader.construct_object(name)
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=name.start_mark)
            keys.add(key)
        _check_keys(loader, item, seen)


def _parse(path: Path) -> dict[str, Any]:
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _check_keys(loader, node, set())
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{line}{error.problem or error}") from error
    except (yaml.YAMLError, ValueError) as error:  # text that is not UTF-8, a date or a number that cannot be
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError("not a deploy file: it is nested too deeply") from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}") from error
    value = {} if value is None else value
    check_mapping(value, "")
    return dict(value)
