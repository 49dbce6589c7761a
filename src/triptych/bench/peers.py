"""Triptych beside Hugging Face Transformers: the same checkpoint and requests in one run, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from triptych.bench.audio import SAMPLE_RATE
from triptych.bench.ceilings import Setting
from triptych.bench.driver import Load
from triptych.bench.grid import Grid, number
from triptych.bench.machine import memory_mib
from triptych.bench.measure import Measurement
from triptych.bench.metrics import summarise
from triptych.bench.outcome import Outcome
from triptych.bench.peer_worker import FRAMES, SAMPLES, TEXT_TOKENS, WORDS
from triptych.bench.server import START_S, served
from triptych.bench.target import Target, find_target
from triptych.bench.worker import run_worker
from triptych.bench.workload import RandomWorkload, Reply
from triptych.errors import ConfigError, TriptychError

PEER_S = 3600.0  # that one run of Transformers may take
COLUMNS = {
    "audio-s/s": ("audio_throughput", 2),
    "RTF": ("median_audio_rtf", 3),
    "TTFP, ms": ("median_audio_ttfp_ms", 0),
    "TTFT, ms": ("median_ttft_ms", 0),
    "output tok/s": ("output_throughput", 1),
    "text only, tok/s": ("text_only_throughput", 0),
    "without underrun": ("streams_without_underrun_ratio", 2),
}


def _setting(run: Mapping[str, Any]) -> Setting:
    return Setting(run["dtype"], run["threads"], run["device"])


def settings(deploy: Mapping[str, Any]) -> list[Setting]:
    """Those to try, the server's own first: its Thinker's dtype and device, the threads of all its processes. On CPU
    also one thread, and bfloat16: the best of them is the peer."""
    thinker = deploy["stages"][0]
    threads: dict[str, int] = {}
    for stage in deploy["stages"]:
        threads[stage["process"]] = max(threads.get(stage["process"], 1), stage["threads"])
    own = Setting(thinker["dtype"], sum(threads.values()), thinker["devices"])
    if own.device != "cpu":
        return [own]
    return list(dict.fromkeys([own, Setting(own.dtype, 1, "cpu"), Setting("bfloat16", own.threads, "cpu")]))


def first_voice(folder: Path) -> str:
    """Raises ConfigError for a checkpoint that does not speak."""
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    voices = (config.get("talker_config") or {}).get("speaker_id")
    if not voices:
        raise ConfigError(f"{folder} has no voices: bench peers compares speech")
    return str(next(iter(voices)))


async def run_transformers(
    folder: Path, setting: Setting, *, voice: str, num_prompts: int, seed: int
) -> dict[str, Any]:
    """What Transformers takes for `num_prompts` requests, one after another. Raises TriptychError if it fails."""
    request = msgspec.json.encode(
        {
            "folder": str(folder),
            **msgspec.structs.asdict(setting),
            "voice": voice,
            "num_prompts": num_prompts,
            "seed": seed,
        }
    )
    found = await run_worker(
        "triptych.bench.peer_worker",
        request,
        PEER_S,
        doing=f"Transformers, {setting},",
        failed=f"Transformers, {setting}, failed",
        env={"HF_HUB_OFFLINE": "1"},
    )
    result: dict[str, Any] = msgspec.json.decode(found)
    return {**msgspec.structs.asdict(setting), **result}


class _Memory:
    """Called with each outcome: the most memory that the server's processes had together, looked at now and then."""

    def __init__(self, pid: int) -> None:
        self.peak_mib = 0.0
        self._pid = pid
        self._seen = 0

    def __call__(self, outcome: Outcome) -> None:
        if self._seen % 8 == 0:
            self.peak_mib = max(self.peak_mib, memory_mib(self._pid))
        self._seen += 1


