"""Growth: the arithmetic of what a stage takes against linear, what is asked for, and what a run shows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from triptych.bench import growth_report, watch
from triptych.bench.audio import speech_samples
from triptych.bench.ceilings import Ceilings, Setting
from triptych.bench.driver import Run
from triptych.bench.growth import Growth, Point, Speech, check, check_places, memory_growth, stage_growth
from triptych.bench.machine import memory_by_process, memory_mib
from triptych.bench.metrics import summarise
from triptych.bench.roofline import Counted, Scrape
from triptych.bench.server import Server
from triptych.bench.stage_cost import LEAST_MARKS, Cost, costs, of_linear, parts, spent
from triptych.bench.watch import Look, observed
from triptych.errors import ConfigError, TriptychError

CPU = Setting("float32", 1, "cpu")
MACHINE = Ceilings(setting=CPU, copy_bytes_per_s=5e9, triad_bytes_per_s=10e9, read_bytes_per_s=9e9, flops_per_s=50e9)
DEPLOY: dict[str, Any] = {
    "stages": [
        {"stage": "thinker", "max_model_len": 2000, "max_num_seqs": 8, "num_replicas": 1},
        {"stage": "talker", "max_model_len": 5000, "max_num_seqs": 8, "num_replicas": 1}
        | {"frames_per_text_token": 12, "extra_frames": 50},
        {"stage": "code2wav", "max_model_len": 4000, "max_num_seqs": 4, "num_replicas": 2},
    ]
}
SPEECH = Speech.of(10.0, DEPLOY, "--seconds")


def talker(tokens: float, seconds: float, **more: float) -> Counted:
    return Counted(steps=tokens, step_s=seconds, tokens=tokens, setting=CPU, **more)


def scraped(counted: Counted, *replicas: Counted) -> Scrape:
    return {("talker", str(index)): one for index, one in enumerate((counted, *replicas))}


def point(streams: int, *looks: Look, completed: int = 2, speech: Speech = SPEECH) -> Point:
    return Point(streams, speech, looks, summarise(Run([], 0.0)) | {"completed": completed})


def looked(counted: Counted, mib: float = 100.0) -> Look:
    return Look(scraped(counted), {"server": 10.0, "speech": mib - 10.0})


# --- what a stage took ---


def test_a_cost_is_what_came_between_two_looks_over_all_replicas() -> None:
    before = scraped(talker(10, 1.0, moved_bytes=5.0), talker(20, 1.0))
    after = scraped(talker(30, 2.0, moved_bytes=9.0), talker(20, 1.0), talker(5, 0.5, flops=7.0))
    [(stage, cost)] = spent([before, before, after]).items()
    assert stage == "talker"
    assert cost == Cost(steps=25, tokens=25, seconds=1.5, moved_bytes=4.0, flops=7.0)
    assert (cost.step_s, cost.token_s) == (0.06, 0.06)
    assert spent([before, before]) == {}, "a stage that made nothing took nothing"


def test_linear_is_the_least_that_a_token_took_below() -> None:
    cheap, dear, now = (Cost(steps=10, tokens=10, seconds=seconds) for seconds in (1.0, 2.0, 1.5))
    assert of_linear(now, [], MACHINE) is None
    assert of_linear(now, [dear, cheap], MACHINE) == pytest.approx(1.5)
    assert of_linear(now, [dear], None) == pytest.approx(0.75)


def test_what_attention_has_more_to_read_is_no_growth_of_the_stage() -> None:
    short = Cost(steps=100, tokens=100, seconds=1.0, moved_bytes=100 * 50e6, flops=100 * 1e6)
    long = Cost(steps=10, tokens=10, seconds=0.2, moved_bytes=10 * 150e6, flops=10 * 2e6)
    # 100 MB more for a token take 10 ms at 10 GB/s, beside the 10 ms that it took: the 20 ms are linear.
    assert of_linear(long, [short], MACHINE) == pytest.approx(1.0)
    assert of_linear(long, [short], None) == pytest.approx(2.0), "without ceilings nothing is allowed for"
    computing = Cost(steps=10, tokens=10, seconds=0.4, flops=10 * 501e6)
    assert of_linear(computing, [short], MACHINE) == pytest.approx(0.04 / 0.02)
    batched = Cost(steps=1, tokens=100, seconds=1.0, moved_bytes=50e6, flops=100 * 1e6)
    assert of_linear(batched, [short], MACHINE) == pytest.approx(1.0), "less work lowers no bar"


def series(per_token: Callable[[float], float], looks: int = 20, each: int = 50) -> list[dict[str, Cost]]:
    """Looks at a stage whose token number n takes per_token(n) seconds."""
    tokens, seconds, found = 0, 0.0, [{"talker": Cost(steps=7, tokens=7, seconds=1.0)}]
    for _ in range(looks):
        seconds += sum(per_token(tokens + index) for index in range(each))
        tokens += each
        found.append({"talker": Cost(steps=7 + tokens, tokens=7 + tokens, seconds=1.0 + seconds)})
    return found


def test_thirds_of_a_reply_have_what_their_tokens_took() -> None:
    flat = parts(series(lambda token: 0.01), "talker")
    assert flat is not None and [part.token_s for part in flat] == pytest.approx([0.01] * 3)
    assert sum(part.tokens for part in flat) == pytest.approx(1000)
    growing = parts(series(lambda token: 0.001 * token), "talker")
    assert growing is not None
    assert [part.token_s for part in growing] == pytest.approx([1 / 6, 1 / 2, 5 / 6], rel=0.02)


def test_thirds_are_cut_only_where_looks_tell_them_apart() -> None:
    assert parts(series(lambda token: 0.01, looks=LEAST_MARKS - 2), "talker") is None
    seen = series(lambda token: 0.01, looks=LEAST_MARKS - 2)
    assert parts([*seen, seen[-1], seen[-1]], "talker") is None, "looks that show nothing new are no more looks"
    assert parts(series(lambda token: 0.01, looks=LEAST_MARKS - 1), "talker") is not None
    assert parts([{}, *series(lambda token: 0.01)], "code2wav") is None


# --- a run ---


def growth() -> Growth:
    """Linear up to two streams, and three times that for a token at four; the long reply grows towards its end."""
    grown = Growth(looked(talker(0, 0.0)))
    for streams, seconds, blocks in ((1, 1.0, 10.0), (2, 1.0, 20.0), (4, 3.0, 60.0)):
        held = talker(100, seconds, kv_blocks=200.0, kv_usage=blocks / 200, preemptions=float(streams == 4))
        grown.streams.append(point(streams, looked(talker(0, 0.0)), looked(held, 100 + 10.0 * streams)))
    short = point(1, looked(talker(0, 0.0)), looked(talker(100, 1.0)), speech=Speech.of(1.0, DEPLOY, "-"))
    looks = [looked(talker(n * 50, n * 0.5 if n < 10 else 5.0 + (n - 10) * 1.0)) for n in range(16)]
    grown.lengths = [short, point(1, *looks, completed=1, speech=Speech.of(60.0, DEPLOY, "-"))]
    return grown


def test_each_point_is_held_against_those_below() -> None:
    ratios = [[stage.of_linear for stage in stages] for stages in stage_growth(growth().streams, [MACHINE])]
    assert ratios == [[None], [pytest.approx(1.0)], [pytest.approx(3.0)]]
    short, [long] = stage_growth(growth().lengths, [MACHINE])
    assert short[0].parts is None, "it was more than one reply"
    assert long.parts is not None and long.parts_of_linear == pytest.approx(2.0)
    assert long.of_linear == pytest.approx(10.0 / 750 / 0.01)


def test_memory_is_held_against_what_a_stream_took_before() -> None:
    one, two, four = memory_growth(growth())
    assert [row.stream_mib for row in (one, two, four)] == [10.0, 10.0, 10.0]
    assert (one.of_linear, one.kv_of_linear) == (None, None)
    assert [two.of_linear, two.kv_of_linear] == pytest.approx([1.0, 1.0])
    assert four.kv_blocks == {"talker": pytest.approx(60.0)} and four.kv_of_linear == pytest.approx(1.5)
    assert four.memory_mib == {"server": 10.0, "speech": 130.0}


def test_what_exceeds_the_limit_is_named_with_its_place() -> None:
    assert growth_report.exceeded(growth(), [MACHINE], 3.5) == []
    assert growth_report.exceeded(growth(), [MACHINE], 1.4) == [
        "talker at 4 streams: 30 ms a token, 3.00 times what linear growth gives",
        "talker at 60 s of speech: a later third took 2.00 times what the first one gives",
        "memory at 4 streams: KV blocks, 1.50 times what linear growth gives",
    ]


def test_the_tables_and_the_record_have_every_point() -> None:
    grids = growth_report.grids(growth(), [MACHINE])
    streams, memory, lengths = (table for _, table in grids)
    assert streams.rows[-1] == ["4", "talker", "100", "1.0", "30.00", "30.000", "3.00"]
    assert memory.columns[1:3] == ["server, MiB", "speech, MiB"] and memory.rows[1][3:6] == ["120", "10.00", "1.00"]
    assert lengths.rows[0][7:] == ["-"] * 4 and lengths.rows[1][-1] == "2.00"
    assert all(len(row) == len(table.columns) for _, table in grids for row in table.rows)
    content = growth_report.record(growth(), [MACHINE], 1.4)
    assert [row["streams"] for row in content["by_streams"]] == [1, 2, 4] and len(content["exceeded"]) == 3
    assert content["by_length"][1]["stages"][0]["parts_token_ms"] == pytest.approx([10.0, 10.0, 20.0])
    assert growth_report.record(growth(), [], None)["exceeded"] == []
    [note] = growth_report.notes(growth())
    assert note.startswith("4 streams of 10 s: 1 preemptions")
    text = growth_report.markdown(growth(), [MACHINE], title="Growth of nano", about=["Here."])
    assert "## One stream, by its length" in text and note in text
    assert growth_report.grids(Growth(looked(talker(0, 0.0))), []) == []


# --- what is asked ---


def test_speech_has_text_enough_for_its_frames() -> None:
    assert (SPEECH.frames, SPEECH.text_tokens) == (125, 32)
    assert SPEECH.reply.extra == {"sampling_params_list": [{}, {"ignore_eos": True, "max_tokens": 125}]}
    strict = DEPLOY["stages"][1] | {"frames_per_text_token": 2, "extra_frames": 5}
    watched = Speech.of(10.0, {"stages": [DEPLOY["stages"][0], strict, DEPLOY["stages"][2]]}, "--seconds")
    assert 2 * watched.text_tokens + 5 > watched.frames, "the Talker's watchdog lets it speak"
    assert Speech.of(0.08, DEPLOY, "--seconds").frames == 1


@pytest.mark.parametrize(
    ("stage", "room", "reason"),
    [
        (0, 900, r"stages\[0\].max_model_len: thinker: its max_model_len 900 .* --seconds 300 is 938 text tokens"),
        (1, 3750, r"stages\[1\].max_model_len: talker: .* 3750 codec frames, beside the prompt; raise it"),
        (2, 3000, r"stages\[2\].max_model_len: code2wav: .* 3750 codec frames"),
    ],
)
def test_a_stage_that_limits_the_length_is_named(stage: int, room: int, reason: str) -> None:
    stages = [dict(one) for one in DEPLOY["stages"]]
    assert Speech.of(300.0, {"stages": stages}, "--seconds").frames == 3750
    stages[stage]["max_model_len"] = room
    with pytest.raises(ConfigError, match=reason):
        Speech.of(300.0, {"stages": stages}, "--seconds")


def test_a_deployment_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not speak"):
        Speech.of(1.0, {"stages": DEPLOY["stages"][:1]}, "--seconds")
    check_places([1, 8], DEPLOY)
    with pytest.raises(ConfigError, match=r"stages\[0\].max_num_seqs: --concurrency 9 is more than the 8 requests"):
        check_places([1, 9], DEPLOY)


def test_a_reply_of_another_length_is_no_result() -> None:
    whole = summarise(Run([], 0.0)) | {"total_audio_duration_s": 2 * speech_samples(125) / 24_000}
    check(whole, 2, SPEECH)
    with pytest.raises(TriptychError, match=r"10 s were asked for, and 4\.00 s came: the server limits them"):
        check(whole | {"total_audio_duration_s": 8.0}, 2, SPEECH)
    with pytest.raises(TriptychError, match="1 replies of 10 s failed: http 504: deadline of 600 s"):
        check(whole | {"failed": 1, "failure_examples": {"http 504": "deadline of 600 s"}}, 2, SPEECH)


# --- looking on ---


async def test_a_run_is_looked_at_from_before_it_until_the_stages_have_told_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "HEARTBEAT_S", 0.01)
    told = iter([0.0, 0.0, 5.0, 5.0, 9.0])
    done = asyncio.Event()
    seen: list[float] = []

    async def look(server: Server) -> Look:
        seen.append(next(told))
        if seen[-1] == 5.0:
            done.set()
        return looked(talker(seen[-1], 1.0))

    async def work() -> str:
        await done.wait()
        return "done"

    monkeypatch.setattr(watch, "look", look)
    server = Server("http://127.0.0.1:9", 0, 0.0)
    result, looks = await observed(work(), server, lambda before, now: costs(now.stages)["talker"].tokens == 9)
    assert result == "done" and [costs(one.stages)["talker"].tokens for one in looks] == seen == [0, 0, 5, 5, 9]

    monkeypatch.setattr(watch, "TOLD_S", 0.05)
    told = iter([1.0] * 1000)
    with pytest.raises(TriptychError, match=r"have not told of all their steps in 0\.05 s"):
        await observed(work(), server, lambda before, now: False)

    async def fails() -> None:
        raise TriptychError("no answer")

    with pytest.raises(TriptychError, match="no answer"):
        await observed(fails(), server, lambda before, now: True)


def test_memory_is_told_by_process_name() -> None:
    command = [sys.executable, "-c", "print('up', flush=True); input()", "--endpoint", "x", "--process", "speech"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        found = memory_by_process(os.getpid())
        whole = memory_mib(os.getpid())
        child.communicate("\n")
    assert found["speech"] > 1 and found["server"] > found["speech"]
    assert sum(found.values()) <= whole * 1.1
