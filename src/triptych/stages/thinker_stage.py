"""The Thinker as a stage: prompts in, text to the server, confirmed token ids to the Talker.

Media in a prompt is encoded a slice before each step, so answers go on while a long video is taken in. A speaking
request also hands over the hidden states of its users' media.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from triptych.config.schema import StageKind
from triptych.connectors.wire import Failed, Grant, StageStats, SubmitText, TextOutput, TokenLogprob
from triptych.engine.batch import ScheduledRow
from triptych.engine.detokenizer import Detokenizer
from triptych.engine.engine import Engine
from triptych.engine.inputs import StepInputs
from triptych.engine.model_runner import ModelRunner
from triptych.engine.random_stream import TEXT
from triptych.engine.request import EngineRequest, FinishReason
from triptych.engine.sampler import Sampler
from triptych.errors import TriptychError
from triptych.layers.decoder import BetweenLayers
from triptych.models.qwen3_omni.bridge import talker_spans
from triptych.models.qwen3_omni.config import OmniConfig, load_config
from triptych.models.qwen3_omni.processor import Processor
from triptych.models.qwen3_omni.thinker import Thinker
from triptych.stages.contract import Outbox, StageContext, Submit
from triptych.stages.decoder_work import thinker_work
from triptych.stages.encoding import EncoderLine, Fault
from triptych.stages.handoffs import Handoffs
from triptych.stages.hidden_rows import PIECE_ROWS, media_rows, to_array
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
from triptych.stages.prompt_media import MediaLayers, PromptMedia
from triptych.telemetry.stage_counts import StageCounts
from triptych.telemetry.stage_times import StageTimes


@dataclass(slots=True)
class _TextRequest:
    """What the stage keeps beside the engine's view of a request."""

    engine: EngineRequest
    detokenizer: Detokenizer
    max_tokens: int
    stop_ids: frozenset[int]
    speaks: bool
    spoken_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_spoken: int = 0  # how many of those media rows the Talker has been handed the hidden state of
    seq: int = 0
    silent_tokens: int = 0  # sampled, but with no text to show yet
    admitted: bool = False


