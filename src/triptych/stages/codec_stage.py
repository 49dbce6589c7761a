"""The Code2Wav stage: codec frames in, chunks of audio out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.config.schema import SchedulingPolicy, StageKind
from triptych.connectors.contract import Handoff
from triptych.connectors.wire import AudioOutput, Failed, Grant, StageStats, SubmitCodec
from triptych.errors import CheckpointError, ConfigError
from triptych.layers.recording import Recorder
from triptych.models.qwen3_omni.code2wav import Code2Wav
from triptych.models.qwen3_omni.config import load_config
from triptych.stages.arrivals import Arrivals
from triptych.stages.cadence import Cadence, deployed_cadence
from triptych.stages.codec_stream import Chunk, CodecFault, Codes, Stream
from triptych.stages.contract import Outbox, StageContext, Submit
from triptych.stages.loading import computes_with, load_model, stage_device, stage_dtype, stage_recorder
from triptych.stages.playout_clock import START_WAIT_S, PlayoutClock
from triptych.stages.recorded_vocoder import RecordedVocoder
from triptych.stages.vocoder_work import VocoderWork
from triptych.streaming.state import StreamState
from triptych.telemetry.stage_counts import StageCounts
from triptych.telemetry.stage_times import StageTimes

logger = logging.getLogger(__name__)

# The compiled vocoder takes one stream after the other: more in a call would save little, and others wait for it.
STEP_FRAMES = 32


class CodecStage:
    """Decodes the streams of up to `max_num_seqs` requests; others wait for a slot.

    A stream takes one when its first chunk can be decoded, in order of arrival where several can. One that has nothing
    to decode holds none: the Talker may start requests in another order than they came, and those that it has started
    keep their places there until this stage has taken their frames.

    A step decodes the chunk of the stream whose audio runs out first; a stream that has none in hand is due
    `START_WAIT_S` after its first chunk could be decoded. What is due stays so while it waits, and a stream that is
    served is due again only when that audio has played: so none starves, and after those `START_WAIT_S` a new stream
    waits for at most one chunk of each other. With the policy "fcfs", the chunk that was ready first is decoded
    first. `max_batch` > 1 lets chunks of one kind share a call:
    faster (twice for 4 frames, 1.15 times for 25 on one CPU core), but matrix products round differently with the
    number of rows, so a stream's samples then depend on its company. Up to then they depend on its frames only. With
    the compiled vocoder they always do; of its chunks at most as many as have `STEP_FRAMES` share a call.

    A request without credit is not decoded, and its handoffs are not released once two full chunks are buffered: the
    connector's window then holds the sender back.
    """

    kind: StageKind = "code2wav"

    def __init__(
        self,
        *,
        model: Code2Wav,
        arrivals: Arrivals,
        outbox: Outbox,
        cadence: Cadence,
        max_num_seqs: int,
        max_batch: int = 1,
        recorder: Recorder | None = None,
        policy: SchedulingPolicy = "slack",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._arrivals = arrivals
        self._outbox = outbox
        self._cadence = cadence
        self._max_batch = max_batch
        self._order = _due_at if policy == "slack" else _ready_at
        self._clock = clock
        self._device = model.norm.device
        self._state = StreamState(
            model, max_num_seqs, device=self._device, dtype=model.norm.dtype, recorded=recorder is not None
        )
        self._recorded: RecordedVocoder | None = None
        if recorder is not None:
            self._recorded = RecordedVocoder(model, self._state, cadence, recorder, max_batch=max_batch)
        self._free_slots = list(range(max_num_seqs))
        self._streams: dict[str, Stream] = {}
        self._waiting: deque[Stream] = deque()
        self._counts = StageCounts()
        self._work = lru_cache(256)(VocoderWork(model.config, element_bytes=model.norm.itemsize))

    @classmethod
    def load(cls, context: StageContext) -> CodecStage:
        """Raises CheckpointError where the checkpoint has no vocoder, ConfigError where the stage has no input."""
        config = load_config(context.model)
        if config.code2wav is None:
            raise CheckpointError(f"{context.model} has no code2wav_config: it cannot speak")
        if "talker" not in context.receivers:
            raise ConfigError("code2wav needs a talker to get codec frames from; add one", "stages")
        device, dtype = stage_device(context.config), stage_dtype(context.config, config)
        if device.type == "cpu" and dtype != torch.float32:
            # Few channels and long sequences: on CPU half precision costs quality here and saves no time.
            logger.info("code2wav computes in float32 on CPU, not in %s", dtype)
            dtype = torch.float32
        vocoder = config.code2wav
        model = load_model(context, lambda: Code2Wav(vocoder), device, dtype)
        recorder = stage_recorder(context.config, device, dtype)
        model.prepare(eager=context.config.enforce_eager or recorder is not None)
        return cls(
            model=model,
            recorder=recorder,
            arrivals=Arrivals(context.receivers["talker"]),
            outbox=context.outbox,
            cadence=deployed_cadence(context.deploy),
            max_num_seqs=context.config.max_num_seqs,
            max_batch=1 if context.config.batch_invariant and model.compiled is None else context.config.max_num_seqs,
            policy=context.config.scheduling_policy,
        )

    def submit(self, message: Submit) -> None:
        """Expect the frames of a request. One that is here already is failed: its two halves would mix."""
        if not isinstance(message, SubmitCodec):
            raise TypeError(f"code2wav takes SubmitCodec, not {type(message).__name__}")
        request_id = message.request_id
        if request_id in self._streams:
            self._fail(request_id, "the request was submitted twice")
            return
        stream = Stream(request_id=request_id, credit=message.credit, playout=PlayoutClock(self._cadence))
        self._streams[request_id] = stream
        self._waiting.append(stream)
        self._arrivals.open(request_id, message.route.talker)

    def grant(self, message: Grant) -> None:
        stream = self._streams.get(message.request_id)
        if stream is not None:  # else it has ended while the grant was on its way
            stream.credit += message.count

    def abort(self, request_id: str) -> StageTimes | None:
        stream = self._streams.get(request_id)
        if stream is None:  # frames of a request that was refused may be on their way
            self._arrivals.close(request_id)
            return None
        self._free(stream)
        self._counts.aborted += 1
        return stream.times(self._clock())

    def poll_inputs(self) -> None:
        for item in self._arrivals.receive():
            if isinstance(item, tuple):
                request_id, error = item
                self._fail(request_id, str(error))
            elif item.request_id in self._streams:
                stream = self._streams[item.request_id]
                stream.handoffs.append(item)
                self._absorb(stream)
            else:  # freed while the handoff was on its way
                self._arrivals.release(item)

    def has_work(self) -> bool:
        return any(True for _ in self._ready())

    @torch.inference_mode()
    def step(self) -> None:
        """Decode and send one chunk, or one batch of chunks of the same kind."""
        started = self._clock()
        ready = sorted(self._ready(), key=self._order)
        if not ready:
            return
        batch = [chunk for chunk in ready if chunk.kind == ready[0].kind][: self._most(ready[0].num_frames)]
        for chunk in batch:
            if not chunk.stream.num_chunks:
                self._begin(chunk.stream, started)
        if ready[0].num_frames == 0:
            for chunk in batch:
                self._emit(chunk, np.empty(0, dtype="<f4"))
        else:
            for chunk, samples in zip(batch, self._decode(batch), strict=True):
                self._emit(chunk, samples)
        self._counts.step_time_s.observe(self._clock() - started)
        self._counts.batch_size.observe(len(batch))
        self._counts.step_tokens.observe(sum(chunk.num_frames for chunk in batch))

    def stats(self) -> StageStats:
        running = [stream for stream in self._streams.values() if stream.slot is not None]
        return StageStats(
            stage=self.kind,
            running=len(running),
            waiting=len(self._waiting),
            parked=sum(stream.credit == 0 and self._next_chunk(stream) is not None for stream in running),
            **computes_with(self._device, self._model.norm.dtype),
            counts=self._counts,
        )

    def close(self) -> None:
        for stream in list(self._streams.values()):
            self._free(stream)

    def _ready(self) -> Iterator[Chunk]:
        for stream in self._streams.values():
            if stream.ready_at is not None and stream.slot is not None and stream.credit > 0:
                chunk = self._next_chunk(stream)
                assert chunk is not None
                yield chunk

    def _next_chunk(self, stream: Stream) -> Chunk | None:
        size = self._cadence.size(stream.num_decoded)
        if stream.num_buffered >= size:
            return Chunk(stream, size, final=stream.ended and stream.num_buffered == size)
        return Chunk(stream, stream.num_buffered, final=True) if stream.ended else None

    def _most(self, num_frames: int) -> int:
        """How many chunks of `num_frames` may share a call."""
        if self._model.compiled is None:
            return self._max_batch
        return min(self._max_batch, max(1, STEP_FRAMES // max(1, num_frames)))

    def _begin(self, stream: Stream, now: float) -> None:
        assert stream.ready_at is not None
        stream.started_at = now
        self._counts.queue_wait_s.observe(now - stream.ready_at)

    def _absorb(self, stream: Stream) -> None:
        """Copy frames out of handoffs and release these, until two full chunks are buffered.

        A chunk can need more handoffs than the connector's window holds, so waiting for a whole chunk before the first
        release would wait for ever.
        """
        while stream.handoffs and stream.num_buffered < 2 * self._cadence.full:
            handoff = stream.handoffs[0]
            try:
                codes = self._codes(stream, handoff)
            except CodecFault as fault:
                self._fail(stream.request_id, str(fault))
                return
            stream.handoffs.popleft()
            self._arrivals.release(handoff)
            stream.ended = handoff.final
            if len(codes):
                stream.buffer.append(codes)
                stream.num_buffered += len(codes)
        if stream.ready_at is None and self._next_chunk(stream) is not None:
            stream.ready_at = self._clock()
            if not stream.num_chunks:
                stream.first_ready_at = stream.ready_at
                stream.playout.start_by = stream.ready_at + START_WAIT_S
                self._fill_slots()

    def _codes(self, stream: Stream, handoff: Handoff) -> Codes:
        """A copy of the handoff's frames. Raises CodecFault on anything the vocoder has no embedding for."""
        config = self._model.config
        codes = handoff.arrays.get("codes")
        if stream.ended:
            raise CodecFault("codec frames came after the final handoff")
        if codes is None or codes.ndim != 2 or codes.shape[1] != config.num_quantizers or codes.dtype != np.int32:
            found = "nothing" if codes is None else f"{codes.dtype} {list(codes.shape)}"
            raise CodecFault(f"codec frames must be int32 [n, {config.num_quantizers}] named 'codes', not {found}")
        if int(codes.view(np.uint32).max(initial=0)) >= config.codebook_size:  # a negative one is a large one then
            raise CodecFault(
                f"codec codes go from 0 to {config.codebook_size - 1}; handoff {handoff.seq} has "
                f"{int(codes.min())} to {int(codes.max())}"
            )
        return codes.astype(np.int32, copy=True)

    def _take(self, chunk: Chunk) -> Codes:
        """Remove the chunk's frames from the buffer."""
        stream, parts, missing = chunk.stream, [], chunk.num_frames
        while missing:
            codes = stream.buffer.popleft()
            if len(codes) > missing:
                stream.buffer.appendleft(codes[missing:])
            parts.append(codes[:missing])
            missing -= len(parts[-1])
        stream.num_buffered -= chunk.num_frames
        return np.concatenate(parts)

    def _decode(self, batch: list[Chunk]) -> NDArray[np.float32]:
        """Samples [B, n] of chunks of one kind."""
        codes = torch.from_numpy(np.stack([self._take(chunk).T for chunk in batch])).to(self._device)
        slots = torch.tensor([chunk.stream.slot for chunk in batch], device=self._device)
        first = batch[0].stream.num_decoded == 0
        if self._recorded is not None:
            wav = self._recorded(codes, slots, first=first)
        else:
            wav = self._model(codes, self._state, slots, first=first)
        self._counts.tokens += sum(chunk.num_frames for chunk in batch)
        self._counts.worked(self._work(len(batch), batch[0].num_frames, first=first))
        samples: NDArray[np.float32] = wav.cpu().numpy().astype("<f4", copy=False)
        return samples

    def _emit(self, chunk: Chunk, samples: NDArray[np.float32]) -> None:
        stream = chunk.stream
        if not np.isfinite(samples).all():
            self._fail(stream.request_id, "the vocoder made samples that are not numbers")
            return
        now = self._clock()
        if stream.first_at is None:
            stream.first_at = now
        message = AudioOutput(
            request_id=stream.request_id,
            seq=stream.num_chunks,
            num_frames=chunk.num_frames,
            final=chunk.final,
            times=stream.times(now) if chunk.final else None,
        )
        self._outbox.send(message, samples.tobytes())
        stream.num_chunks += 1
        stream.num_decoded += chunk.num_frames
        stream.credit -= 1
        stream.playout.hand_out(chunk.num_frames, now)
        stream.ready_at = None
        if chunk.final:
            self._free(stream)
            assert stream.started_at is not None
            self._counts.gen_time_s.observe(now - stream.started_at)
        else:
            self._absorb(stream)

    def _fail(self, request_id: str, message: str) -> None:
        """Answer `Failed` for one request and free it. The others do not notice."""
        stream = self._streams.get(request_id)
        if stream is None:
            return  # it has ended, so nobody waits for an answer
        self._free(stream)
        self._counts.failed += 1
        times = stream.times(self._clock())
        self._outbox.send(Failed(request_id=request_id, stage=self.kind, message=message, times=times))

    def _free(self, stream: Stream) -> None:
        """Give back all that the request holds here and in the connector, and its slot to the next that can use it."""
        del self._streams[stream.request_id]
        for handoff in stream.handoffs:
            self._arrivals.release(handoff)
        stream.handoffs.clear()
        stream.buffer.clear()
        self._arrivals.close(stream.request_id)
        if stream.slot is None:
            self._waiting.remove(stream)
        else:
            self._free_slots.append(stream.slot)
            stream.slot = None
        self._fill_slots()

    def _fill_slots(self) -> None:
        ready = [stream for stream in self._waiting if stream.ready_at is not None] if self._free_slots else []
        for stream in ready[: len(self._free_slots)]:
            self._waiting.remove(stream)
            stream.slot = self._free_slots.pop()


def _due_at(chunk: Chunk) -> float:
    return chunk.stream.playout.chunk_due_at


def _ready_at(chunk: Chunk) -> float:
    assert chunk.stream.ready_at is not None
    return chunk.stream.ready_at
