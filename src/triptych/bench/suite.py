"""A perf suite: a JSON list of tests, each a server and the loads to put on it.

The keys are those of vLLM-Omni's suites; one that would have no effect here is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from triptych.bench.baseline import COMPARED
from triptych.bench.driver import Load
from triptych.bench.measure import Measurement
from triptych.bench.synthetic import VIDEO_FPS
from triptych.bench.workload import KINDS, MODALITIES, OWN_FIELDS, RandomWorkload, Reply
from triptych.config.check import check_shape
from triptych.errors import ConfigError, UnknownNameError

OWN_FLAGS = ("--host", "--port", "--api-key", "--stage-overrides", "--dry-run")  # the suite sets these itself
_BUCKET = re.compile(r"\((\d+), ?(\d+), ?(\d+)\)")


class ServerParams(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    stage_overrides: dict[str, dict[str, Any]] = {}
    extra_cli_args: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of `triptych serve`, after the model."""
        overrides = msgspec.json.encode(self.stage_overrides).decode()
        return (*self.extra_cli_args, *(("--stage-overrides", overrides) if self.stage_overrides else ()))


class BenchmarkParams(msgspec.Struct, frozen=True, kw_only=True):
    """One load, swept over `max_concurrency` or `request_rate`. Speech is asked for unless `extra_body.modalities` says
    otherwise. `baseline` is hardware -> metric -> one value for each point of the sweep."""

    dataset_name: Literal["random", "random-mm"] = "random"
    backend: Literal["openai-chat-omni", "openai-chat"] = "openai-chat-omni"
    endpoint: str = "/v1/chat/completions"
    num_prompts: tuple[int, ...]
    num_warmups: int = 1
    max_concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = {}
    random_input_len: int = 128
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_mm_base_items_per_request: int = 0
    random_mm_num_mm_items_range_ratio: float = 0.0
    random_mm_limit_mm_per_prompt: dict[str, int] = {}
    random_mm_bucket_config: dict[str, float] = {}
    baseline: dict[str, dict[str, tuple[float, ...]]] = {}

    @property
    def num_points(self) -> int:
        return len(self.max_concurrency or self.request_rate)

    @property
    def labels(self) -> list[str]:
        """What distinguishes the points of the sweep."""
        if self.max_concurrency:
            return [f"concurrency {places}" for places in self.max_concurrency]
        return [f"{rate:g} req/s" for rate in self.request_rate]

    def measurements(self, timeout_s: float, *, points_before: int = 0, path: str = "") -> list[Measurement]:
        """One for each point of the sweep, each with prompts that no other point of the test has: caches do not help.

        Raises ConfigError for what does not fit together.
        """
        workload, reply = _workload(self, path), _reply(self, path)
        counts = self.num_prompts * (self.num_points if len(self.num_prompts) == 1 else 1)
        loads = [Load(places, math.inf, self.seed) for places in self.max_concurrency]
        loads += [Load(None, rate, self.seed) for rate in self.request_rate]
        return [
            Measurement(workload, reply, load, count, self.num_warmups, self.seed + number, timeout_s)
            for number, (load, count) in enumerate(zip(loads, counts, strict=True), points_before)
        ]


class SuiteTest(msgspec.Struct, frozen=True, kw_only=True):
    """`baseline_test` names an earlier test with the same loads: what it measures in the same run is the baseline."""

    test_name: str
    server_params: ServerParams
    benchmark_params: tuple[BenchmarkParams, ...]
    baseline_test: str | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """`written` is the file as it was read, for `--update-baseline` to write back."""

    tests: tuple[SuiteTest, ...]
    written: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Suite:
        """Raises ConfigError, with the place in the file, for anything that is not a suite."""
        try:
            written = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if not isinstance(written, list) or not written:
            raise ConfigError(f"{path} is not a list of tests")
        try:
            tests = tuple(_test(value, f"[{index}]") for index, value in enumerate(written))
            names = [test.test_name for test in tests]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"test_name {', '.join(twice)} is given twice; results go by it")
            for index, test in enumerate(tests):
                _check_baseline_test(test, tests[:index], f"[{index}]")
        except ConfigError as error:
            raise ConfigError(f"{error.reason} (in {path})", error.path) from error
        return cls(tests, written)


def _test(value: Any, path: str) -> SuiteTest:
    shape = check_shape(value, SuiteTest, path)
    try:
        test = msgspec.convert(shape, SuiteTest)
    except msgspec.ValidationError as error:  # a key that is missing
        raise ConfigError(str(error), path) from error
    if not test.test_name.strip() or not test.benchmark_params:
        raise ConfigError("a test needs a test_name and at least one entry of benchmark_params", path)
    for flag in test.server_params.extra_cli_args:
        if flag.partition("=")[0] in OWN_FLAGS:
            raise ConfigError(
                f"{flag} is not for a suite, which sets it itself ({', '.join(OWN_FLAGS)})",
                f"{path}.server_params.extra_cli_args",
            )
    for index, params in enumerate(test.benchmark_params):
        where = f"{path}.benchmark_params[{index}]"
        _check_sweep(params, where)
        params.measurements(1.0, path=where)
        _check_baseline(params, f"{where}.baseline")
    return test


