"""Real stages in this process, joined by edges in memory: what a test steps by hand."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tests.bench_media import MediaPrompt, Part, media_prompt
from triptych.config.sampling import SamplingParams
from triptych.config.schema import ConnectorConfig, DeployConfig, StageConfig, StageKind
from triptych.connectors.contract import Arrays, Handoff
from triptych.connectors.wire import (
    AudioOutput,
    Failed,
    MediaItem,
    SpeechOutput,
    SubmitCodec,
    SubmitSpeech,
    SubmitText,
    TextOutput,
    ToServer,
)
from triptych.models.qwen3_omni.bridge import talker_prompt_token_ids, talker_spans
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.stages.codec_stage import CodecStage
from triptych.stages.contract import Stage, StageContext
from triptych.stages.talker_stage import TalkerStage
from triptych.stages.thinker_stage import ThinkerStage


class MemoryEdge:
    """Sender and receiver of one edge."""

    def __init__(self, source: str, window: int = 64) -> None:
        self.source, self.window = source, window
        self.queue: deque[Handoff] = deque()
        self.seq: dict[str, int] = defaultdict(int)
        self.unread: dict[str, int] = defaultdict(int)
        self.refused: set[str] = set()
        self.closed: set[str] = set()

    def open(self, request_id: str) -> None:
        pass

    def try_put(self, request_id: str, arrays: Arrays, *, final: bool = False) -> bool:
        if self.unread[request_id] >= self.window:
            self.refused.add(request_id)
            return False
        self.unread[request_id] += 1
        seq, self.seq[request_id] = self.seq[request_id], self.seq[request_id] + 1
        self.queue.append(Handoff(request_id=request_id, source=self.source, seq=seq, final=final, arrays=dict(arrays)))
        return True

    def writable(self) -> list[str]:
        names = [name for name in self.refused if self.unread[name] < self.window]
        self.refused -= set(names)
        return names

    def moves(self) -> bool:
        """Whether its target has something to take, or its source has got credit to go on."""
        return bool(self.queue) or any(self.unread[name] < self.window for name in self.refused)

    def receive(self) -> list[Handoff | tuple[str, Exception]]:
        taken: list[Handoff | tuple[str, Exception]] = list(self.queue)
        self.queue.clear()
        return taken

    def release(self, handoff: Handoff) -> None:
        self.unread[handoff.request_id] -= 1

    def close(self, request_id: str) -> None:
        self.closed.add(request_id)


@dataclass
class Reply:
    """Everything one request gave."""

    text: str = ""
    num_tokens: int = 0
    text_reason: str | None = None
    frames: int = 0
    speech_reason: str | None = None
    chunks: list[bytes] = field(default_factory=list)
    done: bool = False
    failure: str | None = None

    @property
    def audio(self) -> NDArray[np.float32]:
        return np.frombuffer(b"".join(self.chunks), dtype=np.float32)


class Bench:
    """The three stages of one checkpoint and the outbox they share.

    `stage` overrides go to every stage config, `talker` and `code2wav` to theirs.
    """

    def __init__(
        self,
        model: Path,
        *,
        async_chunk: bool = True,
        window: int = 64,
        talker: dict[str, Any] | None = None,
        code2wav: dict[str, Any] | None = None,
        **stage: Any,
    ) -> None:
        self.config: OmniConfig = load_config(model)
        self.replies: dict[str, Reply] = defaultdict(Reply)
        self.codes: dict[str, list[NDArray[np.int32]]] = defaultdict(list)
        self.text_edge, self.code_edge = MemoryEdge("thinker", window), MemoryEdge("talker", window)
        edges: tuple[tuple[StageKind, StageKind, MemoryEdge], ...] = (
            ("thinker", "talker", self.text_edge),
            ("talker", "code2wav", self.code_edge),
        )
        common = {"max_model_len": 1024, "devices": "cpu", "dtype": "float32", "kv_cache_bytes": 1 << 24, **stage}
        kinds: tuple[StageKind, ...] = ("thinker", "talker", "code2wav")
        own: dict[StageKind, dict[str, Any] | None] = {"talker": talker, "code2wav": code2wav}
        configs = {
            kind: StageConfig(stage_id=index, stage=kind, process="one", **(common | (own.get(kind) or {})))
            for index, kind in enumerate(kinds)
        }
        deploy = DeployConfig(
            stages=tuple(configs.values()), connectors={"shm": ConnectorConfig()}, async_chunk=async_chunk
        )

        def context(kind: StageKind) -> StageContext:
            return StageContext(
                config=configs[kind],
                deploy=deploy,
                model=str(model),
                outbox=self,
                senders={target: {target: edge} for source, target, edge in edges if source == kind},
                receivers={source: {source: edge} for source, target, edge in edges if target == kind},
                progress=lambda done, total: None,
            )

        self.thinker = ThinkerStage.load(context("thinker"))
        self.talker = TalkerStage.load(context("talker"))
        self.codec = CodecStage.load(context("code2wav"))
        self.stages: tuple[Stage, ...] = (self.thinker, self.talker, self.codec)

    def send(self, message: ToServer, samples: bytes | None = None) -> None:
        if isinstance(message, TextOutput):
            reply = self.replies[message.request_id]
            reply.text += message.text
            reply.num_tokens += message.num_tokens
            reply.text_reason = message.finish_reason
        elif isinstance(message, SpeechOutput):
            reply = self.replies[message.request_id]
            reply.frames, reply.speech_reason = message.num_frames, message.finish_reason
        elif isinstance(message, AudioOutput):
            reply = self.replies[message.request_id]
            assert samples is not None
            reply.chunks.append(samples)
            reply.done = message.final
        elif isinstance(message, Failed):
            self.replies[message.request_id].failure = message.message

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        *,
        media: Sequence[MediaItem] = (),
        speak: bool = True,
        thinker: SamplingParams | None = None,
        talker: SamplingParams | None = None,
        credit: int = 10_000,
    ) -> None:
        text = thinker or SamplingParams(temperature=0.0, max_tokens=12, seed=0)
        self.replies[request_id] = Reply()
        if speak:
            assert self.config.talker is not None
            self.codec.submit(SubmitCodec(request_id=request_id, credit=credit))
            self.talker.submit(
                SubmitSpeech(
                    request_id=request_id,
                    prompt_token_ids=talker_prompt_token_ids(prompt, self.config),
                    speaker_id=next(iter(self.config.talker.speaker_id.values())),
                    params=talker or SamplingParams(temperature=0.0, max_tokens=20, seed=0, repetition_penalty=1.05),
                    media=tuple(
                        msgspec.structs.replace(media[span.part], start=span.start, end=span.end, features=None)
                        for span in talker_spans(prompt, media, self.config)
                    ),
                )
            )
        self.thinker.submit(
            SubmitText(
                request_id=request_id, prompt_token_ids=tuple(prompt), params=text, speak=speak, media=tuple(media)
            )
        )

    def run(self, only: tuple[Stage, ...] | None = None, max_steps: int = 20_000) -> None:
        """Step the stages in turn until none has work."""
        for _ in range(max_steps):
            busy = False
            for stage in only or self.stages:
                stage.poll_inputs()
                if stage.has_work():
                    stage.step()
                    busy = True
            if not busy and not any(edge.moves() for edge in (self.text_edge, self.code_edge) if only is None):
                return
        raise AssertionError("the stages did not come to rest")

    def prompt(self, *words: int, turns: int = 1) -> list[int]:
        """A chat of `turns` user turns of `words`, ending with the assistant's header."""
        config = self.config
        newline = self.thinker.tokenizer.encode("\n", add_special_tokens=False).ids
        end = [config.im_end_token_id, *newline]
        ids: list[int] = []
        for _ in range(turns):
            ids += [config.im_start_token_id, config.user_token_id, *newline, *words, *end]
        return [*ids, config.im_start_token_id, config.assistant_token_id, *newline]

    def media_prompt(self, *parts: Part) -> MediaPrompt:
        """A chat of one user turn with these parts, numbers being tokens of text."""
        return self.media_chat((self.config.user_token_id, parts))

    def media_chat(self, *turns: tuple[int, Sequence[Part]]) -> MediaPrompt:
        newline = self.thinker.tokenizer.encode("\n", add_special_tokens=False).ids
        return media_prompt(self.config, newline, *turns)
