"""The ladder: what each step serves with, the table and its gains, the record, the charts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from triptych.bench import ladder
from triptych.bench.charts import CHARTS, check_charts, draw
from triptych.bench.driver import Run
from triptych.bench.grid import Grid
from triptych.bench.ladder import STEPS, Rung, RungResult, Step, differences, every, grid, markdown, rungs
from triptych.bench.metrics import summarise
from triptych.config.load import load_deploy
from triptych.config.resolve import to_yaml
from triptych.errors import ConfigError

EMPTY = summarise(Run([], 0.0))


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deploy files are resolved here and not by a `triptych serve --dry-run`."""

    async def resolved(model: str, flag: str, file: str) -> dict[str, Any]:
        assert flag == "--deploy-config"
        deploy = load_deploy(file, platform="cpu", flags={}, stage_overrides={})
        config: dict[str, Any] = yaml.safe_load(to_yaml(deploy))
        return config

    monkeypatch.setattr(ladder, "resolved_config", resolved)


def seqs(rung: Rung) -> list[int]:
    return [stage["max_num_seqs"] for stage in rung.deploy["stages"]]


def processes(rung: Rung) -> set[str]:
    return {stage["process"] for stage in rung.deploy["stages"]}


async def test_each_step_adds_one_thing_and_the_last_has_all(tmp_path: Path) -> None:
    steps, left_out = await rungs("nano", ["--deploy-config", "tiny_cpu"], tmp_path)
    assert [rung.name for rung in steps] == [
        "no batching",
        "batching",
        "+ compiled steps",
        "+ processes",
        "+ async chunk",
    ]
    assert left_out == ["+ replicas"]
    assert [seqs(rung) for rung in steps] == [[1, 1, 1], *[[64, 64, 64]] * 4]
    assert [rung.deploy["stages"][1]["enforce_eager"] for rung in steps] == [True, True, False, False, False]
    assert [processes(rung) for rung in steps] == [{"all"}] * 3 + [{"text", "speech"}] * 2
    assert [rung.deploy["async_chunk"] for rung in steps] == [False] * 4 + [True]
    assert differences(steps[3].deploy, steps[4].deploy) == ["async_chunk: false"]
    assert differences(steps[4].deploy, steps[4].deploy) == []
    assert differences(steps[0].deploy, steps[1].deploy) == [f"stages[{n}].max_num_seqs: 1" for n in range(3)]


async def test_replicas_are_a_step_where_there_are_some(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text("base_config: tiny_cpu\nstages: [{stage_id: 1, num_replicas: 2, devices: 'cpu,cpu'}]\n")
    steps, left_out = await rungs("nano", ["--deploy-config", str(given)], tmp_path)
    assert not left_out
    assert differences(steps[-2].deploy, steps[-1].deploy) == ["stages[1].devices: cpu", "stages[1].num_replicas: 1"]


async def test_a_further_step_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(stage: Mapping[str, Any]) -> dict[str, Any]:
        return {"threads": 2} if stage["stage"] == "talker" else {}

    more = Step("+ larger queue", off={"max_queued_requests": 7}, stages=threads)
    monkeypatch.setattr(ladder, "STEPS", (*STEPS, more))
    [*before, last], _ = await rungs("nano", ["--deploy-config", "tiny_cpu"], tmp_path)
    assert [rung.deploy["stages"][1]["threads"] for rung in before] == [2] * 5
    assert seqs(before[0]) == [1, 1, 1], "layers of both steps are there"
    assert (last.deploy["stages"][1]["threads"], last.deploy["max_queued_requests"]) == (1, 256)


async def test_a_step_is_switched_on_even_where_the_config_has_it_off(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text("base_config: tiny_cpu\nasync_chunk: false\n")
    [*_, last], _ = await rungs("nano", ["--deploy-config", str(given)], tmp_path)
    assert last.deploy["async_chunk"]


async def test_a_ladder_of_one_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "STEPS", (Step("first"), Step("tiles", stages=every(batch_invariant=True))))
    with pytest.raises(ConfigError, match=r"none of tiles changes anything"):
        await rungs("nano", ["--deploy-config", "tiny_cpu"], tmp_path)


def result(name: str, **numbers: float | None) -> RungResult:
    return RungResult(Rung(name, Path(), {"async_chunk": name != "first"}), 1.0, [EMPTY | numbers])


RESULTS = [
    result("first", audio_throughput=10.0, mean_audio_ttfp_ms=1000.0, mean_audio_rtf=None),
    result("second", audio_throughput=25.0, mean_audio_ttfp_ms=500.0, mean_audio_rtf=0.5),
]


def test_gains_are_above_one_where_it_got_better() -> None:
    table = grid(RESULTS, 0)
    assert table.columns == ["step", "output tok/s", "audio-s/s", "req/s", "mean TTFP, ms", "mean RTF"]
    assert table.rows == [
        ["first", "0.0", "10.00", "0.00", "1000", "-"],
        ["second", "0.0", "25.00 (2.50x)", "0.00", "500 (2.00x)", "0.500"],
    ]


def test_a_table_in_markdown_is_what_was_in_it() -> None:
    assert Grid(["a", "b"], [["x", "1"]]).markdown() == "| a | b |\n| --- | --- |\n| x | 1 |"


def test_the_record_says_how_where_and_what_differs() -> None:
    text = markdown(RESULTS, [32], title="Ladder of nano", about=["Command: `x`.", "A machine."])
    assert text.startswith("# Ladder of nano\n\nCommand: `x`.\n\nA machine.\n")
    assert "## Concurrency 32\n\n| step |" in text and "| second | 0.0 | 25.00 (2.50x) |" in text
    assert text.endswith("- first: `async_chunk: false`\n")


def test_charts_without_matplotlib_are_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'triptych\[charts\]'"):
        check_charts(tmp_path)


def test_there_is_a_chart_of_each_number(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_charts(tmp_path / "charts")
    draw(tmp_path / "charts", {r.rung.name: r.summaries for r in RESULTS}, [32], "Ladder")
    for name in CHARTS:
        assert (tmp_path / "charts" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
