"""What more streams, and longer ones, cost a server: time of each stage for a token, memory for a stream."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from triptych.bench.audio import FRAMES_PER_S, SAMPLE_RATE, speech_samples
from triptych.bench.ceilings import Ceilings, Setting
from triptych.bench.driver import Load
from triptych.bench.measure import Measurement
from triptych.bench.metrics import summarise
from triptych.bench.report import watched
from triptych.bench.roofline import settings
from triptych.bench.server import Server
from triptych.bench.stage_cost import Cost, costs, of_linear, parts, spent
from triptych.bench.target import Target
from triptych.bench.watch import Look, observed
from triptych.bench.workload import RandomWorkload, Reply
from triptych.errors import ConfigError, TriptychError

FRAMES_PER_TOKEN = 4  # of text; about what speech has
LEAST_S = 10.0  # of speech at each length: short replies are asked for again and again


@dataclass(frozen=True, slots=True)
class Speech:
    """Replies of exactly so many codec frames and text tokens."""

    seconds: float
    frames: int
    text_tokens: int

    @classmethod
    def of(cls, seconds: float, deploy: Mapping[str, Any], option: str) -> Speech:
        """Raises ConfigError where a stage of the resolved `deploy` config has no room for what `option` asks for."""
        stages = {stage["stage"]: (index, stage) for index, stage in enumerate(deploy["stages"])}
        if "code2wav" not in stages:
            raise ConfigError("this deployment does not speak, and bench growth measures speech")
        frames = max(1, round(seconds * FRAMES_PER_S))
        talker = stages["talker"][1]
        spoken = math.ceil((frames - talker["extra_frames"]) / talker["frames_per_text_token"])
        text_tokens = max(1, math.ceil(frames / FRAMES_PER_TOKEN), spoken + 1)
        for kind, needed, unit in (
            ("thinker", text_tokens, "text tokens"),
            ("talker", frames, "codec frames"),
            ("code2wav", frames, "codec frames"),
        ):
            index, stage = stages[kind]
            room = stage["max_model_len"] - (kind != "code2wav")  # at least one row of a prompt
            if needed > room:
                raise ConfigError(
                    f"{kind}: its max_model_len {stage['max_model_len']} limits the speech: {option} {seconds:g} is "
                    f"{needed} {unit}, {'beside the prompt' if kind != 'code2wav' else 'and that is all it takes'}; "
                    f"raise it, or ask for less",
                    f"stages[{index}].max_model_len",
                )
        return cls(seconds, frames, text_tokens)

    @property
    def reply(self) -> Reply:
        limits = {"sampling_params_list": [{}, {"ignore_eos": True, "max_tokens": self.frames}]}
        return Reply(("text", "audio"), None, self.text_tokens, ignore_eos=True, temperature=0.0, extra=limits)

    @property
    def tokens(self) -> dict[str, int]:
        """What each stage makes for one reply."""
        return {"thinker": self.text_tokens, "talker": self.frames, "code2wav": self.frames}


def check_places(levels: Sequence[int], deploy: Mapping[str, Any]) -> None:
    """Raises ConfigError for a level of concurrency that a stage would not compute at once."""
    for index, stage in enumerate(deploy["stages"]):
        places = stage["max_num_seqs"] * stage["num_replicas"]
        if max(levels) > places:
            raise ConfigError(
                f"--concurrency {max(levels)} is more than the {places} requests that {stage['stage']} computes at "
                "once: raise it, or give lower levels",
                f"stages[{index}].max_num_seqs",
            )


class StageGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage took at one point. `parts` is for each third of the reply, `of_linear` against lower points and
    `parts_of_linear` the last thirds against the first; None where nothing can be said."""

    stage: str
    cost: Cost
    parts: tuple[Cost, ...] | None = None
    of_linear: float | None = None
    parts_of_linear: float | None = None

    def record(self) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self),
            "step_ms": 1000 * self.cost.step_s,
            "token_ms": 1000 * self.cost.token_s,
            "parts_token_ms": [1000 * part.token_s for part in self.parts] if self.parts else None,
        }


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: so many streams of so much speech, the looks at the server meanwhile, and its summary."""

    streams: int
    speech: Speech
    looks: Sequence[Look]
    summary: dict[str, Any]

    @property
    def costs(self) -> dict[str, Cost]:
        return spent([one.stages for one in self.looks])

    def parts(self, stage: str) -> tuple[Cost, ...] | None:
        """Of a run that was one reply."""
        return parts([costs(one.stages) for one in self.looks], stage) if self.summary["completed"] == 1 else None

    @property
    def peak(self) -> Look:
        return max(self.looks, key=lambda one: one.total_mib)

    @property
    def kv_blocks(self) -> dict[str, float]:
        """The most that requests held of each stage."""
        held: dict[str, float] = {}
        for one in self.looks:
            held |= {stage: max(count, held.get(stage, 0.0)) for stage, count in one.kv_blocks.items()}
        return held

    @property
    def preemptions(self) -> int:
        before, after = (
            {key: one.preemptions for key, one in at.stages.items()} for at in (self.looks[0], self.looks[-1])
        )
        return int(sum(count - before.get(key, 0.0) for key, count in after.items()))


@dataclass(slots=True)
class Growth:
    """The points of both sweeps as they come. `idle` is the server when it had answered one request."""

    idle: Look
    streams: list[Point] = field(default_factory=list)
    lengths: list[Point] = field(default_factory=list)

    @property
    def settings(self) -> list[Setting]:
        return settings(self.idle.stages)


async def measure(
    server: Server, target: Target, *, streams: int, speech: Speech, count: int, words: int, seed: int, timeout_s: float
) -> Point:
    """`count` replies, so many at a time. Raises TriptychError for one that is not what was asked for."""
    request = Measurement(RandomWorkload(input_len=words), speech.reply, Load(streams), count, 0, seed, timeout_s)

    def told(before: Look, now: Look) -> bool:
        made = spent([before.stages, now.stages])
        return all(stage in made and made[stage].tokens >= count * each for stage, each in speech.tokens.items())

    async def work() -> dict[str, Any]:
        summary = summarise(await watched(request, target))
        check(summary, count, speech)
        return summary

    summary, looks = await observed(work(), server, told)
    return Point(streams, speech, looks, summary)


def check(summary: Mapping[str, Any], count: int, speech: Speech) -> None:
    """Raises TriptychError unless every reply is there, of full length: what limits it is named."""
    if summary["failed"]:
        said = "; ".join(f"{reason}: {detail or '-'}" for reason, detail in summary["failure_examples"].items())
        raise TriptychError(f"{summary['failed']} replies of {speech.seconds:g} s failed: {said}")
    samples = round(summary["total_audio_duration_s"] * SAMPLE_RATE)
    if samples != count * speech_samples(speech.frames):
        raise TriptychError(
            f"replies of {speech.seconds:g} s were asked for, and {summary['total_audio_duration_s'] / count:.2f} s "
            "came: the server limits them; see max_model_len of its talker and its code2wav"
        )


def stage_growth(points: Sequence[Point], ceilings: Sequence[Ceilings]) -> list[list[StageGrowth]]:
    """For each point, in rising order, its stages."""
    most = {one.setting: one for one in ceilings}
    found = []
    for index, point in enumerate(points):
        at = {stage: counted.setting for (stage, _), counted in point.looks[-1].stages.items()}
        rows = []
        for stage, cost in point.costs.items():
            ceiling = most.get(setting) if (setting := at[stage]) is not None else None
            lower = [below.costs[stage] for below in points[:index] if stage in below.costs]
            thirds = point.parts(stage)
            rows.append(
                StageGrowth(
                    stage=stage,
                    cost=cost,
                    parts=thirds,
                    of_linear=of_linear(cost, lower, ceiling),
                    parts_of_linear=max(of_linear(part, thirds[:1], ceiling) or 0.0 for part in thirds[1:])
                    if thirds
                    else None,
                )
            )
        found.append(rows)
    return found


class MemoryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """The most memory at one level of concurrency, and the KV blocks that requests held. Linear is the memory that the
    server had before and what a stream took at a lower level, for each; of blocks the most that one held there."""

    streams: int
    memory_mib: dict[str, float]
    total_mib: float
    stream_mib: float
    kv_blocks: dict[str, float]
    of_linear: float | None = None
    kv_of_linear: float | None = None


def memory_growth(growth: Growth) -> list[MemoryGrowth]:
    found: list[MemoryGrowth] = []
    idle = growth.idle.total_mib
    for point in growth.streams:
        peak, blocks = point.peak, point.kv_blocks
        linear = idle + point.streams * max(0.0, min((row.stream_mib for row in found), default=0.0))
        ratios = [
            held / point.streams / most
            for stage, held in blocks.items()
            if (most := max((row.kv_blocks.get(stage, 0.0) / row.streams for row in found), default=0.0))
        ]
        found.append(
            MemoryGrowth(
                streams=point.streams,
                memory_mib=peak.memory_mib,
                total_mib=peak.total_mib,
                stream_mib=(peak.total_mib - idle) / point.streams,
                kv_blocks=blocks,
                of_linear=peak.total_mib / linear if found and linear else None,
                kv_of_linear=max(ratios, default=None),
            )
        )
    return found
