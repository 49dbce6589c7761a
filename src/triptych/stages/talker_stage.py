"""The Talker as a stage: text ids in as the Thinker confirms them, codec frames out as they are drawn.

Of media in the prompt it gets the Thinker's hidden states, before the first text id.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.config.schema import StageKind
from triptych.connectors.contract import Handoff
from triptych.connectors.wire import Failed, Grant, SpeechOutput, StageStats, SubmitSpeech
from triptych.engine.batch import ScheduledRow
from triptych.engine.draw import GREEDY
from triptych.engine.engine import Engine
from triptych.engine.model_runner import ModelRunner
from triptych.engine.random_stream import CODEBOOK0, UniformBlocks, residual
from triptych.engine.request import FinishReason
from triptych.engine.sampler import Sampler
from triptych.engine.step_cost import StepCost
from triptych.errors import TriptychError
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.models.qwen3_omni.talker import Talker
from triptych.stages.arrivals import Arrivals
from triptych.stages.cadence import Cadence, deployed_cadence
from triptych.stages.contract import Outbox, StageContext, Submit
from triptych.stages.decoder_work import talker_work
from triptych.stages.handoffs import Handoffs
from triptych.stages.hidden_rows import from_array
from triptych.stages.loading import (
    DecoderSetup,
    allocated_bytes,
    engine_stats,
    load_model,
    row_tile,
    set_up_decoder,
    stage_device,
    stage_dtype,
    stage_recorder,
)
from triptych.stages.playout_clock import START_WAIT_S, PlayoutClock
from triptych.stages.recorded_frames import RecordedFrames
from triptych.stages.residual_draw import ResidualDraw
from triptych.stages.speech_rows import SpeechRows
from triptych.telemetry.stage_counts import StageCounts
from triptych.telemetry.stage_times import StageTimes

logger = logging.getLogger(__name__)


class TalkerStage:
    """Continuous batching over one Talker. One step draws one whole frame for every request that has a row to read.

    `by_slack`: streams are served by when their listeners run out of audio. Every stream that can make a frame makes
    one in each step; beside them goes as much of the prompts of new streams as leaves none of them late. A new stream
    is held back so for at most `START_WAIT_S`; then its prompt has the whole token budget, as it has from the start
    where streams are served first come, first served. A stream that must give up its KV blocks is the one with the
    most audio in hand.
    """

    kind: StageKind = "talker"

    def __init__(
        self,
        *,
        model: Talker,
        config: OmniConfig,
        setup: DecoderSetup,
        outbox: Outbox,
        arrivals: Arrivals,
        handoffs: Handoffs,
        cadence: Cadence,
        frames: RecordedFrames | None = None,
        by_slack: bool,
        batch_invariant: bool,
        frames_per_text_token: int,
        extra_frames: int,
    ) -> None:
        self.model, self.config, self.scheduler = model, config, setup.scheduler
        self.outbox, self.arrivals, self.handoffs, self.cadence = outbox, arrivals, handoffs, cadence
        self.device = setup.device
        # Compiled layers give a row the same bits wherever it is computed; the eager ones where it is computed alone.
        self.single = batch_invariant and not model.backbone.by_row
        self.frames_per_text_token, self.extra_frames = frames_per_text_token, extra_frames
        runner = ModelRunner(
            model=model.backbone,
            embed=self._embed,
            cache=setup.cache,
            device=setup.device,
            batch_invariant=batch_invariant,
            recorded=setup.recorded,
        )
        self.residual_codes = model.residual_codes if frames is None else frames
        self.counts = StageCounts(transfers={"code2wav": handoffs.transfers})
        self.cost = StepCost() if by_slack else None
        sizes = {
            "weight_bytes": model.head.itemsize,
            "projection_bytes": model.backbone.itemsize,
            "element_bytes": setup.cache.itemsize,
        }
        work = talker_work(model.talker_config, **sizes)
        self.engine = Engine(setup.scheduler, runner, self.counts, work, cost=self.cost)
        slots = setup.scheduler.config.max_num_seqs
        self.sampler = Sampler(
            num_slots=slots,
            vocab_size=model.config.vocab_size,
            device=setup.device,
            suppress=model.suppressed,
            eager=setup.eager,
        )
        self.residual_uniforms = UniformBlocks(slots, [residual(index) for index in range(1, model.num_code_groups)])
        self.requests: dict[str, SpeechRows] = {}
        self.playouts: dict[str, PlayoutClock] = {}  # of each request, where streams are served by slack
        self.runaways = 0

    @classmethod
    def load(cls, context: StageContext) -> Self:
        """Load the Talker of `context.model`. Raises CheckpointError or ConfigError."""
        checkpoint = load_config(context.model)
        device, dtype = stage_device(context.config), stage_dtype(context.config, checkpoint)
        before = allocated_bytes(device)
        model = load_model(context, lambda: Talker(checkpoint), device, dtype)
        recorder = stage_recorder(context.config, device, dtype, model.config)
        tile = row_tile(context.config)
        model.prepare(row_tile=tile, eager=context.config.enforce_eager or recorder is not None)
        taken_bytes = allocated_bytes(device) - before
        seats = context.config.max_num_seqs
        return cls(
            model=model,
            config=checkpoint,
            setup=set_up_decoder(
                context.config, model.config, model.backbone, taken_bytes, device, dtype, recorder=recorder
            ),
            frames=RecordedFrames(model, recorder, max_frames=seats, row_tile=tile) if recorder is not None else None,
            outbox=context.outbox,
            arrivals=Arrivals(context.receivers["thinker"]),
            handoffs=Handoffs(context.senders["code2wav"], async_chunk=context.deploy.async_chunk),
            cadence=deployed_cadence(context.deploy),
            # Without async chunks nobody hears a stream before its end, so none can run out of audio.
            by_slack=context.config.scheduling_policy == "slack" and context.deploy.async_chunk,
            batch_invariant=context.config.batch_invariant,
            frames_per_text_token=context.config.frames_per_text_token,
            extra_frames=context.config.extra_frames,
        )

    def submit(self, message: Submit) -> None:
        assert isinstance(message, SubmitSpeech)
        if message.params.ignore_eos:  # the end is no code that a frame could hold, so it must not be drawn
            never = {self.model.talker_config.codec_eos_token_id: -math.inf}
            params = msgspec.structs.replace(message.params, logit_bias=message.params.logit_bias | never)
            message = msgspec.structs.replace(message, params=params)
        try:
            rows = SpeechRows(message, self.config, self.model, single=self.single)
            room = self.scheduler.config.max_model_len - rows.engine.num_prompt_tokens
            vocab = self.model.config.vocab_size
            if outside := [token for token in message.params.logit_bias if not 0 <= token < vocab]:
                raise TriptychError(f"token id {outside[0]} is not in the Talker's vocabulary, 0 to {vocab - 1}")
            if room < 1:
                limit = self.scheduler.config.max_model_len
                raise TriptychError(f"the prompt takes {rows.engine.num_prompt_tokens} rows, the Talker has {limit}")
            rows.max_frames = min(room, message.params.max_tokens or room)
            self.scheduler.add(rows.engine)
        except TriptychError as error:
            self._tell_failure(message.request_id, str(error))
            return
        self.requests[message.request_id] = rows
        if self.cost is not None:
            self.playouts[message.request_id] = PlayoutClock(self.cadence)
        self._ready(rows)
        self.arrivals.open(message.request_id, message.route.thinker)
        self.handoffs.open(message.request_id, message.route.code2wav)

    def grant(self, message: Grant) -> None:
        """The Talker sends no audio."""

    def abort(self, request_id: str) -> StageTimes | None:
        times = self._drop(request_id)
        if times is not None:
            self.counts.aborted += 1
        return times

    def poll_inputs(self) -> None:
        for arrival in self.arrivals.receive():
            if isinstance(arrival, tuple):
                request_id, error = arrival
                if request_id in self.requests:
                    self._fail(request_id, str(error))
                continue
            rows = self.requests.get(arrival.request_id)
            try:
                if rows is not None:
                    self._hear(rows, arrival)
            except TriptychError as error:
                self._fail(arrival.request_id, str(error))
            self.arrivals.release(arrival)
            if rows is not None and arrival.request_id in self.requests:
                self._advance(rows)
        for request_id in self.handoffs.flush():
            self.scheduler.unpark(request_id)

    def has_work(self) -> bool:
        return self.engine.has_work()

    def step(self) -> None:
        if self.cost is not None:
            now, step_s = self.engine.clock(), self.cost.decode_s
            for request_id, playout in self.playouts.items():
                self.requests[request_id].engine.due_at = playout.frame_due_at(now, step_s)
        self.engine.step(self._draw_frames)

    def stats(self) -> StageStats:
        return engine_stats(self.kind, self.engine)

    def close(self) -> None:
        for request_id in list(self.requests):
            self.abort(request_id)

    def _ready(self, rows: SpeechRows) -> None:
        """The request has what it needs to begin, or more of it."""
        self.engine.ready(rows.engine)
        if (playout := self.playouts.get(rows.engine.request_id)) is not None:
            playout.start_by = rows.engine.ready_at + START_WAIT_S

    @torch.inference_mode()
    def _hear(self, rows: SpeechRows, handoff: Handoff) -> None:
        """What one handoff brings: hidden states of media rows, text ids, or both."""
        hidden, token_ids = (handoff.arrays.get(name) for name in ("hidden", "token_ids"))
        if hidden is not None:
            states = from_array(hidden).to(self.device, self.model.text_table.dtype)
            rows.add_media(self.model.project_hidden(states))
            self.scheduler.arrived(rows.engine, rows.num_known_rows)
            self._ready(rows)
        if token_ids is not None:
            rows.hear(token_ids.tolist(), final=handoff.final)

    def _embed(self, rows: Sequence[ScheduledRow], num_rows: int) -> Tensor:
        text: list[int] = []
        codes: list[list[int]] = []
        media: list[tuple[NDArray[np.int64], Tensor]] = []
        for row in rows:
            speech, end = self.requests[row.request.request_id], row.start + row.num_tokens
            if (found := speech.media_in(row.start, end)) is not None:
                media.append((found[0] + len(text), found[1]))
            text += speech.text_ids[row.start : end]
            codes += speech.code_rows[row.start : end]
        # Padding repeats a real row: it then chooses the same experts and costs no others.
        missing = num_rows - len(text)
        x = self.model.embed(
            torch.tensor(text + text[:1] * missing, dtype=torch.long, device=self.device),
            torch.tensor(codes + codes[:1] * missing, dtype=torch.long, device=self.device),
        )
        for places, projected in media:
            x.index_copy_(0, torch.from_numpy(places).to(self.device), projected)
        return x

    def _draw_frames(self, rows: tuple[ScheduledRow, ...], hidden: Tensor) -> None:
        requests = [self.requests[row.request.request_id] for row in rows]
        for speech in requests:
            if not speech.admitted:
                speech.admitted = True
                self.sampler.admit(speech.engine.slot, speech.engine.params)
                assert speech.engine.params.seed is not None
                self.residual_uniforms.admit(speech.engine.slot, speech.engine.params.seed)
        slots = [speech.engine.slot for speech in requests]
        positions = [speech.engine.num_sampled for speech in requests]
        sampled = self.sampler.sample(self.model.logits(hidden)[: len(rows)], slots, positions, CODEBOOK0)
        frames = self._whole_frames(requests, hidden, sampled.token_ids, slots, positions)
        bad = frozenset(sampled.bad)
        for index, (speech, frame) in enumerate(zip(requests, frames, strict=True)):
            if index in bad:
                self._fail(speech.engine.request_id, "the model gave no finite logits")
            else:
                self._take(speech, frame)

    def _whole_frames(
        self, requests: list[SpeechRows], hidden: Tensor, first: Tensor, slots: list[int], positions: list[int]
    ) -> list[list[int]]:
        """The residual codes behind each codebook-0 code: [S] -> S lists of num_code_groups codes."""
        draw = ResidualDraw.of(
            uniforms=torch.from_numpy(self.residual_uniforms.take(slots, positions)).to(self.device),
            greedy=[speech.engine.params.temperature < GREEDY for speech in requests],
        )
        codes = self.residual_codes(hidden, first, draw)
        frames: list[list[int]] = torch.cat((first.unsqueeze(1), codes), dim=1).tolist()
        return frames

    def _take(self, speech: SpeechRows, frame: list[int]) -> None:
        """One drawn frame of one request: on to Code2Wav, or the end."""
        engine = speech.engine
        self.engine.sampled(engine)
        if frame[0] == self.model.talker_config.codec_eos_token_id:
            self._finish(speech, FinishReason.STOP)
            return
        self.counts.tokens += 1
        speech.add_frame(frame, self.model.code_rows(frame))
        if (playout := self.playouts.get(engine.request_id)) is not None:
            playout.hand_out(1, self.engine.clock())
        codes = np.asarray([frame], dtype=np.int32)
        limited = speech.num_frames >= speech.max_frames or self._runs_away(speech)
        if not self.handoffs.push(engine.request_id, {"codes": codes}) and not limited:
            self.scheduler.park(engine.request_id)
        if limited:
            self._finish(speech, FinishReason.LENGTH)
        else:
            self._advance(speech)

    def _runs_away(self, speech: SpeechRows) -> bool:
        """Whether the speech is longer than its text can need: the model has lost its end marker."""
        if not speech.heard_all:
            return False
        if speech.num_frames < self.frames_per_text_token * speech.num_text_tokens + self.extra_frames:
            return False
        self.runaways += 1
        logger.warning(
            "request %s: %d frames for %d text tokens, speech ended",
            speech.engine.request_id,
            speech.num_frames,
            speech.num_text_tokens,
        )
        return True

    def _advance(self, speech: SpeechRows) -> None:
        """Make the next row known if its text is, or end a speech that has no text at all."""
        if speech.heard_all and speech.num_text_tokens == 0:
            self._finish(speech, FinishReason.STOP)
        elif speech.next_row():
            self.scheduler.extend(speech.engine)

    def _finish(self, speech: SpeechRows, reason: FinishReason) -> None:
        request_id = speech.engine.request_id
        del self.requests[request_id]
        self._release(speech, reason)
        self.engine.finished(speech.engine)
        nothing = np.zeros((0, self.model.num_code_groups), dtype=np.int32)
        self.handoffs.push(request_id, {"codes": nothing}, final=True)
        self.outbox.send(
            SpeechOutput(
                request_id=request_id,
                num_frames=speech.num_frames,
                finish_reason=reason.value,
                times=self.engine.times(speech.engine),
            )
        )

    def _fail(self, request_id: str, message: str) -> None:
        self._tell_failure(request_id, message, self._drop(request_id))

    def _tell_failure(self, request_id: str, message: str, times: StageTimes | None = None) -> None:
        self.counts.failed += 1
        self.outbox.send(Failed(request_id=request_id, stage=self.kind, message=message, times=times))

    def _drop(self, request_id: str) -> StageTimes | None:
        """Free everything of the request. None where it was not here."""
        rows = self.requests.pop(request_id, None)
        if rows is not None:
            self._release(rows, FinishReason.ABORT)
        self.arrivals.close(request_id)  # also of a request that was refused: its text may be on the way
        self.handoffs.close(request_id)
        return self.engine.times(rows.engine) if rows is not None else None

    def _release(self, speech: SpeechRows, reason: FinishReason) -> None:
        if speech.admitted:
            self.sampler.release(speech.engine.slot)
        self.playouts.pop(speech.engine.request_id, None)
        self.arrivals.close(speech.engine.request_id)
        self.scheduler.finish(speech.engine, reason)
