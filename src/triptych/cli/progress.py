"""How loading looks: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from triptych.config.units import format_bytes
from triptych.connectors.wire import Loaded, LoadProgress

logger = logging.getLogger(__name__)


class LoadDisplay:
    """Called with what the pipeline says while it loads. Off a terminal, a stage is logged when it begins; the log of
    the pipeline says the rest."""

    def __init__(self) -> None:
        self._bars = (
            Progress(TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), console=Console(stderr=True))
            if sys.stderr.isatty()
            else None
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: LoadProgress | Loaded) -> None:
        if isinstance(progress, Loaded):
            return
        stage, done, total = progress.stage, progress.done, progress.total
        known = stage in self._tasks
        if self._bars is not None:
            if not known:
                self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(self._tasks[stage], completed=done, total=total)
        elif not known:
            self._tasks[stage] = TaskID(0)
            logger.info("loading %s: %s of weights", stage, format_bytes(total))