class ThinkerStage:
    """Continuous batching over one Thinker."""

    kind: StageKind = "thinker"

    def __init__(
        self,
        *,
        model: Thinker,
        config: OmniConfig,
        setup: DecoderSetup,
        line: EncoderLine | None,
        tokenizer: Tokenizer,
        outbox: Outbox,
        handoffs: Handoffs | None,
        batch_invariant: bool,
    ) -> None:
        self.model, self.config, self.scheduler, self.tokenizer = model, config, setup.scheduler, tokenizer
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self.outbox, self.handoffs = outbox, handoffs
        # Compiled layers give a row the same bits wherever it is computed; the eager ones where it is computed alone.
        self.single = batch_invariant and not model.backbone.by_row
        self.device, self.cache = setup.device, setup.cache
        self.media = PromptMedia(line=line, scheduler=setup.scheduler, config=config) if line is not None else None
        self.counts = StageCounts()
        if handoffs is not None:
            self.counts.transfers["talker"] = handoffs.transfers
        self.line = line
        if line is not None:
            self.counts.encoder_step_time_s = line.step_time_s
        runner = ModelRunner(
            model=model.backbone,
            embed=self._embed,
            cache=setup.cache,
            device=setup.device,
            batch_invariant=batch_invariant,
            between=self._between,
            recorded=setup.recorded,
        )
        sizes = {
            "weight_bytes": model.head.itemsize,
            "projection_bytes": model.backbone.itemsize,
            "element_bytes": setup.cache.itemsize,
        }
        self.engine = Engine(setup.scheduler, runner, self.counts, thinker_work(config.thinker, **sizes))
        self.sampler = Sampler(
            num_slots=setup.scheduler.config.max_num_seqs,
            vocab_size=model.config.vocab_size,
            device=setup.device,
            eager=setup.eager,
        )
        self.requests: dict[str, _TextRequest] = {}

    @classmethod
    def load(cls, context: StageContext) -> Self:
        """Load the Thinker of `context.model`. Raises CheckpointError or ConfigError."""
        checkpoint = load_config(context.model)
        device, dtype = stage_device(context.config), stage_dtype(context.config, checkpoint)
        before = allocated_bytes(device)
        model = load_model(context, lambda: Thinker(checkpoint), device, dtype)
        recorder = stage_recorder(context.config, device, dtype, checkpoint.thinker)
        model.prepare(row_tile=row_tile(context.config), eager=context.config.enforce_eager or recorder is not None)
        line = EncoderLine.load(context, device, dtype)
        # What encoded media may hold is not the cache's either.
        taken_bytes = allocated_bytes(device) - before + (line.ahead_bytes if line is not None else 0)
        senders = context.senders.get("talker")
        return cls(
            model=model,
            config=checkpoint,
            setup=set_up_decoder(
                context.config,
                checkpoint.thinker,
                model.backbone,
                taken_bytes,
                device,
                dtype,
                recorder=recorder,
                keep_hidden=senders is not None,
            ),
            line=line,
            tokenizer=Processor(context.model).tokenizer,
            outbox=context.outbox,
            handoffs=Handoffs(senders, async_chunk=context.deploy.async_chunk) if senders else None,
            batch_invariant=context.config.batch_invariant,
        )

    def submit(self, message: Submit) -> None:
        assert isinstance(message, SubmitText)
        prompt = list(message.prompt_token_ids)
        room = self.scheduler.config.max_model_len - len(prompt)
        request = EngineRequest(
            request_id=message.request_id,
            num_prompt_tokens=len(prompt),
            params=message.params,
            token_ids=prompt,
            num_tokens=len(prompt),
            single_from=len(prompt) if self.single else None,
        )
        try:
            if room < 1:
                limit = self.scheduler.config.max_model_len
                raise TriptychError(f"the prompt has {len(prompt)} tokens, the Thinker's context {limit}")
            vocab = self.model.config.vocab_size
            if outside := [token for token in (*prompt, *message.params.logit_bias) if not 0 <= token < vocab]:
                raise TriptychError(f"token id {outside[0]} is not in the Thinker's vocabulary, 0 to {vocab - 1}")
            if message.speak and self.handoffs is None:
                raise TriptychError("speech was asked for, but this deployment has no Talker")
            self.scheduler.add(request)
            self.engine.ready(request)
            if message.media:
                if self.media is None:
                    raise TriptychError("this checkpoint has no encoders for media")
                self.media.open(request, message.media)
        except TriptychError as error:
            self.scheduler.finish(request, FinishReason.ABORT)
            self._tell_failure(message.request_id, str(error))
            return
        ignored: frozenset[int] = frozenset() if not message.params.ignore_eos else self.eos_token_ids
        self.requests[message.request_id] = _TextRequest(
            engine=request,
            detokenizer=Detokenizer(self.tokenizer, message.params.stop),
            max_tokens=min(room, message.params.max_tokens or room),
            stop_ids=(self.eos_token_ids - ignored) | frozenset(message.params.stop_token_ids),
            speaks=message.speak,
        )
        if message.speak and message.media:
            spoken = talker_spans(prompt, message.media, self.config)
            rows = media_rows(prompt, [message.media[span.part] for span in spoken], self.config)
            self.requests[message.request_id].spoken_rows = rows
        if message.speak and self.handoffs is not None:
            self.handoffs.open(message.request_id, message.route.talker)

    def grant(self, message: Grant) -> None:
        """The Thinker sends no audio."""

    def abort(self, request_id: str) -> StageTimes | None:
        times = self._drop(request_id)
        if times is not None:
            self.counts.aborted += 1
        return times

    def poll_inputs(self) -> None:
        if self.handoffs is not None:
            for request_id in self.handoffs.flush():
                self.scheduler.unpark(request_id)
        if self.media is not None:
            self._fail_all(self.media.order())

    def has_work(self) -> bool:
        return (self.media is not None and self.media.has_work()) or self.engine.has_work()

    def step(self) -> None:
        """A slice of encoder work, then a step of the engine; either only where there is something to do."""
        if self.media is not None:
            self._fail_all(self.media.step())
        batch = self.engine.step(self._sample)
        if batch is None or not self.media:
            return
        self.media.computed(batch.rows)
        for row in batch.rows:
            request = self.requests.get(row.request.request_id)
            if request is not None:
                self._hand_over_hidden(request)

    def stats(self) -> StageStats:
        if self.line is not None:
            self.counts.encoder_queries, self.counts.encoder_hits = self.line.num_queries, self.line.num_hits
        return engine_stats(self.kind, self.engine)

    def close(self) -> None:
        for request_id in list(self.requests):
            self.abort(request_id)

    def _embed(self, rows: Sequence[ScheduledRow], num_rows: int) -> torch.Tensor:
        ids = [token for row in rows for token in row.request.token_ids[row.start : row.start + row.num_tokens]]
        # Padding repeats a real row: it then chooses the same experts and costs no others.
        ids += ids[:1] * (num_rows - len(ids))
        x = self.model.embed(torch.tensor(ids, dtype=torch.long, device=self.device))
        if self.media:
            for placed in self.media.placed(rows, self.device):
                x.index_copy_(0, placed.places, placed.encoded.embeds)
        return x

    def _between(self, inputs: StepInputs) -> BetweenLayers | None:
        """What a step with rows of prompts that have media does between its layers."""
        if not self.media or not any(
            row.request.content_keys and row.start < row.request.num_prompt_tokens for row in inputs.rows
        ):
            return None
        return MediaLayers(
            hidden=self.cache.hidden,
            kept_layer=self.config.talker.accept_hidden_layer - 1 if self.config.talker is not None else -1,
            slots=inputs.metadata.slots,
            added=self.media.placed(inputs.rows, self.device),
        )

    def _sample(self, rows: tuple[ScheduledRow, ...], hidden: torch.Tensor) -> None:
        requests = [self.requests[row.request.request_id] for row in rows]
        for request in requests:
            if not request.admitted:
                engine = request.engine
                prompt = engine.token_ids[: engine.num_prompt_tokens]
                self.sampler.admit(engine.slot, engine.params, prompt)
                request.admitted = True
        sampled = self.sampler.sample(
            self.model.logits(hidden)[: len(rows)],
            [request.engine.slot for request in requests],
            [request.engine.num_sampled for request in requests],
            TEXT,
        )
        bad = frozenset(sampled.bad)
        for index, (request, token) in enumerate(zip(requests, sampled.token_ids.tolist(), strict=True)):
            if index in bad:
                self._fail(request, "the model gave no finite logits")
                continue
            found = sampled.logprobs[index] if sampled.logprobs else None
            logprob = TokenLogprob(token_id=token, logprob=found.logprob, top=found.top) if found else None
            self._take(request, token, logprob)

    def _take(self, request: _TextRequest, token: int, logprob: TokenLogprob | None) -> None:
        """One new token of one request: its text, its end, its way to the Talker."""
        engine = request.engine
        self.engine.sampled(engine)
        self.counts.tokens += 1
        request.silent_tokens += 1
        reason: FinishReason | None = None
        if token in request.stop_ids:
            piece, logprob, reason = request.detokenizer.finish(), None, FinishReason.STOP
            text, released = piece.text, list(piece.released)
        else:
            piece = request.detokenizer.push(token)
            text, released = piece.text, list(piece.released)
            if piece.stopped:
                reason = FinishReason.STOP
            elif engine.num_sampled >= request.max_tokens:
                rest, reason = request.detokenizer.finish(), FinishReason.LENGTH
                text, released = text + rest.text, released + list(rest.released)
            else:
                self.scheduler.extend(engine, token)
        if text or logprob is not None or reason is not None:
            self.outbox.send(
                TextOutput(
                    request_id=engine.request_id,
                    seq=request.seq,
                    text=text,
                    num_tokens=request.silent_tokens,
                    num_cached_tokens=engine.num_cached_tokens,
                    logprobs=(logprob,) if logprob is not None else (),
                    finish_reason=reason.value if reason is not None else None,
                    times=self.engine.times(engine) if reason is not None else None,
                )
            )
            request.seq += 1
            request.silent_tokens = 0
        if request.speaks and (released or reason is not None):
            self._hand_over_hidden(request)
            self._hand_over(engine.request_id, released, final=reason is not None)
        if reason is not None:
            del self.requests[engine.request_id]
            self._release(request, reason)
            self.engine.finished(engine)

    def _hand_over(self, request_id: str, token_ids: list[int], *, final: bool) -> None:
        assert self.handoffs is not None
        if not self.handoffs.push(request_id, {"token_ids": np.asarray(token_ids, dtype=np.int32)}, final=final):
            self.scheduler.park(request_id)

    def _hand_over_hidden(self, request: _TextRequest) -> None:
        """Hand over the hidden states of media rows that are computed and not yet sent, each once."""
        engine, rows = request.engine, request.spoken_rows
        ready = int(np.searchsorted(rows, engine.num_computed_tokens))
        while request.num_spoken < ready:
            assert self.handoffs is not None
            piece = rows[request.num_spoken : min(ready, request.num_spoken + PIECE_ROWS)]
            hidden = to_array(self.cache.hidden_of(engine.block_ids, piece))
            request.num_spoken += len(piece)
            if not self.handoffs.push(engine.request_id, {"hidden": hidden}):
                self.scheduler.park(engine.request_id)

    def _fail_all(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._fail(self.requests[fault.request_id], fault.message)

    def _fail(self, request: _TextRequest, message: str) -> None:
        request_id = request.engine.request_id
        self._tell_failure(request_id, message, self._drop(request_id))

    def _tell_failure(self, request_id: str, message: str, times: StageTimes | None = None) -> None:
        self.counts.failed += 1
        self.outbox.send(Failed(request_id=request_id, stage=self.kind, message=message, times=times))

    def _drop(self, request_id: str) -> StageTimes | None:
        """Free everything of the request. None where it was not here."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._release(request, FinishReason.ABORT)
        if self.handoffs is not None:
            self.handoffs.close(request_id)
        return self.engine.times(request.engine) if request is not None else None

    def _release(self, request: _TextRequest, reason: FinishReason) -> None:
        if request.admitted:
            self.sampler.release(request.engine.slot)
        if self.media is not None:
            self.media.close(request.engine.request_id)
        self.scheduler.finish(request.engine, reason)
