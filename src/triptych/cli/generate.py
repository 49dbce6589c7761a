"""`triptych generate`: one prompt through the pipeline, without a server."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych import log
from triptych.cli.options import (
    DeployConfigPath,
    LogLevel,
    LogLevelOption,
    Model,
    PlatformName,
    PlatformOption,
    StageOverrides,
    check_writable,
    stoppable,
)
from triptych.errors import ConfigError, RequestError, TriptychError

URLS = ("http:", "https:", "data:", "file:")


def command(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="What the user says; may be left out beside media.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture: a path or URL; may be given again.")] = None,
    audio: Annotated[list[str] | None, typer.Option(help="A clip of sound, likewise.")] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(help="A video, likewise. Images come first, then clips, videos, and the prompt last."),
    ] = None,
    use_audio_in_video: Annotated[
        bool, typer.Option("--use-audio-in-video", help="Hear the sound of videos, too.")
    ] = False,
    fps: Annotated[float | None, typer.Option(help="Frames a second to look at of videos.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    modalities: Annotated[
        str | None, typer.Option(help="text, or text,audio. Default: audio if --out is given.")
    ] = None,
    voice: Annotated[str | None, typer.Option(help="A voice of the model. Default: its first one.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same bytes.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of text.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the text; the speech keeps its own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the speech here, as a WAV file.", dir_okay=False)] = None,
    deploy_config: DeployConfigPath = None,
    stage_overrides: StageOverrides = None,
    platform: PlatformOption = None,
    log_level: LogLevelOption = LogLevel.warning,
) -> None:
    """Answer one prompt, with pictures, sound and videos: text on stdout, speech into a file, numbers on stderr."""
    wanted = [name.strip() for name in (modalities or ("text,audio" if out else "text")).split(",")]
    if not set(wanted) <= {"text", "audio"}:
        raise ConfigError(f"--modalities {modalities!r} must be text, or text,audio")
    if "audio" in wanted and out is None:
        raise ConfigError("speech needs a file to go to: give --out answer.wav, or --modalities text")
    if out is not None and "audio" not in wanted:
        raise ConfigError(f"--out takes speech, but --modalities is {modalities!r}; add audio, or leave --out out")
    if voice is not None and out is None:
        raise ConfigError("--voice is for speech; give --out answer.wav as well")
    if out is not None:
        if out.suffix.lower() not in (".wav", ""):
            raise ConfigError(f"--out {str(out)!r}: speech is written as WAV; give a name that ends in .wav")
        check_writable(out)
    from triptych.config.sampling import sampling_params
    from triptych.pipeline.media import media_options

    media = {"image": image or [], "audio": audio or [], "video": video or []}
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": _content(prompt, media)})
    kwargs = _processor_kwargs(use_audio_in_video, fps, media)
    media_options(kwargs)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    thinker = {name: value for name, value in given.items() if value is not None}
    try:  # before minutes of loading
        sampling_params(thinker | ({} if seed is None else {"seed": seed}), "thinker")
    except ConfigError as error:
        option = (error.path or "").rpartition(".")[2].replace("_", "-")
        raise ConfigError(error.reason, f"--{option}") from error
    log.configure(log_level.value)
    options = {"modalities": wanted, "voice": voice, "seed": seed, "thinker": thinker, "mm_processor_kwargs": kwargs}
    with stoppable():
        _run(model, messages, options, out, deploy_config, stage_overrides, platform, log_level)


def _content(prompt: str | None, media: dict[str, list[str]]) -> str | list[dict[str, str]]:
    """What the user shows, plays and says, in this order. Files are looked for before minutes of loading."""
    parts = [{"type": kind, kind: name} for kind, names in media.items() for name in names]
    if prompt is None and not parts:
        raise ConfigError("nothing to answer: give --prompt, --image, --audio or --video")
    for kind, names in media.items():
        for name in names:
            if not name.startswith(URLS) and not Path(name).expanduser().is_file():
                raise ConfigError(f"--{kind} {name!r} is not a file")
    if not parts:
        return prompt or ""
    return [*parts, {"type": "text", "text": prompt}] if prompt is not None else parts


def _named(error: TriptychError, content: str | list[dict[str, str]]) -> TriptychError:
    """The error of a request, with the file that it is about in front."""
    place = re.search(r"content\[(\d+)\]$", getattr(error, "param", None) or "")
    if place is None or isinstance(content, str) or int(place[1]) >= len(content):
        return error
    part = content[int(place[1])]
    return RequestError(f"--{part['type']} {part.get(part['type'], '')!r}: {error}")


def _processor_kwargs(use_audio_in_video: bool, fps: float | None, media: dict[str, list[str]]) -> dict[str, Any]:
    for flag, given in (("--use-audio-in-video", use_audio_in_video), ("--fps", fps is not None)):
        if given and not media["video"]:
            raise ConfigError(f"{flag} is for videos; give --video as well")
    kwargs: dict[str, Any] = {"use_audio_in_video": True} if use_audio_in_video else {}
    return kwargs if fps is None else kwargs | {"fps": fps}


def _run(
    model: str,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    out: Path | None,
    deploy_config: str | None,
    stage_overrides: str | None,
    platform: PlatformName | None,
    log_level: LogLevel,
) -> None:
    from triptych.cli.progress import LoadDisplay
    from triptych.config.load import parse_stage_overrides
    from triptych.pipeline.omni import Omni
    from triptych.server.audio import make_encoder

    started = time.monotonic()
    with LoadDisplay() as display:
        omni = Omni(
            model,
            deploy_config=deploy_config,
            platform=platform.value if platform else None,
            stage_overrides=parse_stage_overrides(stage_overrides) if stage_overrides is not None else None,
            text_only="audio" not in options["modalities"],
            log_level=log_level.value,
            on_progress=display,
        )
    with omni:
        loaded = time.monotonic()
        [output] = omni.generate([messages], **options)
        took = time.monotonic() - loaded
    if output.error is not None:
        raise _named(output.error, messages[-1]["content"])
    typer.echo(output.text)
    summary = f"{output.text_tokens} tokens, finish_reason {output.finish_reason}"
    if out is not None and output.audio is not None:
        encoder = make_encoder("wav", streaming=False, sample_rate=output.sample_rate)
        try:
            out.write_bytes(encoder.encode(output.audio) + encoder.finish())
        except OSError as error:
            raise TriptychError(f"{out} cannot be written: {error.strerror or error}") from error
        summary += f", {output.audio.size / output.sample_rate:.2f} s of speech in {out}"
    typer.echo(f"loaded in {loaded - started:.1f} s, answered in {took:.2f} s: {summary}", err=True)
