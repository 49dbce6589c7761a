"""The pipeline as a Python object: `Omni(model).generate(prompts)`, no server in between."""

from __future__ import annotations

import asyncio
import dataclasses
import operator
import threading
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.config.json_value import shown
from triptych.config.platform import Platform
from triptych.config.sampling import SEEDS
from triptych.errors import ConfigError, RequestError, TriptychError
from triptych.log import LEVELS
from triptych.media.contract import MediaOptions, MediaPart
from triptych.media.loader import Loader
from triptych.pipeline.conversation import Message, Prompt, read_prompt
from triptych.pipeline.launch import load_processor, make_loader, plan
from triptych.pipeline.media import load_media, media_options
from triptych.pipeline.orchestrator import Orchestrator
from triptych.pipeline.prepare import check_request, context_length, prepare
from triptych.pipeline.request import AudioDelta, Done, GenerationRequest, MediaTokens, TextDelta
from triptych.pipeline.supervisor import Progress

MODALITIES = ("text", "audio")
TIDY_S = 10  # an orchestrator that is interrupted stops its processes within 5 s
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniOutput:
    """What one prompt gave. With `error` set, the rest is what had come until then.

    `text` is the reply (and the transcript of `audio`); `audio` is float32 [num_samples] in [-1, 1], mono, or None when
    it was not asked for; `finish_reason` is "stop", or "length" when text or speech hit a limit. `cached_tokens` and
    `media_tokens` are those of the prompt that the prefix cache held, and that stand for images, sound and video.
    """

    text: str = ""
    audio: NDArray[np.float32] | None = None
    sample_rate: int = 24000
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    media_tokens: MediaTokens = field(default_factory=MediaTokens)
    text_tokens: int = 0
    audio_frames: int = 0
    error: TriptychError | None = None