def _check_sweep(params: BenchmarkParams, path: str) -> None:
    if bool(params.max_concurrency) == bool(params.request_rate):
        raise ConfigError("give max_concurrency or request_rate, one of them, as a list of at least one value", path)
    if len(params.num_prompts) not in (1, params.num_points):
        raise ConfigError(
            f"{len(params.num_prompts)} values for {params.num_points} points of the sweep; give one for all, or one "
            "for each",
            f"{path}.num_prompts",
        )
    for name, least in (
        ("num_prompts", 1),
        ("max_concurrency", 1),
        ("num_warmups", 0),
        ("random_input_len", 1),
        ("random_output_len", 1),
    ):
        values = getattr(params, name)
        for value in values if isinstance(values, tuple) else (values,):
            if value < least:
                raise ConfigError(f"{value} is less than {least}", f"{path}.{name}")
    for rate in params.request_rate:
        if not 0 < rate < math.inf:
            raise ConfigError(f"{rate} is not a number of requests a second", f"{path}.request_rate")
    for name in ("random_range_ratio", "random_mm_num_mm_items_range_ratio"):
        if getattr(params, name):
            raise ConfigError(
                f"{getattr(params, name)}: lengths and counts are not drawn here, every request is alike; write 0, or "
                "leave the key out",
                f"{path}.{name}",
            )


def _check_baseline(params: BenchmarkParams, path: str) -> None:
    for hardware, metrics in params.baseline.items():
        for metric, values in metrics.items():
            where = f"{path}.{hardware}.{metric}"
            if metric not in COMPARED:
                raise UnknownNameError(metric, COMPARED, where)
            if len(values) != params.num_points:
                raise ConfigError(f"{len(values)} values for {params.num_points} points of the sweep", where)


def _check_baseline_test(test: SuiteTest, before: Sequence[SuiteTest], path: str) -> None:
    if test.baseline_test is None:
        return
    loads = {one.test_name: one.benchmark_params for one in before}
    if test.baseline_test not in loads:
        known = ", ".join(map(repr, loads)) or "none"
        raise ConfigError(
            f"{test.baseline_test!r} is no test before this one; there is {known}", f"{path}.baseline_test"
        )
    if test.benchmark_params != tuple(msgspec.structs.replace(one, baseline={}) for one in loads[test.baseline_test]):
        raise ConfigError(
            f"they are not those of {test.baseline_test!r} without its baseline, and only the same loads compare",
            f"{path}.benchmark_params",
        )


def _reply(params: BenchmarkParams, path: str) -> Reply:
    extra = dict(params.extra_body)
    modalities = extra.pop("modalities", ["text", "audio"])
    if modalities not in [list(known) for known in MODALITIES]:
        raise ConfigError(f'{modalities!r} is not ["text"], ["text", "audio"] or ["audio"]', f"{path}.extra_body")
    if own := [name for name in OWN_FIELDS if name in extra]:
        raise ConfigError(f"sets {', '.join(own)}, which the benchmark sets itself", f"{path}.extra_body")
    return Reply(
        modalities=tuple(modalities),
        max_tokens=params.random_output_len,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature,
        extra=extra,
    )


def _workload(params: BenchmarkParams, path: str) -> RandomWorkload:
    """`random_mm_limit_mm_per_prompt` is what every request brings, `random_mm_bucket_config` how large it is."""
    counts = params.random_mm_limit_mm_per_prompt
    for kind, count in counts.items():
        if kind not in KINDS or count < 0:
            raise ConfigError(f"{kind!r}: {count} is not a count of {', '.join(KINDS)}", f"{path}.{_COUNTS}")
    if (params.dataset_name == "random-mm") != bool(sum(counts.values())):
        raise ConfigError(
            f"dataset_name {params.dataset_name!r} with {counts or 'no'} media: random-mm brings some, random none",
            f"{path}.{_COUNTS}",
        )
    items = params.random_mm_base_items_per_request
    if items != sum(counts.values()):
        raise ConfigError(
            f"{items}, but {_COUNTS} adds up to {sum(counts.values())}: every request brings all of it here",
            f"{path}.random_mm_base_items_per_request",
        )
    sizes = dict(_sizes(params.random_mm_bucket_config, f"{path}.{_BUCKETS}"))
    if set(sizes) != {kind for kind, count in counts.items() if count}:
        raise ConfigError(
            f"sizes of {', '.join(sizes) or 'nothing'}, and {_COUNTS} of {counts}: give each kind one size",
            f"{path}.{_BUCKETS}",
        )
    fields: dict[str, Any] = {f"{kind}s": count for kind, count in counts.items() if count}
    for kind, (height, width, third) in sizes.items():
        if kind == "audio":
            fields["audio_s"] = float(width)
        else:
            fields[f"{kind}_size"] = (width, height)
        if kind == "video":
            fields["video_s"] = third / VIDEO_FPS
    return RandomWorkload(input_len=params.random_input_len, **fields)


_COUNTS, _BUCKETS = "random_mm_limit_mm_per_prompt", "random_mm_bucket_config"


def _sizes(buckets: dict[str, float], path: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """kind -> (height, width, 1) of an image, (height, width, frames) of a video, (0, seconds, 1) of a clip.

    A share has no effect, since every request brings all; one that says "never" is refused.
    """
    seen: set[str] = set()
    for key, share in buckets.items():
        found = _BUCKET.fullmatch(key)
        if found is None or share <= 0:
            raise ConfigError(
                f'"{key}": {share:g} is not "(height, width, 1)" of an image, "(height, width, frames)" of a video or '
                '"(0, seconds, 1)" of a clip, with a share above 0',
                path,
            )
        height, width, third = (int(number) for number in found.groups())
        kind = "audio" if height == 0 else "image" if third == 1 else "video"
        if (
            not width
            or not third
            or (kind == "audio" and third != 1)
            or (kind != "audio" and (height % 2 or width % 2))
        ):
            raise ConfigError(f"{key}: clips have one channel, and the sides of pictures and videos are even", path)
        if kind in seen:
            raise ConfigError(f"{key} is a second size of {kind}; there is one of each kind here", path)
        seen.add(kind)
        yield kind, (height, width, third)
