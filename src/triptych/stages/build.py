"""From `Configure` to loaded stages: the edges of a process, and the class of each stage."""

from __future__ import annotations

import itertools
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
        # By name: the replicas of this process, and of each the edges, in order of the far end's replicas.
        self._replicas: dict[str, StageConfig] = {}
        self._senders: dict[str, dict[StageKind, dict[str, Sender]]] = {}
        self._receivers: dict[str, dict[StageKind, dict[str, Receiver]]] = {}
        self.stage: StageKind | None = None
        for stage in deploy.stages:
            for name, replica in deploy.replicas(stage.stage).items():
                if replica.process == process:
                    self._replicas[name], self._senders[name], self._receivers[name] = replica, {}, {}
        for source, target in EDGES:
            self._connect(endpoint, source, target)

    def load(self, load: Load) -> list[Stage]:
        """Raises what the stages raise: CheckpointError, ConfigError, or anything else that makes loading fail."""
        stages: list[Stage] = []
        for name, replica in self._replicas.items():
            self.stage = replica.stage
            stages.append(load(self._context(name, replica)))
        self.stage = None
        return stages

    def _connect(self, endpoint: Endpoint, source: StageKind, target: StageKind) -> None:
        """Every replica of a stage may send to every replica of the next: an edge for each pair with an end here."""
        pairs = itertools.product(self._deploy.replicas(source).items(), self._deploy.replicas(target).items())
        for (giver, giving), (taker, taking) in pairs:
            if self._process not in (giving.process, taking.process):
                continue
            sender, receiver = endpoint.edge(
                source=giver,
                target=taker,
                source_process=giving.process,
                target_process=taking.process,
                config=connector(self._deploy, giving, taking),
            )
            if sender is not None:
                self._senders[giver].setdefault(target, {})[taker] = sender
            if receiver is not None:
                self._receivers[taker].setdefault(source, {})[giver] = receiver

    def _context(self, name: str, replica: StageConfig) -> StageContext:
        return StageContext(
            config=replica,
            deploy=self._deploy,
            model=self._model,
            outbox=self._outbox,
            senders=self._senders[name],
            receivers=self._receivers[name],
            progress=report_progress(name, self._outbox),
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


def report_progress(name: str, outbox: Outbox) -> Callable[[int, int], None]:
    """Reports at most a hundred times a replica: a checkpoint has thousands of tensors."""
    reported = -1

    def report(done: int, total: int) -> None:
        nonlocal reported
        percent = 100 * done // max(total, 1)
        if percent != reported:
            reported = percent
            outbox.send(LoadProgress(stage=name, done=done, total=total))

    return report
