"""Which replica of a stage a request goes to. Plain values: no clock, no socket, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from triptych.config.schema import StageKind


@dataclass(slots=True)
class _Load:
    requests: int = 0
    work: int = 0


class Router:
    """Keeps the outstanding work of every replica, and names the one that has least.

    Work is what a stage has to read and may have to write for a request: tokens for the Thinker, codec frames for
    Talker and Code2Wav. It is taken whole when the request is submitted, and given back whole when the stage is done
    with it or the request is over. `places` is how many requests one replica of a stage computes at once.
    """

    def __init__(self, places: Mapping[StageKind, int]) -> None:
        self._places = places
        self._loads: dict[str, _Load] = {}  # by the replica's name
        self._submitted: dict[tuple[str, StageKind], tuple[str, int]] = {}  # (replica, work) of requests in a stage

    def choose(self, kind: StageKind, replicas: Iterable[str]) -> str:
        """Of these replicas of a stage, the one with the least outstanding work; of several, the first.

        One whose places are all taken, where a request would wait, comes after every one that has a place. Raises
        ValueError when there is none to choose from.
        """
        return min(replicas, key=lambda name: (self.num_requests(name) >= self._places[kind], self.work(name)))

    def submitted(self, request_id: str, kind: StageKind, replica: str, work: int) -> None:
        """The request is with this replica now, until `finished`. A request is in a stage once."""
        if (request_id, kind) in self._submitted:
            raise ValueError(f"request {request_id!r} is in stage {kind} already")
        self._submitted[request_id, kind] = replica, work
        load = self._loads.setdefault(replica, _Load())
        load.requests += 1
        load.work += work

    def finished(self, request_id: str, *kinds: StageKind) -> None:
        """These stages have nothing more to do for the request. Idempotent."""
        for kind in kinds:
            replica, work = self._submitted.pop((request_id, kind), ("", 0))
            if replica:
                load = self._loads[replica]
                load.requests -= 1
                load.work -= work

    def num_requests(self, replica: str) -> int:
        return self._loads[replica].requests if replica in self._loads else 0

    def work(self, replica: str) -> int:
        return self._loads[replica].work if replica in self._loads else 0
