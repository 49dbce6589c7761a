"""Steps of fixed shapes, recorded once and replayed: what a GPU then needs of the host is one launch a step.

A recorded step reads its inputs where they were when it was recorded, and leaves its result where it then lay. So a
`Recording` owns both, and a call copies inputs in. On CUDA a recording is a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from triptych.errors import ConfigError

Replay = Callable[[], object]


class Recorder(Protocol):
    """Records steps of one device."""

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Run `step`; returns what runs it again, and its result, which every replay writes anew."""


class GraphRecorder:
    """Captures CUDA graphs, all in one pool of memory. Recording the largest first lets the others use its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Raises ConfigError where a step waits for the device, needs more memory than there is, or does else what no
        graph can hold."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):  # a capture waits for the current device
            before = torch.cuda.current_stream()
            self.stream.wait_stream(before)
            try:
                with torch.cuda.stream(self.stream):
                    step()  # libraries choose their kernels in a first run, and that is not for the graph
                # Other threads may use the device meanwhile.
                with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                    result = step()
            except RuntimeError as error:
                torch.cuda.set_stream(before)  # a capture that fails leaves its own
                # It ends with an error that says only that there was one: the cause is behind it.
                cause = error.__context__ or error
                raise ConfigError(f"a step could not be recorded ({cause}); write true", "enforce_eager") from error
            before.wait_stream(self.stream)
        return graph.replay, result


class Recording:
    """`function` at the shapes of `inputs`, which it keeps."""

    def __init__(
        self, recorder: Recorder, function: Callable[..., Tensor], inputs: Sequence[Tensor], *, whole: bool = True
    ) -> None:
        self.inputs, self.whole = tuple(inputs), whole
        self.replay, self.result = recorder(lambda: function(*self.inputs))

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The result for `inputs`, of the recorded shapes. It may be overwritten by the next replay of any step of the
        same recorder: they share memory.

        Not `whole`: inputs may have fewer rows than were recorded. The rest then holds what it held, so this is for a
        function of independent rows, and the rows that count are the first of the result.
        """
        for held, given in zip(self.inputs, inputs, strict=True):
            rows = slice(None) if self.whole else slice(given.shape[0])
            if held[rows].shape != given.shape:
                raise ValueError(f"recorded for an input of {tuple(held.shape)}, not of {tuple(given.shape)}")
            held[rows].copy_(given)
        self.replay()
        return self.result
