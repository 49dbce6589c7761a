"""From `Configure` to loaded stages: the edges of a process, and the class of each stage."""

from __future__ import annotations

import os
from collections.abc import Callable

from triptych.config.schema import ConnectorConfig, DeployConfig, StageConfig, StageKind
from triptych.connectors.contract import Receiver, Sender
from triptych.connectors.endpoint import Endpoint
from triptych.connectors.wire import LoadProgress
from triptych.stages.contract import Outbox, Stage, StageContext

EDGES: tuple[tuple[StageKind, StageKind], ...] = (("thinker", "talker"), ("talker", "code2wav"))

Load = Callable[[StageContext], Stage]


class StageLoader:
    """Loads the stages of one process, in stage order. `stage` is the one being loaded, for errors."""

    def __init__(self, *, deploy: DeployConfig, model: str, process: str, outbox: Outbox, endpoint: Endpoint) -> None:
        self._deploy = deploy
        self._model = model
        self._process = process
        self._outbox = outbox
        self._senders: dict[tuple[StageKind, StageKind], Sender] = {}
        self._receivers: dict[tuple[StageKind, StageKind], Receiver] = {}
        self.stage: StageKind | None = None
        for source, target in EDGES:
            self._connect(endpoint, source, target)

    def load(self, load: Load) -> list[Stage]:
        """Raises what the stages raise: CheckpointError, ConfigError, or anything else that makes loading fail."""
        stages: list[Stage] = []
        for config in self._deploy.processes[self._process]:
            self.stage = config.stage
            stages.append(load(self._context(config)))
        self.stage = None
        return stages

    def _connect(self, endpoint: Endpoint, source: StageKind, target: StageKind) -> None:
        giver, taker = self._deploy.stage(source), self._deploy.stage(target)
        if giver is None or taker is None or self._process not in (giver.process, taker.process):
            return
        sender, receiver = endpoint.edge(
            source=source,
            target=target,
            source_process=giver.process,
            target_process=taker.process,
            config=connector(self._deploy, giver, taker),
        )
        if sender is not None:
            self._senders[source, target] = sender
        if receiver is not None:
            self._receivers[source, target] = receiver

    def _context(self, config: StageConfig) -> StageContext:
        kind = config.stage
        return StageContext(
            config=config,
            deploy=self._deploy,
            model=self._model,
            outbox=self._outbox,
            senders={target: sender for (source, target), sender in self._senders.items() if source == kind},
            receivers={source: receiver for (source, target), receiver in self._receivers.items() if target == kind},
            progress=report_progress(kind, self._outbox),
        )


def connector(deploy: DeployConfig, source: StageConfig, target: StageConfig) -> ConnectorConfig:
    """The connector of an edge: the one `target` names, else inproc within a process and shared memory between two."""
    name = target.input_connectors.get(source.stage)
    if name is not None:
        return deploy.connectors[name]
    return ConnectorConfig(kind="inproc" if source.process == target.process else "shm")


def load_stage(context: StageContext) -> Stage:
    """Load the stage that `context.config.stage` names. torch and the models are imported here, not before."""
    wait_idly_if_crowded(context.deploy)
    import torch

    sharing = context.deploy.processes[context.config.process]
    torch.set_num_threads(max(stage.threads for stage in sharing))
    kind = context.config.stage
    if kind == "thinker":
        from triptych.stages.thinker_stage import ThinkerStage

        return ThinkerStage.load(context)
    if kind == "talker":
        from triptych.stages.talker_stage import TalkerStage

        return TalkerStage.load(context)
    from triptych.stages.codec_stage import CodecStage

    return CodecStage.load(context)


def wait_idly_if_crowded(deploy: DeployConfig) -> None:
    """Where all threads of a deployment are more than its cores, let those that wait for others give up their core.

    By default OpenMP's threads wait in a spin, which then takes the core from the very thread they wait for: a step
    becomes a hundred times slower. OpenMP reads the variable when torch is imported, so call this before.
    """
    threads = sum(max(stage.threads for stage in stages) for stages in deploy.processes.values())
    if threads > len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def report_progress(kind: StageKind, outbox: Outbox) -> Callable[[int, int], None]:
    """Reports at most a hundred times a stage: a checkpoint has thousands of tensors."""
    reported = -1

    def report(done: int, total: int) -> None:
        nonlocal reported
        percent = 100 * done // max(total, 1)
        if percent != reported:
            reported = percent
            outbox.send(LoadProgress(stage=kind, done=done, total=total))

    return report
