"""Traces of a process's steps, as chrome://tracing and Perfetto read them. Loaded only where `profile.dir` is set."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from triptych.config.schema import DeployConfig, ProfileConfig, StageKind
from triptych.errors import ConfigError
from triptych.stages.contract import Stage

logger = logging.getLogger(__name__)

_UNITS: dict[StageKind, str] = {"thinker": "tokens", "talker": "rows", "code2wav": "frames"}
_SPAN = re.compile(r'"(\S+ step \d+)"')


@dataclass(slots=True)
class _Window:
    """The recording of one stage. `titles` has its spans, under their names once their sizes are known; `waited` counts
    the steps of stages that wait for their own."""

    owner: StageKind
    recorder: profile
    titles: dict[str, str] = field(default_factory=dict)
    waited: int = 0
    records: bool = True


class StepProfiler:
    """Steps the stages of one process, and writes a trace of each: its first steps left out, then a bounded number.

    torch has one recorder a process, so stages that share one are recorded one after the other. What the others do
    meanwhile is left out; but a window ends early when those that wait for their own have made `max_steps` steps.
    """

    def __init__(self, config: ProfileConfig, replicas: dict[StageKind, str], *, cuda: bool) -> None:
        """`replicas` names those of this process. Raises ConfigError where the folder cannot be made."""
        self._config = config
        self._replicas = replicas
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._due = set(replicas)
        self._seen = dict.fromkeys(replicas, 0)
        self._window: _Window | None = None
        self._folder = Path(config.dir)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{config.dir} cannot be made: {error.strerror or error}", "profile.dir") from error
        with self._recorder():  # the first start loads much of torch, which would stop a live stage for seconds
            pass

    @classmethod
    def of(cls, deploy: DeployConfig, process: str) -> StepProfiler:
        """That of one process of a deployment. Raises ConfigError where the folder cannot be made."""
        here = {
            replica.stage: (name, replica)
            for stage in deploy.stages
            for name, replica in deploy.replicas(stage.stage).items()
            if replica.process == process
        }
        return cls(
            deploy.profile,
            {kind: name for kind, (name, _) in here.items()},
            cuda=any(replica.devices != "cpu" for _, replica in here.values()),
        )

    def step(self, stage: Stage) -> None:
        """Step the stage, inside a span where a window is open."""
        kind = stage.kind
        self._seen[kind] += 1
        waits = kind in self._due and self._seen[kind] > self._config.skip_steps
        if self._window is None and waits:
            self._window = _Window(kind, self._recorder())
            self._window.recorder.start()
        window = self._window
        if window is None or window.owner != kind:
            self._step_unseen(stage, waits)
            return
        self._record(window, True)
        requests, tokens = _sizes(stage)
        span = f"{self._replicas[kind]} step {self._seen[kind]}"
        with record_function(span):
            stage.step()
        now_requests, now_tokens = _sizes(stage)
        batch, size = now_requests - requests, now_tokens - tokens
        window.titles[span] = f"{span}: batch {batch:.0f}, {_UNITS[kind]} {size:.0f}"
        if len(window.titles) >= self._config.max_steps:
            self._write(window)

    def _step_unseen(self, stage: Stage, waits: bool) -> None:
        window = self._window
        if window is not None:
            self._record(window, False)
        stage.step()
        if window is not None and waits:
            window.waited += 1
            if window.waited >= self._config.max_steps:
                self._write(window)

    def close(self) -> None:
        """Write what an open window has. Say which stages were never recorded."""
        if self._window is not None:
            self._write(self._window)
        for kind in sorted(self._due):
            logger.warning(
                "%s made %d steps, of which profile.skip_steps left out %d: there is no trace of it",
                self._replicas[kind],
                self._seen[kind],
                min(self._seen[kind], self._config.skip_steps),
            )

    def _recorder(self) -> profile:
        return profile(activities=self._activities)

    def _record(self, window: _Window, wanted: bool) -> None:
        if window.records != wanted:
            window.recorder.toggle_collection_dynamic(wanted, self._activities)
            window.records = wanted

    def _write(self, window: _Window) -> None:
        """A trace that cannot be written costs an error in the log and not the stage."""
        self._window = None
        self._due.discard(window.owner)
        name = self._replicas[window.owner]
        path = self._folder / f"{name.replace(':', '-')}.{os.getpid()}.trace.json"
        raw = path.with_suffix(".raw")
        try:
            self._record(window, True)
            window.recorder.stop()
            window.recorder.export_chrome_trace(str(raw))
            _rename_spans(raw, path, window.titles)
        except (OSError, RuntimeError) as error:
            logger.error("the trace of %s cannot be written to %s: %s", name, path, error)
            return
        finally:
            raw.unlink(missing_ok=True)
        logger.info("the trace of %d steps of %s is in %s", len(window.titles), name, path)


def _sizes(stage: Stage) -> tuple[float, float]:
    """Requests, and tokens or frames, of all steps so far."""
    counts = stage.stats().counts
    return counts.batch_size.total, counts.step_tokens.total


def _rename_spans(raw: Path, path: Path, titles: dict[str, str]) -> None:
    """Copy a trace with every span under its title: how large a step is, is known only at its end.

    Line by line, for a trace may be larger than memory allows as objects; without the indentation, which is half of it.
    """
    with raw.open(encoding="utf-8") as source, path.open("w", encoding="utf-8") as target:
        for line in source:
            text = line.strip()
            if " step " in text:
                text = _SPAN.sub(lambda found: f'"{titles.get(found[1], found[1])}"', text)
            target.write(text + "\n" if text == "}," else text)
