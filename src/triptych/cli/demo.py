"""`triptych demo`: serve a model, talk to it as any OpenAI client would, keep what it says, stop."""

from __future__ import annotations

import asyncio
import base64
import time
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych import log
from triptych.cli.options import (
    DeployConfigPath,
    LogLevel,
    LogLevelOption,
    Model,
    PlatformOption,
    StageOverrides,
    check_devices,
    check_writable,
    make_plan,
    stoppable,
)
from triptych.errors import ConfigError, TriptychError

if TYPE_CHECKING:
    from triptych.pipeline.launch import LaunchPlan

DEADLINE_S = 600
DEFAULT_PROMPT = "Water damaged my kitchen, please call on Friday."


def command(
    model: Model = "tiny",
    prompt: Annotated[str, typer.Option(help="What the user says.")] = DEFAULT_PROMPT,
    out: Annotated[Path, typer.Option(help="Where the speech goes, as it comes.", dir_okay=False)] = Path("demo.wav"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 7,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of text.", min=1)] = 64,
    deploy_config: DeployConfigPath = None,
    stage_overrides: StageOverrides = None,
    platform: PlatformOption = None,
    log_level: LogLevelOption = LogLevel.warning,
) -> None:
    """Serve MODEL, stream one spoken answer through the openai client into a WAV file, print what was measured."""
    from triptych.models.registry import SYNTHETIC

    log.configure(log_level.value)
    check_writable(out)
    with stoppable():
        plan = make_plan(model, deploy_config, platform, stage_overrides)
        if plan.config.default_speaker is None or plan.deploy.stage("code2wav") is None:
            raise ConfigError(f"{model} has no speech stages; try triptych generate {model} --prompt ...")
        check_devices(plan.deploy)
        typer.echo(f"starting {model} with {plan.profile}", err=True)
        answer = asyncio.run(_demo(plan, prompt, out, seed, max_tokens, log_level.value))
    typer.echo(f"user       {prompt}")
    typer.echo(f"assistant  {answer.transcript}")
    typer.echo(f"speech     {answer.audio_s:.2f} s in {out}")
    typer.echo(f"TTFT       {answer.ttft_s * 1000:.0f} ms   first text")
    typer.echo(f"TTFP       {answer.ttfp_s * 1000:.0f} ms   first audio")
    typer.echo(f"RTF        {answer.last_audio_s / answer.audio_s:.2f}      below 1: faster than it plays")
    if model in SYNTHETIC:
        typer.echo(f"({model} has random weights: its words mean nothing and its voice is noise)")


@dataclass(slots=True)
class _Answer:
    """Times are seconds since the request was sent."""

    transcript: str = ""
    ttft_s: float = 0.0
    ttfp_s: float = 0.0
    last_audio_s: float = 0.0
    audio_s: float = 0.0


async def _demo(plan: LaunchPlan, prompt: str, out: Path, seed: int, max_tokens: int, log_level: str) -> _Answer:
    started = time.monotonic()  # what the imports take counts
    from triptych.cli.progress import LoadDisplay
    from triptych.server.listener import bind, url_of
    from triptych.server.serving import serving

    with bind("127.0.0.1", 0) as listener, LoadDisplay() as display:
        async with serving(
            plan,
            listener,
            model_names=[plan.name],
            api_key=None,
            log_level=log_level,
            on_progress=display,
            warm=False,
        ):
            typer.echo(f"ready in {time.monotonic() - started:.1f} s at {url_of(listener)}", err=True)
            return await _ask(plan, f"{url_of(listener)}/v1", prompt, out, seed, max_tokens)


async def _ask(plan: LaunchPlan, base_url: str, prompt: str, out: Path, seed: int, max_tokens: int) -> _Answer:
    import openai

    answer = _Answer()
    request: dict[str, Any] = {
        "model": plan.name,
        "messages": [{"role": "user", "content": prompt}],
        "modalities": ["text", "audio"],
        "audio": {"voice": plan.config.default_speaker, "format": "pcm16"},
        "max_tokens": max_tokens,
        "seed": seed,
        "stream": True,
    }
    try:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            with out.open("wb") as raw, wave.open(raw, "wb") as file:
                file.setparams((1, 2, plan.config.sample_rate, 0, "NONE", ""))
                started = time.monotonic()
                async with await client.chat.completions.create(**request) as stream:
                    async for chunk in stream:
                        for choice in chunk.choices:
                            _take(choice.delta.to_dict(), answer, file, time.monotonic() - started)
                answer.audio_s = file.tell() / plan.config.sample_rate
    except openai.OpenAIError as error:
        raise TriptychError(f"the request failed: {error}") from error
    except OSError as error:
        raise TriptychError(f"{out} cannot be written: {error.strerror or error}") from error
    if not answer.audio_s:
        raise TriptychError("the model ended its speech before it began; try another --prompt or --seed")
    return answer


def _take(delta: dict[str, Any], answer: _Answer, file: wave.Wave_write, now: float) -> None:
    """One delta of the stream, as plain values: older clients have no type for `audio`."""
    audio = delta.get("audio") or {}
    if text := audio.get("transcript"):
        answer.transcript += text
    if (text or delta.get("content")) and not answer.ttft_s:
        answer.ttft_s = now
    if data := audio.get("data"):
        file.writeframes(base64.b64decode(data))
        answer.last_audio_s = now
        answer.ttfp_s = answer.ttfp_s or now
