"""`triptych bench` against live servers: its numbers and the server's own are about the same replies; suites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live_server import LiveServer
from triptych.bench.metrics import DISTRIBUTIONS, STATISTICS

BENCH_S = 120
REQUESTS = 6


@pytest.fixture(scope="module")
def server(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(nano, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def bench(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("serve", "--base-url", url, *arguments)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triptych", "bench", *arguments]
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BENCH_S)


def since(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]], name: str, label: str = "") -> float:
    return after[name].get(label, 0.0) - before.get(name, {}).get(label, 0.0)


def test_the_client_and_the_server_count_the_same(server: LiveServer, tmp_path: Path) -> None:
    before = server.metrics()
    result = tmp_path / "result.json"
    done = bench(
        server.url,
        *("--model", "nano", "--modalities", "text,audio", "--voice", "chelsie", "--num-prompts", str(REQUESTS)),
        *("--num-warmups", "0", "--max-concurrency", "3", "--random-input-len", "12", "--random-output-len", "16"),
        *("--ignore-eos", "--extra-body", '{"seed": 7}', "--goodput", "ttft:60000", "--goodput", "rtf:1000"),
        *("--result-json", str(result), "--save-detailed", "--fail-on-error"),
    )
    assert done.returncode == 0, done.stderr
    after = server.metrics()
    found: dict[str, Any] = json.loads(result.read_text())

    assert found["completed"] == REQUESTS and found["failed"] == 0 and found["failures"] == {}
    assert found["output_tokens_counted_by"] == "usage"
    assert found["total_output_tokens"] == since(before, after, "generation_tokens_total") == REQUESTS * 16
    assert found["total_input_tokens"] == since(before, after, "prompt_tokens_total") > 0
    spoken = since(before, after, "audio_duration_s_count")
    assert found["completed_with_audio"] == spoken > 0
    assert found["total_audio_duration_s"] == pytest.approx(since(before, after, "audio_duration_s_sum"), abs=1e-6)

    # The client's clock starts before the server's and stops after it; text passes through here in between.
    for mine, theirs, count in (
        ("mean_ttft_ms", "time_to_first_token_s", REQUESTS),
        ("mean_audio_ttfp_ms", "audio_ttfp_s", spoken),
        ("mean_e2el_ms", "e2e_request_latency_s", REQUESTS),
    ):
        served = 1000 * since(before, after, f"{theirs}_sum") / count
        assert served * 0.99 <= found[mine] <= served + 5000, mine
    rtf = since(before, after, "audio_rtf_sum") / spoken
    assert rtf * 0.99 <= found["mean_audio_rtf"]

    assert {f"{statistic}_{name}" for statistic in STATISTICS for name in DISTRIBUTIONS} <= set(found)
    assert found["request_throughput"] == pytest.approx(REQUESTS / found["duration"])
    assert found["output_throughput"] == pytest.approx(REQUESTS * 16 / found["duration"])
    assert found["audio_throughput"] == pytest.approx(found["total_audio_duration_s"] / found["duration"])
    assert found["goodput_ratio"] == spoken / REQUESTS, "targets out of reach of nobody who speaks"
    assert found["arguments"]["extra_body"] == '{"seed": 7}' and "api_key" not in found["arguments"]
    assert found["server"]["fingerprints"] == [f"triptych-{found['versions']['triptych']}"]
    assert found["hardware"]["cores"] >= 1 and "commit" in found
    assert len(found["requests"]) == REQUESTS
    assert all(request["audio_rms"] > 1e-3 for request in found["requests"] if request["audio_duration_s"])
    assert "audio-s/s" in done.stdout and "streams without underrun" in done.stdout and "TTFT, ms" in done.stdout

    [ceilings] = found["ceilings"]
    assert ceilings["setting"] == {"dtype": "float32", "threads": 1, "device": "cpu"}
    stages = {stage["stage"]: stage for stage in found["server"]["stages"]}
    assert set(stages) == {"thinker", "talker", "code2wav"} and "of memory's" in done.stdout
    # Each side sees the stages as of their last heartbeats, so they may differ by a second's steps.
    settled = server.settled_metrics()
    for name, stage in stages.items():
        total = settled["stage_step_time_s_count"][name]
        assert 0.5 * since(before, settled, "stage_step_time_s_count", name) <= stage["steps"] <= total, name
        assert 0 < stage["bytes_share"] and 0 < stage["flops_share"] < 1, name


def test_media_of_every_kind_is_asked_about_at_a_rate(server: LiveServer) -> None:
    before = server.metrics()
    done = bench(
        server.url,
        *("--num-prompts", "3", "--request-rate", "20", "--random-input-len", "4", "--random-output-len", "2"),
        *("--random-image", "1", "--random-image-size", "64x64", "--random-audio", "1"),
        *("--random-audio-seconds", "0.5", "--random-video", "1", "--random-video-size", "64x64"),
        *("--random-video-seconds", "0.5", "--num-warmups", "1", "--fail-on-error"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert since(before, server.metrics(), "media_decoded_total") == 4 * 3, "nobody's media was seen before"
    assert "audio-s/s" not in done.stdout


def test_a_run_in_which_all_fail_has_a_status_and_says_why(server: LiveServer) -> None:
    refused = ("--num-prompts", "2", "--extra-body", '{"nope": 1}')
    done = bench(server.url, *refused, "--num-warmups", "0")
    assert done.returncode == 1 and "every request failed" in done.stderr
    assert "failed: 2 x http 400: unknown field 'nope'" in done.stdout
    done = bench(server.url, *refused)
    assert done.returncode == 1 and "every warm-up request failed" in done.stderr


def test_some_failures_are_a_status_only_when_asked(server: LiveServer, tmp_path: Path) -> None:
    lines = [{"prompt": "Hello"}, {"messages": [{"role": "robot", "content": "beep"}]}]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--dataset-name", "file", "--dataset-path", str(tmp_path / "lines"), "--max-tokens", "2")
    assert bench(server.url, *arguments).returncode == 0
    done = bench(server.url, *arguments, "--fail-on-error")
    assert done.returncode == 1 and "1 requests failed" in done.stderr


def test_a_suite_starts_its_server_names_regressions_and_updates_its_baseline(
    server: LiveServer, nano: Path, tmp_path: Path
) -> None:
    params = {
        "num_prompts": [2],
        "max_concurrency": [1, 2],
        "random_input_len": 4,
        "random_output_len": 6,
        "ignore_eos": True,
        "extra_body": {"sampling_params_list": [{}, {"ignore_eos": True, "max_tokens": 8}]},
        "baseline": {"here": {"output_throughput": [0.001, 1e9], "mean_audio_rtf": [1e9, 1e9]}},
    }
    arguments = ["--deploy-config", "tiny_cpu", "--platform", "cpu"]
    test = {"test_name": "short", "server_params": {"model": str(nano), "extra_cli_args": arguments}}
    file, result = tmp_path / "suite.json", tmp_path / "result.json"
    file.write_text(json.dumps([test | {"benchmark_params": [params]}]))

    done = run("suite", str(file), "--hardware", "here", "--result-json", str(result))
    assert done.returncode == 1, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "baseline is" in line]
    assert "short: output_throughput at concurrency 2" in line and "(more is better)" in line
    found: dict[str, Any] = json.loads(result.read_text())
    [taken] = found["tests"]
    assert taken["deploy"]["stages"][0]["max_num_seqs"] == 64 and taken["start_up_s"] > 0
    assert [point["completed"] for point in taken["benchmarks"][0]["points"]] == [2, 2]
    assert all(point["total_output_tokens"] == 12 for point in taken["benchmarks"][0]["points"])
    assert len(found["regressions"]) == 1 and found["hardware"]["cores"] >= 1

    done = run("suite", str(file), "--hardware", "here", "--update-baseline", "--url", server.url)
    assert done.returncode == 0, done.stderr
    assert "server_params have no effect" in done.stderr
    [written] = json.loads(file.read_text())
    updated = written["benchmark_params"][0].pop("baseline")["here"]
    assert set(updated) == {"output_throughput", "mean_audio_rtf"} and all(
        0.001 < v < 1e9 for v in updated["output_throughput"]
    )
    del params["baseline"]
    assert written == test | {"benchmark_params": [params]}, "nothing else has changed"


def test_a_suite_holds_one_deployment_against_another(nano: Path, tmp_path: Path) -> None:
    """As benchmarks/suites/text_cost.json does: text alone, with the stages of speech beside it and without."""
    load = {"num_prompts": [2], "max_concurrency": [2], "random_input_len": 4, "random_output_len": 8}
    load |= {"ignore_eos": True, "extra_body": {"modalities": ["text"]}}
    arguments = ["--deploy-config", "tiny_cpu", "--platform", "cpu"]
    tests = [
        {
            "test_name": name,
            "server_params": {"model": str(nano), "extra_cli_args": arguments + flags},
            "benchmark_params": [load],
            **baseline,
        }
        for name, flags, baseline in (
            ("thinker_only", ["--text-only"], {}),
            ("text_cost", [], {"baseline_test": "thinker_only"}),
        )
    ]
    file, result = tmp_path / "suite.json", tmp_path / "result.json"
    file.write_text(json.dumps(tests))
    done = run("suite", str(file), "--rounds", "1", "--margin", "1000", "--result-json", str(result))
    assert done.returncode == 0, done.stderr
    assert "text_cost: output_throughput at concurrency 2" in done.stdout and "thinker_only has" in done.stdout
    alone, whole = json.loads(result.read_text())["tests"]
    assert [len(test["deploy"]["stages"]) for test in (alone, whole)] == [1, 3]
    compared = {one["metric"]: one for one in whole["benchmarks"][0]["comparisons"]}
    assert set(compared) == {"output_throughput", "mean_ttft_ms", "mean_e2el_ms"}
    assert all(one["of"] == "thinker_only" and one["ratio"] > 0 for one in compared.values())
    assert run("suite", str(file), "--url", "http://127.0.0.1:9").returncode == 2, "one server is no two"


def test_growth_is_measured_by_streams_and_by_length(nano: Path, tmp_path: Path) -> None:
    served = (str(nano), "--deploy-config", "tiny_cpu", "--platform", "cpu")
    sweeps = ("--concurrency", "2", "--concurrency", "1", "--stream-seconds", "0.4", "--num-prompts", "2")
    result, record = tmp_path / "growth.json", tmp_path / "growth.md"
    files = ("--result-json", str(result), "--record", str(record))
    done = run("growth", *served, *sweeps, "--seconds", "10", *files, "--fail-above", "1000")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    assert [(point["streams"], point["completed"]) for point in found["by_streams"]] == [(1, 2), (2, 4)]
    assert [(point["frames"], point["completed"]) for point in found["by_length"]] == [(125, 1)]
    for point in (*found["by_streams"], *found["by_length"]):
        made = {stage["stage"]: stage["cost"]["tokens"] for stage in point["stages"]}
        frames = point["frames"] * point["completed"]
        assert made == {"thinker": point["text_tokens"] * point["completed"], "talker": frames, "code2wav": frames}
    assert all(stage["of_linear"] is None for stage in found["by_streams"][0]["stages"])
    assert all(stage["of_linear"] > 0 and stage["token_ms"] > 0 for stage in found["by_streams"][1]["stages"])
    assert set(found["memory"][0]["memory_mib"]) == {"server", "text", "speech"}
    assert found["memory"][1]["total_mib"] > 100 and found["exceeded"] == [] and found["ceilings"]
    assert "## One stream, by its length" in record.read_text() and "code2wav" in done.stdout

    done = run("growth", *served, "--seconds", "700")
    assert done.returncode == 2 and "code2wav: its max_model_len 8000 limits the speech" in " ".join(
        done.stderr.split()
    )
