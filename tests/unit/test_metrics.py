"""`/metrics`: its numbers, its names against docs/metrics.md, and what the docs and the dashboard ask of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from triptych.connectors.wire import StageStats
from triptych.media.contract import MediaStats
from triptych.pipeline.health import PipelineHealth, ProcessHealth, ProcessState
from triptych.pipeline.request import AudioDelta, Done, MediaTokens, TextDelta
from triptych.server.metrics import Metrics
from triptych.server.request_clock import RequestClock
from triptych.telemetry.histogram import STEP_SECONDS
from triptych.telemetry.stage_counts import StageCounts, TransferCounts
from triptych.telemetry.work import Work

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "triptych.json").read_text(encoding="utf-8"))
SAMPLE_RATE, MODEL = 24000, "omni"


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_metrics(*stages: StageStats) -> Metrics:
    process = ProcessHealth(
        name="text", stages=("thinker",), state=ProcessState.READY, pid=1, heartbeat_age_s=0.1, restarts=2
    )

    def health() -> PipelineHealth:
        return PipelineHealth(
            ready=True,
            processes={"text": process},
            stages={stats.stage: stats for stats in stages},
            running=3,
            queued=1,
            freeing=0,
        )

    return Metrics(MODEL, SAMPLE_RATE, health, MediaStats(decoded=4))


def three_stages() -> tuple[StageStats, ...]:
    return (
        StageStats(stage="thinker", counts=StageCounts(transfers={"talker": TransferCounts()})),
        StageStats(stage="talker", counts=StageCounts(transfers={"code2wav": TransferCounts()})),
        StageStats(stage="code2wav", device="cpu", dtype="float32", threads=2),
    )


def samples(metrics: Metrics) -> Iterator[tuple[str, Sample]]:
    """Type and sample."""
    for family in text_string_to_metric_families(metrics.scrape().decode()):
        for sample in family.samples:
            yield family.type, sample


def value(metrics: Metrics, name: str, **labels: str) -> float:
    wanted = {"model_name": MODEL, **labels}
    [found] = [sample.value for _, sample in samples(metrics) if sample.name == name and sample.labels == wanted]
    return found


def exposed() -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> type and labels, of everything there is once every kind of thing has happened."""
    metrics = make_metrics(*three_stages())
    metrics.count_media(MediaTokens(audio=1, image=1, video=1))
    found = {}
    for kind, sample in samples(metrics):
        name = re.sub("_(bucket|sum|count)$", "", sample.name) if kind == "histogram" else sample.name
        found[name] = (kind, frozenset(sample.labels) - {"le"})
    return found


# --- numbers ---


def test_a_histogram_of_a_stage_looks_as_one_of_prometheus_own() -> None:
    dice, counts = random.Random(1), StageCounts()
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("triptych:stage_step_time_s", "", registry=registry, buckets=STEP_SECONDS)
    for _ in range(500):
        seconds = dice.choice([dice.expovariate(20), dice.choice(STEP_SECONDS)])
        counts.step_time_s.observe(seconds)
        theirs.observe(seconds)
    text = prometheus_client.generate_latest(registry).decode()
    expected = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for _, sample in samples(make_metrics(StageStats(stage="talker", counts=counts)))
        if sample.name.startswith("triptych:stage_step_time_s")
    }
    assert found == expected


def test_a_stage_has_a_series_for_what_it_does_and_no_other() -> None:
    stages: dict[str, set[str]] = {}
    for _, sample in samples(make_metrics(*three_stages())):
        if "stage" in sample.labels:
            assert sample.labels["replica"] == "0"
            stages.setdefault(sample.name, set()).add(sample.labels["stage"])
    assert stages["triptych:stage_step_time_s_count"] == {"thinker", "talker", "code2wav"}
    assert stages["triptych:kv_cache_usage_perc"] == {"thinker", "talker"}
    assert stages["triptych:encoder_cache_hits_total"] == {"thinker"}
    assert stages["triptych:transfer_size_bytes_sum"] == {"thinker", "talker"}


def test_gauges_and_outcomes_of_a_replica() -> None:
    counts = StageCounts(failed=2, aborted=1, preemptions=5)
    counts.gen_time_s.observe(3)
    stats = StageStats(stage="talker", replica=1, parked=2, kv_blocks_used=3, kv_blocks_total=12, counts=counts)
    metrics = make_metrics(stats)
    of = {"stage": "talker", "replica": "1"}
    assert value(metrics, "triptych:kv_cache_usage_perc", **of) == 0.25
    assert value(metrics, "triptych:stage_parked_requests", **of) == 2
    assert value(metrics, "triptych:num_preemptions_total", **of) == 5
    outcomes = {
        name: value(metrics, "triptych:stage_requests_total", outcome=name, **of)
        for name in ("finished", "failed", "aborted")
    }
    assert outcomes == {"finished": 1, "failed": 2, "aborted": 1}


