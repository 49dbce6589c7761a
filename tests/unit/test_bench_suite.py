"""Perf suites: what a file may say, what it becomes, and how numbers compare with a baseline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from triptych.bench import suite_run
from triptych.bench.baseline import Comparison, compare, measured_baseline
from triptych.bench.driver import Run
from triptych.bench.metrics import summarise
from triptych.bench.suite import Suite, SuiteTest
from triptych.bench.suite_run import Sweep, joined, median, regressions
from triptych.bench.workload import RandomWorkload
from triptych.errors import ConfigError
from triptych.pipeline.launch import plan

SUITES = sorted((Path(__file__).parents[2] / "benchmarks" / "suites").glob("*.json"))
TEXT: dict[str, Any] = {"num_prompts": [4], "max_concurrency": [1, 2]}
MEDIA: dict[str, Any] = {
    "dataset_name": "random-mm",
    "num_prompts": [4, 8],
    "request_rate": [0.5, 1],
    "random_mm_base_items_per_request": 3,
    "random_mm_limit_mm_per_prompt": {"image": 1, "video": 1, "audio": 1},
    "random_mm_bucket_config": {"(256, 128, 1)": 0.4, "(192, 320, 10)": 0.3, "(0, 5, 1)": 0.3},
}


def suite(tmp_path: Path, params: dict[str, Any], **server: Any) -> Suite:
    test = {"test_name": "t", "server_params": {"model": "nano", **server}, "benchmark_params": [params]}
    (tmp_path / "suite.json").write_text(json.dumps([test]))
    return Suite.read(tmp_path / "suite.json")


@pytest.mark.parametrize("file", SUITES, ids=lambda file: file.stem)
def test_every_suite_that_comes_with_triptych_reads_and_is_as_an_update_writes_it(file: Path) -> None:
    read = Suite.read(file)
    assert file.stem in [test.test_name for test in read.tests]
    assert file.read_text() == json.dumps(read.written, indent=2) + "\n"


def test_the_suites_cover_every_kind_of_request() -> None:
    assert {file.stem for file in SUITES} == {
        *("text_only", "long_text_audio", "audio_input", "image_video", "image_video_audio"),
        *("multi_replica", "text_cost"),
    }


@pytest.mark.parametrize("file", SUITES, ids=lambda file: file.stem)
def test_the_servers_of_every_suite_resolve(file: Path, nano: Path) -> None:
    replicas = {}
    for test in Suite.read(file).tests:
        arguments = test.server_params.extra_cli_args
        deploy = plan(
            str(nano),
            deploy_config="tiny_cpu",
            platform="cpu",
            stage_overrides=test.server_params.stage_overrides,
            text_only="--text-only" in arguments,
        ).deploy
        assert set(arguments) <= {"--text-only"}, "nothing that this test does not know of"
        replicas[test.test_name] = [stage.num_replicas for stage in deploy.stages]
    several = {"multi_replica": [2, 2, 2], "multi_replica_talker": [1, 2, 1], "thinker_only": [1]}
    assert replicas == {name: several.get(name, [1, 1, 1]) for name in replicas}


def test_a_sweep_is_a_measurement_for_each_value(tmp_path: Path) -> None:
    [test] = suite(tmp_path, TEXT | {"ignore_eos": True, "extra_body": {"seed": 7}}).tests
    first, second = test.benchmark_params[0].measurements(9.0)
    assert [(m.load.max_concurrency, m.load.request_rate) for m in (first, second)] == [(1, math.inf), (2, math.inf)]
    assert first.num_prompts == second.num_prompts == 4 and first.timeout_s == 9
    assert first.reply.speaks and first.reply.ignore_eos and first.reply.extra == {"seed": 7}
    assert test.benchmark_params[0].labels == ["concurrency 1", "concurrency 2"]
    later = test.benchmark_params[0].measurements(9.0, points_before=2)
    assert [m.seed for m in (first, second, *later)] == [0, 1, 2, 3], "no point finds another's prompts in a cache"
    [test] = suite(tmp_path, MEDIA | {"extra_body": {"modalities": ["text"]}}).tests
    first, second = test.benchmark_params[0].measurements(9.0)
    assert [(m.num_prompts, m.load.request_rate) for m in (first, second)] == [(4, 0.5), (8, 1)]
    assert not first.reply.speaks and "modalities" not in first.reply.extra
    workload = first.workload
    assert isinstance(workload, RandomWorkload)
    assert (workload.images, workload.audios, workload.videos) == (1, 1, 1)
    assert (workload.image_size, workload.audio_s) == ((128, 256), 5.0), "files say height before width"
    assert (workload.video_size, workload.video_s) == ((320, 192), 1.0), "ten frames at ten a second"


def test_a_server_gets_its_arguments(tmp_path: Path) -> None:
    overrides = {"1": {"max_num_seqs": 2}}
    [test] = suite(tmp_path, TEXT, stage_overrides=overrides, extra_cli_args=["--text-only"]).tests
    plain, flag, given = test.server_params.arguments
    assert (plain, flag, json.loads(given)) == ("--text-only", "--stage-overrides", overrides)
    [test] = suite(tmp_path, TEXT).tests
    assert test.server_params.arguments == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_concurency": [1]}, r"max_concurency: unknown key.*did you mean 'max_concurrency'\? Allowed: .*backend"),
        ({"request_rate": [1.0]}, r"benchmark_params\[0\]: give max_concurrency or request_rate, one of them"),
        ({"max_concurrency": []}, "one of them, as a list of at least one value"),
        ({"num_prompts": [1, 2, 3]}, r"num_prompts: 3 values for 2 points"),
        ({"num_prompts": 4}, r"num_prompts: Expected `array`, got `int`"),
        ({"max_concurrency": [1, 0]}, r"max_concurrency: 0 is less than 1"),
        ({"random_range_ratio": 0.5}, r"random_range_ratio: 0.5.*every request is alike"),
        ({"extra_body": {"modalities": ["video"]}}, r"extra_body: \['video'\] is not"),
        ({"extra_body": {"stream": False}}, "sets stream, which the benchmark sets itself"),
        ({"dataset_name": "random-mm"}, "random-mm brings some"),
        ({"random_mm_base_items_per_request": 1}, r"base_items_per_request: 1, but .* adds up to 0"),
        ({"baseline": {"x": {"mean_rtf": [1, 1]}}}, r"baseline\.x\.mean_rtf: unknown key.*mean_audio_rtf"),
        ({"baseline": {"x": {"mean_audio_duration_s": [1, 1]}}}, "unknown key"),
        ({"baseline": {"x": {"mean_ttft_ms": [1]}}}, "1 values for 2 points"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused_by_name(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        suite(tmp_path, TEXT | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"random_mm_limit_mm_per_prompt": {"image": 1, "smell": 2}}, "'smell': 2 is not a count of image, audio"),
        ({"random_mm_base_items_per_request": 2}, r"2, but .* adds up to 3"),
        ({"random_mm_bucket_config": {"(256, 128, 1)": 1}}, r"sizes of image, .*give each kind one size"),
        ({"random_mm_bucket_config": {"256x128": 1}}, '"256x128": 1 is not'),
        ({"random_mm_bucket_config": {"(0, 5, 3)": 1}}, r"\(0, 5, 3\): clips have one channel"),
        ({"random_mm_bucket_config": {"(255, 128, 1)": 1}}, "sides of pictures and videos are even"),
        ({"random_mm_bucket_config": {"(2, 2, 1)": 1, "(4, 4, 1)": 1}}, "a second size of image"),
        ({"random_mm_bucket_config": {"(2, 2, 1)": 0}}, "a share above 0"),
    ],
)
def test_media_that_cannot_be_made_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        suite(tmp_path, MEDIA | change)


def paired(tmp_path: Path, *tests: tuple[str, str | None, dict[str, Any]]) -> Suite:
    """Tests by name, the test that each is compared with, and its load."""
    written = [
        {"test_name": name, "server_params": {"model": "nano"}, "benchmark_params": [params]}
        | ({"baseline_test": other} if other else {})
        for name, other, params in tests
    ]
    (tmp_path / "suite.json").write_text(json.dumps(written))
    return Suite.read(tmp_path / "suite.json")


def test_a_test_is_compared_with_one_before_it_that_has_the_same_loads(tmp_path: Path) -> None:
    old = TEXT | {"baseline": {"here": {"mean_ttft_ms": [1, 1]}}}
    first, second = paired(tmp_path, ("alone", None, old), ("whole", "alone", TEXT)).tests
    assert (first.baseline_test, second.baseline_test) == (None, "alone")
    for tests, reason in (
        (
            [("whole", "alone", TEXT), ("alone", None, TEXT)],
            r"\[0\]\.baseline_test: 'alone' is no test before.*is none",
        ),
        ([("alone", None, TEXT), ("whole", "alone", old)], r"\[1\]\.benchmark_params: they are not those of 'alone'"),
        ([("alone", None, TEXT), ("whole", "alone", TEXT | {"num_prompts": [5]})], "only the same loads compare"),
    ):
        with pytest.raises(ConfigError, match=reason):
            paired(tmp_path, *tests)


def test_a_file_that_is_no_suite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    whole = {"test_name": "t", "server_params": {"model": "nano"}, "benchmark_params": [TEXT]}
    for written, reason in (
        ("{}", "not a list of tests"),
        ("[", "cannot be read"),
        (json.dumps([whole, whole]), "test_name t is given twice"),
        (
            json.dumps([whole | {"mark": []}]),
            r"\[0\]\.mark: unknown key 'mark'; Allowed: baseline_test, benchmark_params",
        ),
        (json.dumps([whole | {"server_params": {}}]), "missing required field `model`"),
        (json.dumps([whole | {"server_params": {"model": "nano", "gpu": 1}}]), r"server_params\.gpu: unknown key"),
        (json.dumps([whole | {"benchmark_params": []}]), "at least one entry of benchmark_params"),
        (json.dumps([whole | {"server_params": {"model": "n", "extra_cli_args": ["--port=1"]}}]), "--port=1 is not"),
    ):
        path.write_text(written)
        with pytest.raises(ConfigError, match=reason):
            Suite.read(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Suite.read(tmp_path / "none.json")


# --- baselines ---


@pytest.mark.parametrize(
    ("metric", "measured", "worse"),
    [
        ("mean_audio_rtf", 0.111, True),
        ("mean_audio_rtf", 0.109, False),
        ("mean_audio_rtf", 0.01, False),
        ("output_throughput", 0.089, True),
        ("output_throughput", 0.091, False),
        ("output_throughput", 9.0, False),
        ("mean_audio_ttfp_ms", None, True),
    ],
)
def test_more_is_worse_of_times_and_less_of_throughput(metric: str, measured: float | None, worse: bool) -> None:
    assert Comparison(metric, "concurrency 1", 0.1, measured).regressed(0.1) is worse


def test_a_regression_says_what_where_and_how_much() -> None:
    said = str(Comparison("mean_audio_rtf", "concurrency 8", 0.2, 0.3))
    assert said == "mean_audio_rtf at concurrency 8: 0.3, the baseline is 0.2, +50.0% (less is better)"
    assert "nothing was measured" in str(Comparison("mean_audio_rtf", "x", 0.2, None))
    assert "%" not in str(Comparison("total_audio_underrun_s", "x", 0.0, 0.3)), "no share of nothing"


def test_every_point_is_compared_with_its_own_value() -> None:
    summaries = [{"output_throughput": 1.0}, {"output_throughput": 2.0}]
    found = compare({"output_throughput": [3.0, 4.0]}, ["a", "b"], summaries)
    assert [(c.point, c.baseline, c.measured) for c in found] == [("a", 3.0, 1.0), ("b", 4.0, 2.0)]
    assert compare({}, ["a", "b"], summaries) == []


def test_a_new_baseline_has_what_was_measured_and_nothing_else() -> None:
    empty = summarise(Run([], 0.0))
    summaries = [empty | {"mean_ttft_ms": 12.345678}, empty | {"mean_ttft_ms": 20.0}]
    assert measured_baseline(["mean_ttft_ms", "mean_audio_rtf"], summaries, speaks=True) == {
        "mean_ttft_ms": [12.346, 20.0]
    }
    assert set(measured_baseline([], summaries, speaks=False)) == {"mean_ttft_ms", "output_throughput"}


# --- rounds, and one test against another ---


def one_round(test: SuiteTest, *summaries: dict[str, Any]) -> suite_run.Tested:
    """One round of a test."""
    return suite_run.Tested(test, {}, 1.0, {}, [Sweep(test.test_name, test.benchmark_params[0], list(summaries), [])])


def summary(**numbers: Any) -> dict[str, Any]:
    return summarise(Run([], 0.0)) | numbers


def test_of_several_rounds_a_number_is_the_median_and_no_failure_is_lost() -> None:
    rounds = [
        summary(mean_ttft_ms=5.0, completed=4, output_tokens_counted_by="usage"),
        summary(mean_ttft_ms=9.0, completed=3, failed=1, failures={"http 500": 1}, failure_examples={"http 500": "x"}),
        summary(mean_ttft_ms=6.0, completed=4, failures={"http 500": 2, "cut off": 1}),
    ]
    found = median(rounds)
    assert (found["mean_ttft_ms"], found["completed"], found["failed"]) == (6.0, 11, 1)
    assert found["failures"] == {"http 500": 3, "cut off": 1} and found["failure_examples"] == {"http 500": "x"}
    assert found["mean_audio_rtf"] is None and found["output_tokens_counted_by"] == "usage"
    assert median(rounds[:1]) == rounds[0]


def test_a_test_is_held_against_the_other_one_round_by_round(tmp_path: Path) -> None:
    alone, whole = paired(tmp_path, ("alone", None, TEXT), ("whole", "alone", TEXT)).tests
    runs = []
    for first, second in ((100.0, 99.0), (50.0, 45.0), (80.0, 40.0)):
        runs.append(one_round(alone, summary(output_throughput=first, mean_ttft_ms=10.0), summary()))
        runs.append(one_round(whole, summary(output_throughput=second, mean_ttft_ms=10.4), summary(mean_ttft_ms=3.0)))
    results = joined(runs, "here")
    assert [result.test.test_name for result in results] == ["alone", "whole"]
    assert results[0].sweeps[0].comparisons == [] and len(results[0].sweeps[0].rounds) == 3
    throughput, *_ = results[1].sweeps[0].comparisons
    assert (throughput.baseline, throughput.measured, throughput.of) == (80.0, 45.0, "alone")
    assert throughput.ratios == pytest.approx((0.99, 0.9, 0.5))
    assert str(throughput) == (
        "output_throughput at concurrency 1: 45, alone has 80, -10.0% in the median of 3 rounds (more is better)"
    )
    [regression] = regressions(results, 0.05)
    assert regression.startswith("whole: output_throughput at concurrency 1")
    assert regressions(results, 0.11) == []
    assert joined(runs[:1], "here")[0].sweeps[0].rounds == (), "one round is no several"
