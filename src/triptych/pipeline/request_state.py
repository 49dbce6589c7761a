"""How far one request has come, told from the messages of its stages. Plain values: no clock, no socket."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.config.schema import StageKind
from triptych.connectors.wire import AudioOutput, SpeechOutput, TextOutput
from triptych.errors import StageError
from triptych.pipeline.request import AudioDelta, Done, GenerationRequest, TextDelta


@dataclass(slots=True, kw_only=True)
class RequestState:
    """A request is finished when the Thinker gave its finish reason and, if it speaks, the Talker gave its own and
    Code2Wav sent its final chunk. The three come from different processes, so in any order.

    Every output is checked against what must come next; one that is missing or doubled raises StageError.
    """

    request: GenerationRequest
    stages: tuple[StageKind, ...]
    credit: int  # audio chunks that Code2Wav may still send
    text_seq: int = 0
    text_tokens: int = 0
    cached_tokens: int = 0
    text_reason: str | None = None
    speech_frames: int = 0
    speech_reason: str | None = None
    audio_seq: int = 0
    audio_frames: int = 0
    audio_final: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def on_text(self, output: TextOutput) -> TextDelta:
        if self.text_reason is not None or output.seq != self.text_seq:
            raise self._out_of_order("thinker", "text", output.seq, self.text_seq, self.text_reason is not None)
        self.text_seq += 1
        self.text_tokens += output.num_tokens
        self.cached_tokens = output.num_cached_tokens
        self.text_reason = output.finish_reason
        return TextDelta(
            text=output.text,
            num_tokens=output.num_tokens,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
        )

    def on_speech(self, output: SpeechOutput) -> None:
        if self.speech_reason is not None:
            raise self._error("talker", "ended its speech twice")
        self.speech_frames = output.num_frames
        self.speech_reason = output.finish_reason
        self._check_frames()

    def on_audio(self, output: AudioOutput, samples: bytes) -> AudioDelta:
        if self.audio_final or output.seq != self.audio_seq:
            raise self._out_of_order("code2wav", "audio", output.seq, self.audio_seq, self.audio_final)
        if self.credit == 0:
            raise self._error("code2wav", f"sent audio chunk {output.seq} without credit")
        self.credit -= 1
        self.audio_seq += 1
        self.audio_frames += output.num_frames
        self.audio_final = output.final
        self._check_frames()
        return AudioDelta(samples=samples, num_frames=output.num_frames, final=output.final)

    def done(self) -> Done | None:
        """The last event, once nothing is missing any more."""
        if self.waits_for() is not None:
            return None
        return self.terminal("length" if "length" in (self.text_reason, self.speech_reason) else "stop")

    def terminal(self, finish_reason: str) -> Done:
        return Done(
            finish_reason=finish_reason,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            text_tokens=self.text_tokens,
            audio_frames=self.audio_frames,
            media_tokens=self.request.media_tokens,
        )

    def waits_for(self) -> StageKind | None:
        """The first stage that has not given all it owes; None when the request is finished."""
        if self.text_reason is None:
            return "thinker"
        if not self.request.speaks:
            return None
        if self.speech_reason is None:
            return "talker"
        return None if self.audio_final else "code2wav"

    def needs(self, kind: StageKind) -> bool:
        """Whether the request is lost when that stage dies now.

        A stage may owe its consumer a handoff after it has given the server everything, so it is needed until the
        consumer has given the server everything too.
        """
        if kind not in self.stages:
            return False
        if kind == "thinker":
            return self.text_reason is None or (self.request.speaks and self.speech_reason is None)
        return not self.audio_final or (kind == "talker" and self.speech_reason is None)

    def num_tokens(self, kind: StageKind) -> int:
        """What the stage has made as far as it has said: text tokens, or codec frames."""
        return {"thinker": self.text_tokens, "talker": self.speech_frames, "code2wav": self.audio_frames}[kind]

    def progress(self) -> str:
        """For the message of an error: what came so far."""
        text = f"{self.text_tokens} text tokens"
        if not self.request.speaks:
            return text
        stalled = ", which the client is not taking" if self.credit == 0 else ""
        return f"{text} and {self.audio_frames} frames of audio{stalled}"

    def _check_frames(self) -> None:
        """All the frames that the Talker made are in the audio: speech is never cut in silence."""
        if self.audio_final and self.speech_reason is not None and self.audio_frames != self.speech_frames:
            raise self._error("code2wav", f"decoded {self.audio_frames} of {self.speech_frames} frames")

    def _out_of_order(self, kind: StageKind, what: str, seq: int, expected: int, ended: bool) -> StageError:
        if ended:
            return self._error(kind, f"sent {what} {seq} after its last one")
        return self._error(kind, f"sent {what} {seq} where {expected} was next")

    def _error(self, kind: StageKind, message: str) -> StageError:
        return StageError(f"stage {kind} {message}", kind, self.request_id)
