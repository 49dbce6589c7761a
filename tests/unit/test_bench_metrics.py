"""From outcomes to numbers: definitions by hand, percentiles, what is left out, targets."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from triptych.bench.driver import Run
from triptych.bench.metrics import DISTRIBUTIONS, STATISTICS, Target, parse_targets, statistics, summarise
from triptych.bench.outcome import Outcome
from triptych.bench.report import print_table, record
from triptych.errors import ConfigError

LOUD = (np.ones(24_000) * 8000).astype("<i2").tobytes()


def reply(
    *,
    texts: tuple[float, ...] = (10.1, 10.2, 10.4),
    audio: tuple[float, ...] = (),  # when one second of it arrived, each
    ended: float = 11.0,
    usage: dict[str, Any] | None = None,
    failure: str | None = None,
) -> Outcome:
    """A request sent at 10.0."""
    outcome = Outcome(started_at=10.0, ended_at=ended, failure=failure, usage=usage or {})
    outcome.text_times, outcome.text = list(texts), ["word "] * len(texts)
    for at in audio:
        outcome.playout.arrive(at, outcome.audio.feed(LOUD))
    return outcome


def test_times_are_what_their_names_say() -> None:
    outcome = reply(audio=(10.5, 11.2), ended=12.0)
    assert outcome.ttft_s == pytest.approx(0.1)
    assert outcome.itl_s == pytest.approx([0.1, 0.2])
    assert outcome.tpot_s == pytest.approx(0.15)
    assert outcome.e2el_s == pytest.approx(2.0)
    assert outcome.ttfp_s == pytest.approx(0.5)
    assert outcome.audio_after_text_s == pytest.approx(0.4)
    assert outcome.rtf == pytest.approx(1.2 / 2), "(last audio - start) / seconds of audio"


def test_time_per_token_uses_the_servers_count_not_the_pieces() -> None:
    outcome = reply(usage={"completion_tokens": 7})
    assert outcome.text_tokens == 7 and outcome.tpot_s == pytest.approx(0.3 / 6)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"completion_tokens": 9, "completion_tokens_details": {"text_tokens": 4, "audio_tokens": 5}}, 4),
        ({"completion_tokens": 9, "completion_tokens_details": {"audio_tokens": 5}}, 4),
        ({"completion_tokens": 9, "completion_tokens_details": None}, 9),
        ({"completion_tokens": 9}, 9),
        ({}, 3),
    ],
)
def test_codec_frames_are_no_output_tokens(usage: dict[str, Any], tokens: int) -> None:
    assert reply(usage=usage).text_tokens == tokens


def test_a_reply_of_nothing_has_no_times() -> None:
    outcome = reply(texts=())
    assert (outcome.ttft_s, outcome.tpot_s, outcome.ttfp_s, outcome.rtf) == (None, None, None, None)
    assert reply(texts=(), audio=(10.5,)).audio_after_text_s is None and reply().audio_after_text_s is None
    assert reply(texts=(10.1,)).tpot_s is None


def test_percentiles_by_hand() -> None:
    found = statistics([float(value) for value in range(11)])  # 0..10: the p-th percentile is p / 10
    assert found == {"mean": 5.0, "median": 5.0, "p90": 9.0, "p99": pytest.approx(9.9)}
    assert statistics([3.0]) == dict.fromkeys(STATISTICS, 3.0)
    assert statistics([]) == dict.fromkeys(STATISTICS), "no values are not zero"


def test_requests_without_audio_are_left_out_of_audio_means() -> None:
    summary = summarise(Run([reply(audio=(10.5,)), reply(), reply()], 2.0))
    assert summary["completed"] == 3 and summary["completed_with_audio"] == 1
    assert summary["mean_audio_ttfp_ms"] == pytest.approx(500)
    assert summary["mean_audio_duration_s"] == 1.0 and summary["mean_audio_rtf"] == pytest.approx(0.5)
    assert summary["mean_audio_underrun_s"] == 0


def test_failures_count_by_reason_and_enter_no_other_number() -> None:
    late = reply(audio=(50.0,), ended=60.0, failure="timeout after 50 s")
    late.detail = "gave up"
    summary = summarise(Run([reply(), late, reply(failure="http 429"), reply(failure="http 429")], 2.0))
    assert summary["failed"] == 3 and summary["failures"] == {"http 429": 2, "timeout after 50 s": 1}
    assert summary["failure_examples"]["timeout after 50 s"] == "gave up"
    assert summary["completed_with_audio"] == 0 and summary["mean_audio_ttfp_ms"] is None
    assert summary["mean_e2el_ms"] == pytest.approx(1000) and summary["total_output_tokens"] == 3


def test_throughput_is_per_second_of_the_run() -> None:
    run = Run([reply(audio=(10.5, 11.0), usage={"completion_tokens": 30, "prompt_tokens": 5}), reply()], 4.0)
    summary = summarise(run)
    assert summary["request_throughput"] == 0.5 and summary["audio_throughput"] == 0.5
    assert summary["total_output_tokens"] == 33 and summary["output_throughput"] == 33 / 4
    assert summary["total_input_tokens"] == 5 and summary["output_tokens_counted_by"] == "mixed"


def test_underrun_and_streams_without_it() -> None:
    broken = reply(audio=(10.5, 12.0, 14.0))  # silence 11.5-12.0 and 13.0-14.0
    summary = summarise(Run([broken, reply(audio=(10.5, 11.0)), reply()], 4.0))
    assert summary["streams_without_underrun"] == 1 and summary["streams_without_underrun_ratio"] == 0.5
    assert summary["total_audio_underrun_s"] == pytest.approx(1.5)
    assert summary["p99_audio_longest_gap_s"] == pytest.approx(0.99)


def test_every_name_of_a_result_is_there_even_for_an_empty_run() -> None:
    summary = summarise(Run([], 0.0))
    assert {f"{statistic}_{name}" for statistic in STATISTICS for name in DISTRIBUTIONS} <= set(summary)
    for name in ("request_throughput", "output_throughput", "audio_throughput", "total_audio_duration_s"):
        assert summary[name] == 0
    assert summary["mean_ttft_ms"] is None


# --- goodput ---


def test_good_is_answered_with_every_target_met() -> None:
    targets = parse_targets(["ttft:300", "ttfp:500", "rtf:1"], speaks=True)
    outcomes = [
        reply(audio=(10.5,)),  # just in time
        reply(audio=(10.6,)),  # first audio late
        reply(texts=(10.4,), audio=(10.5,)),  # first text late
        reply(audio=(10.2, 13.0)),  # RTF 1.5
        reply(),  # no audio at all
        reply(audio=(10.5,), failure="cut off"),
    ]
    summary = summarise(Run(outcomes, 2.0), targets)
    assert summary["request_goodput"] == 0.5 and summary["goodput_ratio"] == pytest.approx(1 / 6)


def test_each_target_is_about_its_own_number() -> None:
    outcome = reply(audio=(10.5, 11.7))  # underrun 200 ms
    for name, value in {"ttft": 100, "tpot": 150, "e2el": 1000, "ttfp": 500, "rtf": 0.85, "underrun": 200}.items():
        assert Target(name, value + 0.01).met(outcome) and not Target(name, value - 0.01).met(outcome), name


def test_one_token_misses_no_time_per_token_but_no_text_does() -> None:
    assert Target("tpot", 1).met(reply(texts=(10.1,)))
    assert not Target("tpot", 1).met(reply(texts=())) and not Target("ttft", 1e9).met(reply(texts=()))


def test_without_targets_there_is_no_goodput() -> None:
    assert "request_goodput" not in summarise(Run([reply()], 1.0))


@pytest.mark.parametrize(
    ("written", "speaks", "said"),
    [
        (["speed:1"], True, "'speed' is not one of ttft, tpot, e2el, ttfp, rtf, underrun"),
        (["ttft:1", "ttft:2"], True, "given twice"),
        (["ttft"], True, "a number"),
        (["ttft:fast"], True, "a number"),
        (["ttft:nan"], True, "a number"),
        (["ttft:-1"], True, "a number"),
        (["rtf:1"], False, "--modalities text,audio"),
    ],
)
def test_a_target_that_cannot_be_is_refused(written: list[str], speaks: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_targets(written, speaks=speaks)


# --- the report ---


def shown(run: Run, *, speaks: bool) -> str:
    file = io.StringIO()
    print_table(summarise(run), title="omni", speaks=speaks, console=Console(file=file, width=120))
    return file.getvalue()


def test_the_table_says_what_went_wrong_and_what_was_guessed() -> None:
    bad = reply(failure="http 503")
    bad.detail = "[red]stage down[/red]"
    text = shown(Run([reply(audio=(10.5,)), reply(), bad], 1.0), speaks=True)
    assert "failed: 1 x http 503: [red]stage down[/red]" in text
    assert "1 replies had no audio" in text and "pieces of text were counted" in text
    assert "audio RTF" in text and "1, 100 %" in text


def test_a_table_of_text_says_nothing_of_audio() -> None:
    text = shown(Run([reply(usage={"completion_tokens": 3})], 1.0), speaks=False)
    assert "TTFT" in text and "audio" not in text and "underrun" not in text and "counted" not in text


def test_a_record_says_where_it_was_taken() -> None:
    taken = record("bench serve", {"arguments": {"seed": 3}})
    assert taken["command"] == "bench serve" and taken["arguments"] == {"seed": 3}
    assert taken["hardware"]["cores"] >= 1 and taken["hardware"]["memory_gib"] > 0
    assert taken["versions"]["triptych"] and taken["versions"]["python"] and "commit" in taken
