"""Traces of steps: from a real run, bounded, each span with its sizes, and nothing without being asked."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stage_bench import Bench
from triptych.config.schema import ProfileConfig, StageKind
from triptych.connectors.wire import Grant, StageStats
from triptych.errors import ConfigError
from triptych.stages.contract import Submit
from triptych.stages.profiler import StepProfiler
from triptych.telemetry.stage_counts import StageCounts

NAMES: dict[StageKind, str] = {"thinker": "thinker", "talker": "talker:1", "code2wav": "code2wav"}


def spans(file: Path) -> list[dict[str, Any]]:
    """Those of steps, as they began."""
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation" and " step " in event["name"]]
    return sorted(found, key=lambda event: float(event["ts"]))


class CountingStage:
    """Each step multiplies once and counts one request more than the last, of three tokens each."""

    def __init__(self, kind: StageKind) -> None:
        self.kind = kind
        self.counts = StageCounts()

    def submit(self, message: Submit) -> None: ...

    def grant(self, message: Grant) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def poll_inputs(self) -> None: ...

    def has_work(self) -> bool:
        return True

    def step(self) -> None:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        requests = self.counts.batch_size.count + 1
        self.counts.batch_size.observe(requests)
        self.counts.step_tokens.observe(3 * requests)

    def stats(self) -> StageStats:
        return StageStats(stage=self.kind, counts=self.counts)

    def close(self) -> None: ...


def test_a_run_of_nano_leaves_a_trace_of_every_stage_with_the_sizes_of_its_steps(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(nano)
    profiler = StepProfiler(ProfileConfig(dir=str(tmp_path / "new"), skip_steps=2, max_steps=4), NAMES, cuda=False)
    for name in ("a", "b"):
        bench.submit(name, bench.prompt(5, 6, 7))
    sizes: dict[StageKind, list[tuple[float, float]]] = {stage.kind: [] for stage in bench.stages}
    busy = True
    while busy or any(edge.moves() for edge in (bench.text_edge, bench.code_edge)):
        busy = False
        for stage in bench.stages:
            stage.poll_inputs()
            if stage.has_work():
                counts = stage.stats().counts
                before = counts.batch_size.total, counts.step_tokens.total
                profiler.step(stage)
                sizes[stage.kind].append((counts.batch_size.total - before[0], counts.step_tokens.total - before[1]))
                busy = True
    profiler.close()
    files = {file.name.partition(".")[0]: file for file in (tmp_path / "new").iterdir()}
    assert set(files) == {"thinker", "talker-1", "code2wav"} and all(f.name.endswith(".json") for f in files.values())
    assert all(str(file) in caplog.text for file in files.values()), "the log names the files"
    units = {"thinker": "tokens", "talker": "rows", "code2wav": "frames"}
    for kind, name in NAMES.items():
        found = spans(files[name.replace(":", "-")])
        own = [span["name"] for span in found]
        assert 1 <= len(own) <= 4
        first = int(re.findall(r"step (\d+)", own[0])[0])
        assert first >= 3, "the first steps are left out"
        assert own == [
            f"{name} step {first + index}: batch {batch:.0f}, {units[kind]} {rows:.0f}"
            for index, (batch, rows) in enumerate(sizes[kind][first - 1 : first - 1 + len(own)])
        ]
        assert all(float(span["dur"]) > 0 for span in found)
        inside = json.loads(files[name.replace(":", "-")].read_text())["traceEvents"]
        assert any(event["name"].startswith("aten::") for event in inside), "what a step does is in the trace"


def test_a_stage_is_recorded_once_and_its_file_is_bounded(tmp_path: Path) -> None:
    stage = CountingStage("thinker")
    profiler = StepProfiler(
        ProfileConfig(dir=str(tmp_path), skip_steps=3, max_steps=2), {"thinker": "thinker"}, cuda=False
    )
    for _ in range(5):
        profiler.step(stage)
    [file] = tmp_path.iterdir()
    written = file.read_bytes()
    for _ in range(20):
        profiler.step(stage)
    profiler.close()
    assert [file] == list(tmp_path.iterdir()) and file.read_bytes() == written
    assert [span["name"] for span in spans(file)] == [
        "thinker step 4: batch 4, tokens 12",
        "thinker step 5: batch 5, tokens 15",
    ]


def test_stages_of_one_process_take_turns_and_none_waits_for_one_that_is_idle(tmp_path: Path) -> None:
    thinker, codec = CountingStage("thinker"), CountingStage("code2wav")
    names: dict[StageKind, str] = {"thinker": "thinker:0", "code2wav": "code2wav:0"}
    profiler = StepProfiler(ProfileConfig(dir=str(tmp_path), skip_steps=0, max_steps=3), names, cuda=False)
    profiler.step(thinker)
    for _ in range(4):
        profiler.step(codec)
    for _ in range(10):  # its trace is written, so it holds nobody up
        profiler.step(thinker)
    for _ in range(5):
        profiler.step(codec)
    profiler.close()
    files = {file.name.partition(".")[0]: [span["name"] for span in spans(file)] for file in tmp_path.iterdir()}
    assert files["thinker-0"] == ["thinker:0 step 1: batch 1, tokens 3"]
    assert [name.split(": ")[0] for name in files["code2wav-0"]] == [f"code2wav:0 step {n}" for n in (4, 5, 6)]


def test_a_clean_end_writes_what_there_is_and_says_of_whom_there_is_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thinker, codec = CountingStage("thinker"), CountingStage("code2wav")
    names: dict[StageKind, str] = {"thinker": "thinker", "code2wav": "code2wav"}
    profiler = StepProfiler(ProfileConfig(dir=str(tmp_path), skip_steps=1, max_steps=100), names, cuda=False)
    for _ in range(3):
        profiler.step(thinker)
    profiler.step(codec)
    profiler.close()
    [file] = tmp_path.iterdir()
    assert [span["name"].split(":")[0] for span in spans(file)] == ["thinker step 2", "thinker step 3"]
    assert "code2wav made 1 steps, of which profile.skip_steps left out 1" in caplog.text


def test_a_folder_that_cannot_be_is_an_error_and_a_file_that_cannot_be_is_only_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        StepProfiler(ProfileConfig(dir=str(tmp_path / "file")), {"thinker": "thinker"}, cuda=False)
    config = ProfileConfig(dir=str(tmp_path / "gone"), skip_steps=0, max_steps=1)
    profiler = StepProfiler(config, {"thinker": "thinker"}, cuda=False)
    (tmp_path / "gone").rmdir()
    profiler.step(CountingStage("thinker"))
    assert "the trace of thinker cannot be written" in caplog.text


def test_a_process_that_is_not_asked_loads_no_profiler() -> None:
    script = (
        "import sys, triptych.stages.process, triptych.stages.__main__\n"
        "sys.exit(', '.join({'torch', 'triptych.stages.profiler'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