async def run_triptych(
    model: str, arguments: Sequence[str], levels: Sequence[int], *,
    voice: str, num_prompts: int, seed: int, timeout_s: float, start_s: float = START_S,
) -> dict[str, Any]:  # fmt: skip
    """The server's numbers at each level of concurrency, of at least `num_prompts` requests and twice the level.

    Raises TriptychError if it does not start, or a reply is not what was asked for.
    """
    workload = RandomWorkload(input_len=WORDS)
    frames = {"sampling_params_list": [{}, {"ignore_eos": True, "max_tokens": FRAMES}]}
    written = Reply(("text",), max_tokens=TEXT_TOKENS, ignore_eos=True, temperature=0.0)
    spoken = Reply(("text", "audio"), voice, TEXT_TOKENS, ignore_eos=True, temperature=0.0, extra=frames)
    rows = []
    seeds = count(seed)  # the first requests are those of Transformers; later ones find nothing of theirs in a cache
    async with served(model, *arguments, start_s=start_s) as server:
        target = await find_target(server.url, "/v1/chat/completions", None, None)
        memory = _Memory(server.pid)
        for level in levels:
            size = max(num_prompts, 2 * level)
            speech, text = [
                await _take(Measurement(workload, reply, Load(level), size, 1, next(seeds), timeout_s), target, memory)
                for reply in (spoken, written)
            ]
            rows.append({"concurrency": level, **speech, "text_only_throughput": text["output_throughput"]})
    tokens = rows[0]["total_input_tokens"] / rows[0]["completed"]
    return {"start_up_s": server.start_up_s, "peak_mib": memory.peak_mib, "prompt_tokens": tokens, "levels": rows}


async def _take(measurement: Measurement, target: Target, memory: _Memory) -> dict[str, Any]:
    summary = summarise(await measurement.take(target, on_end=memory))
    check(summary, measurement.num_prompts, speaks=measurement.reply.speaks)
    return summary


def check(summary: Mapping[str, Any], num_prompts: int, *, speaks: bool) -> None:
    """Speed must not come from broken output. Raises TriptychError unless every reply is there, of full length."""
    if summary["failed"]:
        said = "; ".join(f"{reason}: {detail or '-'}" for reason, detail in summary["failure_examples"].items())
        raise TriptychError(f"Triptych: {summary['failed']} requests failed: {said}")
    if summary["total_output_tokens"] != TEXT_TOKENS * num_prompts:
        raise TriptychError(
            f"Triptych: {summary['total_output_tokens']} text tokens, not {num_prompts} x {TEXT_TOKENS}"
        )
    samples = round(summary["total_audio_duration_s"] * SAMPLE_RATE)
    if speaks and samples != SAMPLES * num_prompts:
        raise TriptychError(f"Triptych: {samples} samples of speech, not {num_prompts} x {SAMPLES}")


def grid(best: Mapping[str, Any], ours: Mapping[str, Any]) -> Grid:
    table = Grid(["system", *COLUMNS])
    for name, numbers in [
        (f"Transformers, {_setting(best)}, one after another", best),
        *((f"Triptych, concurrency {row['concurrency']}", row) for row in ours["levels"]),
    ]:
        table.rows.append([name, *(number(numbers.get(key), digits) for key, digits in COLUMNS.values())])
    return table


def markdown(content: Mapping[str, Any], *, command: str, machine: str) -> str:
    """The record of a run."""
    runs, best, ours = content["transformers"]["runs"], content["transformers"]["best"], content["triptych"]
    single, last = ours["levels"][0], ours["levels"][-1]
    tried = "; ".join(
        f"{Setting(r['dtype'], r['threads'], r['device'])}: RTF {r['median_audio_rtf']:.3f}" for r in runs
    )
    device = f", {best['device_peak_mib']:.0f} MiB on the device" if best["device_peak_mib"] else ""
    facts = [
        f"RTF at concurrency {single['concurrency']}: {single['median_audio_rtf'] / best['median_audio_rtf']:.3f} of "
        "Transformers'.",
        f"audio-s/s at concurrency {last['concurrency']}: {last['audio_throughput'] / best['audio_throughput']:.1f} "
        "times Transformers'.",
        f"Ready in {ours['start_up_s']:.1f} s (Transformers: loaded in {best['load_s']:.1f} s); peak memory "
        f"{ours['peak_mib']:.0f} MiB over all processes (Transformers: {best['peak_mib']:.0f} MiB{device}).",
        f"Transformers, every setting tried: {tried}.",
    ]
    parts = [
        f"# Triptych beside Transformers, checkpoint `{content['model']}`",
        f"Command: `{command}`. One request: about {ours['prompt_tokens']:.0f} prompt tokens, {TEXT_TOKENS} text "
        f"tokens, {FRAMES} codec frames ({SAMPLES / SAMPLE_RATE:.2f} s of speech). Medians over the requests of one "
        "run; throughput over the whole run. Memory is the peak over all processes, shared pages counted once.",
        machine,
        grid(best, ours).markdown(),
        "\n".join(f"- {fact}" for fact in facts),
    ]
    return "\n\n".join(parts) + "\n"
