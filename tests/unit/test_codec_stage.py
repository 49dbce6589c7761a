"""The Code2Wav stage with a tiny vocoder, a fake connector that checks its contract, and a fake outbox."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from triptych.bench.playout import Playout
from triptych.config.sampling import SamplingParams
from triptych.config.schema import ConnectorConfig, ConnectorExtra, DeployConfig, SchedulingPolicy, StageConfig
from triptych.connectors.contract import Array, Handoff
from triptych.connectors.wire import AudioOutput, Failed, Grant, SubmitCodec, SubmitText, ToServer
from triptych.errors import CheckpointError, ConfigError, SequenceGap
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import Code2WavConfig, load_config
from triptych.stages.arrivals import Arrivals
from triptych.stages.cadence import Cadence
from triptych.stages.codec_stage import CodecStage
from triptych.stages.contract import StageContext
from triptych.stages.playout_clock import START_WAIT_S
from triptych.telemetry.stage_times import StageTimes

CODEBOOKS, CODEBOOK_SIZE = 3, 16
CONFIG = Code2WavConfig(
    codebook_size=CODEBOOK_SIZE,
    num_quantizers=CODEBOOKS,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    sliding_window=4,
    decoder_dim=4,
    upsample_rates=(3, 2),
    upsampling_ratios=(2,),
)
PLENTY = 1000


class FakeReceiver:
    """Both halves of an edge: `window` handoffs of a request may be unreleased; each is released exactly once."""

    def __init__(self, window: int = 64) -> None:
        self.window = window
        self.opened: set[str] = set()
        self.closed: list[str] = []
        self.unreleased: defaultdict[str, list[int]] = defaultdict(list)
        self._arrived: list[Handoff | tuple[str, Exception]] = []
        self._next_seq: defaultdict[str, int] = defaultdict(int)

    def put(self, request_id: str, codes: Array, *, final: bool = False) -> bool:
        if len(self.unreleased[request_id]) >= self.window:
            return False
        seq = self._next_seq[request_id]
        self._next_seq[request_id] += 1
        self.unreleased[request_id].append(seq)
        arrays = {"codes": codes.copy()}
        self._arrived.append(Handoff(request_id=request_id, source="talker", seq=seq, final=final, arrays=arrays))
        return True

    def put_error(self, request_id: str, error: Exception) -> None:
        self._arrived.append((request_id, error))

    def open(self, request_id: str) -> None:
        self.opened.add(request_id)

    def receive(self) -> list[Handoff | tuple[str, Exception]]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def release(self, handoff: Handoff) -> None:
        self.unreleased[handoff.request_id].remove(handoff.seq)  # ValueError when released twice
        handoff.arrays["codes"].fill(-1)  # the memory is the sender's again

    def close(self, request_id: str) -> None:
        self.opened.discard(request_id)
        self.closed.append(request_id)


class FakeOutbox:
    def __init__(self) -> None:
        self.audio: defaultdict[str, list[tuple[AudioOutput, bytes]]] = defaultdict(list)
        self.order: list[str] = []
        self.failed: dict[str, str] = {}

    def send(self, message: ToServer, samples: bytes | None = None) -> None:
        if isinstance(message, AudioOutput):
            assert samples is not None
            assert message.seq == len(self.audio[message.request_id])
            self.audio[message.request_id].append((message, samples))
            self.order.append(message.request_id)
        else:
            assert isinstance(message, Failed)
            assert samples is None
            assert message.request_id not in self.failed
            self.failed[message.request_id] = message.message

    def samples(self, request_id: str) -> bytes:
        return b"".join(samples for _, samples in self.audio[request_id])

    def frames(self, request_id: str) -> list[int]:
        return [message.num_frames for message, _ in self.audio[request_id]]

    def ended(self, request_id: str) -> bool:
        return [message.final for message, _ in self.audio[request_id]].count(True) == 1


@dataclass
class Bench:
    """A stage and what surrounds it. Time stands still unless a test moves it."""

    model: Code2Wav
    window: int = 64
    max_num_seqs: int = 4
    max_batch: int = 1
    cadence: Cadence = field(default_factory=lambda: Cadence(2, 5))
    policy: SchedulingPolicy = "slack"
    now: float = 0.0
    outbox: FakeOutbox = field(default_factory=FakeOutbox)

    def __post_init__(self) -> None:
        self.receiver = FakeReceiver(self.window)
        self.stage = CodecStage(
            model=self.model,
            arrivals=Arrivals({"talker": self.receiver}),
            outbox=self.outbox,
            cadence=self.cadence,
            max_num_seqs=self.max_num_seqs,
            max_batch=self.max_batch,
            policy=self.policy,
            clock=lambda: self.now,
        )

    def submit(self, request_id: str, credit: int = PLENTY) -> None:
        self.stage.submit(SubmitCodec(request_id=request_id, credit=credit))

    def run(self) -> None:
        """Until the stage has nothing left to do."""
        self.stage.poll_inputs()
        while self.stage.has_work():
            self.stage.step()
            self.stage.poll_inputs()

    def speak(self, request_id: str, frames: Array, *, per_handoff: int = 1, credit: int = PLENTY) -> None:
        """A whole request; sends as the window allows and runs the stage whenever it is full."""
        self.submit(request_id, credit)
        pieces = deque(split(frames, per_handoff))
        while pieces:
            if self.receiver.put(request_id, pieces[0], final=len(pieces) == 1):
                pieces.popleft()
            else:
                before = len(self.receiver.unreleased[request_id])
                self.run()
                assert len(self.receiver.unreleased[request_id]) < before, "no progress with a full window"
        self.run()

    def assert_empty(self) -> None:
        """Nothing of any request is held anywhere."""
        stats = self.stage.stats()
        assert (stats.running, stats.waiting, stats.parked) == (0, 0, 0)
        assert not self.stage.has_work()
        assert not self.receiver.opened
        assert not any(self.receiver.unreleased.values())


def split(frames: Array, size: int) -> list[Array]:
    return [frames[start : start + size] for start in range(0, len(frames), size)] or [frames]


def codes(frames: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, CODEBOOK_SIZE, (frames, CODEBOOKS), dtype=np.int32)


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def model(request: pytest.FixtureRequest) -> Code2Wav:
    generator = torch.Generator().manual_seed(0)
    vocoder = Code2Wav(CONFIG)
    for parameter in vocoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    vocoder.prepare(eager=request.param)
    return vocoder


@pytest.fixture
def bench(model: Code2Wav) -> Bench:
    return Bench(model)


def one_shot(model: Code2Wav, frames: Array) -> Array:
    with torch.inference_mode():
        samples: Array = model(torch.from_numpy(frames.T[None]))[0].numpy()
    return samples


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 40])
def test_the_audio_of_a_request_equals_the_one_shot_decode(bench: Bench, model: Code2Wav, frames: int) -> None:
    bench.speak("a", codes(frames))
    samples = np.frombuffer(bench.outbox.samples("a"), dtype="<f4")
    np.testing.assert_allclose(samples, one_shot(model, codes(frames)), atol=1e-5)
    assert bench.outbox.ended("a")
    assert bench.stage.stats().counts.tokens == frames
    bench.assert_empty()


@pytest.mark.parametrize("window", [1, 2, 64])
@pytest.mark.parametrize("per_handoff", [1, 3, 100])
def test_bytes_depend_on_frames_only_and_no_window_is_too_small(model: Code2Wav, window: int, per_handoff: int) -> None:
    reference, other = Bench(model), Bench(model, window=window)
    reference.speak("a", codes(60))
    other.speak("a", codes(60), per_handoff=per_handoff)
    assert other.outbox.samples("a") == reference.outbox.samples("a")
    assert other.outbox.frames("a")[:-1] == reference.outbox.frames("a")[:-1]
    other.assert_empty()


def test_chunks_follow_the_cadence_and_the_last_takes_what_remains(bench: Bench) -> None:
    bench.speak("a", codes(19), per_handoff=19)
    expected, start = [], 0
    while start < 19:
        expected.append(min(bench.cadence.size(start), 19 - start))
        start += expected[-1]
    assert bench.outbox.frames("a") == expected
    assert [message.final for message, _ in bench.outbox.audio["a"]] == [False] * (len(expected) - 1) + [True]


def test_first_audio_leaves_with_the_initial_chunk(bench: Bench) -> None:
    bench.submit("a")
    bench.receiver.put("a", codes(1))
    bench.run()
    assert not bench.outbox.audio["a"]
    bench.receiver.put("a", codes(1))
    bench.run()
    assert bench.outbox.frames("a") == [2]


def test_a_request_without_frames_ends_with_one_empty_chunk(bench: Bench) -> None:
    bench.speak("a", codes(0))
    [(message, samples)] = bench.outbox.audio["a"]
    assert (message.seq, message.num_frames, message.final, samples) == (0, 0, True, b"")
    bench.assert_empty()


def test_an_empty_final_handoff_ends_audio_that_is_already_out(bench: Bench) -> None:
    bench.submit("a")
    bench.receiver.put("a", codes(2))
    bench.run()
    bench.receiver.put("a", codes(0), final=True)
    bench.run()
    assert bench.outbox.frames("a") == [2, 0]
    assert bench.outbox.ended("a")
    bench.assert_empty()


def test_interleaved_requests_have_the_bytes_they_have_alone(model: Code2Wav) -> None:
    alone = {name: Bench(model) for name in "abcde"}
    speech = {name: codes(20 + 7 * index, seed=index) for index, name in enumerate("abcde")}
    for name, single in alone.items():
        single.speak(name, speech[name])
    together, dice = Bench(model, max_num_seqs=3), random.Random(0)
    pending = {name: deque(split(frames, 1)) for name, frames in speech.items()}
    for name in speech:
        together.submit(name)
    while any(pending.values()):
        name = dice.choice([name for name, pieces in pending.items() if pieces])
        if together.receiver.put(name, pending[name][0], final=len(pending[name]) == 1):
            pending[name].popleft()
        together.now += 0.01
        together.stage.poll_inputs()
        if together.stage.has_work() and dice.random() < 0.5:
            together.stage.step()
    together.run()
    for name, single in alone.items():
        assert together.outbox.samples(name) == single.outbox.samples(name)
    together.assert_empty()


def test_chunks_of_one_kind_share_a_step_where_batching_is_allowed(model: Code2Wav) -> None:
    batched = Bench(model, max_batch=8)
    for index, name in enumerate("abc"):
        batched.submit(name)
        batched.receiver.put(name, codes(9, seed=index), final=True)
    batched.run()
    assert batched.stage.stats().counts.step_time_s.count == len(batched.outbox.audio["a"])
    for index, name in enumerate("abc"):
        samples = np.frombuffer(batched.outbox.samples(name), dtype="<f4")
        np.testing.assert_allclose(samples, one_shot(model, codes(9, seed=index)), atol=1e-5)
    batched.assert_empty()


def test_first_and_later_chunks_of_one_length_never_share_a_step(model: Code2Wav) -> None:
    batched = Bench(model, max_batch=8, cadence=Cadence(5, 5))
    batched.submit("a")
    batched.receiver.put("a", codes(5))
    batched.run()
    batched.submit("b")
    batched.receiver.put("a", codes(5))
    batched.receiver.put("b", codes(5))
    batched.stage.poll_inputs()
    batched.stage.step()
    assert len(batched.outbox.order) == 2
    batched.run()
    assert sorted(batched.outbox.order) == ["a", "a", "b"]


def test_a_request_sends_no_more_chunks_than_it_has_credit_for(bench: Bench) -> None:
    bench.submit("a", credit=2)
    bench.receiver.put("a", codes(50), final=True)
    bench.run()
    assert len(bench.outbox.audio["a"]) == 2
    assert bench.stage.stats().parked == 1
    decoded = bench.stage.stats().counts.tokens
    bench.stage.grant(Grant(request_id="a", count=1))
    bench.run()
    assert len(bench.outbox.audio["a"]) == 3
    assert bench.stage.stats().counts.tokens > decoded
    bench.stage.grant(Grant(request_id="a", count=PLENTY))
    bench.run()
    assert bench.outbox.ended("a")
    bench.assert_empty()


def test_a_parked_request_holds_its_sender_back_and_nobody_else(model: Code2Wav) -> None:
    bench = Bench(model, window=8)
    bench.submit("slow", credit=0)
    taken = 0
    while bench.receiver.put("slow", codes(1)):
        taken += 1
        bench.run()
    assert taken == 2 * bench.cadence.full + bench.window
    assert not bench.outbox.audio["slow"]
    bench.speak("quick", codes(30))
    assert bench.outbox.ended("quick")
    bench.stage.grant(Grant(request_id="slow", count=PLENTY))
    bench.run()
    assert bench.receiver.put("slow", codes(1), final=True)
    bench.run()
    assert sum(bench.outbox.frames("slow")) == taken + 1
    bench.assert_empty()


def test_requests_beyond_the_slots_wait_in_order(model: Code2Wav) -> None:
    bench = Bench(model, max_num_seqs=1)
    for name in "abc":
        bench.submit(name)
        bench.receiver.put(name, codes(6))
    bench.run()
    assert (bench.stage.stats().running, bench.stage.stats().waiting) == (1, 2)
    assert set(bench.outbox.order) == {"a"}
    for name in "cba":
        bench.receiver.put(name, codes(0), final=True)
    bench.run()
    assert list(dict.fromkeys(bench.outbox.order)) == ["a", "b", "c"]
    bench.assert_empty()


def test_a_stream_that_has_nothing_to_decode_keeps_nobody_from_a_slot(model: Code2Wav) -> None:
    """The Talker may start requests in another order than they came, and then wait for this stage."""
    bench = Bench(model, max_num_seqs=1, window=8)
    bench.submit("a")
    bench.speak("b", codes(50))
    assert bench.outbox.ended("b")
    bench.receiver.put("a", codes(6), final=True)
    bench.run()
    assert bench.outbox.ended("a")
    bench.assert_empty()


def test_the_stream_whose_audio_runs_out_first_goes_first(bench: Bench) -> None:
    for name in ("ahead", "behind"):
        bench.submit(name)
        bench.receiver.put(name, codes(2))
    bench.receiver.put("ahead", codes(2))
    bench.run()
    bench.outbox.order.clear()
    bench.receiver.put("ahead", codes(5))
    bench.receiver.put("behind", codes(5))
    bench.stage.poll_inputs()
    bench.stage.step()
    assert bench.outbox.order == ["behind"]


@pytest.mark.parametrize(("in_hand", "goes_first"), [(2, "old"), (20, "new")])
def test_a_new_stream_goes_before_those_with_enough_audio_in_hand(bench: Bench, in_hand: int, goes_first: str) -> None:
    bench.submit("old")
    bench.receiver.put("old", codes(in_hand))
    bench.run()
    assert sum(bench.outbox.frames("old")) == in_hand
    bench.outbox.order.clear()
    bench.submit("new")
    bench.receiver.put("old", codes(5))
    bench.receiver.put("new", codes(2))
    bench.stage.poll_inputs()
    bench.stage.step()
    assert bench.outbox.order == [goes_first]


def test_first_come_first_served_takes_the_chunk_that_was_ready_first(model: Code2Wav) -> None:
    for policy, order in (("fcfs", ["ahead", "behind"]), ("slack", ["behind", "ahead"])):
        bench = Bench(model, policy=policy)  # type: ignore[arg-type]
        for name in ("ahead", "behind"):
            bench.submit(name)
            bench.receiver.put(name, codes(2))
        bench.receiver.put("ahead", codes(2))
        bench.run()
        bench.outbox.order.clear()
        for name, frames in (("ahead", 2), ("behind", 1)):
            bench.now += 0.01
            bench.receiver.put(name, codes(frames))
            bench.stage.poll_inputs()
        bench.stage.step()
        bench.stage.step()
        assert bench.outbox.order == order


def test_a_new_stream_is_overtaken_at_most_once_by_each_other_when_it_has_waited(model: Code2Wav) -> None:
    """Every chunk comes late, so every other stream is always due before now."""
    bench = Bench(model, max_num_seqs=8)
    late = [f"late {index}" for index in range(6)]
    for name in late:
        bench.submit(name)
        bench.receiver.put(name, codes(60))
    bench.stage.poll_inputs()
    for _ in late:
        bench.stage.step()
    bench.now = 10.0
    bench.submit("new")
    bench.receiver.put("new", codes(2))
    bench.stage.poll_inputs()
    ready_at, served = bench.now, []
    while "new" not in served:
        began_at = bench.now
        bench.stage.step()
        bench.now += 0.2
        if began_at > ready_at + START_WAIT_S:
            served.append(bench.outbox.order[-1])
    assert 1 < len(served) == len(set(served))


def under_load(model: Code2Wav, policy: SchedulingPolicy) -> list[Playout]:
    """Listeners of forty streams of 2 to 12 s whose frames come twice as fast as they play.

    A chunk takes 20 ms and 9 ms a frame: what the streams bring keeps the vocoder busy nine tenths of the time.
    """
    dice = random.Random(0)
    bench = Bench(model, window=1000, max_num_seqs=40, cadence=Cadence(4, 25), policy=policy)
    listeners: defaultdict[str, Playout] = defaultdict(Playout)
    send = bench.outbox.send

    def timed(message: ToServer, samples: bytes | None = None) -> None:
        assert isinstance(message, AudioOutput)
        bench.now += 0.02 + 0.009 * message.num_frames
        listeners[message.request_id].arrive(bench.now, 0.08 * message.num_frames)
        send(message, samples)

    bench.outbox.send = timed  # type: ignore[method-assign]
    frame = codes(1)
    events: list[tuple[float, str, bool]] = []
    start = 0.0
    for index in range(40):
        frames = dice.randint(25, 150)
        events += [(start + 0.04 * n, f"r{index}", n == frames - 1) for n in range(frames)]
        start += dice.expovariate(0.9)  # a stream takes 1 s on average
    events.sort(reverse=True)
    for index in range(40):
        bench.submit(f"r{index}")
    while events or bench.stage.has_work():
        while events and events[-1][0] <= bench.now:
            _, name, final = events.pop()
            assert bench.receiver.put(name, frame, final=final)
        bench.stage.poll_inputs()
        if bench.stage.has_work():
            bench.stage.step()
        elif events:
            bench.now = max(bench.now, events[-1][0])
    bench.assert_empty()
    return list(listeners.values())


def test_under_load_fewer_listeners_hear_silence_than_first_come_first_served(model: Code2Wav) -> None:
    silent: dict[str, float] = {}
    broken: dict[str, int] = {}
    policies: tuple[SchedulingPolicy, ...] = ("slack", "fcfs")
    for policy in policies:
        listeners = under_load(model, policy)
        assert len(listeners) == 40
        silent[policy] = sum(listener.silent_s for listener in listeners)
        broken[policy] = sum(not listener.flows for listener in listeners)
    assert silent["slack"] < 0.8 * silent["fcfs"]
    assert broken["slack"] < broken["fcfs"]


def test_no_stream_starves_under_a_flow_of_new_ones(bench: Bench) -> None:
    bench.submit("old")
    bench.receiver.put("old", codes(2))
    bench.run()
    bench.receiver.put("old", codes(5))
    for index in range(100):
        bench.now += 0.005
        bench.submit(f"new {index}")
        bench.receiver.put(f"new {index}", codes(2), final=True)
        bench.stage.poll_inputs()
        bench.stage.step()
        if bench.outbox.order.count("old") == 2:
            return
    pytest.fail("the old stream was not served within half a second")


@pytest.mark.parametrize("code", [-1, CODEBOOK_SIZE, 4200])
def test_a_code_out_of_range_fails_its_request_alone(bench: Bench, code: int) -> None:
    bad = codes(3)
    bad[1, 2] = code
    for name in ("bad", "good"):
        bench.submit(name)
    bench.receiver.put("bad", codes(1))
    bench.receiver.put("bad", bad)
    bench.receiver.put("bad", codes(1))  # is on its way already
    bench.receiver.put("good", codes(9), final=True)
    bench.run()
    assert str(code) in bench.outbox.failed["bad"]
    assert f"0 to {CODEBOOK_SIZE - 1}" in bench.outbox.failed["bad"]
    assert not bench.outbox.ended("bad")
    assert bench.outbox.ended("good")
    bench.assert_empty()


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, CODEBOOKS + 1), np.int32), np.zeros(CODEBOOKS, np.int32), np.zeros((2, CODEBOOKS), np.float32)],
    ids=["too many codebooks", "no frame axis", "not integers"],
)
def test_frames_of_another_shape_or_type_fail_their_request(bench: Bench, frames: Array) -> None:
    bench.submit("a")
    bench.receiver.put("a", frames)
    bench.run()
    assert f"int32 [n, {CODEBOOKS}]" in bench.outbox.failed["a"]
    bench.assert_empty()


def test_frames_after_the_final_handoff_fail_their_request(bench: Bench) -> None:
    bench.submit("a", credit=0)
    bench.receiver.put("a", codes(1), final=True)
    bench.receiver.put("a", codes(1))
    bench.run()
    assert "after the final handoff" in bench.outbox.failed["a"]
    bench.assert_empty()


def test_a_gap_in_the_handoffs_fails_its_request(bench: Bench) -> None:
    bench.submit("a")
    bench.receiver.put("a", codes(1))
    bench.receiver.put_error("a", SequenceGap("handoff 1 is missing"))
    bench.run()
    assert bench.outbox.failed == {"a": "handoff 1 is missing"}
    bench.assert_empty()


def test_samples_that_are_not_numbers_fail_their_request(bench: Bench) -> None:
    broken = Code2Wav(CONFIG)
    for parameter in broken.parameters():
        parameter.fill_(float("nan"))
    broken.prepare()
    sick = Bench(broken)
    sick.speak("a", codes(4))
    assert "not numbers" in sick.outbox.failed["a"]
    assert not sick.outbox.audio["a"]
    sick.assert_empty()


def test_submitting_a_request_twice_fails_it(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("a")
    assert "twice" in bench.outbox.failed["a"]
    bench.assert_empty()


@pytest.mark.parametrize("moment", ["waiting", "empty", "buffered", "parked", "speaking", "over"])
def test_abort_frees_everything_at_any_moment_and_twice(model: Code2Wav, moment: str) -> None:
    bench = Bench(model, max_num_seqs=1, window=8)
    if moment == "waiting":
        bench.submit("first")
        bench.receiver.put("first", codes(3))
    bench.submit("a", credit=0 if moment == "parked" else PLENTY)
    frames = {"buffered": 1, "parked": 18, "speaking": 4, "waiting": 3, "over": 4}.get(moment, 0)
    for index in range(frames):
        if not bench.receiver.put("a", codes(1), final=moment == "over" and index == frames - 1):
            bench.run()
            bench.receiver.put("a", codes(1))
    bench.run()
    assert bool(bench.outbox.audio["a"]) == (moment in ("speaking", "over"))
    bench.stage.abort("a")
    bench.stage.abort("a")
    bench.stage.abort("first")
    bench.stage.abort("unknown")
    bench.assert_empty()
    bench.receiver.put("a", codes(1))  # was on its way
    bench.run()
    bench.stage.grant(Grant(request_id="a", count=1))
    bench.assert_empty()
    assert not bench.outbox.failed


def test_the_times_of_a_request_go_with_its_last_message(model: Code2Wav) -> None:
    bench = Bench(model)
    bench.submit("a", credit=1)
    bench.now = 10.0
    for _ in range(2):
        bench.receiver.put("a", codes(1))
    bench.stage.poll_inputs()
    bench.now = 12.0
    bench.run()
    bench.receiver.put("a", codes(5), final=True)
    bench.now = 15.0
    bench.stage.poll_inputs()
    bench.stage.grant(Grant(request_id="a", count=9))
    bench.now = 20.0
    bench.run()
    assert bench.outbox.ended("a")
    *before, last = [message.times for message, _ in bench.outbox.audio["a"]]
    assert last == StageTimes(ready=10.0, started=8.0, first=8.0) and before and not any(before)


def test_the_answer_to_an_abort_has_the_times_as_far_as_there_are_any(model: Code2Wav) -> None:
    bench = Bench(model)
    assert bench.stage.abort("unknown") is None
    bench.submit("new")
    assert bench.stage.abort("new") == StageTimes()
    bench.submit("a")
    bench.receiver.put("a", codes(2))
    bench.stage.poll_inputs()
    bench.now = 3.0
    assert bench.stage.abort("a") == StageTimes(ready=3.0)
    assert bench.stage.abort("a") is None


def test_an_aborted_slot_serves_the_next_request_unchanged(model: Code2Wav) -> None:
    reference, bench = Bench(model), Bench(model, max_num_seqs=1)
    reference.speak("b", codes(30, seed=1))
    bench.submit("a")
    bench.receiver.put("a", codes(9))
    bench.run()
    bench.stage.abort("a")
    bench.speak("b", codes(30, seed=1))
    assert bench.outbox.samples("b") == reference.outbox.samples("b")


def test_random_life_ends_with_everything_free(model: Code2Wav) -> None:
    bench, dice = Bench(model, window=3, max_num_seqs=2), random.Random(2)
    names = [f"r{index}" for index in range(40)]
    live: set[str] = set()
    for name in names:
        bench.submit(name, credit=dice.randrange(3))
        live.add(name)
        for _ in range(12):
            bench.now += 0.01
            target = dice.choice(sorted(live))
            action = dice.random()
            if action < 0.6:
                if bench.receiver.put(target, codes(dice.randrange(4)), final=dice.random() < 0.1):
                    live -= {target} if bench.outbox.ended(target) else set()
            elif action < 0.8:
                bench.stage.grant(Grant(request_id=target, count=1))
            elif action < 0.85:
                bench.stage.abort(target)
            bench.stage.poll_inputs()
            if bench.stage.has_work():
                bench.stage.step()
            stats = bench.stage.stats()
            assert stats.running <= 2
    stats = bench.stage.stats()
    ended = (stats.counts.gen_time_s.count, stats.counts.failed, stats.counts.aborted)
    assert min(ended) > 0 and sum(ended) + stats.running + stats.waiting == len(names)
    bench.stage.close()
    bench.run()
    bench.assert_empty()


def test_has_work_means_that_a_step_sends_something(bench: Bench) -> None:
    bench.submit("a", credit=3)
    for index in range(30):
        bench.receiver.put("a", codes(1), final=index == 29)
        bench.stage.poll_inputs()
        sent = len(bench.outbox.order)
        expected = bench.stage.has_work()
        bench.stage.step()
        assert (len(bench.outbox.order) > sent) == expected


def test_messages_for_other_stages_are_a_programming_error(bench: Bench) -> None:
    message = SubmitText(request_id="a", prompt_token_ids=(1,), params=SamplingParams(), speak=False)
    with pytest.raises(TypeError, match="SubmitText"):
        bench.stage.submit(message)


def context(folder: Path, outbox: FakeOutbox, receiver: FakeReceiver | None) -> StageContext:
    config = StageConfig(
        stage_id=2, stage="code2wav", process="codec", devices="cpu", input_connectors={"talker": "frames"}
    )
    extra = ConnectorExtra(initial_codec_chunk_frames=3, codec_chunk_frames=6)
    return StageContext(
        config=config,
        deploy=DeployConfig(stages=(config,), connectors={"frames": ConnectorConfig(kind="inproc", extra=extra)}),
        model=str(folder),
        outbox=outbox,
        senders={},
        receivers={} if receiver is None else {"talker": {"talker": receiver}},
        progress=lambda done, total: None,
    )


def test_load_takes_weights_and_cadence_from_checkpoint_and_deploy_config(nano: Path) -> None:
    outbox, receiver = FakeOutbox(), FakeReceiver()
    stage = CodecStage.load(context(nano, outbox, receiver))
    vocoder = load_config(nano).code2wav
    assert vocoder is not None
    stage.submit(SubmitCodec(request_id="a", credit=PLENTY))
    receiver.put("a", np.ones((8, vocoder.num_quantizers), np.int32), final=True)
    stage.poll_inputs()
    while stage.has_work():
        stage.step()
    assert outbox.frames("a")[0] == 3
    samples = np.frombuffer(outbox.samples("a"), dtype="<f4")
    assert len(samples) == 1920 * 8 - 555
    assert np.abs(samples).max() > 0.01
    stage.close()


def test_load_without_a_talker_or_a_vocoder_says_so(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="talker"):
        CodecStage.load(context(nano, FakeOutbox(), None))
    raw = msgspec.json.decode((nano / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(raw | {"enable_audio_output": False}))
    with pytest.raises(CheckpointError, match="code2wav_config"):
        CodecStage.load(context(tmp_path, FakeOutbox(), FakeReceiver()))