class Omni:
    """A model, loaded and ready. Use it as a context manager, or call `close`.

    `model` is a checkpoint folder, a Hugging Face repository, or "tiny", "nano", "bench", "mini". The other arguments
    are those of `triptych serve`; `log_level` is that of the stage processes, while this process keeps its own logging.
    Raises ConfigError, CheckpointError or StageError when the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        deploy_config: str | Path | None = None,
        platform: Platform | None = None,
        stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
        text_only: bool = False,
        log_level: str = "warning",
        on_progress: Progress | None = None,
    ) -> None:
        if log_level not in LEVELS:
            raise ConfigError(f"{log_level!r} is not one of {', '.join(LEVELS)}", "log_level")
        self._plan = plan(
            str(model),
            deploy_config=deploy_config,
            platform=platform,
            stage_overrides=stage_overrides,
            text_only=text_only,
        )
        self._processor = load_processor(self._plan)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="triptych", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._orchestrator, self._loader = self._wait(self._start(log_level, on_progress))
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[Message]],
        *,
        modalities: Sequence[str] = ("text",),
        voice: str | None = None,
        seed: int | Sequence[int] | None = None,
        thinker: Mapping[str, Any] | None = None,
        talker: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[OmniOutput]:
        """Run all prompts at once; one output each, in their order.

        A prompt is a string or a conversation: a list of messages as in the chat API, or with parts such as `{"type":
        "image", "image": x}`, x a path, a URL, bytes, an image of Pillow; for "audio" also `(array, rate)`. `seed` is
        one for all or one for each; the same seed gives the same bytes, alone or among others. `thinker` and `talker`
        are sampling parameters over the deploy config's defaults. `mm_processor_kwargs` say how media is read, as in
        the chat API: `{"use_audio_in_video": True, "fps": 1}`.

        A prompt given as a single string raises its error. In a list, a prompt that fails does so alone: its output
        carries `error`, and the others are unaffected. Arguments that are wrong for all raise RequestError.
        """
        if self._closed:
            raise TriptychError("this Omni is closed")
        batch = _batch(prompts)
        listed = isinstance(modalities, Iterable) and not isinstance(modalities, str)
        if not listed or not modalities or any(name not in MODALITIES for name in modalities):
            raise RequestError(
                f"modalities {modalities!r} is not a list of names out of {list(MODALITIES)}", param="modalities"
            )
        if "audio" not in modalities:
            for name, value in (("voice", voice), ("talker", talker)):
                if value is not None:
                    raise RequestError(f"{name} is given, but modalities does not ask for audio", param=name)
        if voice is not None and not isinstance(voice, str):
            raise RequestError(f"{voice!r} is not the name of a voice", param="voice")
        for name, value in (("thinker", thinker), ("talker", talker), ("mm_processor_kwargs", mm_processor_kwargs)):
            if value is not None and not isinstance(value, Mapping):
                raise RequestError(f"{value!r} is not a mapping of parameters", param=name)
        reading = media_options(mm_processor_kwargs or {})
        seeds = _seeds(seed, len(batch))
        options = {"speak": "audio" in modalities, "voice": voice, "thinker": thinker or {}, "talker": talker or {}}
        outputs = self._wait(self._generate_all(batch, seeds, options, reading))
        if isinstance(prompts, str) and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def close(self) -> None:
        """Stop the stage processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._wait(self._stop())
        finally:
            self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _start(self, log_level: str, on_progress: Progress | None) -> tuple[Orchestrator, Loader]:
        loader = make_loader(self._plan, patient=True)
        try:
            orchestrator = await Orchestrator.start(
                deploy=self._plan.deploy,
                model=str(self._plan.model_dir),
                config=self._plan.config,
                log_level=log_level,
                on_progress=on_progress,
            )
        except BaseException:
            await loader.close()
            raise
        return orchestrator, loader

    async def _stop(self) -> None:
        try:
            await self._orchestrator.close()
        finally:
            await self._loader.close()

    async def _generate_all(
        self,
        batch: Sequence[Prompt],
        seeds: Sequence[int | None],
        options: Mapping[str, Any],
        reading: MediaOptions,
    ) -> list[OmniOutput]:
        thinker = self._plan.deploy.stages[0]
        room = asyncio.Semaphore(thinker.max_num_seqs * thinker.num_replicas)  # never more than the pipeline admits

        async def one(prompt: Prompt, seed: int | None) -> OmniOutput:
            async with room:
                return await self._generate(prompt, {**options, "seed": seed}, reading)

        return list(await asyncio.gather(*(one(prompt, seed) for prompt, seed in zip(batch, seeds, strict=True))))

    async def _generate(self, prompt: Prompt, options: Mapping[str, Any], reading: MediaOptions) -> OmniOutput:
        collected = _Collected(self._plan.config.sample_rate, speaks=options["speak"])
        try:
            arrival = self._loop.time()
            messages, parts = await asyncio.to_thread(read_prompt, prompt, self._plan.deploy.media.max_bytes)
            asked: dict[str, Any] = {
                "processor": self._processor,
                "config": self._plan.config,
                "deploy": self._plan.deploy,
                "messages": messages,
                **options,
            }
            request = await self._prepare(asked, parts, reading, arrival)
            await collected.run(self._orchestrator, request)
        except TriptychError as error:
            return collected.output(error)
        return collected.output(None)

    async def _prepare(
        self, asked: Mapping[str, Any], parts: list[MediaPart], reading: MediaOptions, arrival: float
    ) -> GenerationRequest:
        request_id = f"omni-{uuid.uuid4().hex}"
        if not parts:
            return prepare(**asked, request_id=request_id)
        check_request(**asked)  # what can be refused without the media is
        lease = await load_media(
            self._loader,
            parts,
            reading,
            max_rows=context_length(self._plan.config, self._plan.deploy),
            arrival=arrival,
            timeout_s=self._plan.deploy.request_timeout_s,
        )
        parts.clear()  # what they hold may be large
        try:
            request = prepare(**asked, request_id=request_id, media=lease.items, lease=lease)
        except BaseException:
            lease.close()
            raise
        return dataclasses.replace(request, arrival=arrival)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run in the loop's thread. Interrupted, the work is cancelled and may tidy up before the loop is stopped."""
        finished = threading.Event()

        async def run() -> _Result:
            try:
                return await work
            finally:
                finished.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            finished.wait(TIDY_S)
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _batch(prompts: Any) -> list[Prompt]:
    """A list of prompts out of one or several. Raises RequestError on anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"{type(prompts).__name__} is not a string, nor a list of strings or conversations", param="prompts"
        )
    batch = list(prompts)
    if any(isinstance(prompt, Mapping) for prompt in batch):
        raise RequestError("one conversation is a list in a list: generate([messages])", param="prompts")
    return batch


def _seeds(seed: Any, count: int) -> list[int | None]:
    """One seed for each prompt. NumPy's integers are as good as Python's. Raises RequestError."""
    given = list(seed) if isinstance(seed, Iterable) and not isinstance(seed, str | bytes) else [seed] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} seeds for {count} prompts; give one, or one for each", param="seed")
    for value in given:
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise RequestError(f"{value!r} is not a whole number", param="seed")
    seeds = [None if value is None else operator.index(value) for value in given]
    for value in seeds:
        if value is not None and value not in SEEDS:
            raise RequestError(f"seed {shown(value)} does not fit 64 bits", param="seed")
    return seeds


class _Collected:
    """The events of one request, put together."""

    def __init__(self, sample_rate: int, *, speaks: bool) -> None:
        self._sample_rate = sample_rate
        self._speaks = speaks
        self._text: list[str] = []
        self._samples: list[bytes] = []
        self._done: Done | None = None

    async def run(self, orchestrator: Orchestrator, request: GenerationRequest) -> None:
        try:
            stream = orchestrator.submit(request)
        except BaseException:
            if request.lease is not None:
                request.lease.close()
            raise
        async with stream as events:
            async for event in events:
                match event:
                    case TextDelta():
                        self._text.append(event.text)
                    case AudioDelta():
                        self._samples.append(event.samples)
                    case Done():
                        self._done = event

    def output(self, error: TriptychError | None) -> OmniOutput:
        done = self._done
        return OmniOutput(
            text="".join(self._text),
            audio=np.frombuffer(b"".join(self._samples), dtype="<f4") if self._speaks else None,
            sample_rate=self._sample_rate,
            finish_reason=done.finish_reason if done else None,
            prompt_tokens=done.prompt_tokens if done else 0,
            cached_tokens=done.cached_tokens if done else 0,
            media_tokens=done.media_tokens if done else MediaTokens(),
            text_tokens=done.text_tokens if done else 0,
            audio_frames=done.audio_frames if done else 0,
            error=error,
        )
