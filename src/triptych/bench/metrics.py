"""From the outcomes of a run to its numbers, under the names that users of vLLM's benchmarks know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triptych.bench.driver import Run
from triptych.bench.outcome import Outcome
from triptych.errors import ConfigError

# Of each request that was answered. A value that it does not have (no audio, no second token) is left out.
_DISTRIBUTIONS: dict[str, Callable[[Outcome], float | None]] = {
    "ttft_ms": lambda outcome: _ms(outcome.ttft_s),
    "tpot_ms": lambda outcome: _ms(outcome.tpot_s),
    "e2el_ms": lambda outcome: _ms(outcome.e2el_s),
    "audio_ttfp_ms": lambda outcome: _ms(outcome.ttfp_s),
    "audio_after_text_ms": lambda outcome: _ms(outcome.audio_after_text_s),
    "audio_rtf": lambda outcome: outcome.rtf,
    "audio_duration_s": lambda outcome: outcome.playout.audio_s if outcome.has_audio else None,
    "audio_underrun_s": lambda outcome: outcome.playout.silent_s if outcome.has_audio else None,
    "audio_longest_gap_s": lambda outcome: outcome.playout.longest_gap_s if outcome.has_audio else None,
}
DISTRIBUTIONS = ("ttft_ms", "tpot_ms", "itl_ms", *list(_DISTRIBUTIONS)[2:])
STATISTICS = ("mean", "median", "p90", "p99")

_TARGETS: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": _DISTRIBUTIONS["ttft_ms"],
    "tpot": _DISTRIBUTIONS["tpot_ms"],
    "e2el": _DISTRIBUTIONS["e2el_ms"],
    "ttfp": _DISTRIBUTIONS["audio_ttfp_ms"],
    "rtf": _DISTRIBUTIONS["audio_rtf"],
    "underrun": lambda outcome: _ms(outcome.playout.silent_s) if outcome.has_audio else None,
}
AUDIO_TARGETS = ("ttfp", "rtf", "underrun")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


@dataclass(frozen=True, slots=True)
class Target:
    """The most that one number of a request may be: milliseconds, for `rtf` a ratio."""

    name: str
    most: float

    def met(self, outcome: Outcome) -> bool:
        """A reply of one token has no time per token to miss; a reply without the text or audio a target is about
        misses it."""
        value = _TARGETS[self.name](outcome)
        return self.name == "tpot" and bool(outcome.text_times) if value is None else value <= self.most


def parse_targets(written: Sequence[str], *, speaks: bool) -> list[Target]:
    """Targets from `name:number` strings. Raises ConfigError for an unknown name, one given twice, a bad number, or one
    about audio when none is asked for."""
    targets: dict[str, Target] = {}
    for item in written:
        name, _, number = item.partition(":")
        if name not in _TARGETS:
            raise ConfigError(f"--goodput {item!r}: {name!r} is not one of {', '.join(_TARGETS)}")
        if name in targets:
            raise ConfigError(f"--goodput {name} is given twice")
        if name in AUDIO_TARGETS and not speaks:
            raise ConfigError(f"--goodput {name} is about audio; ask for some: --modalities text,audio")
        try:
            most = float(number)
        except ValueError:
            most = -1.0
        if not 0 <= most < float("inf"):
            raise ConfigError(f"--goodput {item!r}: give a number of at least 0 after the colon, as in {name}:300")
        targets[name] = Target(name, most)
    return list(targets.values())


def statistics(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and percentiles (linear between neighbours); all None for no values, which is not zero."""
    if not values:
        return dict.fromkeys(STATISTICS)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return {"mean": float(np.mean(values)), "median": p50, "p90": p90, "p99": p99}


def summarise(run: Run, targets: Sequence[Target] = ()) -> dict[str, Any]:
    """The numbers of a run, flat. Requests that failed enter none but the counts of failures."""
    answered = [outcome for outcome in run.outcomes if outcome.failure is None]
    spoken = [outcome for outcome in answered if outcome.has_audio]
    text_tokens = sum(outcome.text_tokens for outcome in answered)
    audio_s = sum(outcome.playout.audio_s for outcome in spoken)
    flowing = sum(outcome.playout.flows for outcome in spoken)
    failed = [outcome for outcome in run.outcomes if outcome.failure is not None]

    def per_second(total: float) -> float:
        return total / run.duration_s if run.duration_s > 0 else 0.0

    summary: dict[str, Any] = {
        "duration": run.duration_s,
        "completed": len(answered),
        "failed": len(failed),
        "failures": dict(Counter(str(outcome.failure) for outcome in failed).most_common()),
        "failure_examples": {str(outcome.failure): outcome.detail for outcome in reversed(failed)},
        "completed_with_audio": len(spoken),
        "total_input_tokens": sum(outcome.prompt_tokens for outcome in answered),
        "total_output_tokens": text_tokens,
        "output_tokens_counted_by": _counted_by(answered),
        "total_audio_duration_s": audio_s,
        "total_audio_underrun_s": sum(outcome.playout.silent_s for outcome in spoken),
        "streams_without_underrun": flowing,
        "streams_without_underrun_ratio": flowing / len(spoken) if spoken else None,
        "request_throughput": per_second(len(answered)),
        "output_throughput": per_second(text_tokens),
        "audio_throughput": per_second(audio_s),
        "max_send_delay_ms": 1000 * max((outcome.send_delay_s for outcome in run.outcomes), default=0.0),
    }
    if targets:
        good = sum(all(target.met(outcome) for target in targets) for outcome in answered)
        summary["request_goodput"] = per_second(good)
        summary["goodput_ratio"] = good / len(run.outcomes) if run.outcomes else None
    for name in DISTRIBUTIONS:
        if name == "itl_ms":
            values = [1000 * gap for outcome in answered for gap in outcome.itl_s]
        else:
            values = [value for outcome in answered if (value := _DISTRIBUTIONS[name](outcome)) is not None]
        summary |= {f"{statistic}_{name}": value for statistic, value in statistics(values).items()}
    return summary


def _counted_by(answered: Sequence[Outcome]) -> str | None:
    """`usage`: the server's counts; `events`: pieces of text, which may hold several tokens; `mixed`: some of each."""
    kinds = {"usage" if outcome.counted_by_server else "events" for outcome in answered}
    return "mixed" if len(kinds) > 1 else next(iter(kinds), None)