def test_what_a_stage_had_to_do_and_computes_with() -> None:
    counts = StageCounts()
    counts.worked(Work(3e9, 5e12))
    counts.worked(Work(1.0, 0.5))
    metrics = make_metrics(
        StageStats(stage="code2wav", device="cuda:1", dtype="bfloat16", threads=4, counts=counts),
        StageStats(stage="talker"),
    )
    of = {"stage": "code2wav", "replica": "0"}
    assert value(metrics, "triptych:stage_moved_bytes_total", **of) == 3e9 + 1
    assert value(metrics, "triptych:stage_flops_total", **of) == 5e12 + 0.5
    infos = [sample.labels for _, sample in samples(metrics) if sample.name == "triptych:stage_info"]
    computes = {"device": "cuda:1", "dtype": "bfloat16", "threads": "4"}
    assert infos == [{"model_name": MODEL} | of | computes], "a stage that is down computes with nothing"


def test_the_times_of_a_reply_are_those_of_its_client() -> None:
    metrics, now = make_metrics(), Clock()
    clock = RequestClock(metrics, now=now)
    second = AudioDelta(samples=bytes(4 * SAMPLE_RATE), num_frames=12, final=False)
    for at, event in (
        (0.5, TextDelta(text="", num_tokens=1)),
        (1.0, TextDelta(text="Hi", num_tokens=1)),
        (2.0, second),
        (3.5, second),  # half a second after the first has played out
        (4.0, second),
        (4.2, Done(finish_reason="stop", prompt_tokens=5, text_tokens=2, audio_frames=36)),
    ):
        now.now = at
        clock.saw(event)
    clock.end(None)  # too late to count
    for name, expected in (
        ("time_to_first_token_s", 1.0),
        ("audio_ttfp_s", 2.0),
        ("audio_duration_s", 3.0),
        ("audio_underrun_s", 0.5),
        ("audio_rtf", 4.0 / 3),
        ("e2e_request_latency_s", 4.2),
    ):
        assert value(metrics, f"triptych:{name}_sum") == pytest.approx(expected), name
        assert value(metrics, f"triptych:{name}_count") == 1
    assert value(metrics, "triptych:requests_total", outcome="stop") == 1
    assert value(metrics, "triptych:requests_total", outcome="disconnected") == 0
    assert value(metrics, "triptych:audio_frames_total") == 36


# --- docs and dashboard ---


def test_docs_name_every_metric_with_its_type_and_labels_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    documented = {
        f"triptych:{name}": (kind, frozenset({"model_name", *re.findall(r"`(\w+)`", labels)}))
        for name, kind, labels in rows
    }
    assert len(rows) == len(documented), "a name is documented twice"
    assert documented == exposed()


def dashboard_queries() -> list[str]:
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    variables = [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    return [*(target["expr"] for target in targets), *variables]


def documented_queries() -> list[str]:
    return [
        line
        for block in re.findall(r"^```promql\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]


@pytest.mark.parametrize("query", [*dashboard_queries(), *documented_queries()])
def test_every_query_asks_for_names_and_labels_that_exist(query: str) -> None:
    known = exposed()
    buckets = {(sample.name, sample.labels.get("le")) for _, sample in samples(make_metrics(*three_stages()))}
    asked = re.findall(r"(triptych:\w+)(?:\{([^}]*)\})?", query)
    assert asked and query.count("triptych:") == len(asked)
    shared: set[str] | frozenset[str] = {"le"}
    for name, matchers in asked:
        family = re.sub("_(bucket|sum|count)$", "", name)
        assert name in known or known.get(family, ("",))[0] == "histogram", name
        kind, labels = known[name if name in known else family]
        assert (kind == "histogram") == (name not in known), f"{name} is no series of a {kind}"
        for label, matched in re.findall(r'(\w+)\s*=~?\s*"([^"]*)"', matchers):
            assert label in labels or label == "le", f"{name} has no label {label}"
            assert label != "le" or (name, matched) in buckets, f"{name} has no bucket {matched}"
        shared = shared | labels
    for grouped in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in grouped.split(",")} <= shared
    if "histogram_quantile" in query:
        assert re.search(r"by \([^)]*\ble\b", query) and "_bucket" in query
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_the_docs_have_queries_to_alert_on() -> None:
    assert len(documented_queries()) >= 8


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in ("row", "timeseries", "stat")
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"] and panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = [set(re.split(r",\s*", group)) for group in re.findall(r"\bby \(([^)]*)\)", target["expr"])]
            assert all(named <= group for group in grouped) and (grouped or not named), target["expr"]
