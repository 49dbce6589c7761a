"""The roofline of a benchmark: ceilings as they are measured, and the table from given counters."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.unit.test_metrics import make_metrics
from triptych.bench import ceilings, report, roofline
from triptych.bench.ceiling_worker import measure as measure_here
from triptych.bench.ceilings import Ceilings, Setting
from triptych.cli.bench_options import measured_ceilings
from triptych.connectors.wire import StageStats
from triptych.errors import TriptychError
from triptych.telemetry.stage_counts import StageCounts
from triptych.telemetry.work import Work

CPU = Setting("float32", 1, "cpu")
CEILINGS = Ceilings(setting=CPU, copy_bytes_per_s=8e9, triad_bytes_per_s=10e9, read_bytes_per_s=9e9, flops_per_s=50e9)


def counted(steps: int, **work: float) -> StageCounts:
    """So many steps of half a second, each with that work."""
    counts = StageCounts()
    for _ in range(steps):
        counts.step_time_s.observe(0.5)
        counts.worked(Work(**work))
    return counts


def scraped(*stages: StageStats) -> roofline.Scrape:
    return roofline.parse(make_metrics(*stages).scrape().decode())


BEFORE = scraped(StageStats(stage="thinker", counts=counted(2, moved_bytes=7e9, flops=1e9)))
AFTER = scraped(
    StageStats(
        stage="thinker",
        device="cpu",
        dtype="float32",
        threads=1,
        counts=counted(2, moved_bytes=7e9, flops=1e9) + counted(4, moved_bytes=1e9, flops=1.25e9),
    ),
    StageStats(stage="talker", replica=1, counts=counted(1, moved_bytes=2e6, flops=1e12)),
    StageStats(stage="code2wav", device="cpu", dtype="float32", threads=1),
)


def test_rates_are_what_came_between_two_looks_by_the_time_of_the_steps() -> None:
    thinker, talker = roofline.rates(BEFORE, AFTER, [CEILINGS])
    assert (thinker.stage, thinker.replica, thinker.steps, thinker.step_s) == ("thinker", "0", 4, 2.0)
    assert (thinker.bytes_per_s, thinker.flops_per_s) == (2e9, 2.5e9)
    assert (thinker.bytes_share, thinker.flops_share) == (0.2, 0.05), "the best of the bandwidths is the ceiling"
    assert (talker.replica, talker.steps, talker.setting, talker.bytes_share) == ("1", 1, None, None)
    assert roofline.settings(AFTER) == [CPU]
    [alone, _] = roofline.rates(BEFORE, AFTER, [])
    assert (alone.bytes_per_s, alone.bytes_share, alone.flops_share) == (2e9, None, None)


def test_the_table_names_the_replicas_their_rates_and_shares() -> None:
    file = io.StringIO()
    stages = roofline.rates(BEFORE, AFTER, [CEILINGS])
    roofline.grid(stages).print("stages", Console(file=file, width=140))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in file.getvalue().splitlines() if "│" in line]
    assert ["thinker", "float32 on cpu, 1 thread", "4", "2.00", "2", "20.0 %", "2.5", "5.0 %"] in rows
    assert ["talker:1", "-", "1", "0.50", "0.004", "-", "2000", "-"] in rows
    assert not [row for row in rows if row[0] == "code2wav"], "it made no step"
    assert json.loads(msgspec.json.encode(roofline.record(stages)))[0]["bytes_per_s"] == 2e9


def test_a_server_without_these_metrics_says_nothing() -> None:
    assert roofline.parse("# HELP vllm:num_requests_running Number.\nvllm:num_requests_running 1.0\n") == {}
    assert roofline.parse("<html>{ not metrics</html>") == {}
    assert roofline.rates({}, {}, [CEILINGS]) == []


async def test_nobody_there_says_nothing_either() -> None:
    assert await roofline.scrape("http://127.0.0.1:9") == {}


@pytest.mark.parametrize(
    ("base", "here"),
    [
        ("http://127.0.0.1:8091", True),
        ("http://localhost:1/v1", True),
        ("http://[::1]:2", True),
        ("http://0.0.0.0:3", True),
        ("http://10.0.0.3:8091", False),
        ("https://models.example.com", False),
    ],
)
def test_ceilings_are_measured_where_the_server_is_and_nowhere_else(base: str, here: bool) -> None:
    assert roofline.on_this_machine(base) is here


def test_a_deploy_config_says_what_its_stages_compute_with() -> None:
    def stage(kind: str, process: str, threads: int, dtype: str, devices: str = "cpu") -> dict[str, Any]:
        return {"stage": kind, "process": process, "threads": threads, "dtype": dtype, "devices": devices}

    on_cpu = [
        stage("thinker", "a", 1, "bfloat16"),
        stage("talker", "b", 3, "bfloat16"),
        stage("code2wav", "a", 2, "bfloat16"),
    ]
    assert ceilings.settings_of({"stages": on_cpu}) == [
        Setting("bfloat16", 2, "cpu"),
        Setting("bfloat16", 3, "cpu"),
        Setting("float32", 2, "cpu"),
    ]
    replicas = [
        stage("thinker", "a", 1, "bfloat16", "cuda:0,cuda:1"),
        stage("code2wav", "a", 1, "bfloat16", "cuda:1,cuda:1"),
    ]
    assert ceilings.settings_of({"stages": replicas}) == [
        Setting("bfloat16", 1, "cuda:0"),
        Setting("bfloat16", 1, "cuda:1"),
    ]


def test_every_ceiling_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.bench.ceiling_worker.SECONDS", 0.01)
    monkeypatch.setattr("triptych.bench.ceiling_worker.SIDE", {"cpu": 64})
    found = measure_here(dtype="bfloat16", threads=1, device="cpu", array_bytes=2**20)
    taken = Ceilings(setting=Setting("bfloat16", 1, "cpu"), **found)
    assert min(found.values()) > 0 and taken.bytes_per_s == max(
        taken.copy_bytes_per_s, taken.triad_bytes_per_s, taken.read_bytes_per_s
    )


async def test_a_setting_that_cannot_be_measured_is_an_error_that_costs_no_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nowhere = Setting("float31", 1, "cpu")
    with pytest.raises(TriptychError, match=r"float31 on cpu, 1 thread cannot be measured here: .*float31"):
        await ceilings.measure([nowhere])
    assert await measured_ceilings([nowhere, nowhere]) == []
    assert capsys.readouterr().err.count("no ceilings: float31") == 1


def test_a_record_has_the_ceilings() -> None:
    taken = report.record("bench serve", {}, [CEILINGS])
    assert taken["ceilings"] == [
        {
            "setting": {"dtype": "float32", "threads": 1, "device": "cpu"},
            "copy_bytes_per_s": 8e9,
            "triad_bytes_per_s": 10e9,
            "read_bytes_per_s": 9e9,
            "flops_per_s": 50e9,
        }
    ]
    assert report.record("bench serve", {})["ceilings"] == []
    assert ceilings.sentence([CEILINGS]) == ("Ceilings as measured: float32 on cpu, 1 thread: 10.0 GB/s, 50.0 GFLOP/s.")


def test_the_command_prints_a_table_and_writes_a_record(tmp_path: Path) -> None:
    result = tmp_path / "ceilings.json"
    command = [sys.executable, "-m", "triptych", "bench", "machine", "--device", "cpu", "--threads", "1"]
    done = subprocess.run(
        [*command, "--result-json", str(result)],
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "triad, GB/s" in done.stdout and "float32 on cpu, 1 thread" in done.stdout
    taken: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    [one] = taken["ceilings"]
    assert one.pop("setting") == {"dtype": "float32", "threads": 1, "device": "cpu"}
    assert len(one) == 4 and min(one.values()) > 1e6 and taken["command"] == "bench machine"
