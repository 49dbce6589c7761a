"""Stages without a model, in real stage processes: what the tests of the pipeline run against.

A request says by its `max_tokens` how many words it wants and by its `seed` what every word and sample of it holds.
Its id may ask for trouble: `reject-KIND`, `fail-KIND`, `hang-KIND` and `raise-KIND` happen in that stage, all but the
first once it has worked on the request. `model` is a JSON object of knobs: `pace_s`, seconds that each step takes;
`load_s`, seconds that each load takes; `refuse` and `die`, the stage that says why it cannot load, and the one that
does not; `sick`, a file whose presence makes the Talker fail each warm-up.

Run as a script it is the entry of a stage process; with `--serve` it is a whole server that waits for a signal.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triptych.config.sampling import SamplingParams
from triptych.config.schema import ConnectorConfig, ConnectorExtra, DeployConfig, StageConfig, StageKind
from triptych.connectors.contract import Handoff, Sender
from triptych.connectors.wire import (
    AudioOutput,
    Failed,
    Grant,
    SpeechOutput,
    StageStats,
    SubmitCodec,
    SubmitSpeech,
    SubmitText,
    TextOutput,
)
from triptych.errors import CheckpointError
from triptych.models.qwen3_omni.config import OmniConfig, parse_config
from triptych.pipeline.request import GenerationRequest
from triptych.stages.__main__ import main
from triptych.stages.arrivals import Arrivals
from triptych.stages.contract import StageContext, Submit
from triptych.telemetry.stage_counts import StageCounts

FRAMES_PER_WORD = 2
SAMPLES_PER_FRAME = 8
COMMAND = (sys.executable, __file__)

DECODER: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 4096,
}
CONFIG: OmniConfig = parse_config(
    {
        "model_type": "qwen3_omni_moe",
        "im_start_token_id": 1,
        "im_end_token_id": 2,
        "system_token_id": 3,
        "user_token_id": 4,
        "assistant_token_id": 5,
        "thinker_config": {"text_config": DECODER},
        "talker_config": {
            "text_config": DECODER,
            "code_predictor_config": DECODER,
            "speaker_id": {"Chelsie": 11, "Ethan": 12},
        },
        "code2wav_config": {},
    }
)
PROMPT = (1, 4, 9, 10, 11, 2, 9, 1, 5, 9)


def deploy_config(
    *,
    processes: tuple[str, ...] = ("text", "speech", "wave"),
    replicas: tuple[int, ...] = (1, 1, 1),
    window: int = 8,
    max_num_seqs: int = 64,
    **values: Any,
) -> DeployConfig:
    """A deployment of the fake stages: a process name and a number of replicas for each; one name is text only."""
    kinds: tuple[StageKind, ...] = ("thinker", "talker", "code2wav")
    stages = tuple(
        StageConfig(
            stage_id=index,
            stage=kind,
            process=process,
            devices=",".join(["cpu"] * count),
            num_replicas=count,
            max_num_seqs=max_num_seqs,
            input_connectors={kinds[index - 1]: "edge"} if index and processes[index - 1] != process else {},
        )
        for index, (kind, process, count) in enumerate(zip(kinds, processes, replicas, strict=False))
    )
    connectors = {"edge": ConnectorConfig(kind="shm", extra=ConnectorExtra(window=window, inline_bytes=16))}
    return DeployConfig(stages=stages, connectors=connectors, **values)


def generation_request(
    request_id: str, *, words: int = 5, seed: int = 7, speak: bool = True, voice: str | None = None
) -> GenerationRequest:
    params = SamplingParams(max_tokens=words, seed=seed)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        thinker=params,
        talker=SamplingParams(seed=seed) if speak else None,
        voice=voice,
    )


@dataclass
class Held:
    """One request in one stage."""

    submit: Submit
    sender: Sender | None = None
    inputs: deque[Handoff] = field(default_factory=deque)
    out: deque[tuple[np.ndarray[Any, Any], bool]] = field(default_factory=deque)
    made: int = 0
    credit: int = 0
    finished: bool = False
    parked: bool = False


class FakeStage:
    """One unit of work a step for every request that can go on; the three kinds differ in what a unit is."""

    def __init__(self, context: StageContext) -> None:
        self.kind: StageKind = context.config.stage
        self.knobs: dict[str, Any] = json.loads(context.model)
        self.outbox = context.outbox
        self.senders = {name: edge for edges in context.senders.values() for name, edge in edges.items()}
        self.arrivals = Arrivals({name: edge for edges in context.receivers.values() for name, edge in edges.items()})
        self.held: dict[str, Held] = {}
        self.counts = StageCounts()
        if self.knobs.get("refuse") == self.kind:
            raise CheckpointError(f"the weights of {self.kind} are made of cheese")
        if self.knobs.get("die") == self.kind:
            os._exit(3)
        time.sleep(self.knobs.get("load_s", 0))
        context.progress(1, 1)

    def submit(self, message: Submit) -> None:
        sick = self.kind == "talker" and os.path.exists(self.knobs.get("sick", ""))
        if message.request_id == f"reject-{self.kind}" or (sick and message.request_id.startswith("warm-up")):
            self.outbox.send(Failed(request_id=message.request_id, stage=self.kind, message="I was told to reject"))
            return
        held = self.held[message.request_id] = Held(message, credit=getattr(message, "credit", 0))
        match message:
            case SubmitText(speak=True):
                held.sender = self.senders[message.route.talker]
            case SubmitSpeech():
                self.arrivals.open(message.request_id, message.route.thinker)
                held.sender = self.senders[message.route.code2wav]
            case SubmitCodec():
                self.arrivals.open(message.request_id, message.route.talker)
        if held.sender is not None:
            held.sender.open(message.request_id)

    def grant(self, message: Grant) -> None:
        if self.kind == "code2wav" and message.request_id in self.held:
            self.held[message.request_id].credit += message.count

    def abort(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None and held.sender is not None:
            held.sender.close(request_id)
        self.arrivals.close(request_id)

    def poll_inputs(self) -> None:
        for sender in self.senders.values():
            for request_id in sender.writable():
                if request_id in self.held:
                    self.held[request_id].parked = False
        for item in self.arrivals.receive():
            if isinstance(item, tuple):
                request_id, error = item
                self.abort(request_id)
                self.outbox.send(Failed(request_id=request_id, stage=self.kind, message=str(error)))
            elif item.request_id in self.held:
                self.held[item.request_id].inputs.append(item)
            else:
                self.arrivals.release(item)

    def has_work(self) -> bool:
        return any(self._ready(held) for held in self.held.values())

    def step(self) -> None:
        self.counts.step_time_s.observe(0)
        time.sleep(self.knobs.get("pace_s", 0))
        for request_id, held in list(self.held.items()):
            if self._ready(held):
                self._advance(request_id, held)
                self._make_trouble(request_id, held)

    def stats(self) -> StageStats:
        return StageStats(stage=self.kind, running=len(self.held), counts=self.counts)

    def close(self) -> None:
        for request_id in list(self.held):
            self.abort(request_id)

    def _ready(self, held: Held) -> bool:
        if held.parked or (held.submit.request_id == f"hang-{self.kind}" and held.made):
            return False
        if held.out:
            return True
        if self.kind == "thinker":
            return not held.finished
        return bool(held.inputs) and (self.kind == "talker" or held.credit > 0)

    def _advance(self, request_id: str, held: Held) -> None:
        if held.out:
            self._hand_over(request_id, held)
        elif isinstance(held.submit, SubmitText):
            self._write(request_id, held, held.submit)
        elif self.kind == "talker":
            self._speak(request_id, held)
        else:
            self._decode(request_id, held)

    def _write(self, request_id: str, held: Held, submit: SubmitText) -> None:
        words, seed = submit.params.max_tokens or 1, submit.params.seed or 0
        held.made += 1
        last = held.finished = held.made == words
        reason = None if not last else "length" if submit.params.ignore_eos else "stop"
        self.outbox.send(
            TextOutput(request_id=request_id, seq=held.made - 1, text=f"{seed} ", num_tokens=1, finish_reason=reason)
        )
        if submit.speak:
            held.out.append((np.full(1, seed, np.int32), last))
            self._hand_over(request_id, held)
        elif last:
            self.abort(request_id)

    def _speak(self, request_id: str, held: Held) -> None:
        handoff = held.inputs.popleft()
        words = handoff.arrays["token_ids"].repeat(FRAMES_PER_WORD)
        codes = np.repeat(words[:, None], 16, axis=1).astype(np.int32)
        self.arrivals.release(handoff)
        held.made += len(codes)
        if handoff.final:
            self.outbox.send(SpeechOutput(request_id=request_id, num_frames=held.made, finish_reason="stop"))
        held.out.append((codes, handoff.final))
        self._hand_over(request_id, held)

    def _hand_over(self, request_id: str, held: Held) -> None:
        assert held.sender is not None
        name = "token_ids" if self.kind == "thinker" else "codes"
        while held.out and not held.parked:
            array, final = held.out[0]
            held.parked = not held.sender.try_put(request_id, {name: array}, final=final)
            if not held.parked and held.out.popleft()[1]:
                self.held.pop(request_id)

    def _decode(self, request_id: str, held: Held) -> None:
        handoff = held.inputs.popleft()
        codes = handoff.arrays["codes"]
        samples = np.repeat(codes[:, 0], SAMPLES_PER_FRAME).astype("<f4").tobytes()
        message = AudioOutput(request_id=request_id, seq=held.made, num_frames=len(codes), final=handoff.final)
        self.arrivals.release(handoff)
        self.outbox.send(message, samples)
        held.made += 1
        held.credit -= 1
        if message.final:
            self.abort(request_id)

    def _make_trouble(self, request_id: str, held: Held) -> None:
        if not request_id.endswith(f"-{self.kind}") or held.made < 3:
            return
        if request_id.startswith("fail-"):
            self.abort(request_id)
            self.outbox.send(Failed(request_id=request_id, stage=self.kind, message="I was told to fail"))
        elif request_id.startswith("raise-"):
            raise RuntimeError("I was told to raise")


async def serve() -> None:
    """A server that starts one long request, prints its pids, and stops cleanly on SIGINT or SIGTERM."""
    from triptych.pipeline.orchestrator import Orchestrator

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    orchestrator = await Orchestrator.start(
        deploy=deploy_config(), model=json.dumps({"pace_s": 0.005}), config=CONFIG, command=COMMAND, log_level="warning"
    )
    stream = orchestrator.submit(generation_request("long", words=3000))
    await anext(stream)
    health = orchestrator.health()
    print(json.dumps([process.pid for process in health.processes.values()]), flush=True)
    await stopped.wait()
    await orchestrator.close()


if __name__ == "__main__":
    if "--serve" in sys.argv:
        asyncio.run(serve())
    else:
        sys.exit(main(load=FakeStage))
